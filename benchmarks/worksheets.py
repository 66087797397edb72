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
from typing import Any, Literal

import jax
import tqdm
from rich.console import Console
from rich.table import Table

import refusion_jax as rf
from refusion_jax import demo
from refusion_jax.cli.options import parse
from refusion_jax.cli.output import check_output
from refusion_jax.cli.process import exit_code, keep_compiled_programs
from refusion_jax.data import worksheet
from refusion_jax.presets import PRESETS
from refusion_jax.training.identity import write_whole

ROWS = 20
"""Worksheets that are decoded together."""


def _presets(verify: Literal["exact", "threshold"]) -> dict[str, rf.DecodeConfig]:
    budget = demo.EXACT.max_new_tokens
    return {
        f"{verify}, {name}": dataclasses.replace(preset, verify=verify, max_new_tokens=budget)
        for name, preset in PRESETS.items()
    }


WAYS = {
    "left to right": dataclasses.replace(demo.EXACT, method="ar"),
    **_presets("exact"),
    **_presets("threshold"),
    **{
        f"exact, balanced, planner {planner}": dataclasses.replace(demo.EXACT, planner=planner)
        for planner in ("mean", "entropy", "random", "left_to_right")
    },
    **{
        f"threshold, balanced, kv_reuse {reuse}": dataclasses.replace(demo.EXACT, verify="threshold", kv_reuse=reuse)
        for reuse in ("recompute", "none")
    },
}
"""Left to right, every preset with both ways of verifying, and the switches for ablations."""


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
    """How many answers are right in every token, and what they cost."""
    prompts = [[{"role": "user", "content": sheet["query"]}] for sheet in sheets]
    with tqdm.tqdm(total=len(prompts), unit="worksheet", disable=None, dynamic_ncols=True) as bar:
        answers = rf.generate(model, prompts, config, batch_size=ROWS, on_progress=lambda batch: bar.update(len(batch)))
    right = [demo.is_right(sheet["query"], answer) for sheet, answer in zip(sheets, answers, strict=True)]
    total = {
        name: sum(getattr(answer.stats, name) for answer in answers) for name in ("tokens", "forwards", "positions")
    }
    return {
        "right": sum(right) / len(right),
        "tokens_per_forward": total["tokens"] / total["forwards"],
        "positions_per_token": total["positions"] / total["tokens"],
        **total,
    }


def share(right: float, count: int) -> str:
    """A share of ``count`` in percent, with its standard error."""
    return f"{100 * right:.1f} ± {100 * math.sqrt(right * (1 - right) / count):.1f} %"


def run(args: Sequence[str]) -> None:
    """Decode, print, and write what was asked for. Raises UserError, ValueError and OSError."""
    options = parse(Options, args, Options())
    if options.output is not None:
        check_output(options.output, io.BytesIO())
    keep_compiled_programs()
    directory = demo.ASSETS / "model" if options.model is None else Path(options.model)
    model = rf.load(directory)
    sheets = of_the_test_split(options.seed, options.worksheets)
    decoded = {way: decode(model, sheets, config) for way, config in WAYS.items()}
    title = f"{options.worksheets} test worksheets, seed {options.seed}"
    table = Table("", "slot", "block", "right", "tokens per forward", "positions per token", title=title)
    for way, figures in decoded.items():
        config = WAYS[way]
        sizes = ("", "") if config.method == "ar" else (str(config.slot_size), str(config.block_size))
        costs = (f"{figures[name]:.2f}" for name in ("tokens_per_forward", "positions_per_token"))
        table.add_row(way, *sizes, share(figures["right"], options.worksheets), *costs)
    Console(width=120).print(table)
    if options.output is not None:
        weights = directory / "model.safetensors"
        report = {
            "command": " ".join(["python -m benchmarks.worksheets", *args]),
            "date": time.strftime("%Y-%m-%d"),
            "jax": jax.__version__,
            "sha256": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None,
            "worksheets": options.worksheets,
            "seed": options.seed,
            "decoded": decoded,
        }
        write_whole(Path(options.output), json.dumps(report, indent=1) + "\n")


def main(args: Sequence[str] | None = None) -> int:
    """Do what ``args`` (of the process, if None) ask for. Returns the exit code."""
    return exit_code(run, args)


if __name__ == "__main__":
    sys.exit(main())
