"""AdamW and its schedule, from their settings."""

from __future__ import annotations

from typing import Any

import jax
import optax

from refusion_jax.training.config import OptimizerConfig


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


def make(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping and AdamW. Norms are never decayed."""
    adamw = optax.adamw(
        schedule(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=_is_matrix,
    )
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


def _is_matrix(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: not str(path[-1].key).endswith("norm"), params)
