"""The hybrid loss of ReFusion: autoregressive in clean slots, masked diffusion in masked ones.

R rows, T tokens of a row, D width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from refusion_jax.sharding import ROWS, TENSOR, einsum, row_shards

LOGITS_IN_MEMORY = 2**24
"""Logits of a chunk where its size is not given: 64 MiB in float32."""


class Losses(NamedTuple):
    """The two terms of the loss, float32 scalars."""

    ar: jax.Array
    masked: jax.Array


class Totals(NamedTuple):
    """What the terms are averaged over: counted in all pieces of a step, on all devices. Float32 scalars."""

    ar_labels: jax.Array
    examples: jax.Array


def totals(ar_weights: jax.Array, segments: jax.Array) -> Totals:
    """The totals of a whole step, of arrays [..., T]; the examples of a row are its segments 1, 2, ..."""
    return Totals(jnp.sum(ar_weights), jnp.sum(jnp.max(segments, axis=-1)).astype(jnp.float32))


def hybrid(
    cross_entropy: jax.Array,  # [R, T] float32
    ar_weights: jax.Array,  # [R, T] float32
    masked_weights: jax.Array,  # [R, T] float32
    total: Totals,
) -> Losses:
    """What these rows add to both terms of a step (ReFusion, section 4.3, as the official code computes it).

    The autoregressive term is the mean over all labels of the step, 0 where there is none. The masked term sums
    cross entropy / (masking rate * answer length) over an example, and is the mean over examples.
    """
    ar = jnp.sum(cross_entropy * ar_weights) / jnp.maximum(total.ar_labels, 1)
    masked = jnp.sum(cross_entropy * masked_weights) / jnp.maximum(total.examples, 1)
    return Losses(ar, masked)


def cross_entropies(
    hidden: jax.Array,  # [R, T, D]
    head: jax.Array,  # [V, D]
    targets: jax.Array,  # [R, T] int32
    chunk: int | None = None,
) -> jax.Array:  # [R, T] float32
    """-log p(target) at every token. The logits of ``chunk`` tokens are in memory at once, on each shard of rows.

    They are computed again in the backward pass, so a step never holds [R, T, V].
    """
    R, T, _ = hidden.shape
    head = head.astype(hidden.dtype)
    chunk = chunk or max(LOGITS_IN_MEMORY // head.shape[0], 1)
    width = max(min(chunk * row_shards() // R, T), 1)  # tokens of each row that a chunk takes
    pieces = -(-T // width)
    if pieces == 1:
        return _cross_entropies(hidden, head, targets)

    def cut(x: jax.Array) -> jax.Array:  # [R, T, ...] -> [pieces, R, width, ...]
        x = jnp.pad(x, ((0, 0), (0, pieces * width - T), *(((0, 0),) * (x.ndim - 2))))
        return x.reshape(R, pieces, width, *x.shape[2:]).swapaxes(0, 1)

    def one(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _cross_entropies(piece[0], head, piece[1])

    losses = jax.lax.map(jax.checkpoint(one), (cut(hidden), cut(targets)))
    return losses.swapaxes(0, 1).reshape(R, -1)[:, :T]


def _cross_entropies(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    logits = einsum("btd,vd->btv", hidden, head, (ROWS, None, TENSOR), preferred_element_type=jnp.float32)
    logits -= jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))  # here, or small losses are lost
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    target = jnp.sum(jnp.where(ids == targets[..., None], logits, 0), axis=-1)
    return jnp.log(jnp.sum(jnp.exp(logits), axis=-1)) - target
