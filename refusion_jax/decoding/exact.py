"""Exact plan-and-infill: the tokens of the sequential process, in fewer forward passes.

The process (one slot after another, one token at a time): plan every open slot behind the committed text, choose the
certain ones, commit them in position order, the first token of a slot from a lone mask behind the text as it is then,
every later one from the token before it; EOS drops what lies behind it. This module produces the very same tokens:
drafts change the speed, never the output.

One forward verifies and plans. Its window, behind the cached text:

=============  =====  ===========================================================================================
pending        1      the last committed token while its keys and values are not cached
drafts         b      drafted tokens of the chosen slots, in position order, up to the first EOS
probes         J      a mask at the first position of each drafted slot, behind the drafts of the slots before it
alternatives   A      other candidates for the first draft, behind the pending token
next plan      b      masks of the open slots; when none is left, those of the next serial block; none behind an EOS
=============  =====  ===========================================================================================

A draft is right when it equals its target: the probe's token for the first of a slot, the token after the one before
otherwise. The longest right prefix is committed with its keys and values, *plus the target behind it, for free*: that
token is exact, but what stood in its place was not, so it is pending and leads the next window. If one of the
alternatives equals the first target, it is committed with its keys and values, and the token after it is free.
Every forward that does not only plan commits at least one token.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from refusion_jax.decoding.plan import by_position, by_slot, certainties, choose
from refusion_jax.decoding.row import (
    PLAN,
    VERIFY,
    Report,
    Row,
    first_true,
    is_eos,
    last_true,
    new_row,
    shift,
    view,
    write,
)
from refusion_jax.decoding.sampling import Sampling, Scores
from refusion_jax.decoding.window import HIDDEN, SHARED, WHOLE_TRUNK, Window, assemble, on_branches, on_trunk

ALTERNATIVES = 4
REACH = 0.1  # drafts are verified as far as they are all right with at least this probability
PLAN_AHEAD = 0.3  # the next plan is made with the verification if all drafts are right with more than this


class ExactRow(Row):
    """What exact decoding knows of a row, beside its text."""

    chosen: jax.Array  # [S] bool: the position belongs to a slot that was chosen
    alternatives: jax.Array  # [S, A] int32: the next most likely tokens there
    pending: jax.Array  # int32: position of the committed token that is not cached; -1: none
    planned: jax.Array  # bool: nothing was committed since the plan, so that its first token is exact


class Parts(NamedTuple):
    """A value of every window entry, split by role."""

    pending: jax.Array  # [...]
    drafts: jax.Array  # [b, ...]
    probes: jax.Array  # [J, ...]
    alternatives: jax.Array  # [A, ...]
    plan: jax.Array  # [b, ...]


class Exact(flax.struct.PyTreeNode):
    """The exact method; see the module's docstring. ``window`` and ``update`` are written for one row."""

    slot_threshold: jax.Array  # float32
    slot_size: int = flax.struct.field(pytree_node=False)
    block_size: int = flax.struct.field(pytree_node=False)
    mask: int = flax.struct.field(pytree_node=False)
    eos: tuple[int, ...] = flax.struct.field(pytree_node=False)
    sampling: Sampling | None = None
    planner: str = flax.struct.field(pytree_node=False, default="confidence")

    candidates: ClassVar[int] = ALTERNATIVES + 1

    @property
    def slots(self) -> int:
        """J, slots of a block."""
        return -(-self.block_size // self.slot_size)

    @property
    def restricted(self) -> bool:
        """Neither the mask nor ids beyond the tokenizer are ever written."""
        return True

    @property
    def entries(self) -> int:
        """T, entries of the window."""
        return 1 + 2 * self.block_size + self.slots + ALTERNATIVES

    def split(self, values: jax.Array) -> Parts:
        """A value of every window entry [T, ...], by role."""
        ends = itertools.accumulate((1, self.block_size, self.slots, ALTERNATIVES))
        pending, *others = jnp.split(values, list(ends))
        return Parts(pending[0], *others)

    def init(self, tokens: jax.Array, prompt_length: jax.Array, budget: jax.Array, noise: jax.Array) -> ExactRow:
        """A row whose prompt is cached: ``tokens`` [S] holds the prompt, ``budget`` tokens may follow.

        ``noise`` [2] uint32 is the key of its noise.
        """
        S = tokens.shape[0]
        return ExactRow(
            **new_row(tokens, prompt_length, budget, noise),
            chosen=jnp.zeros(S, bool),
            alternatives=jnp.zeros((S, ALTERNATIVES), jnp.int32),
            pending=jnp.asarray(-1, jnp.int32),
            planned=jnp.asarray(False),
        )

    def window(self, row: ExactRow) -> Window:
        """What the row feeds next: the table above."""
        k, b, J, A = self.slot_size, self.block_size, self.slots, ALTERNATIVES
        block = row.start + jnp.arange(b)
        offset, slot = jnp.arange(b) % k, jnp.arange(b) // k
        heads = jnp.arange(J) * k
        todo = view(row.unwritten & row.chosen, block, False)
        first = first_true(todo)
        verifying = jnp.any(todo)
        proven = row.planned & first  # a draft that needs no verification

        has_pending = row.pending >= 0
        pending = on_trunk(view(row.tokens, row.pending[None]), row.pending[None], has_pending[None])

        logprob = jnp.where(todo & ~proven, view(row.logprob, block), 0.0)
        all_right_before = jnp.cumsum(logprob) - logprob
        ends = todo & is_eos(view(row.tokens, block), self.eos)
        live = todo & (first | (all_right_before >= jnp.log(REACH))) & (jnp.cumsum(ends) - ends == 0)
        drafts = on_trunk(view(row.tokens, block), block, live, has_pending.astype(jnp.int32))

        probed = (live & ~proven)[heads]
        probes = on_branches(jnp.full(J, self.mask), block[heads], probed, drafts.place[heads], jnp.arange(J))

        next_to_pending = has_pending & jnp.any(first & (offset > 0) & (block == row.pending + 1))
        position = jnp.full(A, row.pending + 1)
        alternatives = on_branches(
            view(row.alternatives, position[:1])[0],
            position,
            jnp.broadcast_to(next_to_pending, A),
            1,
            J + jnp.arange(A),
        )

        base, plannable = self.next_plan(row)
        all_right = jnp.all(live == todo) & ~jnp.any(ends) & (jnp.sum(logprob) > jnp.log(PLAN_AHEAD))
        masks = on_branches(
            jnp.full(b, self.mask),
            base + jnp.arange(b),
            plannable & (~verifying | all_right),
            WHOLE_TRUNK,
            J + A + slot,
        )
        cached = row.committed & (jnp.arange(row.tokens.shape[0]) != row.pending)
        return assemble([pending, drafts, probes, alternatives, masks], jnp.where(cached, SHARED, HIDDEN))

    def next_plan(self, row: ExactRow) -> tuple[jax.Array, jax.Array]:
        """The block to plan next: its first position, and which of its positions [b] are open."""
        block = row.start + jnp.arange(self.block_size)
        is_open = row.unwritten & ~row.chosen
        base = jnp.where(jnp.any(view(is_open, block, False)), row.start, row.start + self.block_size)
        return base, view(is_open, base + jnp.arange(self.block_size), False)

    def update(self, row: ExactRow, window: Window, scores: Scores) -> tuple[ExactRow, jax.Array, Report]:
        """What the scores prove. Returns the row, which entries' keys and values to store [T], and a report."""
        verified, stored, accepted, as_drafted = self.verify(row, window, scores)
        base, masks = window.positions[-self.block_size], self.split(window.live).plan
        certainty = self.split(scores.certainty).plan
        certainty = certainties(self.planner, certainty, masks, base, row.noise, self.slot_size)
        planned = masks & as_drafted
        chosen = planned & by_position(
            choose(certainty, by_slot(planned, self.slot_size)[:, 0], self.slot_threshold),
            self.slot_size,
            self.block_size,
        )
        new = self.draft(verified, base, chosen, scores)
        block = row.start + jnp.arange(self.block_size)
        finished = ~jnp.any(view(new.unwritten, block, False))
        start = jnp.where(jnp.any(planned), base, jnp.where(finished, row.start + self.block_size, row.start))
        verifying = jnp.any(self.split(window.live).drafts)
        new = new.replace(start=start, forwards=row.forwards.at[jnp.where(verifying, VERIFY, PLAN)].add(1))
        return new, stored, Report(base, planned, certainty, chosen, self.split(window.live).drafts, accepted)

    def verify(self, row: ExactRow, window: Window, scores: Scores) -> tuple[ExactRow, jax.Array, jax.Array, jax.Array]:
        """Commit what is right, and what comes for free.

        Returns the row, which entries to store [T], which drafts are right [b], and whether everything came as it was
        drafted, so that a plan made behind the drafts holds.
        """
        k, b = self.slot_size, self.block_size
        block = row.start + jnp.arange(b)
        offset, slot = jnp.arange(b) % k, jnp.arange(b) // k
        live, fed = self.split(window.live), self.split(window.tokens)
        after = self.split(scores.tokens[:, 0])  # the token chosen at a mask, or after a token
        logprob = self.split(scores.logprob)
        first = first_true(live.drafts)

        # Targets: what the sequential process writes at each draft's place if all drafts before it are right.
        proven = row.planned & first

        def of_target(values: Parts, if_proven: jax.Array) -> jax.Array:
            before = jnp.where(shift(live.drafts), shift(values.drafts), values.pending)
            return jnp.where(proven, if_proven, jnp.where(offset == 0, values.probes[slot], before))

        target = of_target(after, fed.drafts)
        right = live.drafts & (target == fed.drafts)
        accepted = live.drafts & (jnp.cumsum(live.drafts & ~right) == 0)
        eos = accepted & is_eos(fed.drafts, self.eos)
        accepted &= (jnp.cumsum(eos) - eos) == 0
        ended = jnp.any(eos)

        # For free: the target at the first wrong place; behind a right alternative or the last draft, one more.
        wrong = first_true(live.drafts & ~right) & ~ended
        corrected = jnp.any(wrong)
        found = live.alternatives & jnp.any(wrong & first) & (fed.alternatives == jnp.sum(jnp.where(wrong, target, 0)))
        tip = jnp.where(corrected, wrong & jnp.any(found) & ~is_eos(target, self.eos), last_true(accepted) & ~ended)
        free = shift(tip) & (offset > 0) & view(row.unwritten & row.chosen, block, False)

        def after_tip(values: Parts) -> jax.Array:
            behind_alternative = jnp.sum(jnp.where(found, values.alternatives, 0))
            return jnp.where(corrected, behind_alternative, jnp.sum(jnp.where(tip, values.drafts, 0)))

        tokens = jnp.where(free, after_tip(after), target)
        logprobs = jnp.where(free, after_tip(logprob), of_target(logprob, view(row.logprob, block)))
        uncached = free | (wrong & ~jnp.any(found))
        stored = Parts(live.pending[None], accepted, jnp.zeros_like(live.probes), found, jnp.zeros_like(live.plan))
        new = write(row, block, tokens, logprobs, accepted | wrong | free, self.eos)
        new = new.replace(
            pending=jnp.where(jnp.any(uncached), jnp.sum(jnp.where(last_true(uncached), block, 0)), -1),
            planned=jnp.asarray(False),
        )
        return new, jnp.concatenate(stored), accepted, ~jnp.any(wrong | free) & ~ended

    def draft(self, row: ExactRow, base: jax.Array, chosen: jax.Array, scores: Scores) -> ExactRow:
        """The tokens chosen at the masks of the ``chosen`` positions [b] of the block at ``base``, as drafts."""
        place = jnp.where(chosen, base, row.tokens.shape[0]) + jnp.arange(self.block_size)
        tokens, logprob = self.split(scores.tokens).plan, self.split(scores.logprob).plan

        def put(array: jax.Array, values: Any) -> jax.Array:
            return array.at[place].set(values, mode="drop", unique_indices=True)

        return row.replace(
            tokens=put(row.tokens, tokens[:, 0]),
            chosen=put(row.chosen, True),
            logprob=put(row.logprob, logprob),
            alternatives=put(row.alternatives, tokens[:, 1:]),
            planned=jnp.any(chosen),
        )
