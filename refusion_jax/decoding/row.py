"""The state that every row of a batch carries through the loop, whatever the method.

All arrays are indexed by true position: the prompt stands at 0..P-1, the answer from P on. Written for one row;
batched, every field gains a leading [B].
"""

from __future__ import annotations

from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp

PLAN, VERIFY, DRAFT = range(3)  # kinds of forward passes, as counted in the statistics


class Row(flax.struct.PyTreeNode):
    """One prompt and what has been written behind it. Methods extend it by what they need."""

    tokens: jax.Array  # [S] int32: prompt, committed tokens, current drafts
    committed: jax.Array  # [S] bool: prompt and committed tokens
    logprob: jax.Array  # [S] float32: of the token or draft, under the distribution that it was chosen from
    order: jax.Array  # [S] int32: how many tokens of the answer were committed before this one; -1: not committed
    noise: jax.Array  # [2] uint32: key of all noise of the row
    prompt_length: jax.Array  # int32
    start: jax.Array  # int32: first position of the current serial block
    end: jax.Array  # int32: nothing is written from here on (budget; then just behind the earliest EOS)
    forwards: jax.Array  # [3] int32: forward passes by kind
    positions: jax.Array  # int32: live window entries so far
    padded_positions: jax.Array  # int32: computed window entries so far
    finished_at: jax.Array  # int32: step of the loop in which the row ended; -1 before

    @property
    def done(self) -> jax.Array:
        """Whether everything is written: no position of a further block lies before the end."""
        return self.start >= self.end

    @property
    def unwritten(self) -> jax.Array:
        """[S] bool: positions still to be written."""
        position = jnp.arange(self.tokens.shape[0])
        return ~self.committed & (position < self.end)


SomeRow = TypeVar("SomeRow", bound=Row)


def new_row(tokens: jax.Array, prompt_length: jax.Array, budget: jax.Array, noise: jax.Array) -> dict[str, jax.Array]:
    """The fields of a Row before its first step: ``tokens`` [S] holds the prompt, ``budget`` tokens may follow."""
    zero = jnp.zeros((), jnp.int32)
    is_prompt = jnp.arange(tokens.shape[0]) < prompt_length
    return {
        "tokens": tokens,
        "committed": is_prompt,
        "logprob": jnp.zeros(tokens.shape, jnp.float32),
        "order": jnp.full(tokens.shape, -1, jnp.int32),
        "noise": noise,
        "prompt_length": prompt_length,
        "start": prompt_length,
        "end": prompt_length + budget,
        "forwards": jnp.zeros(3, jnp.int32),
        "positions": zero,
        "padded_positions": zero,
        "finished_at": zero - 1,
    }


def write(
    row: SomeRow,
    positions: jax.Array,
    tokens: jax.Array,
    logprob: jax.Array,
    chosen: jax.Array,
    eos: tuple[int, ...],
) -> SomeRow:
    """Commit ``tokens`` [T], with their log-probabilities, at ``positions`` [T], ascending, where ``chosen`` [T].

    An EOS among them moves the end.
    """
    S = row.tokens.shape[0]
    index = jnp.where(chosen, positions, S + jnp.arange(positions.shape[0]))
    written = jnp.sum(row.committed) - row.prompt_length
    order = written + jnp.cumsum(chosen.astype(jnp.int32)) - 1
    ends = chosen & is_eos(tokens, eos)
    end = jnp.min(jnp.where(ends, positions + 1, row.end))

    def put(array: jax.Array, values: jax.Array | bool) -> jax.Array:
        return array.at[index].set(values, mode="drop", unique_indices=True)

    return row.replace(
        tokens=put(row.tokens, tokens),
        committed=put(row.committed, True),
        logprob=put(row.logprob, logprob),
        order=put(row.order, order),
        end=jnp.minimum(row.end, end),
    )


def is_eos(tokens: jax.Array, eos: tuple[int, ...]) -> jax.Array:
    """Whether each token ends the text."""
    return jnp.any(tokens[..., None] == jnp.asarray(eos, jnp.int32), axis=-1)


def view(array: jax.Array, positions: jax.Array, fill: int | bool | float = 0) -> jax.Array:
    """``array`` [S, ...] at ``positions`` [T], ``fill`` beyond its end (an index never clamps)."""
    return array.at[positions].get(mode="fill", fill_value=fill)


def shift(array: jax.Array) -> jax.Array:
    """``array`` [T] moved one place to the right; zero enters on the left."""
    return jnp.concatenate([jnp.zeros_like(array[:1]), array[:-1]])


def first_true(mask: jax.Array) -> jax.Array:
    """``mask`` [T] with its first True alone."""
    return mask & (jnp.cumsum(mask) == 1)


def last_true(mask: jax.Array) -> jax.Array:
    """``mask`` [T] with its last True alone."""
    return mask & (jnp.cumsum(mask) == jnp.sum(mask))


class Report(flax.struct.PyTreeNode):
    """What one step did to one row, for the trace (b positions of a block, J slots)."""

    base: jax.Array  # int32: first position of the block that was planned
    planned: jax.Array  # [b] bool: open positions, if a plan was made that holds
    certainty: jax.Array  # [J] float32, logarithms
    chosen: jax.Array  # [b] bool: positions of the slots chosen by this plan
    drafts: jax.Array  # [b] bool: positions of the current block whose drafts were verified
    accepted: jax.Array  # [b] bool: of these, the ones that were right
