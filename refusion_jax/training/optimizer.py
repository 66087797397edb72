"""The optimizer and its schedule, from their settings."""

from __future__ import annotations

from typing import Any

import jax
import optax
import optax.contrib

from refusion_jax.model.transformer import Params
from refusion_jax.sharding import reshard
from refusion_jax.training.config import OptimizerConfig
from refusion_jax.training.lora import INPUTS


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate by step, of a run of ``steps``."""
    peak, last = config.learning_rate, config.learning_rate * config.final
    rise = round(config.warmup * steps)
    fall = max(steps - rise, 1)
    behind: optax.Schedule
    if config.schedule == "cosine":
        behind = optax.cosine_decay_schedule(peak, fall, config.final)
    elif config.schedule == "linear":
        behind = optax.linear_schedule(peak, last, fall)
    else:
        behind = optax.constant_schedule(peak)
    # The first step is not wasted on a learning rate of 0.
    return optax.join_schedules([optax.linear_schedule(peak / (rise + 1), peak, rise), behind], [rise])


UPDATE = 0.2
"""Root mean square of Muon's updates before the learning rate: about that of AdamW's (arXiv 2502.16982)."""


def make(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping and AdamW; or Muon for the matrices of layers and AdamW for the rest. Norms are never decayed."""
    learning_rate = schedule(config, steps)
    if config.algorithm == "adamw":
        algorithm = optax.adamw(
            learning_rate,
            b1=config.b1,
            b2=config.b2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=_is_matrix,
        )
    else:
        algorithm = optax.contrib.muon(
            lambda step: config.matrix_rate * learning_rate(step),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            consistent_rms=UPDATE,
            muon_weight_dimension_numbers=_matrices,
            adam_learning_rate=learning_rate,
            adam_b1=config.b1,
            adam_b2=config.b2,
        )
        algorithm = _on_whole_parameters(algorithm)
    return optax.chain(optax.clip_by_global_norm(config.clip), algorithm)


def _on_whole_parameters(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer, run by every device of a mesh for itself: Muon multiplies matrices by themselves."""

    def whole(tree: Any) -> Any:
        return jax.tree.map(reshard, tree)

    def init(params: Params) -> optax.OptState:
        return inner.init(whole(params))

    def update(gradient: Params, state: optax.OptState, params: Params) -> tuple[Params, optax.OptState]:
        updates, state = inner.update(whole(gradient), state, whole(params))
        return jax.tree.map(lambda x, like: reshard(x, *jax.typeof(like).sharding.spec), updates, gradient), state

    return optax.GradientTransformation(init, update)


def _matrices(params: Params) -> Params:
    """The dimensions of each matrix of the layers, [L, *inputs, *outputs]; None for other parameters."""

    def dimensions(path: tuple[Any, ...], leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        if (inputs := INPUTS.get(path[-1].key)) is None:
            return None
        axes = tuple(range(1, leaf.ndim))
        return optax.contrib.MuonDimensionNumbers(axes[:inputs], axes[inputs:])

    return jax.tree_util.tree_map_with_path(dimensions, params)


def _is_matrix(params: Params) -> Params:
    return jax.tree_util.tree_map_with_path(lambda path, _: not str(path[-1].key).endswith("norm"), params)
