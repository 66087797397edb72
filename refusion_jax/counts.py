"""What a program does, counted: operations by its jaxpr, bytes between devices by its compiled text.

XLA's own figures (``cost_analysis``) are not of use for either: they count the body of a loop once.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


# ---- Operations ----


def operations(jaxpr: Any) -> float:
    """Operations of all matrix products of a jaxpr, an addition and a multiplication counted as two.

    A ``scan`` counts as often as it is long, and a branch with most operations for all. A ``while`` loop, whose length
    nobody knows, counts once.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            contracted = params["dimension_numbers"][0][0]
            shape = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        elif name == "cond":
            total += max(operations(branch) for branch in params["branches"])
        else:
            times = params["length"] if name == "scan" else params["mesh"].size if name == "shard_map" else 1
            total += times * sum(operations(inner) for inner in _inner(params))
    return total


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in params.values():
        yield from (one for one in (value if isinstance(value, tuple | list) else (value,)) if hasattr(one, "eqns"))


# ---- Bytes ----

COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)")
CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|true_computation=(.*?), false_computation=([^,]*))")
LOOP = re.compile(r"condition=%?([\w.-]+), body=%?([\w.-]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Instruction(NamedTuple):
    """A line of a compiled program."""

    name: str
    types: str  # of its results
    operation: str
    rest: str  # operands and attributes


class Moved(NamedTuple):
    """What a collective moves."""

    kind: str
    size: int  # bytes


def collectives(text: str) -> dict[str, int]:
    """Bytes that collectives bring together on one device, by kind, of a compiled program's text (HLO).

    Those are the bytes of their results and, of a reduce-scatter, of its operands. A loop counts as often as it runs
    where the text tells, else once; of the branches of a conditional the one counts that moves most. Parts of one
    asynchronous collective, which share its channel, count once.
    """
    computations: defaultdict[str, list[Instruction]] = defaultdict(list)
    entry = name = ""
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            name = head[2]
            entry = name if head[1] else entry
        elif found := INSTRUCTION.match(line):
            computations[name].append(Instruction(*found.groups()))
    types = {one.name: one.types for instructions in computations.values() for one in instructions}
    known: dict[str, dict[str, Moved]] = {}

    def of(name: str) -> dict[str, Moved]:
        """By channel."""
        if name not in known:
            known[name] = {}
            for instruction in computations[name]:
                known[name] |= of_one(instruction)
        return known[name]

    def of_one(one: Instruction) -> dict[str, Moved]:
        kind = one.operation.removesuffix("-done")
        if kind in COLLECTIVES:
            channel = re.search(r"channel_id=(\d+)", one.rest)
            sides = [one.types]
            if kind == "reduce-scatter":
                sides = [types.get(operand, "") for operand in re.findall(r"%([\w.-]+)", one.rest.partition(")")[0])]
            return {channel[1] if channel else one.name: Moved(kind, sum(map(size_of, sides)))}
        if one.operation in ("async-update", "async-done"):  # named by async-start
            return {}
        if branches := BRANCHES.search(one.rest):
            names = ",".join(filter(None, branches.groups())).split(",")
            moved = [of(name.strip(" %")) for name in names]
            return max(moved, key=lambda moved: sum(size for _, size in moved.values()))
        if loop := LOOP.search(one.rest):
            times = trips(one, computations[loop[1]])
            return {channel: Moved(kind, size * times) for channel, (kind, size) in of(loop[2]).items()}
        return {channel: moved for name in CALLED.findall(one.rest) for channel, moved in of(name).items()}

    total: Counter[str] = Counter()
    for kind, size in of(entry).values():
        total[kind] += size
    return dict(total)


def trips(loop: Instruction, condition: list[Instruction]) -> int:
    """How often a loop runs: as it says, or the one number that its condition compares with; 1 if nothing tells."""
    if said := TRIPS.search(loop.rest):
        return int(said[1])
    numbers = [one.rest.partition(")")[0] for one in condition if one.operation == "constant"]
    compared = [one for one in condition if one.operation == "compare" and "direction=LT" in one.rest]
    return int(numbers[0]) if len(numbers) == len(compared) == 1 and len(condition) == 4 else 1


def size_of(types: str) -> int:
    """Bytes of the arrays of a type of HLO, such as ``(bf16[8,128]{1,0}, f32[])``."""
    return sum(
        math.prod(map(int, filter(None, dimensions.split(",")))) * _bits(kind) // 8
        for kind, dimensions in re.findall(r"([a-z]\w*)\[([\d,]*)\]", types)
    )


def _bits(kind: str) -> int:
    bits = re.match(r"[a-z]+(\d+)", kind)
    return int(bits[1]) if bits else 8  # pred
