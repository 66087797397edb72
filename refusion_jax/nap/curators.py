"""Two ways to make canvases of ordinary examples: a teacher's solutions side by side, or a chain of thought cut up.

A curator is a function of an example and a seed, so that a corpus comes out the same however often it is interrupted
and by however many workers it is made. What it cannot use it drops, with a reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from refusion_jax.data.sources import Record
from refusion_jax.data.worksheet import hashed
from refusion_jax.nap.canvas import TAG, Canvas
from refusion_jax.nap.seqdep import Scorer, Tokens, cut


class Dropped(Exception):
    """Why an example makes no canvas: a few words that drops are counted by, and a sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


Curator = Callable[[Record, str], Canvas]
"""The canvas of an example; all that is random in it follows from the text, a seed. Raises Dropped."""


# ---- Sampled paths: what the paper does (NAP, section 4.1) ----


class Request(NamedTuple):
    """What a teacher is asked."""

    messages: Sequence[Mapping[str, Any]]
    temperature: float
    seed: int  # below 2**31


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a teacher gave no reply that can be used."""

    kind: str  # a few words: "timeout", "cut short", "junk"
    message: str


Teacher = Callable[[Sequence[Request]], Sequence[str | Failure]]
"""Whoever writes solutions, a model here or an endpoint: a reply to each request, in order."""

SUMMARY_REQUEST = """\
Several people have tried to answer the question below. Some of them may be wrong; the right answer is given at the \
end. Write a short conclusion that weighs their attempts and states the right answer.

{question}

{attempts}

The right answer: {answer}"""
"""What the teacher is asked for the summary. Ours: the paper says only what the teacher is given."""


@dataclasses.dataclass(frozen=True)
class SamplePaths:
    """Whole solutions by a teacher, and a summary by it that is given them and the right answer (NAP, section 4.1).

    Wrong solutions stay, as noise that the summary sees through. A reply that cannot be used (too late, cut short,
    empty, with a tag in it) is asked for again with another seed.

    Raises:
      ValueError: a setting is out of its range.
    """

    teacher: Teacher
    paths: int = 3
    temperature: float = 1.0
    attempts: int = 3
    """How often a reply is asked for until its example is dropped."""
    summary_request: str = SUMMARY_REQUEST
    """With {question}, {attempts} and {answer} in it."""

    def __post_init__(self) -> None:
        for name in ("paths", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0")

    def __call__(self, record: Record, seed: str) -> Canvas:
        paths = self._ask([record.prompt] * self.paths, seed)
        given = {
            "question": "\n\n".join(str(message["content"]) for message in record.prompt),
            "attempts": "\n\n".join(f"Attempt {number}:\n{path}" for number, path in enumerate(paths, 1)),
            "answer": record.answer,
        }
        request = re.sub("{(question|attempts|answer)}", lambda name: given[name[1]], self.summary_request)
        (summary,) = self._ask([[{"role": "user", "content": request}]], f"{seed} summary")
        return Canvas(tuple(paths), summary)

    def _ask(self, asked: Sequence[Sequence[Mapping[str, Any]]], seed: str) -> list[str]:
        """A usable reply to each. Raises Dropped."""
        replies: dict[int, str] = {}
        failure = None
        for attempt in range(self.attempts):
            missing = [number for number in range(len(asked)) if number not in replies]
            requests = [
                Request(asked[number], self.temperature, hashed(f"{seed} {number} {attempt}") % 2**31)
                for number in missing
            ]
            try:
                given = self.teacher(requests)
            except ValueError as error:  # such as a question that is too long for the model
                raise Dropped("cannot be asked", str(error)) from error
            for number, reply in zip(missing, given, strict=True):
                checked = _usable(reply)
                if isinstance(checked, str):
                    replies[number] = checked
                else:
                    failure = checked
            if len(replies) == len(asked):
                return [replies[number] for number in range(len(asked))]
        assert failure is not None
        raise Dropped(failure.kind, f"no usable reply in {self.attempts} attempts: {failure.message}")


def _usable(reply: str | Failure) -> str | Failure:
    if isinstance(reply, Failure):
        return reply
    if not reply.strip():
        return Failure("junk", "the reply is empty")
    if found := TAG.search(reply):
        return Failure("junk", f"the reply holds {found[0]}, a tag of canvases")
    return reply.strip()


# ---- Split chains: an existing chain of thought, cut where it does not depend on itself ----


def dependences(prompt: Tokens, segments: Sequence[Tokens], scorer: Scorer) -> list[list[float]]:
    """How much of the sequential dependence of each segment is due to each one before it, in nats.

    What lies nearer is known first: [n][j] is log p(s_n | x, s_j ... s_n-1) - log p(s_n | x, s_j+1 ... s_n-1), so that
    the gains of a segment add up to log p(s_n | x, s_<n) - log p(s_n | x), its term of SeqDep (NAP, section 3). That
    takes N (N + 1) / 2 ratings.
    """
    pairs = [
        ([*prompt, *itertools.chain(*segments[start:number])], segment)
        for number, segment in enumerate(segments)
        for start in range(number + 1)
    ]
    scores = iter(scorer(pairs))
    rated = [[next(scores) for _ in range(number + 1)] for number in range(len(segments))]
    return [[longer - shorter for longer, shorter in itertools.pairwise(of_segment)] for of_segment in rated]


class Parts(NamedTuple):
    """Which segments of a chain belong together, by number, each ascending."""

    paths: list[list[int]]  # need nothing of each other
    summary: list[int]  # need several paths, or the summary itself; the last segment of the chain is always there


SUMMARY = -1


def parts(gains: Sequence[Sequence[float]], threshold: float) -> Parts:
    """The parts of a chain whose segments gain so much from each other (``dependences``).

    A segment that gains less than ``threshold`` in all begins a path. Others need the path from which they gain most,
    and each other one that gives at least ``threshold`` and half as much. Those that need one path go on there; those
    that need several belong to the summary, and so do those that need the summary.
    """
    paths: list[list[int]] = []
    summary: list[int] = []
    home: list[int] = []  # of each segment: the number of its path, or SUMMARY
    for number, of_segment in enumerate(gains):
        if number == len(gains) - 1:
            part = SUMMARY
        elif sum(of_segment) < threshold:
            part = len(paths)
            paths.append([])
        else:
            due = dict.fromkeys(home, 0.0)
            for before, gain in enumerate(of_segment):
                due[home[before]] += gain
            most = max(due, key=lambda one: due[one])
            needed = {one for one, gain in due.items() if gain >= max(threshold, due[most] / 2)} | {most}
            part = needed.pop() if len(needed) == 1 else SUMMARY
        home.append(part)
        (summary if part == SUMMARY else paths[part]).append(number)
    return Parts(paths, summary)


@dataclasses.dataclass(frozen=True)
class SplitChain:
    """Cut a chain of thought in parts that do not need each other, as a left-to-right model rates it.

    Raises:
      ValueError: a setting is out of its range.
    """

    scorer: Scorer
    encode: Callable[[str], Tokens]
    encode_prompt: Callable[[Sequence[Mapping[str, Any]]], Tokens]
    pattern: str = r"\n+"
    """A segment ends behind each match of this regular expression."""
    threshold: float = 1.0
    """Nats that a segment gains from one that it needs."""
    paths: int = 3
    """At most so many; further parts are put behind the shortest paths."""

    def __post_init__(self) -> None:
        if self.paths < 2:
            raise ValueError(f"paths={self.paths} must be at least 2: a chain with one part is as it was")
        if not self.threshold > 0:
            raise ValueError(f"threshold={self.threshold} must be above 0")

    def __call__(self, record: Record, seed: str) -> Canvas:
        if found := TAG.search(record.answer):
            raise Dropped("a tag in the text", f"the answer holds {found[0]}, a tag of canvases")
        segments = cut(record.answer, self.pattern)
        if len(segments) < 3:
            raise Dropped("too short", f"{len(segments)} segments cannot be two paths and a summary")
        try:
            gains = dependences(self.encode_prompt(record.prompt), list(map(self.encode, segments)), self.scorer)
        except ValueError as error:  # too long for the model, or tokens that it does not have
            raise Dropped("cannot be rated", str(error)) from error
        found_parts = parts(gains, self.threshold)
        if len(found_parts.paths) < 2:
            raise Dropped("one path", f"each of its {len(segments)} segments needs the others")
        texts = [[segments[number] for number in path] for path in found_parts.paths]
        merged, rest = texts[: self.paths], texts[self.paths :]
        for text in rest:
            min(merged, key=lambda path: sum(map(len, path))).extend(text)
        summary = "".join(segments[number] for number in found_parts.summary)
        return Canvas(tuple("".join(text).strip() for text in merged), summary.strip())


def pairs_together(groups: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """All pairs of numbers that stand in one group: what precision and recall of a split are counted over."""
    return {pair for group in groups for pair in itertools.combinations(sorted(group), 2)}
