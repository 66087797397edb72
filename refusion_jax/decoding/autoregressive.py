"""Left to right, one token a forward pass: the same cache and loop, a window of one or two.

An ordinary causal model reads every token from the one before it (``first="token"``). A ReFusion model has learned
the first token of a slot through its mask only, so those are read from a lone mask behind the text
(``first="mask"``), all others from the token before.
"""

from __future__ import annotations

from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from refusion_jax.decoding.row import VERIFY, Report, Row, new_row, view, write
from refusion_jax.decoding.sampling import Sampling, Scores
from refusion_jax.decoding.window import HIDDEN, SHARED, Window, assemble, on_branches, on_trunk


class AutoregressiveRow(Row):
    """A row whose last token may not be cached yet."""

    pending: jax.Array  # int32: position of the token that is not cached; -1: none


class Autoregressive(flax.struct.PyTreeNode):
    """The left-to-right method. A block is one token; ``start`` is the next position."""

    slot_size: int = flax.struct.field(pytree_node=False)
    mask: int | None = flax.struct.field(pytree_node=False)  # None: read every token from the one before it
    eos: tuple[int, ...] = flax.struct.field(pytree_node=False)
    sampling: Sampling | None = None

    candidates: ClassVar[int] = 1
    planner: ClassVar[str] = "confidence"  # nothing is planned

    @property
    def restricted(self) -> bool:
        """Neither the mask nor ids beyond the tokenizer are ever written."""
        return True

    @property
    def entries(self) -> int:
        """T, entries of the window: the pending token, and a mask where slots begin with one."""
        return 1 if self.mask is None else 2

    def init(
        self, tokens: jax.Array, prompt_length: jax.Array, budget: jax.Array, noise: jax.Array
    ) -> AutoregressiveRow:
        """A row before its first token: ``tokens`` [S] holds the prompt, ``budget`` tokens may follow.

        ``noise`` [2] uint32 is the key of its noise.
        """
        # Without masks the first token is read from the last of the prompt, which is fed (and cached) once more.
        pending = prompt_length - 1 if self.mask is None else jnp.full_like(prompt_length, -1)
        return AutoregressiveRow(**new_row(tokens, prompt_length, budget, noise), pending=pending)

    def window(self, row: AutoregressiveRow) -> Window:
        """The pending token, and the mask of the next position if a slot begins there."""
        going = ~row.done
        has_pending = going & (row.pending >= 0)
        runs = [on_trunk(view(row.tokens, row.pending[None]), row.pending[None], has_pending[None])]
        if self.mask is not None:
            begins = going & ((row.start - row.prompt_length) % self.slot_size == 0)
            runs.append(on_branches(jnp.full(1, self.mask), row.start[None], begins[None], 1, jnp.zeros(1, jnp.int32)))
        cached = row.committed & (jnp.arange(row.tokens.shape[0]) != row.pending)
        return assemble(runs, jnp.where(cached, SHARED, HIDDEN))

    def update(
        self, row: AutoregressiveRow, window: Window, scores: Scores
    ) -> tuple[AutoregressiveRow, jax.Array, Report]:
        """Commit the next token; its keys and values follow with the next window."""
        entry = jnp.where(window.live[-1], -1, 0)
        token, logprob = scores.tokens[entry, :1], scores.logprob[entry][None]
        new = write(row, row.start[None], token, logprob, jnp.ones(1, bool), self.eos)
        new = new.replace(pending=row.start, start=row.start + 1, forwards=row.forwards.at[VERIFY].add(1))
        stored = window.live & (window.positions == row.pending)
        nothing = jnp.zeros(1, bool)
        report = Report(row.start, nothing, jnp.zeros(1, jnp.float32), nothing, nothing, jnp.ones(1, bool))
        return new, stored, report
