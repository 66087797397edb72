"""Speed and right answers of several ways of decoding: one model, one set of prompts, one run.

    python -m refusion_jax.evaluation.benchmark [--shape 100m] [--methods ar,exact-16-32] [--batch-sizes 1,8,32]
        [--prompts worksheets:0:32] [--repeats 3] [--output DIR]

``measure.py`` says what is timed, and how. Beside the speed stands what ``roofline.py`` predicts from what the device
reaches in plain matrix products and copies, measured between the repeats; and the same from what the vendor publishes,
where the device, or --chip, is in ``chips.py``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tqdm
from rich.console import Console
from tyro.conf import arg

from refusion_jax import demo
from refusion_jax.cli.decode import ASSETS
from refusion_jax.cli.options import UserError, parse, read_settings
from refusion_jax.cli.output import write_output
from refusion_jax.cli.process import exit_code, warnings_in_one_line
from refusion_jax.cli.prompts import read_prompts
from refusion_jax.config import ModelConfig
from refusion_jax.data import worksheet
from refusion_jax.decoding.generate import Generation
from refusion_jax.evaluation.compare import compared, digest, key_of, recorded
from refusion_jax.evaluation.inflate import inflate, parameters
from refusion_jax.evaluation.measure import METHODS, Entry, Prompts, measure, overhead
from refusion_jax.evaluation.report import draw, report, show
from refusion_jax.evaluation.roofline import Calibration, Peaks, published
from refusion_jax.model import Model
from refusion_jax.model.hf import load
from refusion_jax.presets import SHAPES as PUBLISHED_SHAPES
from refusion_jax.sharding import usual_dtype

SHAPES = PUBLISHED_SHAPES | {
    "100m": ModelConfig(
        vocab_size=32_768,
        hidden_size=512,
        intermediate_size=2_048,
        num_layers=18,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=4_096,
        eos_token_ids=(1,),
        mask_token_id=None,
    )
}
"""The published ones, and one of 101.7 million parameters for a CPU."""

METHODS_HELP = (
    f"Separated by commas: {', '.join(METHODS)}. exact-SLOT-BLOCK, threshold-SLOT-BLOCK-TOKEN THRESHOLD, mdm-TOKENS A "
    "STEP, mdm-above-THRESHOLD."
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure speed and right answers of ways of decoding, in turn, beside what a roofline predicts."""

    model: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="(default: the bundled model)")] = None
    """Checkpoint in Hugging Face layout: a directory, or a hub id (owner/name)."""
    shape: Annotated[str | None, arg(metavar="NAME|FILE.py", help_behavior_hint="(default: its own)")] = None
    """Sizes to which the model is padded (evaluation/inflate.py): 100m, qwen3_0_6b, qwen3_8b, or the ModelConfig that
    get_config() of a Python file returns."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; auto is bfloat16 on accelerators and float32 on CPU."""
    prompts: Annotated[str, arg(metavar="worksheets:SEED:COUNT|FILE.jsonl")] = "worksheets:0:32"
    """Test worksheets, whose right answers are known, or prompts as decode.py reads them."""
    methods: Annotated[str, arg(metavar="NAMES", help=METHODS_HELP)] = (
        "ar,exact-8-8,exact-16-16,exact-16-32,threshold-16-32-0.4,threshold-32-32-0.4,mdm-1,mdm-2,mdm-4,mdm-above-0.9"
    )
    batch_sizes: Annotated[str, arg(metavar="NUMBERS")] = "1,8,32"
    """Rows that are decoded together, separated by commas."""
    max_new_tokens: int = demo.EXACT.max_new_tokens
    """Budget of every answer."""
    repeats: int = 3
    """Timed passes over all prompts, of every method and batch size."""
    chip: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: this device, if known)")] = None
    """Chip of chips.py for which speed is predicted too, such as "NVIDIA H200"."""
    compare: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """answers.json of another run with the same prompts: answers that differ are counted."""
    output: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="(default: only printed)")] = None
    """Directory for benchmark.json, benchmark.png and answers.json. The first is written after every batch size."""
    figure: bool = True
    """Draw benchmark.png, which needs matplotlib."""

    def __post_init__(self) -> None:
        for name in ("repeats", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        names_of(self.methods)
        batch_sizes_of(self.batch_sizes)


# ---- Options ----


def names_of(text: str) -> list[str]:
    """The names of methods in a list separated by commas, each once. Raises ValueError."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in METHODS:
            raise ValueError(f"--methods: there is no {name!r}: give some of {', '.join(METHODS)}")
    return names


def batch_sizes_of(text: str) -> list[int]:
    """The numbers in a list separated by commas, ascending. Raises ValueError."""
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise ValueError(f"--batch-sizes must be positive integers separated by commas, not {text!r}")
    return sorted(set(map(int, numbers)))


def read(source: str) -> Prompts:
    """The prompts that --prompts names. Raises UserError."""
    if not source.startswith("worksheets:"):
        try:
            lines = read_prompts(Path(source).read_bytes(), source)
        except OSError as error:
            raise UserError(f"--prompts {source} cannot be read: {error.strerror}") from None
        return Prompts(source, [line.prompt for line in lines], None)
    numbers = source.split(":")[1:]
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers) or not int(numbers[1]):
        raise UserError(f"--prompts must be worksheets:SEED:COUNT, such as worksheets:0:32, not {source}")
    seed, count = map(int, numbers)
    queries = [worksheet.example("test", seed, index)["query"] for index in range(count)]

    def is_right(query: str) -> Callable[[Generation], bool]:
        return lambda answer: demo.is_right(query, answer)

    return Prompts(
        source, [[{"role": "user", "content": query}] for query in queries], [is_right(query) for query in queries]
    )


def shape_of(name: str) -> ModelConfig:
    """The shape that --shape names. Raises UserError."""
    if name.endswith(".py"):
        return read_settings(name, ModelConfig, "--shape")
    if name not in SHAPES:
        raise UserError(f"--shape must be one of {', '.join(SHAPES)} or a Python file, not {name}")
    return SHAPES[name]


def load_model(options: Options) -> Model:
    """The model, in the sizes that are wanted. Raises UserError, ValueError and OSError."""
    source = ASSETS / "model" if options.model is None else options.model
    if options.shape is None:
        return load(source, dtype=options.dtype)
    shape = shape_of(options.shape)
    dtype = usual_dtype() if options.dtype == "auto" else options.dtype
    return inflate(load(source, dtype="float32"), shape, dtype=dtype)


def peaks_of(options: Options, dtype: str) -> list[Peaks]:
    """The published peaks for which speed is predicted. Raises UserError."""
    device = jax.devices()[0].device_kind
    try:
        return [published(options.chip or device, dtype)]
    except ValueError as error:
        if options.chip is not None:
            raise UserError(f"--chip: {error}") from None
        return []


# ---- Command line ----


def prepare_output(options: Options) -> Path | None:
    """The directory for the output. Raises UserError, before anything is decoded."""
    if options.output is None:
        return None
    if options.figure and importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "benchmark.png needs matplotlib, which is not installed: pip install 'refusion_jax[eval]', or give "
            "--no-figure"
        )
    directory = Path(options.output)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {directory} cannot be made: {error.strerror}") from None
    return directory


def write_json(path: Path, value: Any) -> None:
    """Write a file of JSON, whole or not at all. Raises UserError."""
    write_output(str(path), [json.dumps(value, indent=1).encode(), b"\n"])


def about(options: Options, command: str, model: Model, prompts: Prompts, *, complete: bool) -> dict[str, Any]:
    """What runs, and on what, for benchmark.json."""
    device = jax.devices()[0]
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "complete": complete,
        "jax": jax.__version__,
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores",
        },
        "compiled_programs_kept_on_disk": bool(jax.config.jax_compilation_cache_dir),  # type: ignore[attr-defined,unused-ignore]
        "model": {
            "source": options.model or "bundled",
            "shape": options.shape,
            "parameters": parameters(model.config),
            "dtype": model.config.dtype,
        },
        "prompts": {"source": prompts.name, "count": len(prompts.prompts)},
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
    }


@warnings_in_one_line()
def run(args: Sequence[str]) -> None:
    """Measure, print, and write what was asked for. Raises UserError, ValueError and OSError."""
    options = parse(Options, args, Options())
    command = " ".join(["python -m refusion_jax.evaluation.benchmark", *args])
    directory = prepare_output(options)
    prompts = read(options.prompts)
    model = load_model(options)
    known = peaks_of(options, model.config.dtype)
    if options.compare is not None:
        compared([], prompts, options.compare)  # whether it can be read
    calibration = Calibration(model.config, model.params)
    fixed = overhead(model.config)
    names, batches = names_of(options.methods), batch_sizes_of(options.batch_sizes)
    configs = {name: dataclasses.replace(METHODS[name], max_new_tokens=options.max_new_tokens) for name in names}
    total = len(names) * len(batches) * (1 + options.repeats)
    entries: list[Entry] = []
    with tqdm.tqdm(total=total, unit="pass", disable=None, dynamic_ncols=True) as bar:

        def advance(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        for group in measure(model, prompts, configs, batches, options.repeats, calibration, advance):
            entries += group
            complete = group[0].job.batch_size == batches[-1]
            what = about(options, command, model, prompts, complete=complete)
            all_peaks = [calibration.peaks(fixed), *known]
            figures = report(what, prompts, entries, calibration, all_peaks, options.compare)
            if directory is not None:
                write_json(directory / "benchmark.json", figures)
    show(figures, terminal())
    if directory is not None:
        answers = {key_of(entry): list(map(recorded, entry.answers)) for entry in entries}
        write_json(directory / "answers.json", {"prompts": digest(prompts), "answers": answers})
        if options.figure:
            draw(figures, directory / "benchmark.png")


def terminal() -> Console:
    """Standard output; wide where it is no terminal."""
    width = None if sys.stdout.isatty() else 180
    return Console(
        color_system=None if os.environ.get("NO_COLOR") else "auto", markup=False, highlight=False, width=width
    )


def main(args: Sequence[str] | None = None) -> int:
    """Do what ``args`` (of the process, if None) ask for. Returns the exit code."""
    return exit_code(run, args)


if __name__ == "__main__":
    sys.exit(main())
