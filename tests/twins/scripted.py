"""A model without weights: its logits are what a test says they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tests.twins.qwen3 import Memory

# (token, position, the set of all (token, position) that it sees, itself included) -> logits [V]
Script = Callable[[int, int, frozenset[tuple[int, int]]], ArrayLike]


class ScriptedModel:
    """Its keys hold the token and position they belong to, so that the script knows what a token sees."""

    def __init__(
        self,
        script: Script,
        *,
        vocabulary: int,
        mask_id: int,
        eos_id: int,
        tokenizer_length: int | None = None,
    ):
        self.script = script
        self.vocabulary = vocabulary
        self.mask_id = mask_id
        self.eos_id = eos_id
        self.tokenizer_length = vocabulary if tokenizer_length is None else tokenizer_length
        self.forwards = 0

    def forward(
        self,
        tokens: NDArray,  # [T] int
        positions: NDArray,  # [T] int
        sees: NDArray,  # [T, C + T] bool
        context: Memory | None = None,
    ) -> tuple[NDArray, NDArray, NDArray]:
        """Logits [T, V]; keys and values [1, T, 1, 2]."""
        self.forwards += 1
        keys = np.stack([tokens, positions], axis=-1)[None, :, None]
        entries = keys if context is None else np.concatenate([context[0], keys], axis=1)
        pairs = [(int(token), int(position)) for token, position in entries[0, :, 0]]
        logits = [
            self.script(int(token), int(position), frozenset(pairs[i] for i in np.flatnonzero(row)))
            for token, position, row in zip(tokens, positions, sees, strict=True)
        ]
        return np.array(logits, np.float32), keys, keys
