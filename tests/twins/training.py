"""The official forward process and loss, token by token, in plain Python.

P prompt length, L answer length, T = P + L, V vocabulary. A slot is a `range` of offsets in the answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.twins.context import partition
from tests.twins.qwen3 import Qwen3

OFFICIAL_SLOT_SIZES = (4, 8, 16, 32)
NO_LABEL = -100


class Noise(NamedTuple):
    """What is drawn for an example."""

    slot_size: int
    p_mask: float
    uniforms: list[float]  # one a slot: it is masked where its uniform is below p_mask
    clean_order: list[int]  # the clean slots, shuffled


class Row(NamedTuple):
    """An example as the network is fed it, all [T]."""

    input_ids: list[int]
    position_ids: list[int]
    labels: list[int]  # of clean slots shifted by one within the slot, of masked ones not; NO_LABEL elsewhere
    masked: list[bool]  # whether the token is the mask
    slots: list[int]  # the slot of the token; -1 in the prompt


class Loss(NamedTuple):
    ar: float
    masked: float


def draw(rng: random.Random, answer_length: int) -> Noise:
    """The draws of the official code, in their order."""
    slot_size = rng.choice(OFFICIAL_SLOT_SIZES)
    p_mask = (1 - 1e-3) * rng.random() + 1e-3
    uniforms = [rng.random() for _ in partition(0, answer_length, slot_size)]
    clean = [slot for slot, uniform in enumerate(uniforms) if not uniform < p_mask]
    rng.shuffle(clean)
    return Noise(slot_size, p_mask, uniforms, clean)


def forward_process(
    tokens: Sequence[int], prompt_length: int, slot_size: int, clean_order: Sequence[int], mask_id: int
) -> Row:
    """The example with the slots of `clean_order` clean, in that order, and all others masked behind them."""
    row = Row([], [], [], [], [])

    def append(position: int, label: int, masked: bool, slot: int) -> None:
        row.input_ids.append(mask_id if masked else int(tokens[position]))
        row.position_ids.append(position)
        row.labels.append(label)
        row.masked.append(masked)
        row.slots.append(slot)

    for position in range(prompt_length):
        append(position, NO_LABEL, False, -1)
    slots = partition(prompt_length, len(tokens), slot_size)
    for slot in clean_order:
        for position in slots[slot]:
            last = position == slots[slot][-1]
            append(position, NO_LABEL if last else int(tokens[position + 1]), False, slot)
    for slot, positions in enumerate(slots):
        if slot not in clean_order:
            for position in positions:
                append(position, int(tokens[position]), True, slot)
    return row


def loss(rows: Iterable[tuple[Row, float, int, NDArray]]) -> Loss:
    """The two terms over a batch of (row, p_mask, answer length, logits [T, V]), in float64.

    Where the batch has no label of a clean slot, the official code divides 0 by 0; here the term is 0.
    """
    ar_sum, ar_labels, masked_sum, examples = 0.0, 0, 0.0, 0
    for row, p_mask, answer_length, logits in rows:
        examples += 1
        for place, label in enumerate(row.labels):
            if label == NO_LABEL:
                continue
            if row.masked[place]:
                masked_sum += cross_entropy(logits[place], label) / (p_mask * answer_length)
            else:
                ar_sum += cross_entropy(logits[place], label)
                ar_labels += 1
    return Loss(ar_sum / max(ar_labels, 1), masked_sum / max(examples, 1))


def cross_entropy(logits: NDArray, label: int) -> float:
    """-log of the softmax of logits [V] at the label."""
    logits = logits.astype(np.float64)
    largest = logits.max()
    return float(largest + np.log(np.exp(logits - largest).sum()) - logits[label])


def gradients(hidden: NDArray, head: NDArray, targets: NDArray, weights: NDArray) -> tuple[NDArray, NDArray]:
    """Of sum(weights * cross entropy) with respect to hidden [R, T, D] and head [V, D], in float64."""
    hidden, head = hidden.astype(np.float64), head.astype(np.float64)
    of_hidden, of_head = np.zeros_like(hidden), np.zeros_like(head)
    for place in np.ndindex(targets.shape):
        scores = head @ hidden[place]
        of_scores = np.exp(scores - scores.max())
        of_scores /= of_scores.sum()
        of_scores[targets[place]] -= 1
        of_scores *= weights[place]
        of_hidden[place] = of_scores @ head
        of_head += np.outer(of_scores, hidden[place])
    return of_hidden, of_head


def logits(model: Qwen3, row: Row) -> NDArray:
    """Of the network fed this row alone, [T, V]."""
    length = len(row.input_ids)
    return model.forward(np.array(row.input_ids, int), np.array(row.position_ids, int), np.tri(length, dtype=bool))[0]


class Laid(NamedTuple):
    """Rows of several examples, each [R][T]."""

    input_ids: list[list[int]]
    position_ids: list[list[int]]
    labels: list[list[int]]
    segments: list[list[int]]  # 1, 2, ... for the examples of a row, 0 behind the last


def lay_out(rows: Sequence[Sequence[Row]], row_count: int, row_length: int) -> Laid:
    """Examples one behind the other; what is left of a row, and of the batch, is padding of token 0."""
    laid = Laid([], [], [], [])
    for examples in [*rows, *[()] * (row_count - len(rows))]:
        tokens: list[int] = []
        positions: list[int] = []
        labels: list[int] = []
        segments: list[int] = []
        for number, example in enumerate(examples, 1):
            tokens += example.input_ids
            positions += example.position_ids
            labels += example.labels
            segments += [number] * len(example.input_ids)
        unused = row_length - len(tokens)
        laid.input_ids.append(tokens + [0] * unused)
        laid.position_ids.append(positions + [0] * unused)
        laid.labels.append(labels + [NO_LABEL] * unused)
        laid.segments.append(segments + [0] * unused)
    return laid
