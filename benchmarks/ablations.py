"""What each part of the recipe is worth: variants of the bundled model, trained and decoded at equal budgets.

    python -m benchmarks.ablations [--steps N] [--output DIR] [--worksheets 500] [--seed 0] [--only NAME,...]

Every variant is trained with the settings of configs/tiny.py, for as many steps, on the same examples in the same
order; forward process and loss alone differ. ``causal-then-refusion`` shares the steps out: four fifths left to right
(``causal``), then one fifth as ReFusion; each of the two has a learning rate schedule of its own. All models answer
the same worksheets of the test split, which training never sees.

A variant is trained in DIR/NAME. A command that was interrupted goes on where it stopped, and what is finished is
neither trained nor decoded again. All figures and settings are in DIR/ablations.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import refusion_jax as rf
from benchmarks.worksheets import ROWS, decode, of_the_test_split, share
from refusion_jax.cli.options import UserError, parse, read_settings
from refusion_jax.cli.process import keep_compiled_programs
from refusion_jax.cli.train import STOPPED
from refusion_jax.training import loop
from refusion_jax.training.config import ForwardConfig, StartConfig, TrainConfig
from refusion_jax.training.identity import write_whole

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.py"
SPEED, HELD_OUT = "train/tokens_per_second", "held_out/"
"""In metrics.jsonl."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is trained in another way than the config says."""

    forward: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ForwardConfig."""
    start: str | None = None
    """The variant whose trained model it starts from; None: as in the config."""
    fifths: tuple[int, int] = (0, 5)
    """The part of all steps that are its own, behind those of ``start``: from, to."""


VARIANTS = {
    "refusion": Variant(),
    "autoregressive": Variant({"objective": "ar"}),
    "no-ar-term": Variant({"ar_weight": 0.0}),
    "no-permutation": Variant({"permute": False}),
    "slot-size-1": Variant({"slot_sizes": (1,)}),
    "fixed-slot-size": Variant({"slot_sizes": (8,)}),
    "causal": Variant({"objective": "ar"}, fifths=(0, 4)),
    "causal-then-refusion": Variant(start="causal", fifths=(4, 5)),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Train and decode variants of the bundled model at equal budgets, and print a table of them."""

    steps: int | None = None
    """Steps of every variant; None: those of configs/tiny.py."""
    output: str = "runs/ablations"
    """Directory of the runs and the figures."""
    worksheets: int = 500
    """Test worksheets that every model answers."""
    seed: int = 0
    """Of the test worksheets."""
    only: str = ",".join(VARIANTS)
    """Names of variants, with commas between them; one that starts from another brings that along."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 2:
            raise ValueError(f"--steps must be at least 2, not {self.steps}: one variant shares them out")
        if self.worksheets < 1:
            raise ValueError(f"--worksheets must be at least 1, not {self.worksheets}")
        if unknown := [name for name in self.only.split(",") if name not in VARIANTS]:
            raise ValueError(f"--only has {unknown[0]!r}; the variants are {', '.join(VARIANTS)}")


def selected(only: str) -> list[str]:
    """The variants that were asked for and those they start from, in the order of ``VARIANTS``."""
    names = set(only.split(","))
    names |= {start for name in names if (start := VARIANTS[name].start) is not None}
    return [name for name in VARIANTS if name in names]


def settings_of(name: str, config: TrainConfig, output: Path) -> TrainConfig:
    """The settings of a variant: ``config``, but for what makes it a variant, and one measurement, at the end."""
    variant = VARIANTS[name]
    assert config.train.steps is not None
    begin, end = (config.train.steps * fifths // 5 for fifths in variant.fifths)
    steps = end - begin
    model = config.model
    if variant.start is not None:
        model = StartConfig(checkpoint=str(output / variant.start / loop.EXPORT))
    return dataclasses.replace(
        config,
        run=str(output / name),
        model=model,
        train=dataclasses.replace(config.train, steps=steps, log_every=min(config.train.log_every, steps)),
        forward=dataclasses.replace(config.forward, **variant.forward),
        evaluation=dataclasses.replace(config.evaluation, every=steps, answers=0),
    )


def ways_to_decode(forward: ForwardConfig, config: rf.DecodeConfig) -> dict[str, rf.DecodeConfig]:
    """``config`` as it suits a model that was trained with ``forward``, by name: the first is the model's own."""
    if forward.objective == "ar":
        return {"left to right": dataclasses.replace(config, method="ar", ar_first="token")}
    if len(forward.slot_sizes) == 1:
        config = dataclasses.replace(config, slot_size=forward.slot_sizes[0])
    return {"exact": config, "left to right": dataclasses.replace(config, method="ar", ar_first="mask")}


# ---- One variant ----


def measure(config: TrainConfig, sheets: Sequence[Mapping[str, str]], test: Mapping[str, Any]) -> dict[str, Any]:
    """Train a variant and decode ``sheets``; what was measured before, with the same settings, is not done again.

    Args:
      config: of the variant.
      test: what the worksheets are.

    Returns:
      What is written to RUN/figures.json: "settings" and "figures".

    Raises:
      As ``loop.train``.
    """
    run = Path(config.run)
    ways = ways_to_decode(config.forward, config.evaluation.decode)
    model = loop.train(config)  # one that is finished is only read, and its settings are checked
    identity = json.loads((run / "run.json").read_text(encoding="utf-8"))
    if identity["start"]["checkpoint"] is not None:  # an absolute path, which means nothing elsewhere
        identity["start"]["checkpoint"] = os.path.relpath(identity["start"]["checkpoint"], run)
    settings = {
        "run": identity,
        "test": dict(test),
        "decoded": {way: dataclasses.asdict(settings) for way, settings in ways.items()},
    }
    settings = json.loads(json.dumps(settings))
    record = run / "figures.json"
    if record.exists():
        there = json.loads(record.read_text(encoding="utf-8"))
        if there["settings"] == settings:
            return there
    figures = {
        "training_seconds": training_seconds(config, run, model),
        "held_out": held_out(run),
        "decoded": {way: decode(model, sheets, settings) for way, settings in ways.items()},
    }
    write_whole(record, json.dumps({"settings": settings, "figures": figures}, indent=1) + "\n")
    return {"settings": settings, "figures": figures}


def training_seconds(config: TrainConfig, run: Path, model: rf.Model) -> float:
    """The seconds of all steps, at the median of the speeds that a run wrote down.

    Preparing data, held-out measures and interruptions are thus left out, and compilation, if it wrote more than once.
    """
    steps = config.train.steps
    assert steps is not None
    with contextlib.redirect_stderr(io.StringIO()):  # training has told of the data
        examples, _ = loop.read_data(config.data, model)
    tokens = steps * config.train.batch_size * float(np.mean(examples.lengths))
    return tokens / statistics.median(line[SPEED] for line in metrics(run) if SPEED in line)


def held_out(run: Path) -> dict[str, float]:
    """What was measured on held-out examples at the end of a run: the terms of the loss, by slot size."""
    (*_, last) = (line for line in metrics(run) if f"{HELD_OUT}loss" in line)
    last.pop(f"{HELD_OUT}ar/slot_1", None)  # a slot of one token has nothing to predict from left to right
    return {name.removeprefix(HELD_OUT): value for name, value in last.items() if name.startswith(HELD_OUT)}


def metrics(run: Path) -> list[dict[str, Any]]:
    """What a run wrote down."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


# ---- All of them ----


def ablate(
    config: TrainConfig, names: Iterable[str], output: Path, *, worksheets: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Train and decode variants of ``config``, one after another. Returns name -> what ``measure`` returns.

    Raises:
      As ``loop.train``.
    """
    sheets = of_the_test_split(seed, worksheets)
    test = {"worksheets": worksheets, "seed": seed, "rows": ROWS}
    results = {}
    for name in names:
        print(f"---- {name} ----", file=sys.stderr)
        results[name] = measure(settings_of(name, config, output), sheets, test)
        for way, figures in results[name]["figures"]["decoded"].items():
            print(
                f"{name}, {way}: {figures['right']:.1%} right, {figures['tokens_per_forward']:.2f} tokens per forward",
                file=sys.stderr,
            )
        jax.clear_caches()  # or the programs of all variants stay in memory
        gc.collect()
    return results


def table_of(results: Mapping[str, dict[str, Any]]) -> Table:
    """One line for every variant and way of decoding it."""
    table = Table(
        "variant", "steps", "training s", "held-out AR", "held-out masked", "decoded", "right", "tokens/forward"
    )
    for name, result in results.items():
        settings, figures = result["settings"], result["figures"]
        own = next(iter(settings["decoded"].values()))
        losses = figures["held_out"]
        ar, masked = (losses.get(f"{term}/slot_{own['slot_size']}", losses.get(term)) for term in ("ar", "masked"))
        cells = [name, str(settings["run"]["train"]["steps"]), number(figures["training_seconds"], 0)]
        cells += [number(ar, 4), number(masked, 4)]
        for way, decoded in figures["decoded"].items():
            right = share(decoded["right"], settings["test"]["worksheets"])
            table.add_row(*cells, way, right, number(decoded["tokens_per_forward"], 2))
            cells = [""] * len(cells)
    return table


def number(value: float | None, digits: int) -> str:
    """With so many decimals; - where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def main(args: Sequence[str] | None = None) -> int:
    """Do what ``args`` (of the process, if None) ask for. Returns the exit code, as that of training."""
    try:
        options = parse(Options, sys.argv[1:] if args is None else args, Options())
        config = read_settings(str(CONFIG), TrainConfig, "--config")
        if options.steps is not None:
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=options.steps))
        output = Path(options.output)
        keep_compiled_programs()  # most variants share theirs
        results = ablate(config, selected(options.only), output, worksheets=options.worksheets, seed=options.seed)
    except loop.Interrupted as stop:
        print(stop, file=sys.stderr)
        return STOPPED if stop.number == signal.SIGTERM else 130
    except (UserError, ValueError, BlockingIOError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    report = {
        "command": " ".join(["python -m benchmarks.ablations", *(sys.argv[1:] if args is None else args)]),
        "date": time.strftime("%Y-%m-%d"),
        "jax": jax.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, {jax.devices()[0].device_kind}",
        "config": dataclasses.asdict(config),
        "variants": results,
    }
    write_whole(output / "ablations.json", json.dumps(report, indent=1) + "\n")
    console = Console(width=140)
    console.print(table_of(results))
    console.print(
        "Right: whole answers, with the standard error of the share. Held-out losses: each under its own forward\n"
        "process, at the slot size that is decoded."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
