"""Exact plan-and-infill, one token at a time: the process that `verify="exact"` must equal, token for token.

Context = prompt + committed tokens, with true RoPE positions; a token sees what was committed before it.
Inside a serial block, until no slot is open:

1. Plan. The masks of every open slot stand behind the context and see it and their own slot's earlier masks.
   The probability of the most likely token at a slot's first mask is the slot's certainty, unless another planner
   than `confidence` says how certain it is.
2. Choose every slot with certainty > slot_threshold; if there is none, the single most certain one.
3. Commit the chosen slots in position order. A slot's first token is chosen at a lone mask at its position
   behind the context as it is then, every later one at the token before it.
4. EOS ends its slot; open and chosen slots at later positions are dropped; earlier open slots of the block
   are still written; then decoding stops.

`python -m tests.twins.exact` decodes all golden prompts and writes tests/golden/exact/*.npz.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.twins import golden
from tests.twins.context import Choose, Context, Model, Slot, greedy, log_probabilities, partition, response

# (log-probabilities at the masks of a slot [k, V], its number in the block, position of the first mask) -> certainty
Planner = Callable[[NDArray, int, int], float]


def confidence(log_probabilities: NDArray, slot: int, position: int) -> float:
    """The probability of the most likely token at the first mask."""
    return np.exp(log_probabilities[0]).max()


def mean(log_probabilities: NDArray, slot: int, position: int) -> float:
    """The geometric mean, over all masks, of the probability of the most likely token."""
    best = np.exp(log_probabilities.astype(np.float64)).max(-1)
    return float(np.prod(best) ** (1 / len(best)))


def entropy(log_probabilities: NDArray, slot: int, position: int) -> float:
    """e to the minus entropy of the distribution at the first mask."""
    possible = log_probabilities[0][np.isfinite(log_probabilities[0])].astype(np.float64)
    return float(np.exp(np.sum(np.exp(possible) * possible)))


def left_to_right(log_probabilities: NDArray, slot: int, position: int) -> float:
    """1/e, and a factor of 1/e less for every slot of the block before it."""
    return float(np.exp(-1.0 - slot))


@dataclass(frozen=True)
class Plan:
    open: list[int]  # first offset of every open slot
    certainties: list[float]
    chosen: list[int]  # first offsets of the chosen ones


@dataclass(frozen=True)
class Decoded:
    token_ids: list[int]  # the response, up to and including the earliest EOS by position
    committed: list[tuple[int, int]]  # (offset, token) in commit order; offset = position minus prompt length
    plans: list[Plan]
    margin: float  # of the closest decision: another order of float sums may turn those below 1e-4
    finish_reason: str  # "stop" | "length"


def decode(
    model: Model,
    prompt: Sequence[int],
    *,
    slot_size: int,
    block_size: int,
    max_new_tokens: int,
    slot_threshold: float = 0.9,
    choose: Choose = greedy,
    planner: Planner = confidence,
) -> Decoded:
    if block_size % slot_size:
        raise ValueError(f"{slot_size=} does not divide {block_size=}")
    committed: list[tuple[int, int]] = []
    plans: list[Plan] = []
    margins: list[float] = []
    context = Context(model)
    if len(prompt) > 0:
        context.commit(prompt, range(len(prompt)))

    def write(slot: Slot) -> bool:
        """Commit a slot token by token; whether it ended in EOS."""
        logits = context.forward([model.mask_id], [len(prompt) + slot.start])[0]
        for offset in slot:
            position = len(prompt) + offset
            token, margin = choose(log_probabilities(model, logits[-1]), position)
            margins.append(margin)
            committed.append((offset, token))
            logits = context.commit([token], [position])
            if token == model.eos_id:
                return True
        return False

    ended = False
    for block in partition(0, max_new_tokens, block_size):
        open_slots = partition(block.start, block.stop, slot_size)
        while open_slots:
            numbers = [(slot.start - block.start) // slot_size for slot in open_slots]
            certainties = _certainties(context, open_slots, numbers, len(prompt), planner)
            chosen, margin = _choose_slots(open_slots, certainties, slot_threshold)
            plans.append(Plan(_firsts(open_slots), certainties.tolist(), _firsts(chosen)))
            margins.append(margin)
            for slot in chosen:
                open_slots.remove(slot)
                if write(slot):
                    ended = True
                    open_slots = [other for other in open_slots if other.start < slot.start]
                    break
        if ended:
            break

    return Decoded(
        token_ids=response(committed, model.eos_id),
        committed=committed,
        plans=plans,
        margin=min(margins),
        finish_reason="stop" if ended else "length",
    )


def _certainties(
    context: Context, open_slots: list[Slot], numbers: list[int], prompt_length: int, planner: Planner
) -> NDArray:
    """How certain [J] every open slot is; `numbers` are those of the slots in their block."""
    offsets = [offset for slot in open_slots for offset in slot]
    slot_of = np.array([index for index, slot in enumerate(open_slots) for _ in slot])
    own = np.tri(len(offsets), dtype=bool) & (slot_of[:, None] == slot_of)
    masks = [context.model.mask_id] * len(offsets)
    logits = context.forward(masks, [prompt_length + offset for offset in offsets], own)[0]
    log_p = log_probabilities(context.model, logits)
    certainties = [
        planner(log_p[slot_of == index], number, prompt_length + slot.start)
        for index, (slot, number) in enumerate(zip(open_slots, numbers, strict=True))
    ]
    return np.array(certainties, np.float32)


def _choose_slots(open_slots: list[Slot], certainties: NDArray, slot_threshold: float) -> tuple[list[Slot], float]:
    """The slots to write now, and the margin of that decision: the most certain is written in any case."""
    threshold = np.float32(slot_threshold)
    best = int(certainties.argmax())
    others = np.delete(certainties, best)
    margins = np.abs(others - threshold).tolist()
    confident = np.flatnonzero(certainties > threshold)
    if len(confident) == 0:
        confident = np.array([best])
        margins += (certainties[best] - others).tolist()
    return [open_slots[index] for index in confident], min(margins, default=np.inf)


def _firsts(slots: list[Slot]) -> list[int]:
    return [slot.start for slot in slots]


# (slot_size, block_size)
SETTINGS = [(4, 16), (4, 24), (4, 96), (8, 8), (8, 24), (8, 48), (8, 96), (16, 48), (16, 96), (32, 96)]
MAX_NEW_TOKENS = 96


def stored(name: str) -> Path:
    """The committed results of golden model "A" or "A0": arrays [settings, prompts, ...], see `table`."""
    return golden.DIRECTORY / "exact" / f"model{name}.npz"


def load(name: str, setting: tuple[int, int]) -> dict[str, NDArray]:
    """The committed `table` of a golden model and one of SETTINGS."""
    with np.load(stored(name)) as arrays:
        row = arrays["settings"].tolist().index(list(setting))
        return {key: arrays[key][row] for key in arrays if key != "settings"}


def table(data: golden.Golden, setting: tuple[int, int], every: int = 1) -> dict[str, NDArray]:
    """Every n-th golden prompt decoded with one (slot_size, block_size): arrays [prompts, ...]."""
    slot_size, block_size = setting
    indices = range(0, len(data.prompts), every)
    rows = [
        decode(
            data.model,
            data.prompts[index].prompt_ids,
            slot_size=slot_size,
            block_size=block_size,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        for index in indices
    ]
    offsets = [[offset for offset, _ in row.committed] for row in rows]
    tokens = [[token for _, token in row.committed] for row in rows]
    right = [data.right(i, row.token_ids, MAX_NEW_TOKENS) for i, row in zip(indices, rows, strict=True)]
    return {
        "token_ids": golden.padded([row.token_ids for row in rows], MAX_NEW_TOKENS),
        "commit_offsets": golden.padded(offsets, MAX_NEW_TOKENS),
        "commit_tokens": golden.padded(tokens, MAX_NEW_TOKENS),
        "margin": np.array([row.margin for row in rows], np.float32),
        "finish_reason": np.array([row.finish_reason for row in rows]),
        "plans": np.array([len(row.plans) for row in rows], np.int16),
        "right": np.array(right),
    }


def main() -> None:
    for name in golden.MODELS:
        data = golden.load(name)
        tables = [table(data, setting) for setting in SETTINGS]
        arrays = {key: np.stack([one[key] for one in tables]) for key in tables[0]}
        arrays["settings"] = np.array(SETTINGS)
        path = stored(name)
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(".unfinished.npz")
        np.savez_compressed(unfinished, **arrays, allow_pickle=False)
        os.replace(unfinished, path)
        for setting, right, margin in zip(SETTINGS, arrays["right"], arrays["margin"], strict=True):
            print(f"model {name} {setting}: {right.mean():.3f} right, {(margin < 1e-4).sum()} near-ties")


if __name__ == "__main__":
    main()
