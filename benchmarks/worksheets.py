"""How often a model is right on worksheets that training never saw, and in how many forward passes.

    python -m benchmarks.worksheets [--model DIR] [--worksheets 500] [--seed 0] [--output FILE.json]

An answer is right if it ended by itself and is right in every token. Without --model it is the bundled one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import tqdm
from rich.console import Console
from rich.table import Table

import refusion_jax as rf
from refusion_jax import demo
from refusion_jax.cli.options import UserError, parse
from refusion_jax.cli.output import check_output
from refusion_jax.cli.process import keep_compiled_programs
from refusion_jax.data import worksheet
from refusion_jax.training.identity import write_whole

ROWS = 20
"""Worksheets that are decoded together."""
WAYS = {
    "exact, slot 16, block 32": demo.EXACT,
    "exact, slot 32, block 32": dataclasses.replace(demo.EXACT, slot_size=32),
    "exact, slot 8, block 32": dataclasses.replace(demo.EXACT, slot_size=8),
    "exact, slot 8, block 8": dataclasses.replace(demo.EXACT, slot_size=8, block_size=8),
    "threshold, slot 16, block 32": dataclasses.replace(demo.EXACT, verify="threshold"),
    "left to right": dataclasses.replace(demo.EXACT, method="ar"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Decode test worksheets in several ways, and print how many answers are right."""

    model: str | None = None
    """A directory in Hugging Face layout, or of a run; None: the bundled model."""
    worksheets: int = 500
    """How many."""
    seed: int = 0
    """Of the test worksheets."""
    output: str | None = None
    """File for the figures and the digest of the weights, as JSON; None: they are only printed."""

    def __post_init__(self) -> None:
        if self.worksheets < 1:
            raise ValueError(f"--worksheets must be at least 1, not {self.worksheets}")


def of_the_test_split(seed: int, count: int) -> list[dict[str, str]]:
    """The first ``count`` worksheets of the test split."""
    return [worksheet.example("test", seed, index) for index in range(count)]


def decode(model: rf.Model, sheets: Sequence[Mapping[str, str]], config: rf.DecodeConfig) -> dict[str, Any]:
    """How many answers are right in every token, and the tokens of a forward pass."""
    prompts = [[{"role": "user", "content": sheet["query"]}] for sheet in sheets]
    with tqdm.tqdm(total=len(prompts), unit="worksheet", disable=None, dynamic_ncols=True) as bar:
        answers = rf.generate(model, prompts, config, batch_size=ROWS, on_progress=lambda batch: bar.update(len(batch)))
    right = [demo.is_right(sheet["query"], answer) for sheet, answer in zip(sheets, answers, strict=True)]
    tokens, forwards = (sum(getattr(answer.stats, name) for answer in answers) for name in ("tokens", "forwards"))
    return {"right": sum(right) / len(right), "tokens_per_forward": tokens / forwards, "tokens": tokens,
            "forwards": forwards}  # fmt: skip


def share(right: float, count: int) -> str:
    """A share of ``count`` in percent, with its standard error."""
    return f"{100 * right:.1f} ± {100 * math.sqrt(right * (1 - right) / count):.1f} %"


def main(args: Sequence[str] | None = None) -> int:
    """Do what ``args`` (of the process, if None) ask for. Returns the exit code."""
    try:
        options = parse(Options, sys.argv[1:] if args is None else args, Options())
        if options.output is not None:
            check_output(options.output, io.BytesIO())
        keep_compiled_programs()
        directory = demo.ASSETS / "model" if options.model is None else Path(options.model)
        model = rf.load(directory)
        sheets = of_the_test_split(options.seed, options.worksheets)
        decoded = {way: decode(model, sheets, config) for way, config in WAYS.items()}
    except (UserError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    table = Table(f"{options.worksheets} test worksheets, seed {options.seed}", "right", "tokens per forward")
    for way, figures in decoded.items():
        table.add_row(way, share(figures["right"], options.worksheets), f"{figures['tokens_per_forward']:.2f}")
    Console(width=100).print(table)
    if options.output is not None:
        weights = directory / "model.safetensors"
        report = {
            "command": " ".join(["python -m benchmarks.worksheets", *(sys.argv[1:] if args is None else args)]),
            "date": time.strftime("%Y-%m-%d"),
            "jax": jax.__version__,
            "sha256": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None,
            "worksheets": options.worksheets,
            "seed": options.seed,
            "decoded": decoded,
        }
        write_whole(Path(options.output), json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
