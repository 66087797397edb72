"""The golden data: two small models, 64 prompts each, and what the official PyTorch code made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.twins.qwen3 import Qwen3

DIRECTORY = Path(__file__).resolve().parent.parent / "golden"
MODELS = ("A", "A0")


class Prompt(NamedTuple):
    prompt_ids: list[int]
    response_ids: list[int]  # the right answer, with EOS


@dataclass(frozen=True)
class Golden:
    model: Qwen3
    prompts: list[Prompt]
    separators: tuple[int, int]  # two tokens that mean the same in an answer
    eos_id: int

    def right(self, index: int, token_ids: Sequence[int], max_new_tokens: int) -> bool:
        """Whether an answer is right, when it is cut at its first EOS and the reference to the budget."""
        answer = list(token_ids)
        if self.eos_id in answer:
            answer = answer[: answer.index(self.eos_id) + 1]
        reference = self.prompts[index].response_ids[:max_new_tokens]
        kept, alias = self.separators
        return [kept if t == alias else t for t in answer] == [kept if t == alias else t for t in reference]


def load(name: str) -> Golden:
    table = json.loads((DIRECTORY / f"golden{name}" / "prompts.json").read_text())
    prompts = [Prompt(prompt["prompt_ids"], prompt["response_ids"]) for prompt in table["prompts"]]
    model = Qwen3(DIRECTORY / f"model{name}")
    return Golden(model, prompts, tuple(table["sep_equivalent_ids"]), table["eos"])


def arrays(name: str, file: str) -> dict[str, NDArray]:
    """The arrays of one of the official code's result files."""
    with np.load(DIRECTORY / f"golden{name}" / f"{file}.npz") as stored:
        return dict(stored)


def padded(rows: Sequence[Sequence[int]], length: int) -> NDArray:
    """Rows of different lengths as one int16 table, padded with -1 as in the golden files."""
    return np.array([list(row) + [-1] * (length - len(row)) for row in rows], np.int16)
