"""A canvas: several ways of thinking side by side, and a summary that has read them all (NAP, section 4.1).

    <think 1>...</think 1><think 2>...</think 2><summary>...</summary>

Tags are given, as the prompt is: they are never written, never masked, and belong to no slot. Between an opening tag
and its closing one lies the *region* of a path, or of the summary. Each region has a budget of tokens; its text runs on
from the opening tag and ends with an end-of-text token of its own, and the closing tag stands where the budget ends. A
text that is shorter leaves a gap in the positions, in training as in decoding.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from refusion_jax.model.tokenizer import Tokenizer

TAG = re.compile(r"</?(?:think [1-9]\d*|summary)>")


def tags(paths: int) -> list[tuple[str, str]]:
    """The opening and the closing tag of every region: of ``paths`` paths, and of the summary."""
    names = [*(f"think {number}" for number in range(1, paths + 1)), "summary"]
    return [(f"<{name}>", f"</{name}>") for name in names]


def with_tags(tokenizer: Tokenizer, paths: int) -> Tokenizer:
    """The tokenizer with the tags of ``paths`` paths as special tokens, those that it lacks behind all others."""
    texts = [text for pair in tags(paths) for text in pair]
    missing = [text for text in texts if tokenizer.token_id(text) is None]
    return tokenizer.with_special_tokens(missing) if missing else tokenizer


@dataclasses.dataclass(frozen=True)
class Canvas:
    """The texts of a canvas.

    Raises:
      ValueError: there is no path, a text is empty, or it holds a tag.
    """

    paths: tuple[str, ...]
    summary: str

    def __post_init__(self) -> None:
        if not self.paths:
            raise ValueError("a canvas needs at least one path")
        for (opening, _), text in zip(tags(len(self.paths)), self.texts, strict=True):
            if not text.strip():
                raise ValueError(f"the text behind {opening} is empty")
            if found := TAG.search(text):
                raise ValueError(f"the text behind {opening} holds {found[0]}; tags stand between texts alone")

    @property
    def texts(self) -> tuple[str, ...]:
        """Of every region: the paths, then the summary."""
        return (*self.paths, self.summary)

    def render(self) -> str:
        """The canvas as one text, which ``parse`` reads."""
        regions = zip(tags(len(self.paths)), self.texts, strict=True)
        return "".join(f"{opening}{text}{closing}" for (opening, closing), text in regions)

    def shuffled(self, rng: np.random.Generator) -> Canvas:
        """The same with its paths in random order."""
        return Canvas(tuple(self.paths[place] for place in rng.permutation(len(self.paths))), self.summary)


def parse(text: str) -> Canvas:
    """The canvas that a text holds; white space between its regions does not matter.

    Raises:
      ValueError: it is none: a tag is missing or out of order, or something stands outside the regions.
    """
    found = list(TAG.finditer(text))
    if len(found) < 4 or len(found) % 2:
        raise ValueError(f"a text with {len(found)} tags is no canvas: each path and the summary have two")
    expected = [tag for pair in tags(len(found) // 2 - 1) for tag in pair]
    for tag, name in zip(found, expected, strict=True):
        if tag[0] != name:
            raise ValueError(f"the canvas has {tag[0]} where {name} must stand")
    ends = [0, *(tag.end() for tag in found)]
    between = [text[end : tag.start()] for end, tag in zip(ends, found, strict=False)] + [text[ends[-1] :]]
    for outside in between[::2]:
        if outside.strip():
            raise ValueError(f"{outside.strip()!r} stands outside the regions of the canvas")
    *paths, summary = between[1::2]
    return Canvas(tuple(paths), summary)


# ---- As tokens ----


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Tokens that the regions of a canvas may take, the end-of-text token of each included.

    Raises:
      ValueError: one is not positive, or there is no path.
    """

    paths: int = 3
    """How many paths there are (NAP, section 4: three)."""
    path: int = 330
    """Tokens of a path."""
    summary: int = 32
    """Tokens of the summary."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be at least 1")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of every region."""
        return (*[self.path] * self.paths, self.summary)

    @property
    def total(self) -> int:
        """Positions that a canvas takes behind its prompt, tags included."""
        return sum(self.sizes) + 2 * len(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where the text of every region begins, counted from the end of the prompt."""
        ends = np.cumsum([size + 2 for size in self.sizes])
        return tuple(int(end) - size - 1 for end, size in zip(ends, self.sizes, strict=True))

    @property
    def tags(self) -> tuple[int, ...]:
        """Where the tags stand, counted from the end of the prompt, ascending."""
        pairs = ((start - 1, start + size) for start, size in zip(self.starts, self.sizes, strict=True))
        return tuple(place for pair in pairs for place in pair)


class Laid(NamedTuple):
    """A canvas as tokens, behind its prompt: what is given first, then region by region. T tokens."""

    tokens: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T], true positions
    given: int  # tokens of the prompt, and tags
    lengths: tuple[int, ...]  # of the text in every region, its end included


def tag_ids(tokenizer: Tokenizer, paths: int) -> list[int]:
    """Ids of the tags, in the order of ``Budgets.tags``. Raises ValueError if the tokenizer lacks one."""
    ids = []
    for text in (text for pair in tags(paths) for text in pair):
        token = tokenizer.token_id(text)
        if token is None:
            raise ValueError(f"the tokenizer has no token {text}: with_tags adds those of a canvas")
        ids.append(token)
    return ids


def lay_out(
    prompt: Sequence[int],
    texts: Sequence[Sequence[int]],  # token ids of every region, without an end of text
    budgets: Budgets,
    tag_ids: Sequence[int],
    eos_token_id: int,
) -> Laid:
    """A canvas at the positions that its budgets give.

    Raises:
      ValueError: there are other regions than budgets, or a text is longer than its budget.
    """
    if len(texts) != len(budgets.sizes):
        raise ValueError(f"the canvas has {len(texts) - 1} paths, and the budgets are those of {budgets.paths}")
    for (opening, _), text, size in zip(tags(budgets.paths), texts, budgets.sizes, strict=True):
        if len(text) + 1 > size:
            raise ValueError(
                f"the text behind {opening} has {len(text)} tokens and an end of text, more than its budget of {size}"
            )
    P = len(prompt)
    ended = [[*text, eos_token_id] for text in texts]
    written = [P + start + np.arange(len(text)) for start, text in zip(budgets.starts, ended, strict=True)]
    return Laid(
        tokens=np.concatenate([np.asarray(part, np.int32) for part in (prompt, tag_ids, *ended)]),
        positions=np.concatenate([np.arange(P), P + np.asarray(budgets.tags), *written]).astype(np.int32),
        given=P + len(tag_ids),
        lengths=tuple(map(len, ended)),
    )
