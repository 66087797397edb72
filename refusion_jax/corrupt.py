"""The forward process of ReFusion: one example in, one corrupted example out. Pure numpy.

The answer is cut in slots of k tokens; some are masked whole. The clean ones are moved, in random order, ahead of
the masks. Every token keeps its position, so the network sees in training what it sees in decoding: prompt, then
what is written in the order of writing, then the masks of what is open (ReFusion, section 4.3).

T tokens of the example, J slots of its answer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_RATE = 1e-3
"""Masking rates lie in [LEAST_RATE, 1), as in the official code."""


class Corrupted(NamedTuple):
    """What the network is fed, and what it should answer. All [T], in the order in which it is fed."""

    inputs: NDArray[np.int32]  # token ids
    positions: NDArray[np.int32]  # true positions
    targets: NDArray[np.int32]  # the token to predict; where both weights are 0, any
    ar_weights: NDArray[np.float32]  # 1 where the next token of a clean slot is predicted, else 0
    masked_weights: NDArray[np.float32]  # 1 / (rate * answer length) where a masked token is predicted, else 0
    slots: NDArray[np.int32]  # the slot of the answer, counted from 0; -1 in the prompt


def corrupt(
    tokens: NDArray[np.int32],  # [T]
    prompt_length: int,
    slot_size: int,
    rng: np.random.Generator,
    *,
    mask_token_id: int,
    permute: bool = True,
) -> Corrupted:
    """Draw the noise of an example, and apply it.

    The masking rate is uniform, each slot is masked with that probability, independently, and the clean slots are
    shuffled (unless ``permute`` is False: then they ascend, as in a causal model).

    Raises:
      ValueError: ``slot_size`` is not positive, or the prompt is longer than the example.
    """
    if slot_size < 1:
        raise ValueError(f"slot_size={slot_size} must be at least 1")
    if not 0 <= prompt_length <= len(tokens):
        raise ValueError(f"prompt_length={prompt_length} must lie in 0..{len(tokens)}, the length of the example")
    rate = (1 - LEAST_RATE) * rng.random() + LEAST_RATE
    masked = rng.random(-(-(len(tokens) - prompt_length) // slot_size)) < rate
    clean = np.flatnonzero(~masked)
    if permute:
        rng.shuffle(clean)
    return arrange(tokens, prompt_length, slot_size, rate, clean, mask_token_id)


def arrange(
    tokens: NDArray[np.int32],  # [T]
    prompt_length: int,
    slot_size: int,
    rate: float,
    clean: NDArray[np.integer],  # the clean slots, in their order; all others are masked
    mask_token_id: int,
) -> Corrupted:
    """The example with given noise: prompt, clean slots in the order given, masked slots ascending.

    A clean slot predicts its own tokens but the first, each from the one before. A masked slot predicts all its tokens,
    each from the mask in its place, weighted by 1 / (rate * answer length). Nothing is predicted from one slot to
    another, nor from the prompt.
    """
    length = len(tokens) - prompt_length
    slot_of = np.arange(length, dtype=np.int32) // slot_size
    rank = np.full(-(-length // slot_size), len(clean))  # masked slots come behind, in the order they are in
    rank[clean] = np.arange(len(clean))
    order = np.argsort(rank[slot_of], kind="stable")  # offsets in the answer, as they are fed

    answer, slots = tokens[prompt_length:][order], slot_of[order]
    masked = rank[slots] == len(clean)
    follows = (slots[:-1] == slots[1:]) & ~masked[:-1]  # the next entry is the next token of the same clean slot
    follows = np.append(follows, np.zeros(min(length, 1), bool))
    targets = np.where(masked, answer, np.roll(answer, -1))

    def behind_prompt(fill: Any, values: Any, dtype: type) -> Any:
        return np.concatenate([np.broadcast_to(fill, prompt_length), values]).astype(dtype)

    return Corrupted(
        inputs=behind_prompt(tokens[:prompt_length], np.where(masked, mask_token_id, answer), np.int32),
        positions=behind_prompt(np.arange(prompt_length), prompt_length + order, np.int32),
        targets=behind_prompt(tokens[:prompt_length], targets, np.int32),
        ar_weights=behind_prompt(0, follows, np.float32),
        masked_weights=behind_prompt(0, masked / (rate * max(length, 1)), np.float32),
        slots=behind_prompt(-1, slots, np.int32),
    )


def left_to_right(tokens: NDArray[np.int32], prompt_length: int) -> Corrupted:
    """An example for plain left-to-right training: every token of the answer is predicted from the one before it."""
    predicts = np.arange(len(tokens)) >= prompt_length - 1
    predicts[-1:] = False
    return Corrupted(
        inputs=tokens.astype(np.int32),
        positions=np.arange(len(tokens), dtype=np.int32),
        targets=np.roll(tokens, -1).astype(np.int32),
        ar_weights=predicts.astype(np.float32),
        masked_weights=np.zeros(len(tokens), np.float32),
        slots=np.full(len(tokens), -1, np.int32),
    )
