"""What a program does, counted: operations by its jaxpr, bytes between devices by its compiled text.

XLA's own figures (``cost_analysis``) are not of use for either: they count the body of a loop once.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

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
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z][\w-]*)\((.*)")
CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%?([\w.-]+)")
BRANCHES = re.compile(r"(?:branch_computations=\{|(?:true|false)_computation=)(.*?)(?:[},]|$)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def collectives(text: str) -> dict[str, int]:
    """Bytes of the results of collectives on one device, by kind, of a compiled program's text (HLO).

    A loop counts as often as it runs where that is known, else once; of the branches of a conditional the one counts
    that moves most. Asynchronous ones count where they are done.
    """
    computations: defaultdict[str, list[tuple[str, str, str]]] = defaultdict(list)
    entry = name = ""
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            name = head[2]
            entry = name if head[1] else entry
        elif instruction := INSTRUCTION.match(line):
            types, operation, rest = instruction.groups()
            computations[name].append((types, operation, rest))
    known: dict[str, Counter[str]] = {}

    def of(name: str) -> Counter[str]:
        if name not in known:
            known[name] = sum((of_one(*instruction) for instruction in computations[name]), Counter())
        return known[name]

    def of_one(types: str, operation: str, rest: str) -> Counter[str]:
        if operation.removesuffix("-done") in COLLECTIVES:
            return Counter({operation.removesuffix("-done"): size_of(types)})
        if operation in ("async-update", "async-done"):  # named by async-start
            return Counter()
        if branches := BRANCHES.search(rest):
            return max((of(branch.strip(" %")) for branch in branches[1].split(",")), key=Counter.total)
        trips = TRIPS.search(rest)
        inner = sum((of(called) for called in CALLED.findall(rest)), Counter())
        return Counter({kind: moved * int(trips[1] if trips else 1) for kind, moved in inner.items()})

    return dict(of(entry))


def size_of(types: str) -> int:
    """Bytes of the arrays of a type of HLO, such as ``(bf16[8,128]{1,0}, f32[])``."""
    return sum(
        math.prod(map(int, filter(None, dimensions.split(",")))) * _bits(kind) // 8
        for kind, dimensions in re.findall(r"([a-z]\w*)\[([\d,]*)\]", types)
    )


def _bits(kind: str) -> int:
    bits = re.match(r"[a-z]+(\d+)", kind)
    return int(bits[1]) if bits else 8  # pred
