"""Planning: how certain a slot is, and which slots are written next.

A planner turns the log-probabilities of the most likely tokens at the masks of one slot into the slot's certainty.
To add one, write such a function and name it in PLANNERS. It gives the logarithm of the certainty: probabilities
close to 1 differ by less than float32 resolves, their logarithms do not.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def confidence(logprob: jax.Array) -> jax.Array:
    """The probability of the most likely token at the first mask (ReFusion, section 4.2)."""
    return logprob[0]


PLANNERS: dict[str, Callable[[jax.Array], jax.Array]] = {"confidence": confidence}
"""Name -> function of one slot's log-probabilities [k] float32 to its log-certainty, float32."""


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
