"""The decoder of the official ReFusion code, bug for bug, and the same with its EOS fault mended.

`compat="official"` must equal `decode_official`, and `verify="threshold"` must equal `decode_threshold`.
Both are greedy, one prompt at a time; float32 probabilities are compared with the thresholds by strict >.

Inside a serial block, until no slot remains:

1. Plan. The masks of all remaining slots stand behind the context, each seeing all before it. A slot's draft
   is the most likely token at each of its masks, its confidence the probability of the first one.
2. Choose every slot with confidence > slot_threshold; if there is none, the single most confident one.
3. Verify globally: the drafts of the chosen slots in one row. A token passes when its probability at the
   token before it is > token_threshold; the first of every slot passes always.
4. The leading passes of that row are its prefix. If it holds an EOS, everything up to it is committed and the
   slots from there on are dropped. Else, if it holds whole slots, those are committed.
5. Otherwise the chosen slots are infilled in parallel, each a row of its own that does not see the others:
   draft what is not accepted at masks, verify, accept the leading passes and at least one token more, until
   all rows are accepted whole. An EOS drops the rows after its own.

After an EOS the remaining slots of its block are still written, then decoding stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from tests.twins.context import Context, Model, Slot, banned, partition, response

# Calls of the model; all rows of a parallel infill are one call.
CALLS = ("plan", "global_verification", "draft", "verify")

# How close the closest decision of every kind was: another order of float sums may turn it.
MARGINS = (
    "slot_threshold",  # confidence of a slot to the threshold
    "slot_fallback",  # most confident slot to the next, where none passes the threshold
    "plan_logit",  # drafts of chosen slots: best logit to the next
    "global_threshold",  # probability to the threshold
    "draft_logit",
    "verify_threshold",
)


@dataclass
class Decoded:
    token_ids: list[int] = field(default_factory=list)
    committed: list[tuple[int, int]] = field(default_factory=list)  # (offset, token) in commit order
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CALLS, 0))
    query_tokens: int = 0  # tokens fed to the model, rows times length
    tokens_per_forward: list[float] = field(default_factory=list)  # the official figure, of every iteration
    margins: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MARGINS, np.inf))
    finish_reason: str = "length"  # "stop" where an EOS was found

    @property
    def margin(self) -> float:
        return min(self.margins.values())


def decode_official(
    model: Model,
    prompt: Sequence[int],
    *,
    gen_length: int,
    slot_size: int,
    serial_num_blocks: int,
    slot_threshold: float,
    token_threshold: float,
) -> Decoded:
    """token_ids: every committed token in position order, whatever stands behind an EOS included."""
    if gen_length < 1:
        raise ValueError(f"{gen_length=}: there must be at least one token to generate")
    rounded = -(-gen_length // slot_size) * slot_size
    block_size = rounded // serial_num_blocks
    if block_size == 0:
        raise ValueError(f"{serial_num_blocks=} exceeds the {rounded} tokens to generate: blocks would be empty")
    if block_size % slot_size:
        raise ValueError(
            f"{slot_size=} does not divide the serial block of {block_size} tokens ({rounded} tokens in "
            f"{serial_num_blocks=})"
        )
    # Where the number of blocks does not divide the length, the last positions are never generated.
    blocks = partition(0, block_size * serial_num_blocks, block_size)
    run = _Run(model, prompt, slot_threshold, token_threshold, eos_fixed=False)
    run.decode([partition(block.start, block.stop, slot_size) for block in blocks])
    run.out.token_ids = [token for _, token in sorted(run.out.committed)]
    return run.out


def decode_threshold(
    model: Model,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    slot_size: int,
    block_size: int,
    slot_threshold: float,
    token_threshold: float,
    recompute: bool = False,
) -> Decoded:
    """The same with three differences.

    With recompute, keys and values of slots that were infilled in parallel are computed again, each token seeing all
    before it. An EOS drops the slots behind it only; the mask and rows beyond the tokenizer are banned; token_ids ends
    with the first EOS by position. The last slot and block may be short.
    """
    if block_size % slot_size:
        raise ValueError(f"{slot_size=} does not divide {block_size=}")
    blocks = partition(0, max_new_tokens, block_size)
    run = _Run(model, prompt, slot_threshold, token_threshold, eos_fixed=True, recompute=recompute)
    run.decode([partition(block.start, block.stop, slot_size) for block in blocks])
    run.out.token_ids = response(run.out.committed, model.eos_id)
    return run.out


@dataclass
class _Row:
    """A chosen slot in parallel infill."""

    slot: Slot
    tokens: list[int]
    accepted: int  # leading tokens that are final
    context: Context  # all that was committed, then the slot's own tokens before the window

    @property
    def done(self) -> bool:
        return self.accepted == len(self.tokens)


class _Run:
    def __init__(
        self,
        model: Model,
        prompt: Sequence[int],
        slot_threshold: float,
        token_threshold: float,
        eos_fixed: bool,
        recompute: bool = False,
    ):
        self.model = model
        self.prompt = list(prompt)
        self.slot_threshold = np.float32(slot_threshold)
        self.token_threshold = np.float32(token_threshold)
        self.eos_fixed = eos_fixed
        self.recompute = recompute
        self.context = Context(model)
        self.out = Decoded()

    def decode(self, blocks: list[list[Slot]]) -> None:
        for block in blocks:
            remaining = block
            ended = False
            while remaining:
                drafts, chosen = self.plan(remaining)
                slots = [remaining[index] for index in chosen]
                passes, keys, values = self.verify_globally(slots, drafts)

                tokens = [token for draft in drafts for token in draft]
                ends = np.cumsum([len(slot) for slot in slots])  # where each slot ends among the tokens
                prefix = _leading(passes)
                whole = int((ends <= prefix).sum())  # slots that lie in the prefix
                if self.model.eos_id in tokens[:prefix]:
                    length = tokens.index(self.model.eos_id) + 1
                    last = int(np.searchsorted(ends, length))
                    self.commit(slots, tokens[:length], keys, values)
                    self.out.tokens_per_forward.append(ends[last] / 2)
                    dropped = [*chosen, *range(chosen[last], len(remaining))]
                    ended = True
                elif whole:
                    length = int(ends[whole - 1])
                    self.commit(slots, tokens[:length], keys, values)
                    self.out.tokens_per_forward.append(length / 2)
                    dropped = chosen[:whole]
                else:
                    eos_row = self.infill(slots, drafts, passes)
                    dropped = chosen
                    if eos_row is not None:
                        # The official code takes the row for the slot's index in the list of remaining slots.
                        first = chosen[eos_row] if self.eos_fixed else eos_row
                        dropped = [*chosen, *range(first, len(remaining))]
                        ended = True
                remaining = [slot for index, slot in enumerate(remaining) if index not in dropped]
            if ended:
                self.out.finish_reason = "stop"
                break

    def plan(self, remaining: list[Slot]) -> tuple[list[list[int]], list[int]]:
        """The drafts of the chosen slots, and which of the remaining slots those are."""
        offsets = [offset for slot in remaining for offset in slot]
        # The first plan feeds the prompt too.
        uncached = self.prompt[len(self.context) :]
        logits, keys, values = self.context.forward(
            uncached + [self.model.mask_id] * len(offsets),
            [*range(len(self.context), len(self.context) + len(uncached)), *self.positions(offsets)],
        )
        self.count("plan", len(logits))
        self.context.append(keys[:, : len(uncached)], values[:, : len(uncached)])

        logits = self.admitted(logits[len(uncached) :])
        firsts = [offsets.index(slot.start) for slot in remaining]
        confidences = _softmax(logits[firsts]).max(-1)
        chosen = np.flatnonzero(confidences > self.slot_threshold).tolist()
        self.note("slot_threshold", np.abs(confidences - self.slot_threshold))
        if not chosen:
            chosen = [int(confidences.argmax())]
            self.note("slot_fallback", confidences.max() - np.delete(confidences, chosen))
        drafts = []
        for index in chosen:
            at_masks = logits[firsts[index] : firsts[index] + len(remaining[index])]
            drafts.append(at_masks.argmax(-1).tolist())
            self.note("plan_logit", _gaps(at_masks))
        return drafts, chosen

    def verify_globally(self, slots: list[Slot], drafts: list[list[int]]) -> tuple[list[bool], NDArray, NDArray]:
        """Which drafted tokens pass, and the keys and values of all, when the slots stand in one row."""
        tokens = [token for draft in drafts for token in draft]
        offsets = [offset for slot in slots for offset in slot]
        logits, keys, values = self.context.forward(tokens, self.positions(offsets))
        self.count("global_verification", len(tokens))
        probabilities = self.probabilities_of(tokens, logits)
        firsts = {slot.start for slot in slots}
        passes = [
            offset in firsts or bool(probability > self.token_threshold)
            for offset, probability in zip(offsets, probabilities, strict=True)
        ]
        for slot in slots:
            start = offsets.index(slot.start)
            own = slice(start, start + len(slot))
            self.note_threshold("global_threshold", probabilities[own], 1, _leading(passes[own]))
        return passes, keys, values

    def infill(self, slots: list[Slot], drafts: list[list[int]], passes: list[bool]) -> int | None:
        """Commit the chosen slots. The row that an EOS was found in, if any: later ones are not committed."""
        rows = []
        for slot, draft in zip(slots, drafts, strict=True):
            accepted = _leading(passes[: len(slot)])
            passes = passes[len(slot) :]
            rows.append(_Row(slot, draft, accepted, Context(self.model, self.context.memory)))
        start = rounds = 0  # the window begins at the last token that is accepted in all rows
        eos_row = None
        while not all(row.done for row in rows):
            rounds += 1
            self.count("draft", sum(len(row.tokens[start:]) for row in rows))
            self.count("verify", sum(len(row.tokens[start:]) for row in rows))
            windows = []
            for row in rows:
                self.draft(row, start)
                windows.append(self.verify(row, start))
            for index, row in enumerate(rows):
                if self.model.eos_id in row.tokens[start : row.accepted]:
                    row.accepted = len(row.tokens)
                    rows = rows[: index + 1]
                    eos_row = index
                    break
            unfinished = [row.accepted for row in rows if not row.done]
            following = min(unfinished) - 1 if unfinished else max(len(row.tokens) for row in rows)
            for row, (keys, values) in zip(rows, windows, strict=False):
                row.context.append(keys[:, : following - start], values[:, : following - start])
            start = following

        tokens = [token for row in rows for token in row.tokens]
        if self.model.eos_id in tokens:
            tokens = tokens[: tokens.index(self.model.eos_id) + 1]
        own = [row.context.since(len(self.context)) for row in rows]
        keys, values = (np.concatenate(parts, axis=1) for parts in zip(*own, strict=True))
        if self.recompute:
            offsets = [offset for row in rows for offset in row.slot][: len(tokens)]
            _, keys, values = self.context.forward(tokens, self.positions(offsets))
        self.commit([row.slot for row in rows], tokens, keys, values)
        self.out.tokens_per_forward.append(sum(len(slot) for slot in slots) / (2 * rounds + 2))
        return eos_row

    def draft(self, row: _Row, start: int) -> None:
        """Read every token that is not accepted yet at a mask in its place."""
        masks = [self.model.mask_id] * (len(row.tokens) - row.accepted)
        if masks:
            window = row.tokens[start : row.accepted] + masks
            logits = self.admitted(row.context.forward(window, self.positions(row.slot[start:]))[0])
            drafted = logits[row.accepted - start :]
            row.tokens = row.tokens[: row.accepted] + drafted.argmax(-1).tolist()
            self.note("draft_logit", _gaps(drafted))

    def verify(self, row: _Row, start: int) -> tuple[NDArray, NDArray]:
        """Accept leading tokens, at least one more than before. Keys and values of the window."""
        tokens = row.tokens[start:]
        logits, keys, values = row.context.forward(tokens, self.positions(row.slot[start:]))
        if not row.done:
            probabilities = self.probabilities_of(tokens, logits)
            forced = row.accepted - start + 1
            passes = [i < forced or bool(p > self.token_threshold) for i, p in enumerate(probabilities)]
            accepted = _leading(passes)
            self.note_threshold("verify_threshold", probabilities, forced, accepted)
            row.accepted = start + accepted
        return keys, values

    def commit(self, slots: list[Slot], tokens: list[int], keys: NDArray, values: NDArray) -> None:
        offsets = [offset for slot in slots for offset in slot]
        self.out.committed.extend(zip(offsets, tokens, strict=False))
        self.context.append(keys[:, : len(tokens)], values[:, : len(tokens)])

    def probabilities_of(self, tokens: list[int], logits: NDArray) -> NDArray:
        """The probability of every token [T] at the one before it; that of the first is meaningless."""
        previous = np.concatenate([logits[:1], logits[:-1]])
        return _softmax(self.admitted(previous))[np.arange(len(tokens)), tokens]

    def note_threshold(self, kind: str, probabilities: NDArray, forced: int, accepted: int) -> None:
        """Decisions that count are those after the forced tokens, up to and including the first refusal."""
        self.note(kind, np.abs(probabilities[forced : accepted + 1] - self.token_threshold))

    def admitted(self, logits: NDArray) -> NDArray:
        return banned(self.model, logits) if self.eos_fixed else logits

    def positions(self, offsets: Sequence[int]) -> list[int]:
        return [len(self.prompt) + offset for offset in offsets]

    def count(self, kind: str, query_tokens: int) -> None:
        self.out.calls[kind] += 1
        self.out.query_tokens += query_tokens

    def note(self, kind: str, margins: NDArray) -> None:
        self.out.margins[kind] = min([self.out.margins[kind], *margins.tolist()])


def _leading(passes: list[bool]) -> int:
    """How many tokens pass before the first that does not."""
    return len(list(takewhile(bool, passes)))


def _softmax(logits: NDArray) -> NDArray:
    """Float32 probabilities [..., V]."""
    logits = logits.astype(np.float32)
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


def _gaps(logits: NDArray) -> NDArray:
    """Best logit [T, V] to the next."""
    ordered = np.sort(logits, axis=-1)
    return ordered[:, -1] - ordered[:, -2]
