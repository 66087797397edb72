"""One optimizer step, as a pure function that is compiled whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from refusion_jax.config import ModelConfig
from refusion_jax.data.batches import Batch
from refusion_jax.losses import Losses, Totals, cross_entropies, hybrid, totals
from refusion_jax.model.transformer import Params, apply, causal
from refusion_jax.sharding import ROWS, local_row_shards, row_shards
from refusion_jax.training import lora
from refusion_jax.training.config import TrainConfig


class TrainState(NamedTuple):
    """All that a step changes, and all that a checkpoint holds."""

    step: jax.Array  # int32: steps done
    params: Params  # what is trained, in float32: the parameters, or with LoRA the adapters
    optimizer: optax.OptState


class Measures(NamedTuple):
    """What a step tells, scalars, float32 but for counts."""

    loss: jax.Array
    ar: jax.Array  # the autoregressive term, unweighted
    masked: jax.Array  # the masked term, unweighted
    gradient_norm: jax.Array  # before clipping
    tokens: jax.Array  # int32: that were trained on


def piece_losses(
    config: ModelConfig,
    train: TrainConfig,
    params: Params,  # all of the model's
    adapters: Params | None,
    piece: Batch,  # arrays [R, T]
    total: Totals,
) -> Losses:
    """What a piece of a step adds to the terms of the loss. Attention is causal, and stays within an example."""
    segments = jnp.asarray(piece.segments)
    sees = causal(segments.shape[-1]) & (segments[:, :, None] == segments[:, None, :])
    out = apply(
        config,
        params,
        piece.inputs,
        piece.positions,
        sees,
        head=False,
        adapters=None if adapters is None else lora.scaled(adapters, train.lora),
        remat=train.train.remat,
    )
    head = params["embedding"] if config.tie_word_embeddings else params["head"].T
    entropies = cross_entropies(out.logits, head, piece.targets, train.train.loss_chunk)
    return hybrid(entropies, piece.ar_weights, piece.masked_weights, total)


def gradients(
    config: ModelConfig, train: TrainConfig, trained: Params, frozen: Params | None, batch: Batch
) -> tuple[Params, Measures]:
    """The gradient of a step's loss with respect to ``trained``, accumulated over its pieces [pieces, R, T].

    Every piece is weighted by the totals of the whole step, so the sum does not depend on how it was cut.
    """
    total = totals(batch.ar_weights, batch.segments)

    def loss(trained: Params, piece: Batch) -> tuple[jax.Array, Losses]:
        params, adapters = (trained, None) if frozen is None else (frozen, trained)
        terms = piece_losses(config, train, params, adapters, piece, total)
        return train.forward.ar_weight * terms.ar + train.forward.masked_weight * terms.masked, terms

    def of_piece(piece: Batch) -> tuple[Params, tuple[jax.Array, Losses]]:
        value, gradient = jax.value_and_grad(loss, has_aux=True)(trained, piece)
        return gradient, value

    result = of_piece(jax.tree.map(lambda x: x[0], batch))
    if len(batch.inputs) > 1:
        rest = jax.tree.map(lambda x: x[1:], batch)
        result, _ = jax.lax.scan(lambda sums, piece: (jax.tree.map(jnp.add, sums, of_piece(piece)), None), result, rest)
    gradient, (value, terms) = result
    tokens = jnp.sum(batch.segments > 0)
    return gradient, Measures(value, terms.ar, terms.masked, optax.tree.norm(gradient), tokens)


def make_step(
    config: ModelConfig, train: TrainConfig, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Params | None, Batch], tuple[TrainState, Measures]]:
    """The compiled step: (state, frozen parameters or None, batch) -> (state, measures). The state is donated."""

    def step(state: TrainState, frozen: Params | None, batch: Batch) -> tuple[TrainState, Measures]:
        gradient, measures = gradients(config, train, state.params, frozen, batch)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, optimizer_state), measures

    return jax.jit(step, donate_argnums=0)


def put_batch(batch: Batch) -> Batch:
    """A batch [pieces, R, T] on the devices, its rows split over the current mesh.

    Every process gives the rows of its own shards, in order (``local_row_shards``).
    """
    mesh, mine = jax.sharding.get_mesh(), local_row_shards()
    if mesh.empty:
        return jax.tree.map(jnp.asarray, batch)

    def put(local: np.ndarray) -> jax.Array:
        pieces, rows, width = local.shape
        size = rows // len(mine)

        def of_shard(index: Any) -> np.ndarray:
            place = mine.index((index[1].start or 0) // size) * size
            return local[:, place : place + size]

        shape = (pieces, size * row_shards(), width)
        return jax.make_array_from_callback(shape, NamedSharding(mesh, PartitionSpec(None, ROWS)), of_shard)

    return jax.tree.map(put, batch)


def all_parameters(trained: Params, frozen: Params | None, config: TrainConfig) -> Params:
    """The parameters of the model, adapters merged."""
    return trained if frozen is None else lora.merge(frozen, trained, config.lora)
