"""Masked diffusion token by token, the usual way: a baseline without slots, drafts or a cache of the answer.

In every step one forward reads the whole answer again: the tokens that are written, in the order of their positions,
and behind them the masks of the current block, one behind the other, as a causal model was trained to see them
(ReFusion, section 4.1, with slots of one token). The most certain masks are written, so many a step or those above a
threshold. Keys and values of the prompt never change and are cached, as for all methods; nothing else is.
"""

from __future__ import annotations

from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from refusion_jax.decoding.plan import certainties, choose
from refusion_jax.decoding.row import VERIFY, Report, Row, new_row, view, write
from refusion_jax.decoding.sampling import Sampling, Scores
from refusion_jax.decoding.window import HIDDEN, SHARED, Entries, Window, assemble


class MaskedDiffusion(flax.struct.PyTreeNode):
    """The masked-diffusion method. ``start`` is the first position of the current block."""

    slot_threshold: jax.Array  # float32
    tokens_per_step: jax.Array  # int32; 0: those above the threshold, one at least
    budget: int = flax.struct.field(pytree_node=False)  # new tokens at most
    block_size: int = flax.struct.field(pytree_node=False)
    mask: int = flax.struct.field(pytree_node=False)
    eos: tuple[int, ...] = flax.struct.field(pytree_node=False)
    sampling: Sampling | None = None
    planner: str = flax.struct.field(pytree_node=False, default="confidence")

    candidates: ClassVar[int] = 1
    slot_size: ClassVar[int] = 1

    @property
    def restricted(self) -> bool:
        """Neither the mask nor ids beyond the tokenizer are ever written."""
        return True

    @property
    def entries(self) -> int:
        """T, entries of the window: the positions of the answer."""
        return self.budget

    def init(self, tokens: jax.Array, prompt_length: jax.Array, budget: jax.Array, noise: jax.Array) -> Row:
        """A row whose prompt is cached: ``tokens`` [S] holds the prompt, ``budget`` tokens may follow.

        ``noise`` [2] uint32 is the key of its noise.
        """
        return Row(**new_row(tokens, prompt_length, budget, noise))

    def window(self, row: Row) -> Window:
        """The written tokens of the answer, and behind them the masks of the block."""
        position = row.prompt_length + jnp.arange(self.budget)
        written = view(row.committed, position, False)
        masked = view(row.unwritten, position, False) & (position < row.start + self.block_size)
        place = jnp.where(written, jnp.cumsum(written), jnp.sum(written) + jnp.cumsum(masked)) - 1
        entries = Entries(
            tokens=jnp.where(written, view(row.tokens, position), self.mask),
            positions=position,
            live=written | masked,
            place=place,
            sees=place + 1,
            branch=jnp.full(self.budget, SHARED),
        )
        is_prompt = jnp.arange(row.tokens.shape[0]) < row.prompt_length
        return assemble([entries], jnp.where(is_prompt, SHARED, HIDDEN))

    def update(self, row: Row, window: Window, scores: Scores) -> tuple[Row, jax.Array, Report]:
        """Write the most certain masks."""
        masked = window.live & ~view(row.committed, window.positions, False)
        certainty = certainties(self.planner, scores.certainty, masked, row.prompt_length, row.noise, 1)
        rank = jnp.argsort(jnp.argsort(-jnp.where(masked, certainty, -jnp.inf), stable=True), stable=True)
        confident = choose(certainty, masked, self.slot_threshold)
        chosen = masked & jnp.where(self.tokens_per_step > 0, rank < self.tokens_per_step, confident)
        new = write(row, window.positions, scores.tokens[:, 0], scores.logprob, chosen, self.eos)
        block = row.start + jnp.arange(self.block_size)
        block_written = ~jnp.any(view(new.unwritten, block, False))
        new = new.replace(
            start=jnp.where(block_written, row.start + self.block_size, row.start),
            forwards=row.forwards.at[VERIFY].add(1),
        )
        nothing = jnp.zeros(self.budget, bool)
        return new, nothing, Report(row.prompt_length, masked, certainty, chosen, nothing, nothing)
