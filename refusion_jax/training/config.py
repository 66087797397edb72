"""Every setting of training, as frozen dataclasses that check themselves."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Annotated, Any, Literal

from tyro.conf import Suppress

from refusion_jax.config import OFFICIAL_SLOT_SIZES, DecodeConfig, ModelConfig
from refusion_jax.sharding import MeshConfig


def _check_integers(config: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError(f"{name}={value!r} must be an integer")
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")


def _check_numbers(config: Any, low: float, high: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            limits = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise ValueError(f"{name}={value!r} must be a number, {limits}")


@dataclasses.dataclass(frozen=True)
class StartConfig:
    """The model that training starts from: a checkpoint, or random weights of a given shape.

    Raises:
      ValueError: neither or both are given.
    """

    checkpoint: str | None = None
    """Directory in Hugging Face layout, hub id, or directory of an earlier run."""
    shape: Annotated[ModelConfig | None, Suppress] = None
    """Shape of random weights, or of the checkpoint where it must be known without reading it."""
    tokenizer: str | None = None
    """Directory or hub id of the tokenizer, or "worksheet"; None: that of the checkpoint."""
    mask_token: str = "<|mask|>"
    """Text of the token that stands for a token not written yet; added where the tokenizer has none."""

    def __post_init__(self) -> None:
        if self.checkpoint is None and self.shape is None:
            raise ValueError("model.checkpoint is missing: give a directory or a hub id, or a model.shape in a config")
        if self.checkpoint is None and self.tokenizer is None:
            raise ValueError("model.tokenizer is missing: random weights have none of their own")
        if not self.mask_token:
            raise ValueError("model.mask_token is empty; it is the text of a token, such as <|mask|>")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where examples come from, and how they are laid out in batches.

    Raises:
      ValueError: a setting is out of its range.
    """

    path: str = ""
    """Files (.json, .jsonl, .parquet, also gs:// and patterns with *), tfds:NAME, or worksheet:SEED:COUNT."""
    validation_path: str | None = None
    """The same for held-out examples; None: none."""
    max_length: int = 4096
    """Most tokens of an example, prompt and answer; longer ones are left out, and counted."""
    max_left_out: float = 0.05
    """Largest share of examples that may be left out because they are too long, empty or malformed."""
    pack: bool = True
    """Several examples in a row of max_length tokens; the loss is the same. False: one in a row."""
    cache: str | None = None
    """Directory of tokenised examples; None: ~/.cache/refusion_jax/data."""
    workers: int = 0
    """Processes that prepare batches; 0: threads of this one."""

    def __post_init__(self) -> None:
        _check_integers(self, 2, "max_length")
        _check_integers(self, 0, "workers")
        _check_numbers(self, 0, 1, "max_left_out")


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """The forward process and the loss (ReFusion, section 4.3).

    Raises:
      ValueError: a setting is out of its range, or no term of the loss is left.
    """

    objective: Literal["refusion", "ar"] = "refusion"
    """ar is plain left-to-right training, which the other settings do not touch."""
    slot_sizes: tuple[int, ...] = OFFICIAL_SLOT_SIZES
    """Slot sizes, of which one is drawn for every example; a single one is a fixed size."""
    curriculum: float = 0.0
    """Share of training over which slot sizes are admitted one after another, the smallest first; 0: all at once."""
    permute: bool = True
    """Whether clean slots stand in random order."""
    ar_weight: float = 1.0
    """Weight of the autoregressive term, over the tokens of clean slots."""
    masked_weight: float = 1.0
    """Weight of the masked term, the paper's lambda."""

    def __post_init__(self) -> None:
        if self.objective not in ("refusion", "ar"):
            raise ValueError(f"objective={self.objective!r} must be 'refusion' or 'ar'")
        sizes = self.slot_sizes
        if not sizes or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in sizes):
            raise ValueError(f"slot_sizes={sizes!r} must be positive integers")
        if list(sizes) != sorted(set(sizes)):
            raise ValueError(f"slot_sizes={sizes!r} must ascend, each size once; try {tuple(sorted(set(sizes)))}")
        _check_numbers(self, 0, 1, "curriculum")
        _check_numbers(self, 0, math.inf, "ar_weight", "masked_weight")
        if self.objective == "refusion" and self.ar_weight == self.masked_weight == 0:
            raise ValueError("ar_weight=0 and masked_weight=0 leave nothing to learn")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon, and the schedule.

    Raises:
      ValueError: a setting is out of its range.
    """

    algorithm: Literal["adamw", "muon"] = "adamw"
    """muon is for the matrices of layers (arXiv 2502.16982), with AdamW for the rest, both with Nesterov momentum:
    far fewer steps from scratch."""
    learning_rate: float = 2e-5
    """At its peak, behind the warm-up."""
    matrix_rate: float = 1.0
    """Learning rate of the matrices that Muon trains, in units of learning_rate."""
    warmup: float = 0.0
    """Share of the steps over which the learning rate rises from 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls behind the warm-up."""
    final: float = 0.0
    """Learning rate at the end, as a share of its peak."""
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """Of matrices; norms are never decayed."""
    clip: float = 1.0
    """Largest norm of the gradient, over all parameters."""

    def __post_init__(self) -> None:
        if self.algorithm not in ("adamw", "muon"):
            raise ValueError(f"algorithm={self.algorithm!r} must be 'adamw' or 'muon'")
        if self.schedule not in ("cosine", "linear", "constant"):
            raise ValueError(f"schedule={self.schedule!r} must be 'cosine', 'linear' or 'constant'")
        _check_numbers(self, 0, 1, "warmup", "final", "b1", "b2")
        _check_numbers(self, 0, math.inf, "learning_rate", "matrix_rate", "epsilon", "weight_decay", "clip")
        if self.clip == 0:
            raise ValueError("clip=0 lets no gradient through; give a large number for no clipping")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) in place of full fine-tuning.

    Raises:
      ValueError: a setting is out of its range.
    """

    rank: int = 0
    """0: all parameters are trained."""
    alpha: float = 16.0
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ("query", "key", "value", "output", "gate", "up", "down")
    """Matrices of a layer that get an adapter."""

    def __post_init__(self) -> None:
        _check_integers(self, 0, "rank")
        _check_numbers(self, 0, math.inf, "alpha")
        known = ("query", "key", "value", "output", "gate", "up", "down")
        if unknown := sorted(set(self.targets) - set(known)):
            raise ValueError(f"lora.targets has {', '.join(unknown)}; a layer has {', '.join(known)}")
        if self.rank and not self.targets:
            raise ValueError("lora.targets is empty: nothing would be trained")


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """What is measured on held-out examples while training.

    Raises:
      ValueError: a setting is out of its range.
    """

    every: int = 500
    """Steps between two evaluations; there is one at the end as well. 0: none."""
    examples: int = 256
    """Held-out examples of the losses, for every slot size."""
    answers: int = 0
    """Held-out prompts that are decoded and compared with their answers."""
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    """How they are decoded."""
    batch_size: int = 8
    """Prompts that are decoded together."""

    def __post_init__(self) -> None:
        _check_integers(self, 0, "every", "examples", "answers")
        _check_integers(self, 1, "batch_size")


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """The training loop.

    Raises:
      ValueError: a setting is out of its range, or two of them contradict each other.
    """

    steps: int | None = None
    """Optimizer steps; None: as many as epochs take."""
    epochs: float | None = None
    """Passes over the data; None: as many as steps take."""
    batch_size: int = 32
    """Examples of a step."""
    accumulate: int = 1
    """Pieces that a step's batch is computed in, one after another; the loss is the same."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters and optimizer state are float32."""
    remat: Literal["none", "dots", "full"] = "none"
    """What is computed again in the backward pass: nothing, all but matrix products, or whole layers."""
    loss_chunk: int | None = None
    """Entries of the vocabulary whose logits are in memory at once; None: as many as make 16 million logits."""
    seed: int = 0
    """Of random weights, the order of examples and their noise."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    save_every: int = 500
    """Steps between two checkpoints; there is one at the end as well."""
    keep: int = 2
    """Latest checkpoints that are kept, beside the best."""
    profile_steps: str | None = None
    """Steps A:B to be profiled into RUN/profile, for TensorBoard."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"steps={self.steps} and epochs={self.epochs}: give one of the two, None for the other")
        if self.steps is not None:
            _check_integers(self, 1, "steps")
        else:
            _check_numbers(self, 0, math.inf, "epochs")
        _check_integers(self, 1, "batch_size", "accumulate", "log_every", "save_every", "keep")
        _check_integers(self, 0, "seed")
        if self.loss_chunk is not None:
            _check_integers(self, 1, "loss_chunk")
        for name, allowed in (("dtype", ("float32", "bfloat16")), ("remat", ("none", "dots", "full"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, allowed))}")
        self.profiled()

    def profiled(self) -> range:
        """The steps to be profiled."""
        if self.profile_steps is None:
            return range(0)
        first, colon, last = self.profile_steps.partition(":")
        if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
            raise ValueError(f"profile_steps={self.profile_steps!r} must be A:B, two steps with A < B")
        return range(int(first), int(last))


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run: what ``get_config()`` of a file in configs/ returns."""

    run: str
    """Directory of the run: checkpoints, metrics, and the trained model in Hugging Face layout."""
    model: StartConfig
    data: DataConfig
    train: LoopConfig
    forward: ForwardConfig = ForwardConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self) -> None:
        if self.lora.rank and self.optimizer.algorithm == "muon":
            raise ValueError("optimizer.algorithm='muon' is for whole matrices; adapters (lora.rank) take 'adamw'")
