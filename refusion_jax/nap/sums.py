"""A small task to try NAP on: several independent solutions of a sum, and a summary that takes the majority.

    python -m refusion_jax.nap.sums --form canvas --split train --seed 0 --count 1000 --output FILE.jsonl

The sum is modulo 10. A solution adds the digits one by one, in an order of its own, and may slip: a step then has a
result that is one too high or too low, and the steps behind it go on from there.

    query    add 3 9 4 1
    plain    4
    chain    the solutions of the canvas and its summary, as one text
    canvas   <think 1>9 + 3 = 2 2 + 1 = 3 3 + 4 = 7</think 1>
             <think 2>1 + 4 = 5 5 + 9 = 4 4 + 3 = 8</think 2>  (a slip)
             <think 3>3 + 4 = 7 7 + 1 = 8 8 + 9 = 7</think 3>
             <summary>last 7 8 7 = 7</summary>

Tokens are those of the worksheets (``refusion_jax.data.worksheet``), and so are the splits.
"""

from __future__ import annotations

import dataclasses
import io
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from refusion_jax.cli.options import parse
from refusion_jax.cli.output import STDOUT, check_output, write_output
from refusion_jax.cli.process import exit_code
from refusion_jax.data.worksheet import SHARES, Split, Uniform, choice, hashed, integers, shuffled

Form = Literal["plain", "chain", "canvas"]

DIGITS = (4, 5, 6)
"""How many a sum may have."""
SLIPS = 0.05
"""The probability that a step of a solution slips."""
STEP = r"(?<== \d) "
"""A step ends behind a match of this: what ``split_chain`` takes as ``--split``."""


class Sum(NamedTuple):
    """One example."""

    query: str
    paths: tuple[tuple[str, ...], ...]  # the steps of every solution
    summary: str
    answer: str  # what is right


def example(split: str, seed: int, index: int, paths: int = 3) -> Sum:
    """Sum number ``index`` of an endless sequence, a pure function of the arguments.

    Solutions are drawn until the most frequent result, the first of those that are equally frequent, is the right one:
    the paper's summaries are written by someone who knows the answer. Splits share no query.

    Raises:
      ValueError: there is no such split.
    """
    if split not in SHARES:
        raise ValueError(f"there is no split {split!r}; choose one of {', '.join(SHARES)}")
    uniform = random.Random(hashed(f"sum {split} {seed} {index}")).random
    while True:
        digits = integers(uniform, 10, choice(uniform, DIGITS))
        query = " ".join(["add", *map(str, digits)])
        if hashed(query) % 10 in SHARES[split]:
            break
    while True:
        solutions = tuple(_solution(uniform, digits) for _ in range(paths))
        results = [steps[-1].split()[-1] for steps in solutions]
        if majority(results) == solve(query):
            return Sum(query, solutions, " ".join(["last", *results, "=", solve(query)]), solve(query))


def _solution(uniform: Uniform, digits: Sequence[int]) -> tuple[str, ...]:
    """Its steps."""
    order = shuffled(uniform, len(digits))
    total, *others = (digits[next(order)] for _ in digits)
    steps = []
    for digit in others:
        slip = choice(uniform, (-1, 1)) if uniform() < SLIPS else 0
        result = (total + digit + slip) % 10
        steps.append(f"{total} + {digit} = {result}")
        total = result
    return tuple(steps)


def majority(results: Sequence[str]) -> str:
    """The most frequent, the first of those that are equally frequent."""
    return Counter(results).most_common(1)[0][0]


def fields(drawn: Sum, form: Form) -> dict[str, Any]:
    """An example in the format of training data."""
    texts = [" ".join(steps) for steps in drawn.paths]
    if form == "canvas":
        return {"query": drawn.query, "paths": texts, "summary": drawn.summary}
    return {"query": drawn.query, "response": drawn.answer if form == "plain" else " ".join([*texts, drawn.summary])}


def solve(query: str) -> str:
    """The right result, computed from the query. Raises ValueError if it is no sum."""
    if not re.fullmatch(r"add(?: \d){2,}", query):
        raise ValueError(f"{query!r} is no sum: it must be add and then two digits or more")
    return str(sum(map(int, query.split()[1:])) % 10)


def is_right(query: str, answer: str) -> bool:
    """Whether an answer of any form, canvases rendered, ends with the right result. Raises ValueError of ``solve``."""
    return answer.removesuffix("</summary>").split()[-1:] == [solve(query)]


@dataclasses.dataclass(frozen=True)
class Options:
    """Write sums as JSON lines: {"query", "response"}, or {"query", "paths", "summary"} of canvases."""

    form: Form = "canvas"
    """What the answer is: the result alone, the solutions as one long chain, or side by side."""
    split: Split = "train"
    """Splits never share a query."""
    seed: int = 0
    """Another seed gives other sums."""
    count: int = 1000
    """How many sums."""
    paths: int = 3
    """Solutions of each."""
    output: str = STDOUT
    """File to write, or - for standard output."""

    def __post_init__(self) -> None:
        for name in ("count", "paths"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, not {getattr(self, name)}")


def run(args: Sequence[str]) -> None:
    """Write the sums that ``args`` ask for. Raises UserError."""
    options = parse(Options, args, Options())
    check_output(options.output, io.BytesIO())
    drawn = (example(options.split, options.seed, index, options.paths) for index in range(options.count))
    write_output(options.output, (f"{json.dumps(fields(one, options.form))}\n".encode() for one in drawn))


if __name__ == "__main__":
    sys.exit(exit_code(run, None))
