"""The hybrid loss of ReFusion: autoregressive in clean slots, masked diffusion in masked ones.

R rows, T tokens of a row, D width, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from refusion_jax.sharding import ROWS, TENSOR, einsum, row_shards, spec, vocabulary_shards

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
    """-log p(target) at every token. The logits of ``chunk`` entries of the vocabulary are in memory at once.

    The vocabulary is cut, and not the tokens: so each part of the head's gradient is computed once and written to its
    place, and sums over the vocabulary and over tokens are in float32 whatever the dtype of ``hidden``. The backward
    pass computes the logits again, so a step never holds [R, T, V].

    Args:
      chunk: entries on each shard of the vocabulary; None: as many as make LOGITS_IN_MEMORY logits on a device.
    """
    (R, T, D), V = hidden.shape, head.shape[0]
    shards = vocabulary_shards()
    share = V // shards
    tokens = max(R // row_shards(), 1) * T
    chunk = min(chunk or max(LOGITS_IN_MEMORY // tokens, 1), share)
    head = head.reshape(shards, share, D, out_sharding=spec(TENSOR, None, "fsdp"))
    return _cross_entropies(hidden, head, targets, chunk)


class _Chunk(NamedTuple):
    """A part of each shard of the vocabulary: C entries of S shards."""

    start: jax.Array  # its first entry
    head: jax.Array  # [S, C, D], in the dtype of the hidden states
    logits: jax.Array  # [R, T, S, C] float32
    new: jax.Array  # [C] bool: not in an earlier chunk; the last one overlaps with the one before
    hit: jax.Array  # [R, T, S, C] bool: the target


def _chunk(hidden: jax.Array, head: jax.Array, targets: jax.Array, number: jax.Array, size: int) -> _Chunk:
    shards, share, _ = head.shape
    start = jnp.minimum(number * size, share - size)
    part = jax.lax.dynamic_slice_in_dim(head, start, size, axis=1).astype(hidden.dtype)
    axes = (ROWS, None, TENSOR, None)
    logits = einsum("rtd,svd->rtsv", hidden, part, axes, preferred_element_type=jnp.float32)
    within = start + jnp.arange(size)
    ids = jnp.arange(shards)[:, None] * share + within
    return _Chunk(start, part, logits, within >= number * size, targets[..., None, None] == ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _cross_entropies(hidden: jax.Array, head: jax.Array, targets: jax.Array, size: int) -> jax.Array:
    return _forward(hidden, head, targets, size)[0]


def _forward(hidden: jax.Array, head: jax.Array, targets: jax.Array, size: int) -> tuple[jax.Array, Any]:
    def step(number: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, target = sums  # total: the sum of exp(logit - largest)
        c = _chunk(hidden, head, targets, number, size)
        now = jnp.maximum(largest, jnp.max(c.logits, axis=(-1, -2)))
        weights = jnp.where(c.new, jnp.exp(c.logits - now[..., None, None]), 0)
        total = total * jnp.exp(largest - now) + jnp.sum(weights, axis=(-1, -2))
        return now, total, target + jnp.sum(jnp.where(c.hit & c.new, c.logits, 0), axis=(-1, -2))

    zeros = jnp.zeros_like(targets, jnp.float32)
    chunks = -(-head.shape[1] // size)
    largest, total, target = jax.lax.fori_loop(0, chunks, step, (zeros - jnp.inf, zeros, zeros))
    # In this order small losses keep their digits.
    return jnp.log(total) - (target - largest), (hidden, head, targets, largest, total)


def _backward(size: int, saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    hidden, head, targets, largest, total = saved

    def step(number: jax.Array, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        of_hidden, of_head = gradients
        c = _chunk(hidden, head, targets, number, size)
        probability = jnp.exp(c.logits - largest[..., None, None]) / total[..., None, None]
        of_logits = (probability - c.hit) * gradient[..., None, None]
        axes = (TENSOR, None, "fsdp")
        of_part = einsum(
            "rtsv,rtd->svd", of_logits.astype(hidden.dtype), hidden, axes, preferred_element_type=jnp.float32
        )
        of_head = jax.lax.dynamic_update_slice_in_dim(of_head, of_part.astype(head.dtype), c.start, axis=1)
        of_logits = jnp.where(c.new, of_logits, 0).astype(hidden.dtype)
        rows = (ROWS, None, None)
        of_hidden += einsum("rtsv,svd->rtd", of_logits, c.head, rows, preferred_element_type=jnp.float32)
        return of_hidden, of_head

    chunks = -(-head.shape[1] // size)
    zeros = jnp.zeros_like(hidden, jnp.float32), jnp.zeros_like(head)
    of_hidden, of_head = jax.lax.fori_loop(0, chunks, step, zeros)
    return of_hidden.astype(hidden.dtype), of_head, None


_cross_entropies.defvjp(_forward, _backward)
