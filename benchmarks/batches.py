"""What a batch costs and gains: tokens/s at several batch sizes, with ended rows filled again and without.

    python -m benchmarks.batches [--preset balanced] [--batch-sizes 1,8,32] [--worksheets 500] [--repeats 3]
        [--max-new-tokens 96]

The bundled model answers the same test worksheets, of prompts and answers of mixed lengths, in every way in turn. All
must give the same tokens.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

import refusion_jax as rf
from refusion_jax import demo
from refusion_jax.cli.options import UserError, parse
from refusion_jax.cli.process import exit_code, keep_compiled_programs
from refusion_jax.decoding.batch import Usage
from refusion_jax.decoding.generate import prepare
from refusion_jax.evaluation.benchmark import batch_sizes_of, read
from refusion_jax.evaluation.measure import decode_once
from refusion_jax.presets import PRESETS


@dataclasses.dataclass(frozen=True)
class Options:
    """Decode test worksheets at several batch sizes, with ended rows filled again and without."""

    preset: str = "balanced"
    """Settings, by name; decoded exactly."""
    batch_sizes: str = "1,8,32"
    """Rows that are decoded together, separated by commas."""
    worksheets: int = 500
    """How many."""
    repeats: int = 3
    """Timed passes over all worksheets, of every way."""
    max_new_tokens: int = demo.EXACT.max_new_tokens
    """The budget of an answer; what the answers leave of it should cost memory alone."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"--preset {self.preset}: give one of {', '.join(PRESETS)}")
        for name in ("worksheets", "repeats", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")


def run(args: Sequence[str]) -> None:
    """Do what ``args`` ask for. Raises UserError, ValueError and OSError."""
    options = parse(Options, args, Options())
    keep_compiled_programs()
    model = rf.load(demo.ASSETS / "model")
    config = dataclasses.replace(PRESETS[options.preset], verify="exact", max_new_tokens=options.max_new_tokens)
    prompts = read(f"worksheets:0:{options.worksheets}").prompts
    ways = {
        (rows, refill): prepare(model, prompts, config, batch_size=rows)
        for rows in batch_sizes_of(options.batch_sizes)
        for refill in (True, False)
    }
    speeds: dict[tuple[int, bool], list[float]] = {way: [] for way in ways}
    usages: dict[tuple[int, bool], Usage] = {}
    first = None
    for repeat in range(1 + options.repeats):
        for way, job in ways.items():
            answers, usage, seconds, _ = decode_once(job, refill=way[1])
            usages[way] = usage
            tokens = [answer.token_ids for answer in answers]
            first = tokens if first is None else first
            if tokens != first:
                raise UserError(
                    f"batch {way[0]} gives other tokens than batch {next(iter(ways))[0]}: near-ties, or a bug"
                )
            if repeat:  # the first compiles
                speeds[way].append(usage.tokens / seconds)
    table = Table("batch", "refilled", "tokens/s", "(spread)", "batch passes", "rows at work", "live positions")
    for (rows, refill), usage in usages.items():
        of_way = speeds[rows, refill]
        spread = f"{min(of_way):,.0f} to {max(of_way):,.0f}"
        shares = f"{usage.occupancy:.0%}", f"{usage.live:.0%}"
        filled = "yes" if refill else "no"
        table.add_row(str(rows), filled, f"{statistics.median(of_way):,.0f}", spread, str(int(usage.steps)), *shares)
    console = Console(width=110)
    console.print(f"{options.worksheets} test worksheets, {options.preset}; all ways give the same tokens")
    console.print(table)


def main(args: Sequence[str] | None = None) -> int:
    """Do what ``args`` (of the process, if None) ask for. Returns the exit code."""
    return exit_code(run, args)


if __name__ == "__main__":
    sys.exit(main())
