"""Planning: how certain a slot is, and which slots are written next.

A planner turns what the masks of one slot say into the slot's certainty. To add one, write such a function and name it
in PLANNERS. It gives the logarithm of the certainty: probabilities close to 1 differ by less than float32 resolves,
their logarithms do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from refusion_jax.decoding.sampling import NO_TOKEN, fold_in, uniform


class Masks(NamedTuple):
    """The masks of one open slot, as a planner sees them."""

    certainty: jax.Array  # [k] float32, logarithms (``Scores.certainty``)
    exists: jax.Array  # [k] bool: the last slot may be short
    slot: jax.Array  # int32: the slot's number in its block
    position: jax.Array  # int32: of the first mask
    noise: jax.Array  # [2] uint32: key of the row's noise


def confidence(masks: Masks) -> jax.Array:
    """The probability of the most likely token at the first mask (ReFusion, section 4.2)."""
    return masks.certainty[0]


def mean(masks: Masks) -> jax.Array:
    """The geometric mean of the probabilities of the most likely tokens at all masks."""
    return jnp.sum(jnp.where(masks.exists, masks.certainty, 0.0)) / jnp.maximum(jnp.sum(masks.exists), 1)


def random(masks: Masks) -> jax.Array:
    """A number that is uniform between 0 and 1, the same in every plan: a random order of the slots."""
    return jnp.log(uniform(fold_in(fold_in(masks.noise, masks.position), jnp.uint32(NO_TOKEN))[0]))


def left_to_right(masks: Masks) -> jax.Array:
    """Less than every earlier slot, exp(-1) at most: one slot at a time, unless the threshold lies below that."""
    return -1.0 - masks.slot.astype(jnp.float32)


PLANNERS: dict[str, Callable[[Masks], jax.Array]] = {
    "confidence": confidence,
    "mean": mean,
    "entropy": confidence,  # of masks that are scored by their entropy
    "random": random,
    "left_to_right": left_to_right,
}
"""Name -> function of one slot's masks to its log-certainty, float32."""


def certainties(
    planner: str,
    certainty: jax.Array,  # [b] float32, logarithms
    live: jax.Array,  # [b] bool: masks of open slots
    start: jax.Array,  # int32: first position of the block
    noise: jax.Array,  # [2] uint32
    slot_size: int,
) -> jax.Array:
    """The log-certainty [J] of every slot of a block."""
    exists = by_slot(live, slot_size)
    slot = jnp.arange(exists.shape[0])

    def rate(certainty: jax.Array, exists: jax.Array, slot: jax.Array) -> jax.Array:
        return PLANNERS[planner](Masks(certainty, exists, slot, start + slot * slot_size, noise))

    return jax.vmap(rate)(by_slot(certainty, slot_size), exists, slot)


def choose(
    certainty: jax.Array,  # [J] float32, logarithms
    open_slots: jax.Array,  # [J] bool
    threshold: jax.Array,  # float32
) -> jax.Array:  # [J] bool
    """The open slots whose certainty exceeds the threshold; if there is none, the most certain one (the earliest)."""
    above = open_slots & (jnp.exp(certainty) > threshold)
    best = jnp.argmax(jnp.where(open_slots, certainty, -jnp.inf))
    fallback = open_slots & (jnp.arange(certainty.shape[0]) == best)
    return jnp.where(jnp.any(above), above, fallback)


def by_slot(array: jax.Array, slot_size: int) -> jax.Array:
    """A block's positions [b, ...] as slots [J, k, ...]; short last slots are padded with zeros."""
    missing = -array.shape[0] % slot_size
    padded = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
    return padded.reshape(-1, slot_size, *array.shape[1:])


def by_position(slots: jax.Array, slot_size: int, block_size: int) -> jax.Array:
    """A value of each slot [J] repeated for its positions [b]."""
    return jnp.repeat(slots, slot_size)[:block_size]
