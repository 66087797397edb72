"""The model of a training run, from its latest checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from refusion_jax.config import ModelConfig
from refusion_jax.model.transformer import Params, abstract_params, parameter_specs
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
    master = dataclasses.replace(config, dtype="float32")
    if adapted is None:
        shapes = abstract_params(master)
        specs = parameter_specs(shapes)
    else:
        shapes = jax.eval_shape(lambda: lora.init(master, adapted, jax.random.key(0)))
        specs = lora.specs(shapes)
    with Checkpoints(directory) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise ValueError(f"{directory} is a run without a checkpoint yet")
        params = checkpoints.restore(step, {"params": on_mesh(shapes, specs)}, partial=True)["params"]
    if adapted is not None:
        start = StartConfig(**identity["start"])
        base = starting_model(start, identity["train"]["seed"])
        if config.mask_token_id is not None:
            base = with_mask_token(base, start.mask_token)
        params = lora.merge(base.params, params, adapted)
    return jax.tree.map(lambda x: x.astype(config.dtype), params)


def on_mesh(shapes: Params, specs: Params) -> Params:
    """Abstract arrays that lie on the current mesh, if there is one, by ``specs``."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return shapes

    def placed(shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(placed, shapes, specs)


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where the settings have tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
