"""What all the twins share: the committed context of one prompt, slots, and the greedy choice.

A model is any object with `forward` (see `qwen3.Qwen3.forward`), `mask_id`, `eos_id`, `vocabulary` and
`tokenizer_length`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tests.twins.qwen3 import Memory


class Model(Protocol):
    mask_id: int
    eos_id: int
    vocabulary: int
    tokenizer_length: int

    def forward(
        self, tokens: NDArray, positions: NDArray, sees: NDArray, context: Memory | None = None
    ) -> tuple[NDArray, NDArray, NDArray]: ...


class Context:
    """The tokens that were committed so far, in commit order, with their keys and values."""

    def __init__(self, model: Model, memory: Memory | None = None):
        self.model = model
        self.memory = memory

    def __len__(self) -> int:
        return 0 if self.memory is None else self.memory[0].shape[1]

    def forward(
        self, tokens: Sequence[int], positions: Sequence[int], own: NDArray | None = None
    ) -> tuple[NDArray, NDArray, NDArray]:
        """Logits, keys and values of a window that sees the whole context, which stays as it is.

        own [T, T] bool says what the window's tokens see of each other: by default themselves and all before.
        """
        if own is None:
            own = np.tri(len(tokens), dtype=bool)
        sees = np.concatenate([np.ones((len(tokens), len(self)), bool), own], axis=1)
        return self.model.forward(np.array(tokens, int), np.array(positions, int), sees, self.memory)

    def append(self, keys: NDArray, values: NDArray) -> None:
        if self.memory is None:
            self.memory = keys, values
        else:
            self.memory = (
                np.concatenate([self.memory[0], keys], axis=1),
                np.concatenate([self.memory[1], values], axis=1),
            )

    def since(self, length: int) -> Memory:
        """Keys and values of what was appended behind the first `length` entries."""
        assert self.memory is not None
        return self.memory[0][:, length:], self.memory[1][:, length:]

    def commit(self, tokens: Sequence[int], positions: Sequence[int]) -> NDArray:
        """Append tokens to the context, each seeing all before it. Logits [T, V] for the token after each."""
        logits, keys, values = self.forward(tokens, positions)
        self.append(keys, values)
        return logits


Slot = range  # offsets of a slot in the response: position minus prompt length


def partition(start: int, stop: int, size: int) -> list[range]:
    """Cut the offsets start ... stop - 1 into parts of `size`; the last one may be short."""
    return [range(first, min(first + size, stop)) for first in range(start, stop, size)]


class Choice(NamedTuple):
    token: int
    margin: float  # how much better than the runner-up


Choose = Callable[[NDArray, int], Choice]  # (log-probabilities [V], true position)


def greedy(log_probabilities: NDArray, position: int) -> Choice:
    """The most likely token, the lowest id on ties; its margin is the gap of probability to the runner-up."""
    second, first = np.sort(np.exp(log_probabilities))[-2:]
    return Choice(int(log_probabilities.argmax()), float(first - second))


def banned(model: Model, logits: NDArray) -> NDArray:
    """Logits [..., V] in which the mask and rows beyond the tokenizer cannot be chosen."""
    logits = logits.copy()
    logits[..., model.mask_id] = -np.inf
    logits[..., model.tokenizer_length :] = -np.inf
    return logits


def log_probabilities(model: Model, logits: NDArray) -> NDArray:
    """Untempered float32 log-probabilities [..., V] of the tokens that are not banned."""
    logits = banned(model, logits.astype(np.float32))
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def response(committed: Sequence[tuple[int, int]], eos_id: int) -> list[int]:
    """The tokens of committed (offset, token) pairs in position order, up to and including the first EOS."""
    tokens = [token for _, token in sorted(committed)]
    return tokens[: tokens.index(eos_id) + 1] if eos_id in tokens else tokens
