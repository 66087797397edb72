"""How autoregressive a decoder was: how close the order in which it wrote comes to left to right (NAP, section 3).

    python decode.py --trace --output FILE.jsonl ...
    python -m refusion_jax.nap.arness FILE.jsonl [--k 1,2,4] [--slot-size 8] [--json]

A *course* is what a decoder wrote, step by step: for every step the offsets that it committed. The paper defines its
measures for one offset a step; where a step commits several, each of them is scored against what was there before the
step. Left to right, one at a time, is then exactly 1, and left to right by four at a time 1/4: three of four were
written without the token before them. All functions take a course of offsets, or of slots (``of_slots``), and raise
ValueError if it is empty, or writes something twice or left of 0.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import scipy.stats
from rich.console import Console
from rich.table import Table
from tyro.conf import FlagCreatePairsOff, Positional, arg

from refusion_jax.cli.options import UserError, parse
from refusion_jax.cli.process import exit_code

Course = Sequence[Sequence[int]]
"""For every step the offsets that it committed."""


def global_arness(course: Course, k: int = 1) -> float:
    """Global-ARness@k: the share of offsets that were among the ``k`` smallest not written yet (NAP, equation 2)."""
    _check(course, k)
    open_offsets = sorted(offset for step in course for offset in step)
    written = len(open_offsets)
    among = 0
    for step in course:
        smallest = open_offsets[:k]
        among += sum(offset in smallest for offset in step)
        for offset in step:
            del open_offsets[bisect.bisect_left(open_offsets, offset)]
    return among / written


def local_arness(course: Course, k: int = 1) -> float:
    """Local-ARness@k: the share of offsets written just after the ``k`` offsets to their left, in whatever order.

    So the definition in appendix A.2 of DiffuCoder (arXiv 2506.20639), by sets; a figure there asks for ascending order
    as well, which differs for k > 1. The prompt counts as written from left to right before the answer. Of offsets that
    a step before committed together, those to the left count as its last.
    """
    _check(course, k)
    step_of = {offset: number for number, step in enumerate(course) for offset in step}
    before = [0]  # how many offsets were committed before each step
    for step in course:
        before.append(before[-1] + len(step))

    def committed_before(step: int) -> int:  # the prompt's last token came in step -1, the one before in step -2
        return before[step] if step >= 0 else step

    def follows(offset: int) -> bool:
        now = step_of[offset]
        steps = [left if left < 0 else step_of.get(left, now) for left in range(offset - k, offset)]
        first = min(steps)
        behind_first = sum(step > first for step in steps)
        return max(steps) < now and committed_before(now) - committed_before(first + 1) == behind_first

    return sum(map(follows, step_of)) / len(step_of)


def kendall_tau(course: Course) -> float:
    """Kendall's rank correlation (tau-b) of step and offset: 1 left to right, -1 the reverse; 0 if all came at once."""
    _check(course, 1)
    pairs = [(number, offset) for number, step in enumerate(course) for offset in step]
    steps, offsets = zip(*pairs, strict=True)
    return float(scipy.stats.kendalltau(steps, offsets).statistic) if len(set(steps)) > 1 else 0.0


def of_slots(course: Course, slot_size: int) -> list[list[int]]:
    """The same of slots: a slot counts as written when the first of its offsets is."""
    seen: set[int] = set()
    slots = []
    for step in course:
        new = list(dict.fromkeys(offset // slot_size for offset in step if offset // slot_size not in seen))
        seen.update(new)
        if new:
            slots.append(new)
    return slots


def one_by_one(order: Sequence[int]) -> list[list[int]]:
    """The course of a decoder that commits one offset a step."""
    return [[offset] for offset in order]


def _check(course: Course, k: int) -> None:
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    offsets = [offset for step in course for offset in step]
    if not offsets:
        raise ValueError("the course is empty: nothing was written")
    if min(offsets) < 0:
        raise ValueError(f"offset {min(offsets)} is not in the answer: offsets count from its begin")
    if len(set(offsets)) < len(offsets):
        twice = next(offset for offset in offsets if offsets.count(offset) > 1)
        raise ValueError(f"offset {twice} is written twice")


# ---- Of a file ----


@dataclasses.dataclass(frozen=True)
class Options:
    """How autoregressive the answers are that decode.py --trace has written, whatever the method.

    Two orders are measured. By pass: what one forward pass commits comes together. One by one: as the trace tells the
    order (exact decoding commits several tokens of one sequential process in a pass). Tokens that an earlier end of
    text cut off do not count.
    """

    file: Annotated[Positional[str], arg(metavar="FILE")] = ""
    """What decode.py --trace wrote."""
    k: str = "1,2,4"
    """Sizes of the neighbourhoods, separated by commas."""
    slot_size: int = 0
    """Measure the order of slots of so many tokens as well; 0: of tokens alone."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON in place of a table."""

    def __post_init__(self) -> None:
        if self.slot_size < 0:
            raise ValueError(f"--slot-size must be at least 0, not {self.slot_size}")
        self.sizes()

    def sizes(self) -> list[int]:
        """What --k lists. Raises ValueError."""
        try:
            sizes = [int(size) for size in self.k.split(",")]
        except ValueError:
            sizes = [0]
        if min(sizes) < 1:
            raise ValueError(f"--k {self.k} must be integers, at least 1, separated by commas")
        return sizes


def read(path: str) -> Iterator[tuple[Course, list[int]]]:
    """Of every answer in what ``decode.py --trace`` wrote its course by forward pass, and its order by token.

    Empty answers are left out. Raises UserError, naming the line.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            output = json.loads(line)
            order = [int(offset) for offset in output["commit_order"]]
            kept = set(order)
            steps = [[int(offset) for offset, _ in event["committed"]] for event in output["trace"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, line {number} holds no trace ({type(error).__name__}: {error}): give what decode.py wrote "
                "with --trace"
            ) from error
        course = [[offset for offset in step if offset in kept] for step in steps]
        if order:
            yield [step for step in course if step], order


MEASURES: dict[str, Callable[[Course, int], float]] = {"global": global_arness, "local": local_arness}


def measure(courses: Sequence[Course], sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation over answers of every measure, by name."""
    found = {
        f"{name} ARness@{k}": [function(course, k) for course in courses]
        for name, function in MEASURES.items()
        for k in sizes
    }
    found["Kendall's tau"] = list(map(kendall_tau, courses))
    return {
        name: {"mean": statistics.fmean(values), "deviation": statistics.pstdev(values)}
        for name, values in found.items()
    }


def report(answers: Sequence[tuple[Course, list[int]]], sizes: Sequence[int], slot_size: int) -> dict[str, Any]:
    """All measures, by what is ordered and how."""
    orders: dict[str, list[Course]] = {
        "tokens, by pass": [course for course, _ in answers],
        "tokens, one by one": [one_by_one(order) for _, order in answers],
    }
    if slot_size:
        orders["slots, by pass"] = [of_slots(course, slot_size) for course, _ in answers]
        orders["slots, one by one"] = [of_slots(one_by_one(order), slot_size) for _, order in answers]
    return {name: measure(courses, sizes) for name, courses in orders.items()}


def run(args: Sequence[str]) -> None:
    """Do what ``args`` ask for. Raises UserError."""
    options = parse(Options, args, Options())
    if not options.file:
        raise UserError("name a file that decode.py --trace wrote")
    answers = list(read(options.file))
    if not answers:
        raise UserError(f"{options.file} holds no answer with a token")
    measures = report(answers, options.sizes(), options.slot_size)
    if options.json:
        print(json.dumps({"answers": len(answers), "measures": measures}))
        return
    table = Table(title=f"{len(answers)} answers, mean and standard deviation", title_justify="left")
    table.add_column("", no_wrap=True)
    for order in measures:
        table.add_column(order, justify="right", no_wrap=True)
    for name in next(iter(measures.values())):
        values = (of_order[name] for of_order in measures.values())
        table.add_row(name, *(f"{value['mean']:.3f} ± {value['deviation']:.3f}" for value in values))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    sys.exit(exit_code(run, None))
