"""What training reports: lines of JSON, TensorBoard, and how much of the hardware is used."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import jax
from tensorboardX import SummaryWriter  # type: ignore[import-untyped]

from refusion_jax.chips import CHIPS
from refusion_jax.config import ModelConfig
from refusion_jax.evaluation.roofline import matrix_parameters
from refusion_jax.training.identity import write_whole


class Metrics:
    """Writes RUN/metrics.jsonl, one object a line, and the same to RUN/tensorboard. A context manager."""

    def __init__(self, run: str | os.PathLike[str], *, step: int | None = None) -> None:
        """Open both, as they were at a step: what was written after it, and half a line, is removed.

        Args:
          run: directory of the run.
          step: step of the checkpoint that training goes on from; None: it starts, and nothing is kept.

        Raises:
          ValueError: there is a file whose lines are not what is written here.
        """
        path = Path(run) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _cut(path, -1 if step is None else step)
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(Path(run) / "tensorboard"), purge_step=0 if step is None else step + 1)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._tensorboard.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write named numbers of a step, at once. What is not finite stands as null in the file."""
        numbers = {name: float(value) for name, value in values.items()}
        line = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._file.write(json.dumps({"step": step, **line}, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in numbers.items():
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()


def measured(run: str | os.PathLike[str], step: int) -> set[str]:
    """The names of what was written of a step."""
    lines = (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {name for line in map(json.loads, lines) if line["step"] == step for name in line}


def _cut(path: Path, step: int) -> None:
    """Keep whole lines up to a step."""
    text = path.read_text(encoding="utf-8")
    kept = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n"):  # its process was killed
            continue
        try:
            known = json.loads(line)["step"] <= step
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}:{number} is not a line of metrics; mend it, or move the file away") from None
        if known:
            kept.append(line)
    if "".join(kept) != text:
        write_whole(path, "".join(kept))


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 operations a second of a device (``jax.Device.device_kind``); None where it is not known here."""
    chip = CHIPS.get(device_kind)
    return None if chip is None else chip.bfloat16


def flops_per_token(config: ModelConfig, length: float) -> float:
    """Operations that training the whole model on a token takes, forward and backward.

    6 P + 6 L N H T: P parameters of matrices that multiply activations, the head among them, the embedding lookup not;
    T tokens of an example, half of which a token attends to on average. That is PaLM's count (arXiv 2204.02311,
    appendix B: 6 P + 12 L N H T), with the half that causal attention does not need left out. What is computed again
    to save memory does not count.

    Args:
      length: T; of several packed in a row, their own, on average.
    """
    c = config
    return 6 * matrix_parameters(c) + 6 * c.num_layers * c.num_heads * c.head_dim * length


def throughput(config: ModelConfig, tokens: int, seconds: float, length: float) -> dict[str, float]:
    """``tokens_per_second`` of all devices and, where their peak is known, ``mfu``: the share of it that was used.

    Args:
      tokens: that were trained on, on all devices, padding not counted.
      seconds: that it took.
      length: see ``flops_per_token``.
    """
    speed = {"tokens_per_second": tokens / seconds}
    if peak := peak_flops(jax.devices()[0].device_kind):
        speed["mfu"] = speed["tokens_per_second"] * flops_per_token(config, length) / (peak * jax.device_count())
    return speed
