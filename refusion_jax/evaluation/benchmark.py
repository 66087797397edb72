"""Speed and right answers of several ways of decoding: one model, one set of prompts, one run.

    python -m refusion_jax.evaluation.benchmark [--shape 100m] [--methods ar,exact-16-32] [--batch-sizes 1,8,32]
        [--prompts worksheets:0:32] [--repeats 3] [--output DIR]

At every batch size every method decodes some prompts, which compiles, and then all of them ``repeats`` times, in turn
with the others, so that what else the machine does meets every method. Speed counts the tokens of answers, EOS
included, over the time from the first prompt to the last answer; prompts are computed in that time but not counted, and
compiling is not in it. Rates are totals over totals.

Beside the speed stands what ``roofline.py`` predicts, from sizes, from the tokens and positions of a forward pass that
were counted here, and from what the device reaches in plain matrix products and copies, measured between the repeats;
and the same from what the vendor publishes, where the device, or --chip, is in ``chips.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import importlib.util
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import tqdm
from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from refusion_jax import demo
from refusion_jax.cli.decode import ASSETS, compiling, covered
from refusion_jax.cli.options import UserError, parse, read_settings
from refusion_jax.cli.output import write_output
from refusion_jax.cli.process import warnings_in_one_line
from refusion_jax.cli.prompts import read_prompts
from refusion_jax.config import DecodeConfig, ModelConfig
from refusion_jax.data import worksheet
from refusion_jax.decoding import engine
from refusion_jax.decoding.batch import Usage
from refusion_jax.decoding.generate import Generation, Job, batch_of, decode, generation, prepare, queue_of
from refusion_jax.decoding.prompts import Prompt
from refusion_jax.evaluation.inflate import inflate, parameters
from refusion_jax.evaluation.roofline import (
    Calibration,
    Decoding,
    Forward,
    Peaks,
    bytes_moved,
    largest_batch,
    overtaken_at,
    published,
    tokens_per_second,
)
from refusion_jax.model import Model, transformer
from refusion_jax.model.hf import load
from refusion_jax.presets import SHAPES as PUBLISHED_SHAPES

METHODS = {
    "ar": DecodeConfig(method="ar"),
    **{
        f"exact-{slot}-{block}": DecodeConfig(slot_size=slot, block_size=block)
        for slot, block in [(4, 4), (8, 8), (16, 16), (8, 16), (8, 32), (16, 32), (32, 32), (16, 64), (32, 64)]
    },
    **{
        f"threshold-{slot}-{block}-{token}": DecodeConfig(
            verify="threshold", slot_size=slot, block_size=block, token_threshold=token
        )
        for slot, block in [(8, 8), (16, 16), (8, 32), (16, 32), (32, 32)]
        for token in (0.4, 0.9)
    },
    **{f"mdm-{tokens}": DecodeConfig(method="mdm", tokens_per_step=tokens) for tokens in (1, 2, 4)},
    **{
        f"mdm-above-{threshold}": DecodeConfig(method="mdm", slot_threshold=threshold)
        for threshold in (0.5, 0.7, 0.9, 0.95, 0.99)
    },
}
"""Name -> settings. The name says the slot, the block and the token threshold; of masked diffusion the tokens of a
step, or the certainty above which tokens are written. Up to the first hyphen it is the method."""

PLAIN = "mdm-1"
"""Masked diffusion as it is usually compared with: one token a step."""

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

NEAR_TIE = 1e-4  # two probabilities that are closer may change places with the order of float sums, in float32

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


class Prompts(NamedTuple):
    """What is decoded."""

    name: str
    prompts: list[Prompt]
    is_right: list[Callable[[Generation], bool]] | None  # of each answer; None: not known


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
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
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


# ---- One pass ----


class Pass(NamedTuple):
    """Prompts decoded once."""

    answers: list[Generation]
    usage: Usage
    seconds: float  # compiling not among them
    compiling: float


def decode_once(job: Job, count: int | None = None) -> Pass:
    """Decode all prompts, or the first ``count``, as ``generate`` does."""
    usage = Usage()
    answers: dict[int, Generation] = {}
    skip = frozenset() if count is None else frozenset(range(count, job.answers))
    with compiling() as spans:
        started = time.perf_counter()
        for ended in decode(job, skip=skip, usage=usage):
            answers |= ended
        seconds = time.perf_counter() - started
    return Pass([answers[number] for number in sorted(answers)], usage, seconds - covered(spans), covered(spans))


def some(job: Job) -> int:
    """How many prompts it takes to see all that there is to see: a batch of them, and several."""
    return min(max(job.batch_size, 8), job.answers)


class Parts(NamedTuple):
    """Where the time of a pass went, in shares of it."""

    prompts: float
    forwards: float
    rest: float  # the queue, and answers as text


def take_apart(job: Job) -> Parts:
    """Decode some prompts, wait for every step of it, and see what it takes. Nothing may compile."""
    queue = queue_of(job, frozenset(range(some(job), job.answers)))
    batch = batch_of(job, len(queue), False, True, Usage())
    prompts = forwards = 0.0
    started = time.perf_counter()
    while queue or batch.active():
        before = time.perf_counter()
        batch.fill(queue)
        jax.block_until_ready(batch.state)
        filled = time.perf_counter()
        batch.advance(len(queue))
        advanced = time.perf_counter()
        for ended in batch.ended():
            generation(job, ended)
        prompts += filled - before
        forwards += advanced - filled
    seconds = time.perf_counter() - started
    return Parts(prompts / seconds, forwards / seconds, 1 - (prompts + forwards) / seconds)


def overhead(config: ModelConfig) -> float:
    """Seconds that a forward pass takes however small it is: left to right, by a model that is deep but hardly wide.

    On an accelerator that is what starting its many small programs takes.
    """
    narrow = dataclasses.replace(
        config,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_heads=2,
        num_kv_heads=2,
        head_dim=32,
        eos_token_ids=(1,),
        mask_token_id=0,
        num_tokens=None,
    )
    model = Model(transformer.init(narrow, jax.random.key(0)), narrow)
    job = prepare(model, [[2] * 8], DecodeConfig(method="ar", max_new_tokens=64, ar_first="token"), batch_size=1)
    decode_once(job)
    passes = [decode_once(job) for _ in range(3)]
    return statistics.median(one.seconds / one.usage.steps for one in passes)


def peak_memory() -> tuple[int, str] | None:
    """Bytes of memory that were used at most so far, and by what; None where the system does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"], "device"
    try:
        import resource
    except ImportError:  # on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"


# ---- All passes ----


@dataclasses.dataclass
class Entry:
    """A method at a batch size, and its passes."""

    method: str
    job: Job
    compiling: float  # seconds of it, in all passes
    memory: tuple[int, str] | None  # as peak_memory, when it had decoded for the first time
    passes: list[Pass] = dataclasses.field(default_factory=list)  # timed ones, over all prompts
    parts: Parts | None = None

    @property
    def usage(self) -> Usage:
        """What a pass computes; the same in all of them."""
        return self.passes[0].usage

    @property
    def answers(self) -> list[Generation]:
        """Of a pass; the same in all of them, but for their seconds."""
        return self.passes[0].answers

    @property
    def family(self) -> str:
        return family(self.method)

    @property
    def rows(self) -> int:
        """B, as many as are decoded together."""
        return int(self.usage.places // self.usage.steps)

    @property
    def seconds(self) -> float:
        """Of a pass, the median."""
        return statistics.median(one.seconds for one in self.passes)

    @property
    def speed(self) -> float:
        """Tokens a second, from the median pass."""
        return self.usage.tokens / self.seconds

    @property
    def decoding(self) -> Decoding:
        """What a forward pass does of every row."""
        usage, job = self.usage, self.job
        rows = self.rows
        sizes = engine.sizes(job.method.entries, rows)
        budget = max(map(len, job.prompts)) + job.config.max_new_tokens
        return Decoding(
            tokens=usage.tokens / usage.places,
            positions=usage.computed / usage.places,
            window=next((width for width, size in sizes if size >= usage.computed / usage.steps), sizes[-1][0]),
            cached=engine.capacity(budget),
        )

    @property
    def forward(self) -> Forward:
        """The mean forward pass."""
        d = self.decoding
        return Forward(d.positions * self.rows, self.rows, d.window, d.cached)

    @property
    def speed_behind_prompts(self) -> float:
        """The same without the time in which prompts were computed."""
        assert self.parts is not None
        return self.speed / (1 - self.parts.prompts)

    def speeds(self) -> list[float]:
        """Tokens a second of every answer, from when its row began to its end: the median of the passes."""
        return [
            statistics.median(answer.stats.tokens / max(answer.stats.seconds, 1e-9) for answer in answers)
            for answers in zip(*(one.answers for one in self.passes), strict=True)
        ]

    def right(self, prompts: Prompts) -> int | None:
        """How many answers are right."""
        if prompts.is_right is None:
            return None
        return sum(check(answer) for check, answer in zip(prompts.is_right, self.answers, strict=True))


def family(method: str) -> str:
    """ar, exact, threshold or mdm."""
    return method.split("-")[0]


def measure(
    model: Model,
    prompts: Prompts,
    options: Options,
    calibration: Calibration,
    advance: Callable[[str], object],
) -> Iterator[list[Entry]]:
    """The entries of every batch size, one batch size after another.

    Args:
      advance: called before every pass, with what it is.

    Raises:
      ValueError: a method cannot decode the model, or a prompt.
      UserError: the memory does not suffice.
    """
    names = names_of(options.methods)
    configs = [dataclasses.replace(METHODS[name], max_new_tokens=options.max_new_tokens) for name in names]
    for rows in batch_sizes_of(options.batch_sizes):
        jobs = [prepare(model, prompts.prompts, config, batch_size=rows) for config in configs]
        entries = []
        for name, job in zip(names, jobs, strict=True):
            advance(f"{name}, batch {rows}, compiling")
            with out_of_memory(name, rows):
                first = decode_once(job, some(job))
            entries.append(Entry(name, job, first.compiling, peak_memory()))
        calibration.compile()
        for _ in range(options.repeats):
            for entry in entries:
                advance(f"{entry.method}, batch {rows}")
                calibration.measure()
                entry.passes.append(decode_once(entry.job))
                entry.compiling += entry.passes[-1].compiling
        for entry in entries:
            entry.parts = take_apart(entry.job)
        yield entries
        if jax.default_backend() == "cpu":
            # A program takes hundreds of the memory maps that Linux grants a process; these serve no other batch size.
            jax.clear_caches()
            gc.collect()


@contextlib.contextmanager
def out_of_memory(name: str, rows: int) -> Iterator[None]:
    """Raise UserError if there is not enough memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(f"out of memory: {name} at batch size {rows}; lower --batch-sizes") from error


# ---- Headline ratios ----


class Ratio(NamedTuple):
    """How many times as fast one entry is as another, in every convention in use."""

    batch: int
    title: str
    one: str
    other: str
    right: tuple[int | None, int | None]
    tokens_per_forward: float  # total over total, one over other
    ratio_of_totals: float  # all tokens over all seconds, one over other
    ratio_of_totals_behind_prompts: float  # the same without the seconds in which prompts were computed
    ratio_of_means: float  # the mean of the answers' tokens/s, one over other
    mean_of_ratios: float  # over answers
    geometric_mean_of_ratios: float


def ratio(title: str, one: Entry, other: Entry, prompts: Prompts) -> Ratio:
    """How many times as fast ``one`` is as ``other``."""
    speeds, others = one.speeds(), other.speeds()
    ratios = [speed / against for speed, against in zip(speeds, others, strict=True)]
    per_forward = [entry.usage.tokens / entry.usage.forwards for entry in (one, other)]
    return Ratio(
        batch=one.job.batch_size,
        title=title,
        one=one.method,
        other=other.method,
        right=(one.right(prompts), other.right(prompts)),
        tokens_per_forward=per_forward[0] / per_forward[1],
        ratio_of_totals=one.speed / other.speed,
        ratio_of_totals_behind_prompts=one.speed_behind_prompts / other.speed_behind_prompts,
        ratio_of_means=statistics.mean(speeds) / statistics.mean(others),
        mean_of_ratios=statistics.mean(ratios),
        geometric_mean_of_ratios=math.exp(statistics.mean(map(math.log, ratios))),
    )


def fastest_at_equal_right(ones: Sequence[Entry], others: Sequence[Entry], prompts: Prompts) -> tuple[Entry, Entry]:
    """The fastest entry of each side among those that are right as often as both sides can be.

    That is as often as the most often right entry of the side whose most often right entry is right less often. Where
    right answers are not known, the fastest of each side.
    """
    level = min(max(entry.right(prompts) or 0 for entry in side) for side in (ones, others))

    def fastest(side: Sequence[Entry]) -> Entry:
        return max((entry for entry in side if (entry.right(prompts) or 0) >= level), key=lambda entry: entry.speed)

    return fastest(ones), fastest(others)


def headlines(entries: Sequence[Entry], prompts: Prompts) -> list[Ratio]:
    """Exact over every other method, each at its best, of one batch size."""
    sides: dict[str, list[Entry]] = {}
    for entry in entries:
        sides.setdefault(entry.family, []).append(entry)
    exact = sides.pop("exact", None)
    if exact is None:
        return []
    out = []
    for name, others in sides.items():
        plain = [other for other in others if other.method == PLAIN]
        if plain != others:
            out.append(ratio(f"exact / {name}", *fastest_at_equal_right(exact, others, prompts), prompts))
        if plain:
            title = f"exact / plain {name}, one token a step"
            out.append(ratio(title, *fastest_at_equal_right(exact, plain, prompts), prompts))
    return out


# ---- Predictions ----


def prompt_seconds(entry: Entry, peaks: Peaks) -> float:
    """Seconds that prompts take, for every forward pass behind them."""
    job, usage = entry.job, entry.usage
    width = engine.prefill_width(max(map(len, job.prompts)))
    together = engine.arrivals(entry.rows)
    seconds = 0.0
    for prompt in job.prompts:
        for chunk in range(-(-len(prompt) // width)):
            forward = Forward(width * together, together, width, entry.decoding.cached * bool(chunk), head=False)
            seconds += peaks.seconds(job.model.config, forward) / together
    return seconds / usage.steps


def predicted(entry: Entry, peaks: Peaks) -> float:
    """Tokens/s of an entry."""
    config = entry.job.model.config
    return tokens_per_second(config, peaks, entry.decoding, entry.rows, prompt_seconds(entry, peaks))


def predicted_at(entries: Sequence[Entry], peaks: Peaks) -> Callable[[int], float]:
    """Tokens/s of a method at any batch size, from what it did at the largest measured one that is not larger."""

    def speed(rows: int) -> float:
        entry = max((e for e in entries if e.rows <= rows), key=lambda e: e.rows, default=entries[0])
        return tokens_per_second(entry.job.model.config, peaks, entry.decoding, rows)

    return speed


class Overtaken(NamedTuple):
    """The batch size at which left-to-right decoding is as fast as a method."""

    method: str
    measured: int | None  # the smallest measured one; None: at none
    predicted: dict[str, int | None]  # by the peaks' name; None: at none that fits into the memory, up to 1,024


def overtaken(entries: Sequence[Entry], all_peaks: Sequence[Peaks]) -> list[Overtaken]:
    """When left-to-right decoding overtakes each other method. Prompts take the same time with both."""
    by_method: dict[str, list[Entry]] = {}
    for entry in entries:
        by_method.setdefault(entry.method, []).append(entry)
    out = []
    left_to_right = by_method.pop("ar", [])
    for method, ones in by_method.items() if left_to_right else ():
        pairs = zip(ones, left_to_right, strict=True)
        measured = next((one.job.batch_size for one, other in pairs if other.speed >= one.speed), None)
        predictions = {}
        for peaks in all_peaks:
            limit = largest_batch(ones[0].job.model.config, peaks, ones[0].decoding.cached)
            speeds = predicted_at(ones, peaks), predicted_at(left_to_right, peaks)
            predictions[peaks.name] = overtaken_at(*speeds, limit)
        out.append(Overtaken(method, measured, predictions))
    return out


# ---- Another run ----


def recorded(answer: Generation) -> dict[str, Any]:
    """What ``difference`` needs of an answer."""
    return {
        "token_ids": answer.token_ids,
        "commit_order": answer.commit_order,
        "logprobs": [round(value, 6) for value in answer.logprobs],
    }


Difference = Literal["equal", "near-tie", "order", "other"]


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> Difference:
    """How two answers to a prompt differ first, in the order in which they were written.

    near-tie: another token was taken, and both are so near one half, or under it, and so near each other that they may
    have changed places by rounding. order: a token of another place was written, as when other slots were chosen.
    """
    if one["token_ids"] == other["token_ids"]:
        return "equal"
    for place, against in zip(one["commit_order"], other["commit_order"], strict=False):
        if place != against:
            return "order"
        if one["token_ids"][place] != other["token_ids"][place]:
            probabilities = [math.exp(answer["logprobs"][place]) for answer in (one, other)]
            tie = max(probabilities) < 0.5 + NEAR_TIE and abs(probabilities[0] - probabilities[1]) < NEAR_TIE
            return "near-tie" if tie else "other"
    return "order"


def compared(entries: Sequence[Entry], prompts: Prompts, file: str) -> list[dict[str, Any]]:
    """How many answers equal those of another run, by method and batch size. Raises UserError."""
    try:
        there = json.loads(Path(file).read_text(encoding="utf-8"))
        of_others, answers = there["prompts"], there["answers"]
    except OSError as error:
        raise UserError(f"--compare {file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--compare {file} is no answers.json that this command wrote") from None
    if of_others != digest(prompts):
        raise UserError(f"--compare {file} holds answers to other prompts")
    out = []
    for entry in entries:
        key = key_of(entry)
        if key in answers:
            pairs = zip(map(recorded, entry.answers), answers[key], strict=True)
            found = [difference(one, other) for one, other in pairs]
            counts = {kind: found.count(kind) for kind in ("equal", "near-tie", "order", "other")}
            out.append({"method": entry.method, "batch": entry.job.batch_size, **counts})
    return out


def key_of(entry: Entry) -> str:
    """How answers.json calls an entry."""
    return f"{entry.method}, batch {entry.job.batch_size}"


def digest(prompts: Prompts) -> str:
    """Of all prompts."""
    return hashlib.sha256(json.dumps(prompts.prompts).encode()).hexdigest()


# ---- Report ----


def result(entry: Entry, prompts: Prompts, all_peaks: Sequence[Peaks], copied: float) -> dict[str, Any]:
    """The figures of an entry."""
    usage, stats = entry.usage, [answer.stats for answer in entry.answers]
    speeds = [usage.tokens / one.seconds for one in entry.passes]
    assert entry.parts is not None
    forward_seconds = entry.seconds * entry.parts.forwards / usage.steps
    moved = bytes_moved(entry.job.model.config, entry.forward)
    return {
        "method": entry.method,
        "batch": entry.job.batch_size,
        "settings": dataclasses.asdict(entry.job.config),
        "right": entry.right(prompts),
        "answers": len(stats),
        "tokens": usage.tokens,
        "tokens_per_s": entry.speed,
        "tokens_per_s_spread": [min(speeds), max(speeds)],
        "tokens_per_s_behind_prompts": entry.speed_behind_prompts,
        "tokens_per_forward": usage.tokens / usage.forwards,
        "positions_per_token": usage.positions / usage.tokens,
        "padded_positions_per_token": sum(s.padded_positions for s in stats) / usage.tokens,
        "forwards": {kind: sum(getattr(s, f"{kind}_forwards") for s in stats) for kind in ("plan", "verify", "draft")},
        "batch_forwards": int(usage.steps),
        "rows_at_work": usage.occupancy,
        "positions_per_batch_forward": usage.computed / usage.steps,
        "compile_seconds": entry.compiling,
        "peak_memory_so_far": None if entry.memory is None else dict(zip(("bytes", "of"), entry.memory, strict=True)),
        "time": entry.parts._asdict(),
        "forward_seconds": forward_seconds,
        "forward_bytes": moved,
        "forward_bytes_per_s": moved / forward_seconds,
        "share_of_copy": moved / forward_seconds / copied,
        "predicted_tokens_per_s": {peaks.name: predicted(entry, peaks) for peaks in all_peaks},
    }


def report(
    options: Options,
    command: str,
    model: Model,
    prompts: Prompts,
    entries: Sequence[Entry],
    calibration: Calibration,
    all_peaks: Sequence[Peaks],
    *,
    complete: bool,
) -> dict[str, Any]:
    """Everything, for benchmark.json."""
    device = jax.devices()[0]
    by_batch: dict[int, list[Entry]] = {}
    for entry in entries:
        by_batch.setdefault(entry.job.batch_size, []).append(entry)
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
        "copy_bytes_per_s": calibration.copied(),
        "results": [result(entry, prompts, all_peaks, calibration.copied()) for entry in entries],
        "ratios": [line._asdict() for group in by_batch.values() for line in headlines(group, prompts)],
        "peaks": [dataclasses.asdict(peaks) for peaks in all_peaks],
        "left_to_right_overtakes": [line._asdict() for line in overtaken(entries, all_peaks)],
        "compared": compared(entries, prompts, options.compare) if options.compare is not None else None,
    }


def table(title: str, *headings: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    out = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        out.add_column(heading, justify="right" if number else "left")
    return out


def show(figures: Mapping[str, Any], console: Console) -> None:
    """Print a report."""
    results = figures["results"]
    model, device = figures["model"], figures["device"]
    console.print(
        f"{model['parameters']:,} parameters in {model['dtype']}, {figures['prompts']['count']} prompts "
        f"({figures['prompts']['source']}), {device['kind']} ({device['machine']})\n"
    )
    speed = table(
        f"Speed, the median of {figures['repeats']}", "batch, method", "right", "tokens/s", "(spread)",
        "w/o prompts", "tokens/forward", "positions/token", "padded", "plan+verify+draft", "compiling", "peak memory",
    )  # fmt: skip
    for row in results:
        memory = row["peak_memory_so_far"]
        speed.add_row(
            f"{row['batch']:>3} {row['method']}",
            "-" if row["right"] is None else f"{row['right']} of {row['answers']}",
            f"{row['tokens_per_s']:,.1f}",
            "{:,.1f} to {:,.1f}".format(*row["tokens_per_s_spread"]),
            f"{row['tokens_per_s_behind_prompts']:,.1f}",
            f"{row['tokens_per_forward']:.2f}",
            f"{row['positions_per_token']:.2f}",
            f"{row['padded_positions_per_token']:.2f}",
            "+".join(str(count) for count in row["forwards"].values()),
            f"{row['compile_seconds']:.1f} s",
            "-" if memory is None else f"{memory['bytes'] / 1e9:.2f} GB",
        )
    console.print(speed)
    note = "compiling: what no method before it had compiled"
    if (memory := results[0]["peak_memory_so_far"]) is not None:
        note += f"; peak memory: of the {memory['of']}, from its begin until this method had decoded for the first time"
    console.print(f"{note}\n")
    show_ratios(figures, console)
    show_roofline(figures, console)
    for row in figures["compared"] or ():
        console.print(
            f"against the other run, {row['method']}, batch {row['batch']}: {row['equal']} answers are equal, "
            f"{row['near-tie']} differ at a near-tie, {row['order']} in the order of writing, {row['other']} otherwise"
        )


def show_ratios(figures: Mapping[str, Any], console: Console) -> None:
    """How many times as fast exact decoding is."""
    if not figures["ratios"]:
        return
    ratios = table(
        "Ratios", "batch, of what", "settings", "right", "tokens/s: of totals", "w/o prompts", "of means",
        "mean of ratios", "geometric mean", "tokens/forward",
    )  # fmt: skip
    for row in figures["ratios"]:
        ratios.add_row(
            f"{row['batch']:>3} {row['title']}",
            f"{row['one']} / {row['other']}",
            " / ".join("-" if right is None else str(right) for right in row["right"]),
            f"{row['ratio_of_totals']:.2f}",
            f"{row['ratio_of_totals_behind_prompts']:.2f}",
            f"{row['ratio_of_means']:.2f}",
            f"{row['mean_of_ratios']:.2f}",
            f"{row['geometric_mean_of_ratios']:.2f}",
            f"{row['tokens_per_forward']:.2f}",
        )
    console.print(ratios)
    console.print(
        "settings: of each, the fastest that is right as often as both methods can be. of totals: all tokens over all "
        "seconds; w/o prompts: without the seconds in which prompts are computed; the next three: of the tokens/s of "
        "every answer\n"
    )


def show_roofline(figures: Mapping[str, Any], console: Console) -> None:
    """What was predicted, beside what was measured."""
    names = [peaks["name"] for peaks in figures["peaks"]]
    roofline = table(
        "Roofline", "batch, method", "positions/pass", "ms/pass", "GB/pass", "GB/s", "of a copy", "tokens/s",
        *(heading for name in names for heading in (f"predicted: {name}", "predicted / measured")),
    )  # fmt: skip
    for row in figures["results"]:
        predictions = [row["predicted_tokens_per_s"][name] for name in names]
        roofline.add_row(
            f"{row['batch']:>3} {row['method']}",
            f"{row['positions_per_batch_forward']:.1f}",
            f"{1e3 * row['forward_seconds']:.2f}",
            f"{row['forward_bytes'] / 1e9:.2f}",
            f"{row['forward_bytes_per_s'] / 1e9:.1f}",
            f"{row['share_of_copy']:.0%}",
            f"{row['tokens_per_s']:,.1f}",
            *(cell for p in predictions for cell in (f"{p:,.1f}", f"{p / row['tokens_per_s']:.2f}")),
        )
    console.print(roofline)
    for peaks in figures["peaks"]:
        rates = ", ".join(f"{rate / 1e12:.3g} at {positions:g}" for positions, rate in peaks["layers"])
        console.print(
            f"{peaks['name']}: in layers {rates} positions, in 10^12 operations/s; {peaks['bandwidth'] / 1e9:.1f} "
            f"GB/s; {1e3 * peaks['overhead']:.2f} ms for every pass"
        )
    if figures["left_to_right_overtakes"]:
        when = table("\nLeft to right is as fast from batch", "method", "measured", *names)
        for row in figures["left_to_right_overtakes"]:
            batches = [row["measured"], *(row["predicted"][name] for name in names)]
            when.add_row(row["method"], *("never" if batch is None else str(batch) for batch in batches))
        console.print(when)
        console.print(
            "measured: among the batch sizes of this run; predicted: up to 1,024, as far as memory suffices\n"
        )


# ---- Figure ----

COLOURS = {"ar": "#000000", "exact": "#0072b2", "threshold": "#e69f00", "mdm": "#cc79a7"}


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Three panels: right answers against tokens per forward, tokens/s against batch size, where the time goes."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker  # type: ignore[import-not-found,unused-ignore]

    results = figures["results"]
    first = [row for row in results if row["batch"] == results[0]["batch"]]
    marks = dict(zip((row["method"] for row in first), itertools.cycle("osD^v<>PX*"), strict=False))
    picture, (answers, speed, parts) = pyplot.subplots(1, 3, figsize=(18, 6), layout="constrained")
    for row in first:
        method = row["method"]
        style = {"color": COLOURS[family(method)], "marker": marks[method]}
        share = math.nan if row["right"] is None else 100 * row["right"] / row["answers"]
        answers.plot(row["tokens_per_forward"], share, linestyle="none", label=method, **style)
        rows = [other for other in results if other["method"] == method]
        low, high = ([abs(r["tokens_per_s"] - r["tokens_per_s_spread"][end]) for r in rows] for end in (0, 1))
        batches, medians = [r["batch"] for r in rows], [r["tokens_per_s"] for r in rows]
        speed.errorbar(batches, medians, yerr=[low, high], capsize=3, label=method, **style)
    answers.set(xlabel="tokens per forward", ylabel="right answers, %", title="Right answers")
    answers.legend()
    speed.set(xlabel="batch size", ylabel="tokens/s", title="Speed", xscale="log", yscale="log")
    batches = sorted({row["batch"] for row in results})
    speed.set_xticks(batches, [str(batch) for batch in batches])
    speed.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    speed.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    speed.minorticks_off()
    names = [f"{row['method']}, batch {row['batch']}" for row in results]
    left = [0.0] * len(results)
    for part, colour in zip(Parts._fields, ("#56b4e9", "#009e73", "#bbbbbb"), strict=True):
        shares = [100 * row["time"][part] for row in results]
        parts.barh(names, shares, left=left, color=colour, label=part)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    parts.invert_yaxis()
    parts.tick_params(axis="y", labelsize=7)
    parts.set(xlabel="% of the time", title="Where the time goes")
    parts.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(Parts._fields))
    picture.savefig(path, dpi=120)
    pyplot.close(picture)


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


def run(options: Options, command: str) -> None:
    """Measure, print, and write what was asked for. Raises UserError, ValueError and OSError."""
    directory = prepare_output(options)
    prompts = read(options.prompts)
    model = load_model(options)
    known = peaks_of(options, model.config.dtype)
    if options.compare is not None:
        compared([], prompts, options.compare)  # whether it can be read
    calibration = Calibration(model.config, model.params)
    fixed = overhead(model.config)
    names, batches = names_of(options.methods), batch_sizes_of(options.batch_sizes)
    total = len(names) * len(batches) * (1 + options.repeats)
    entries: list[Entry] = []
    with tqdm.tqdm(total=total, unit="pass", disable=None, dynamic_ncols=True) as bar:

        def advance(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        for group in measure(model, prompts, options, calibration, advance):
            entries += group
            figures = report(
                options, command, model, prompts, entries, calibration, [calibration.peaks(fixed), *known],
                complete=group[0].job.batch_size == batches[-1],
            )  # fmt: skip
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
    args = sys.argv[1:] if args is None else list(args)
    try:
        with warnings_in_one_line():
            options = parse(Options, args, Options())
            run(options, " ".join(["python -m refusion_jax.evaluation.benchmark", *args]))
    except (UserError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
