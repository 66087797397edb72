"""Small training runs: their settings, and what tests watch of them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

import refusion_jax as rf
from refusion_jax.config import ModelConfig
from refusion_jax.training import loop, optimizer, step
from refusion_jax.training.config import (
    DataConfig,
    EvaluationConfig,
    LoopConfig,
    OptimizerConfig,
    StartConfig,
    TrainConfig,
)

SHAPE = ModelConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    eos_token_ids=(),
    mask_token_id=None,
)


def settings(directory: Path, **changes: dict[str, Any]) -> TrainConfig:
    """A run in ``directory``/run, on worksheets that are tokenised beside it; ``changes`` as in ``changed``.

    The examples of every step fit into one row, so one program is compiled.
    """
    config = TrainConfig(
        run=str(directory / "run"),
        model=StartConfig(shape=SHAPE, tokenizer="worksheet"),
        data=DataConfig(path="worksheet:0:200", max_length=512, cache=str(directory / "cache")),
        train=LoopConfig(steps=20, batch_size=4, save_every=100, log_every=1),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup=0.1, weight_decay=0.01),
        evaluation=EvaluationConfig(
            every=10, examples=4, answers=2, decode=rf.DecodeConfig(max_new_tokens=8, slot_size=4, block_size=8)
        ),
    )
    return changed(config, **changes)


def changed(config: TrainConfig, **changes: dict[str, Any]) -> TrainConfig:
    """The settings with some of a group changed: ``changed(config, train={"steps": 3})``."""
    groups = {name: dataclasses.replace(getattr(config, name), **values) for name, values in changes.items()}
    return dataclasses.replace(config, **groups)


def digest(tree: Any) -> str:
    """Of every bit of all arrays, and where they are in the tree."""
    leaves, structure = jax.tree.flatten(tree)
    digest = hashlib.sha256(str(structure).encode())
    for leaf in map(np.asarray, leaves):
        digest.update(f"{leaf.shape} {leaf.dtype}".encode() + leaf.tobytes())
    return digest.hexdigest()


MAKE_OPTIMIZER = functools.cache(optimizer.make)
"""Of equal settings the same optimizer, whose programs are compiled once."""


class Watch:
    """Sees what every step is given, and may act before it. Tests of one process share compiled programs."""

    programs: ClassVar[dict[Any, Any]] = {}

    def __init__(self, before: Callable[[int], None] = lambda number: None) -> None:
        self.steps: list[tuple[int, str, str]] = []  # number, state before it (parameters and optimizer), batch
        self.before = before

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of ``make_step`` in the training loop."""
        patch.setattr(loop, "make_step", self)
        patch.setattr(optimizer, "make", MAKE_OPTIMIZER)

    def __call__(self, model: ModelConfig, config: TrainConfig, adamw: Any) -> Any:
        train = dataclasses.replace(config.train, log_every=1, save_every=1, keep=1)
        key = (model, config.forward, config.optimizer, config.lora, train, jax.sharding.get_abstract_mesh())
        if key not in self.programs:
            self.programs[key] = step.make_step(model, config, adamw)
        program = self.programs[key]

        def watched(state: step.TrainState, frozen: Any, batch: Any) -> Any:
            number = int(state.step) + 1
            self.steps.append((number, digest(state), digest(batch)))
            self.before(number)
            return program(state, frozen, batch)

        return watched


def metrics(config: TrainConfig) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, without what the clock says."""
    lines = Path(config.run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name != "train/tokens_per_second"} for line in lines
    ]


def exported(config: TrainConfig) -> dict[str, bytes]:
    """The files of the trained model."""
    directory = Path(config.run, "model")
    return {path.name: path.read_bytes() for path in directory.iterdir()}
