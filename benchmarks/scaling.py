"""The smallest slice of TPUs that holds a model, by kind of TPU and of work: the tables of docs/scaling.md.

    python -m benchmarks.scaling [--models qwen3_0_6b,qwen3_8b] [--tpus v5e,v5p]

Programs are compiled for the chips (``refusion_jax.aot``), which are not needed: training by a row of 4,096 tokens on
each chip, in bfloat16, with remat="full" and fsdp over all of them, and exact decoding of 16 rows of 2,048 positions.
Slices go from the smallest to the largest; those that cannot even hold parameters and optimizer state are left out, and
so are those on which the compiler crashes, which is said.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from refusion_jax import aot
from refusion_jax.chips import CHIPS, SLICES, slice_of
from refusion_jax.cli.options import UserError, parse
from refusion_jax.cli.process import exit_code
from refusion_jax.config import DecodeConfig, ModelConfig
from refusion_jax.evaluation.roofline import resident_bytes
from refusion_jax.presets import SHAPES
from refusion_jax.training.config import DataConfig, LoopConfig, LoraConfig, StartConfig, TrainConfig

ROWS, POSITIONS = 16, 2048
TRAIN = LoopConfig(epochs=1, dtype="bfloat16", remat="full")


class Work(NamedTuple):
    """A kind of work."""

    name: str
    least: int  # bytes of every parameter, whatever else there is


WORKS = (
    Work("AdamW", 16),  # parameters, gradient and two moments in float32
    Work("LoRA, rank 16", 2),
    Work("decoding", 2),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Find the smallest slice of TPUs that holds a model."""

    models: str = ",".join(SHAPES)
    """Shapes by name, separated by commas."""
    tpus: str = ",".join(SLICES)
    """Generations of TPUs, separated by commas."""

    def chosen(self, option: str, known: Sequence[str]) -> list[str]:
        """What an option lists. Raises UserError."""
        names = getattr(self, option).split(",")
        if unknown := [name for name in names if name not in known]:
            raise UserError(f"--{option}: there is no {', '.join(unknown)}; give some of {', '.join(known)}")
        return names


def compiled(work: Work, shape: ModelConfig, topology: str) -> aot.Report:
    """The work on a slice."""
    if work.name == "decoding":
        return aot.apart(aot.decoding, shape, DecodeConfig(), topology, rows=ROWS, capacity=POSITIONS)
    lora = LoraConfig(rank=16 if work.name.startswith("LoRA") else 0)
    start = StartConfig(checkpoint="a checkpoint of this shape", shape=shape)
    return aot.apart(aot.training, TrainConfig("", start, DataConfig(), TRAIN, lora=lora), topology)


def smallest(work: Work, shape: ModelConfig, tpu: str) -> aot.Report | None:
    """The work on the smallest slice that holds it; None: not even the largest does."""
    parameters = resident_bytes(dataclasses.replace(shape, dtype="bfloat16"), 0, 0) / 2
    for links in SLICES[tpu].shapes:
        topology = f"{tpu}:{links}"
        chip, chips = slice_of(topology)
        if work.least * parameters <= chip.memory * chips:
            print(f"{work.name}, {topology} ...", file=sys.stderr, flush=True)
            try:
                report = compiled(work, shape, topology)
            except aot.CompilerCrash as error:
                print(f"left out: {error}", file=sys.stderr, flush=True)
                continue
            if report.fits:
                return report
    return None


def lines(models: Sequence[str], tpus: Sequence[str]) -> Iterator[str]:
    """A table in Markdown for every kind of work, line by line."""
    for work in WORKS:
        memory = (f"{tpu} ({CHIPS[SLICES[tpu].kind].memory / aot.GIB:.1f} GiB)" for tpu in tpus)
        yield f"| {work.name} | {' | '.join(memory)} |"
        yield "|---" * (len(tpus) + 1) + "|"
        for model in models:
            reports = (smallest(work, SHAPES[model], tpu) for tpu in tpus)
            yield f"| {model} | {' | '.join(map(cell, reports))} |"
        yield ""


def cell(report: aot.Report | None) -> str:
    """What stands in a table."""
    if report is None:
        return "-"
    mesh = f", tensor {report.mesh.tensor}" if report.mesh.tensor > 1 else ""
    links = report.topology.partition(":")[2]
    return f"{links} ({report.mesh.devices}{mesh}): {report.largest / aot.GIB:.1f} GiB"


def run(args: Sequence[str]) -> None:
    """Do what ``args`` ask for. Raises UserError and ValueError."""
    options = parse(Options, args, Options())
    aot.check_compiler()
    for line in lines(options.chosen("models", list(SHAPES)), options.chosen("tpus", list(SLICES))):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(run, None))
