"""The model of a training run, from its latest checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from refusion_jax.config import ModelConfig
from refusion_jax.model.transformer import Params, abstract_params, parameter_specs
from refusion_jax.sharding import on_mesh
from refusion_jax.training import lora
from refusion_jax.training.checkpoint import Checkpoints
from refusion_jax.training.config import LoraConfig, StartConfig
from refusion_jax.training.start import starting_model, with_mask_token


def load_params(directory: Path, config: ModelConfig) -> Params:
    """All parameters, adapters merged, in the dtype of ``config`` and on the current mesh.

    Raises:
      ValueError: there is no checkpoint yet, or it does not fit ``config``.
    """
    identity = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    adapted = None if identity["lora"] is None else LoraConfig(**_tuples(identity["lora"]))
    trained = abstract_trained(config, adapted)
    with Checkpoints(directory) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise ValueError(f"{directory} is a run without a checkpoint yet")
        params = checkpoints.restore(step, {"params": trained}, partial=True)["params"]
    if adapted is not None:
        start = StartConfig(**identity["start"])
        base = starting_model(start, identity["train"]["seed"])
        if config.mask_token_id is not None:
            base = with_mask_token(base, start.mask_token)
        params = lora.merge(base.params, params, adapted)
    return jax.tree.map(lambda x: x.astype(config.dtype), params)


def abstract_trained(config: ModelConfig, adapted: LoraConfig | None) -> Params:
    """What is trained, in float32, as abstract arrays on the current mesh: the parameters or, if given, adapters."""
    master = dataclasses.replace(config, dtype="float32")
    if adapted is None:
        shapes = abstract_params(master)
        return on_mesh(shapes, parameter_specs(shapes))
    shapes = jax.eval_shape(lambda: lora.init(master, adapted, jax.random.key(0)))
    return on_mesh(shapes, lora.specs(shapes))


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where the settings have tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
