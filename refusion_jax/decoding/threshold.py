"""The paper's algorithm: plan, verify globally, infill the chosen slots in parallel, by two probability thresholds.

One iteration of a serial block (ReFusion, section 4.2, and the official code, of which ``official=True`` reproduces
every decision):

1. *Plan*: one forward over the masks of the open slots, one behind the other. A slot whose first token is more
   probable than ``slot_threshold`` is chosen; if none is, the most certain one. The most likely tokens are drafts.
2. *Verify*: one forward over the drafts of the chosen slots, one behind the other. A token passes if its probability
   after the token before it exceeds ``token_threshold``; the first of a slot always does. If an EOS lies among the
   leading passes, everything up to it is committed; else, if whole slots lead, they are, and the others are open again.
3. *Infill* otherwise: every chosen slot is finished by itself, in parallel, behind the committed text. A *draft*
   forward fills the tokens that have not passed from masks, a *check* forward verifies them; each slot accepts its
   leading passes and one token more, until all are accepted. Keys and values are kept as far as all slots agree.

What an infill has cached of a slot is seen by that slot alone until the slot is committed. Slots that were infilled
together have thus not seen each other, and their keys and values stay so (``kv_reuse="reuse"``, the paper's way); with
"recompute" one more forward computes them again, each token seeing all before it, and with "none" nothing of the answer
is cached at all: every forward computes what is committed again, in the order in which it was.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from refusion_jax.decoding import row as rows
from refusion_jax.decoding.plan import by_position, by_slot, certainties, choose
from refusion_jax.decoding.row import Report, Row, first_true, is_eos, new_row, shift, view, write
from refusion_jax.decoding.sampling import Sampling, Scores
from refusion_jax.decoding.window import HIDDEN, SHARED, Entries, Window, assemble, on_branches, on_trunk

PLAN, VERIFY, DRAFT, CHECK, RECOMPUTE = range(5)
KIND = (rows.PLAN, rows.VERIFY, rows.DRAFT, rows.VERIFY, rows.VERIFY)  # how each phase is counted


class ThresholdRow(Row):
    """What threshold decoding knows of a row, beside its text."""

    phase: jax.Array  # int32: PLAN, VERIFY, DRAFT, CHECK or RECOMPUTE, what the next forward does
    planned: jax.Array  # [S] bool: open when the last plan was made
    chosen: jax.Array  # [S] bool: of the slots that are being written
    passed: jax.Array  # [S] bool: accepted, leading in its slot
    offset: jax.Array  # int32: infill: tokens of every chosen slot whose keys and values are final
    eos_row: jax.Array  # int32: infill: rank among the chosen slots of the one that holds an EOS; -1: none


class Slot(NamedTuple):
    """One slot of an infill, its positions 0..k-1 in a leading axis."""

    tokens: jax.Array  # [k] int32
    writable: jax.Array  # [k] bool: exists and is being written
    passed: jax.Array  # [k] bool


def draft_slot(slot: Slot, best: jax.Array) -> jax.Array:
    """Tokens [k] of one slot: what has passed stays, the rest is the most likely token ``best`` [k] at its mask."""
    return jnp.where(slot.passed, slot.tokens, best)


def check_slot(slot: Slot, probability: jax.Array, threshold: jax.Array, offset: jax.Array) -> jax.Array:
    """Which tokens [k] of one slot have passed after a check, given their ``probability`` [k] after the one before.

    Tokens that had passed stay, the one behind them always passes, and so does the first of the window.
    """
    place = jnp.arange(slot.tokens.shape[0])
    forced = (place <= offset) | shift(slot.passed)
    return leading(forced | (probability > threshold)) & slot.writable


def leading(mask: jax.Array) -> jax.Array:
    """``mask`` [k] up to its first False."""
    return jnp.cumsum(~mask) == 0


class Threshold(flax.struct.PyTreeNode):
    """The threshold method; see the module's docstring. ``window`` and ``update`` are written for one row."""

    slot_threshold: jax.Array  # float32
    token_threshold: jax.Array  # float32
    slot_size: int = flax.struct.field(pytree_node=False)
    block_size: int = flax.struct.field(pytree_node=False)
    mask: int = flax.struct.field(pytree_node=False)
    eos: tuple[int, ...] = flax.struct.field(pytree_node=False)
    sampling: Sampling | None = None
    planner: str = flax.struct.field(pytree_node=False, default="confidence")
    official: bool = flax.struct.field(pytree_node=False, default=False)
    kv_reuse: str = flax.struct.field(pytree_node=False, default="reuse")
    budget: int = flax.struct.field(pytree_node=False, default=0)  # new tokens at most; kv_reuse="none" only

    candidates: ClassVar[int] = 1

    @property
    def restricted(self) -> bool:
        """The official code bans no token."""
        return not self.official

    @property
    def entries(self) -> int:
        """T, entries of the window: the positions of a block, behind those of the whole answer if it is not cached."""
        return self.block_size + (self.budget if self.kv_reuse == "none" else 0)

    def init(self, tokens: jax.Array, prompt_length: jax.Array, budget: jax.Array, noise: jax.Array) -> ThresholdRow:
        """A row whose prompt is cached: ``tokens`` [S] holds the prompt, ``budget`` tokens may follow.

        ``noise`` [2] uint32 is the key of its noise.
        """
        nowhere = jnp.zeros(tokens.shape, bool)
        return ThresholdRow(
            **new_row(tokens, prompt_length, budget, noise),
            phase=jnp.asarray(PLAN, jnp.int32),
            planned=nowhere,
            chosen=nowhere,
            passed=nowhere,
            offset=jnp.zeros((), jnp.int32),
            eos_row=jnp.asarray(-1, jnp.int32),
        )

    def window(self, row: ThresholdRow) -> Window:
        """Plan: the masks of the open slots. Verify: the drafts. Infill: of every slot, what is not final."""
        b, k = self.block_size, self.slot_size
        block = row.start + jnp.arange(b)
        slot, offset = jnp.arange(b) // k, jnp.arange(b) % k
        infill = (row.phase == DRAFT) | (row.phase == CHECK)
        chosen = view(row.chosen, block, False)
        wanted = jnp.where(row.phase == PLAN, view(row.unwritten, block, False), chosen)
        live = wanted if self.kv_reuse == "none" else wanted & ~(infill & (offset < row.offset))
        masked = (row.phase == PLAN) | ((row.phase == DRAFT) & ~view(row.passed, block, False))
        tokens = jnp.where(masked, self.mask, view(row.tokens, block))
        context = self.context(row)
        before = sum((jnp.sum(entries.live) for entries in context), start=jnp.int32(0))
        trunk, branches = on_trunk(tokens, block, live, before), on_branches(tokens, block, live, before, slot)
        entries = jax.tree.map(lambda t, s: jnp.where(infill, s, t), trunk, branches)

        position = jnp.arange(row.tokens.shape[0])
        place = position - row.start
        final = infill & row.chosen & (place % k < row.offset)
        cached = row.committed & ~((row.phase == RECOMPUTE) & row.chosen)
        scope = jnp.where(cached, SHARED, jnp.where(final, place // k, HIDDEN))
        if context:
            scope = jnp.where(position < row.prompt_length, SHARED, HIDDEN)
        following = jnp.where(live, jnp.concatenate([tokens[1:], tokens[:1]]), 0)
        missing = self.entries - b
        return assemble([*context, entries], scope, jnp.pad(following, (missing, 0)))

    def context(self, row: ThresholdRow) -> list[Entries]:
        """What is committed of the answer, in the order in which it was, if it is not cached."""
        if self.kv_reuse != "none":
            return []
        position = row.prompt_length + jnp.arange(self.budget)
        written = view(row.committed, position, False)
        place = view(row.order, position)
        branch = jnp.full(self.budget, SHARED)
        return [Entries(view(row.tokens, position), position, written, place, place + 1, branch)]

    def update(self, row: ThresholdRow, window: Window, scores: Scores) -> tuple[ThresholdRow, jax.Array, Report]:
        """What follows from one forward. Returns the row, which entries' keys and values to store [T], and a report."""
        b, k = self.block_size, self.slot_size
        whole = window
        window, scores = jax.tree.map(lambda x: x[-b:], (window.replace(scope=None), scores))
        assert scores.asked is not None
        best, probability = scores.tokens[:, 0], shift(scores.asked)
        certainty = certainties(self.planner, scores.certainty, window.live, row.start, row.noise, k)
        outcomes = (
            self.after_plan(row, window, best, scores.logprob, certainty),
            self.after_verify(row, window, probability),
            self.after_draft(row, window, best, scores.logprob),
            self.after_check(row, window, probability),
            (self.finish(row), window.live),
        )
        new, stored = jax.tree.map(lambda *values: jnp.stack(values)[row.phase], *outcomes)
        new = new.replace(forwards=row.forwards.at[jnp.asarray(KIND)[row.phase]].add(1))
        block_written = ~jnp.any(view(new.unwritten, row.start + jnp.arange(b), False))
        new = new.replace(start=jnp.where(block_written & (new.phase == PLAN), row.start + b, row.start))
        checking = (row.phase == VERIFY) | (row.phase == CHECK)
        block = row.start + jnp.arange(b)
        report = Report(
            base=row.start,
            planned=window.live & (row.phase == PLAN),
            certainty=certainty,
            chosen=view(new.chosen, block, False) & (row.phase == PLAN),
            drafts=window.live & checking,
            accepted=view(new.passed | new.committed, block, False) & window.live & checking,
        )
        if self.kv_reuse == "none":
            return new, jnp.zeros_like(whole.live), report
        return new, stored, report

    def after_plan(
        self, row: ThresholdRow, window: Window, best: jax.Array, logprob: jax.Array, certainty: jax.Array
    ) -> tuple[ThresholdRow, jax.Array]:
        """Choose slots; their drafts are the most likely tokens."""
        b, k = self.block_size, self.slot_size
        chosen = choose(certainty, by_slot(window.live, k)[:, 0], self.slot_threshold)
        chosen = window.live & by_position(chosen, k, b)
        row = self.put(self.put(row, "tokens", best, chosen), "logprob", logprob, chosen)
        row = self.put(row.replace(chosen=jnp.zeros_like(row.chosen)), "chosen", True, chosen)
        row = self.put(row.replace(planned=jnp.zeros_like(row.planned)), "planned", True, window.live)
        return row.replace(phase=jnp.asarray(VERIFY, jnp.int32)), jnp.zeros(b, bool)

    def after_verify(self, row: ThresholdRow, window: Window, probability: jax.Array) -> tuple[ThresholdRow, jax.Array]:
        """Commit the leading passes up to an EOS, or the leading whole slots, or begin to infill."""
        b, k, live = self.block_size, self.slot_size, window.live
        passes = live & ((jnp.arange(b) % k == 0) | (probability > self.token_threshold))
        lead = live & leading(passes | ~live)
        eos = lead & is_eos(window.tokens, self.eos)
        to_eos = lead & ((jnp.cumsum(eos) - eos) == 0)
        whole = live & by_position(jnp.all(by_slot(lead | ~live, k), axis=1), k, b)
        accepted = jnp.where(jnp.any(eos), to_eos, whole)

        logprob = view(row.logprob, window.positions)
        committed = self.finish(write(row, window.positions, window.tokens, logprob, accepted, self.eos))
        passed = live & jax.vmap(leading)(by_slot(passes, k)).reshape(-1)[:b]
        infill = self.put(row, "passed", passed, live).replace(
            phase=jnp.asarray(DRAFT, jnp.int32), offset=jnp.zeros((), jnp.int32), eos_row=jnp.asarray(-1, jnp.int32)
        )
        new = jax.tree.map(lambda yes, no: jnp.where(jnp.any(accepted), yes, no), committed, infill)
        return new, accepted

    def after_draft(
        self, row: ThresholdRow, window: Window, best: jax.Array, logprob: jax.Array
    ) -> tuple[ThresholdRow, jax.Array]:
        """Fill what has not passed, slot by slot."""
        slots = self.slots(row)
        tokens = jax.vmap(draft_slot)(slots, by_slot(best, self.slot_size)).reshape(-1)[: self.block_size]
        drafted = window.live & ~slots.passed.reshape(-1)[: self.block_size]
        row = self.put(self.put(row, "tokens", tokens, window.live), "logprob", logprob, drafted)
        return row.replace(phase=jnp.asarray(CHECK, jnp.int32)), jnp.zeros_like(window.live)

    def after_check(self, row: ThresholdRow, window: Window, probability: jax.Array) -> tuple[ThresholdRow, jax.Array]:
        """Accept the leading passes of every slot; when all slots are whole, commit them up to the first EOS."""
        b, k = self.block_size, self.slot_size
        place = jnp.arange(b) % k
        slots = self.slots(row)
        passed = jax.vmap(check_slot, in_axes=(0, 0, None, None))(
            slots, by_slot(probability, k), self.token_threshold, row.offset
        )

        # The first slot with an accepted EOS is complete, and the slots behind it are dropped.
        in_window = jnp.arange(k) >= row.offset
        holds_eos = jnp.any(passed & in_window & is_eos(slots.tokens, self.eos), axis=1)
        ends = first_true(holds_eos)
        kept = jnp.cumsum(holds_eos) - holds_eos == 0
        writable = slots.writable & kept[:, None]
        passed = (passed | ends[:, None]) & writable
        chosen_slots = jnp.any(slots.writable, axis=1)
        rank = jnp.sum(jnp.where(ends, jnp.cumsum(chosen_slots) - 1, 0))
        eos_row = jnp.where(jnp.any(ends), rank, row.eos_row)

        complete = jnp.all(passed == writable)
        done = jnp.sum(jax.vmap(leading)(passed | ~writable), axis=1)  # a short slot that is complete holds nobody back
        agreed = jnp.min(jnp.where(jnp.any(writable, axis=1), done, k))
        final = jnp.where(complete, k, agreed - 1)
        chosen = writable.reshape(-1)[:b]
        stored = window.live & chosen & (place < final)

        row = self.put(row, "chosen", chosen, view(row.chosen, window.positions, False))
        row = self.put(row, "passed", passed.reshape(-1)[:b], chosen)
        tokens = view(row.tokens, window.positions)
        eos = chosen & is_eos(tokens, self.eos)
        logprob = view(row.logprob, window.positions)
        written = write(row, window.positions, tokens, logprob, chosen & ((jnp.cumsum(eos) - eos) == 0), self.eos)
        if self.official:
            # Q1: the slots dropped behind an EOS are counted from its rank among the chosen, not from its place.
            planned = by_slot(view(row.planned, window.positions, False), k)[:, 0]
            at_rank = planned & (jnp.cumsum(planned) - 1 == eos_row)
            boundary = row.start + k * jnp.argmax(at_rank)
            written = written.replace(end=jnp.where(eos_row >= 0, jnp.minimum(written.end, boundary), written.end))
        infill = row.replace(phase=jnp.asarray(DRAFT, jnp.int32), offset=final, eos_row=eos_row)
        finished = self.finish(written)
        if self.kv_reuse == "recompute":
            kept = row.chosen & written.committed
            finished = finished.replace(phase=jnp.asarray(RECOMPUTE, jnp.int32), chosen=kept)
        new = jax.tree.map(lambda yes, no: jnp.where(complete, yes, no), finished, infill)
        return new, stored

    def slots(self, row: ThresholdRow) -> Slot:
        """The slots of the current block, for an infill: every field [J, k]."""
        block = row.start + jnp.arange(self.block_size)
        fields = (view(row.tokens, block), view(row.chosen, block, False), view(row.passed, block, False))
        return Slot(*(by_slot(field, self.slot_size) for field in fields))

    def finish(self, row: ThresholdRow) -> ThresholdRow:
        """The row with no slot chosen, ready to plan."""
        nowhere = jnp.zeros_like(row.chosen)
        return row.replace(phase=jnp.asarray(PLAN, jnp.int32), chosen=nowhere, passed=nowhere)

    def put(self, row: ThresholdRow, field: str, values: jax.Array | bool, where: jax.Array) -> ThresholdRow:
        """``row`` with ``values`` [b] in a field of the current block, ``where`` [b]."""
        place = jnp.where(where, row.start, row.tokens.shape[0]) + jnp.arange(self.block_size)
        array = getattr(row, field).at[place].set(values, mode="drop", unique_indices=True)
        return row.replace(**{field: array})
