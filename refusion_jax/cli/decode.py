"""The command line of decoding: JSON lines in, JSON lines out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import stat
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, BinaryIO, Literal

import jax
import numpy as np
import tqdm
from tyro.conf import FlagCreatePairsOff, arg

import refusion_jax
from refusion_jax.cli.options import UserError, parse, read_settings
from refusion_jax.cli.output import STDOUT, check_output, write_output
from refusion_jax.cli.process import company, devices, fail, keep_compiled_programs, warnings_in_one_line
from refusion_jax.cli.prompts import Line, read_prompts
from refusion_jax.cli.resume import Finished, Key, digest, partial
from refusion_jax.config import DecodeConfig, ModelConfig
from refusion_jax.decoding.batch import Usage
from refusion_jax.decoding.generate import Generation, Job, decode, prepare
from refusion_jax.decoding.methods import method_of
from refusion_jax.distributed import DistributedConfig, check_same, is_first, of_first
from refusion_jax.model import Model
from refusion_jax.model.hf import load
from refusion_jax.presets import PRESETS
from refusion_jax.sharding import MeshConfig

ASSETS = Path(refusion_jax.__file__).parent / "assets"
STDIN = "-"
PRESET_HELP = (
    f"Settings that the options below start from: those of the paper for {', '.join(PRESETS)}, or what get_config() of "
    "a Python file returns."
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Decode prompts with a ReFusion model, in batches. Without options: the bundled prompts, by the bundled model.

    Input: one JSON object a line, in UTF-8, with one of
      {"prompt": "text"}                                   plain text, taken as it is
      {"messages": [{"role": "user", "content": "text"}]}  a chat, through the model's template
      {"prompt_ids": [5, 6, 7]}                            token ids
      and, if wanted, an "id": a string or an integer, which is copied to the output
      (without it, the id is the number of the line, counted from 0), and a "seed": an
      integer which takes the place of the line's number in what its noise follows from.
      Blank lines are skipped. Every line is checked before anything is decoded.

    Output: one JSON object a line, in the order of the input, with
      id, text, token_ids, stats, and finish_reason: "stop" if the model or a stop string ended
      the answer, "length" if the budget of tokens was spent; with several samples also sample,
      with --logprobs also logprobs, with --trace also trace and commit_order.
      It is written when everything is decoded, whole or not at all. A summary goes to stderr.

    Exit code: 0; 2 for what you can mend, which is said in one sentence; 130 for Ctrl-C.

    Exit code of --aot: 0 if it fits, 1 if it does not.

    Compiled programs are kept from run to run, and compiling is most of what a short run takes:
      in ~/.cache/refusion_jax/jax (in XDG_CACHE_HOME instead of ~/.cache if that is set), or
      where JAX_COMPILATION_CACHE_DIR says. REFUSION_JAX_CACHE=off keeps none.
    """

    model: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="(default: the bundled model)")] = None
    """Checkpoint in Hugging Face layout: a directory, or a hub id (owner/name)."""
    prompts: Annotated[
        str | None, arg(metavar="FILE", help_behavior_hint="(default: what is piped in, else the bundled prompts)")
    ] = None
    """Input; - is standard input."""
    output: Annotated[str, arg(metavar="FILE", help_behavior_hint="(default: standard output)")] = STDOUT
    """Output; - is standard output."""
    preset: Annotated[str | None, arg(metavar="NAME|FILE.py", help_behavior_hint="", help=PRESET_HELP)] = None
    batch_size: int = 8
    """Prompts that are decoded together."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; auto is bfloat16 on accelerators and float32 on CPU."""
    trace: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Also record every forward pass; slower."""
    logprobs: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Also write the log-probability of every token."""
    resume: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Keep finished answers in OUTPUT.partial until all are there, and go on from those that an interrupted run left;
    they are found by their ids."""
    aot: Annotated[str | None, arg(metavar="TPU:SHAPE", help_behavior_hint="")] = None
    """Decode nothing: compile for these chips, such as v5e:2x4, without having them, and say what it takes. --model may
    be a Python file of training settings that has model.shape."""
    aot_capacity: int = 2048
    """With --aot: positions of a row, prompt and answer."""
    decoding: Annotated[DecodeConfig, arg(name="")] = dataclasses.field(default_factory=DecodeConfig)
    mesh: MeshConfig = MeshConfig()
    processes: Annotated[DistributedConfig, arg(name="")] = DistributedConfig()

    def __post_init__(self) -> None:
        for name in ("batch_size", "aot_capacity"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclasses.dataclass(frozen=True)
class _Preset:
    preset: str | None = None


def main(args: Sequence[str] | None = None) -> int:
    """Decode as ``args`` (of the process, if None) ask for. Returns the exit code."""
    of_process = args is None
    args = sys.argv[1:] if args is None else args
    try:
        with warnings_in_one_line(), company():
            return run(args)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return fail(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        if of_process:
            os._exit(130)  # what runs on the device would outlive the interpreter, and crash it
        return 130
    except BrokenPipeError:  # the reader of the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails again when it flushes
        return 1


def run(args: Sequence[str]) -> int:
    """What may be wrong is looked at first, the cheapest before the dearest: options, files, model, prompts."""
    options = parse_options(args)
    if options.aot is not None:
        return ahead_of_time(options, options.aot)
    name, file = open_prompts(options.prompts, may_be_piped=bool(args) and options.processes.distributed == "off")
    with file:
        content = file.read()
        lines = read_prompts(content, name)
        mesh = devices(options.mesh, options.processes)
        if is_first():
            check_output(options.output, file)
    keep_compiled_programs()
    with mesh:
        check_alike(content, options)
        decode_all(options, lines, name)
    return 0


def decode_all(options: Options, lines: Sequence[Line], name: str) -> None:
    """Decode the lines of the input called ``name``, and write the output: in process 0, if there are several."""
    job = prepare_job(load_model(options), lines, options)
    kept = open_finished(options, lines) if is_first() else None
    outputs = found(job, lines, kept)
    there = of_first(np.isin(np.arange(job.answers), list(outputs)))
    skip = frozenset(np.flatnonzero(there).tolist())
    hidden = None if is_first() else True
    if is_first():
        print(
            f"{'bundled model' if options.model is None else options.model}, {len(lines)} prompts from {name}",
            file=sys.stderr,
        )
    start = time.perf_counter()
    usage = Usage()
    with compiling() as spans, tqdm.tqdm(total=job.answers, unit="answer", leave=False, disable=hidden) as bar:
        bar.update(len(skip))
        for number, output in decode_lines(job, lines, options, kept, skip, usage):
            outputs[number] = output
            bar.update()
    seconds = time.perf_counter() - start
    if is_first():
        in_order = [outputs[number] for number in range(job.answers)]
        write_output(options.output, map(as_bytes, in_order))
        if kept is not None:
            kept.close(remove=True)
        print(summary(in_order, usage, seconds, covered(spans)), file=sys.stderr)


def check_alike(content: bytes, options: Options) -> None:
    """Raise UserError unless all processes have the same prompts and options."""
    own = dataclasses.replace(options, processes=DistributedConfig(), prompts=None, output=STDOUT)
    try:
        check_same("prompts or options", hashlib.sha256(content + repr(own).encode()).digest())
    except ValueError as error:
        raise UserError(str(error)) from error


def ahead_of_time(options: Options, topology: str) -> int:
    """What decoding takes on the chips of ``topology``. Returns the exit code. Raises UserError."""
    from refusion_jax import aot

    model = str(ASSETS / "model") if options.model is None else options.model
    try:
        shape = read_shape(model) if model.endswith(".py") else aot.shape_of(model)
        return aot.command(
            aot.decoding,
            topology,
            shape,
            options.decoding,
            rows=options.batch_size,
            capacity=options.aot_capacity,
            dtype=options.dtype,
            mesh=options.mesh,
        )
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from error


def read_shape(path: str) -> ModelConfig:
    """The shape in a file of training settings. Raises UserError."""
    from refusion_jax.training.config import TrainConfig

    shape = read_settings(path, TrainConfig, "--model").model.shape
    if shape is None:
        raise UserError(f"--model {path}: get_config() names no model.shape; give the directory of its checkpoint")
    return shape


# ---- Options ----


def parse_options(args: Sequence[str]) -> Options:
    """The options, with those of the preset behind them. Raises UserError."""
    chosen = parse(_Preset, args, _Preset(), partial=True).preset
    preset = DecodeConfig() if chosen is None else read_preset(chosen)
    options = parse(Options, args, Options(decoding=preset))
    ignored = [name for name in unread(options.decoding) if getattr(options.decoding, name) != getattr(preset, name)]
    if ignored:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
        warnings.warn(f"{flags}: without effect beside the other options", stacklevel=2)
    return options


def read_preset(name: str) -> DecodeConfig:
    """The preset of that name, or that a Python file gives. Raises UserError."""
    if name in PRESETS:
        return PRESETS[name]
    if not name.endswith(".py"):
        raise UserError(f"there is no preset {name!r}: give one of {', '.join(PRESETS)}, or a Python file")
    return read_settings(name, DecodeConfig, "--preset")


def unread(config: DecodeConfig) -> list[str]:
    """The settings that have no effect beside the others."""
    drawing = ["top_k", "top_p", "untempered_logprobs"] if config.temperature == 0 else []
    if config.temperature == 0 and config.planner != "random":
        drawing.append("seed")
    if config.method == "mdm":
        return [*drawing, "slot_size", "token_threshold", "verify", "ar_first"] + (
            ["slot_threshold"] if config.tokens_per_step else []
        )
    if config.method == "ar":
        names = ["block_size", "slot_threshold", "token_threshold", "verify", "planner"]
        return drawing + (names if config.ar_first == "mask" else ["slot_size", *names])
    names = ["ar_first", *drawing]
    if config.compat is None and config.verify == "exact":
        names.append("token_threshold")
    if config.serial_num_blocks is not None:
        names.append("block_size")
    return names


# ---- Input ----


def open_prompts(prompts: str | None, *, may_be_piped: bool) -> tuple[str, BinaryIO]:
    """The name of the input, and the input. Raises UserError.

    Without any argument nothing is taken from standard input: it may be a pipe that is never closed, or the very script
    that a shell is running.
    """
    if prompts == STDIN or (prompts is None and may_be_piped and _is_piped(sys.stdin)):
        if sys.stdin is None:
            raise UserError("standard input is closed; give --prompts FILE")
        return "standard input", sys.stdin.buffer
    path = ASSETS / "prompts.jsonl" if prompts is None else Path(prompts)
    try:
        return str(path), path.open("rb")
    except OSError as error:
        raise UserError(f"--prompts {path} cannot be read: {error.strerror}") from None


def _is_piped(file: IO[str] | None) -> bool:
    """Whether a pipe, a socket or a file is behind it: no terminal, no /dev/null."""
    try:
        mode = os.fstat(file.fileno()).st_mode if file is not None else 0
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)


def load_model(options: Options) -> Model:
    """The checkpoint. Raises UserError, also where it cannot be decoded in the way asked for."""
    try:
        model = load(ASSETS / "model" if options.model is None else options.model, dtype=options.dtype)
        method_of(model.config, options.decoding)
    except ValueError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}" if error.strerror else str(error)) from error
    return model


def prepare_job(model: Model, lines: Sequence[Line], options: Options) -> Job:
    """All prompts as token ids, and how they are decoded. Raises UserError, with the line's place."""
    try:
        return prepare(
            model,
            [line.prompt for line in lines],
            options.decoding,
            batch_size=options.batch_size,
            seeds=[line.seed for line in lines],
            names=[f"{line.place}: the prompt" for line in lines],
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def open_finished(options: Options, lines: Sequence[Line]) -> Finished | None:
    """Where finished answers are kept, if that is wanted. Raises UserError."""
    if not options.resume:
        if options.output != STDOUT and partial(options.output).exists():
            warnings.warn(f"{partial(options.output)} holds answers of an interrupted run; --resume uses them",
                          stacklevel=2)  # fmt: skip
        return None
    if options.trace:
        raise UserError("--resume keeps no traces; leave one of --resume and --trace out")
    places: dict[str | int, str] = {}
    for line in lines:
        if line.id in places:
            raise UserError(
                f"--resume tells answers apart by their ids, and {line.place} has that of {places[line.id]}"
            )
        places[line.id] = line.place
    settings = dataclasses.asdict(options.decoding)
    model = "the bundled model" if options.model is None else os.path.realpath(options.model)
    return Finished(options.output, {"model": model, "dtype": options.dtype, "logprobs": options.logprobs} | settings)


# ---- Decoding ----


def keys(job: Job, lines: Sequence[Line]) -> list[tuple[Key, str]]:
    """Of every answer what it is found by, and the digest of what it depends on."""
    noisy = job.config.temperature > 0 or job.config.planner == "random"
    digests = [digest(prompt, noise if noisy else 0) for prompt, noise in zip(job.prompts, job.noise, strict=True)]
    samples = range(job.config.num_samples)
    return [((line.id, sample), digest) for line, digest in zip(lines, digests, strict=True) for sample in samples]


def found(job: Job, lines: Sequence[Line], kept: Finished | None) -> dict[int, dict[str, Any]]:
    """The output lines that are there already, by the number of the answer. Raises UserError."""
    if kept is None:
        return {}
    there = {number: kept.get(*key) for number, key in enumerate(keys(job, lines))}
    return {number: output for number, output in there.items() if output is not None}


def decode_lines(
    job: Job,
    lines: Sequence[Line],
    options: Options,
    kept: Finished | None,
    skip: frozenset[int],
    usage: Usage,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The output lines as they end, each with its number, but for those to ``skip``; they are ``kept``.

    Raises UserError if there is not enough memory, or the weights give no numbers.
    """
    names = keys(job, lines)
    try:
        for ended in decode(job, skip=skip, trace=options.trace, usage=usage):
            for number, answer in ended.items():
                key, digest = names[number]
                output = output_line(*key, answer, options)
                if kept is not None:
                    kept.add(key, digest, output)
                yield number, output
    except ValueError as error:
        raise UserError(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(f"out of memory; lower --batch-size={options.batch_size} or --max-new-tokens") from error


@contextlib.contextmanager
def compiling() -> Iterator[list[tuple[float, float]]]:
    """A list that fills with the times, begin and end in seconds, at which JAX traced, lowered, compiled, or read from
    its cache. Some lie within others."""
    spans: list[tuple[float, float]] = []

    def listen(event: str, start_time: float, end_time: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            spans.append((start_time, end_time))

    jax.monitoring.register_event_time_span_listener(listen)
    try:
        yield spans
    finally:
        jax.monitoring.unregister_event_time_span_listener(listen)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long a time the spans cover, where they overlap counted once."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


# ---- Output ----


def output_line(id: str | int, sample: int, answer: Generation, options: Options) -> dict[str, Any]:
    """One answer as an object of JSON."""
    fields: dict[str, Any] = {"id": id}
    if options.decoding.num_samples > 1:
        fields["sample"] = sample
    fields |= {"text": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
    if options.logprobs:
        fields["logprobs"] = answer.logprobs
    fields["stats"] = dataclasses.asdict(answer.stats)
    if answer.trace is not None:
        fields |= {"trace": answer.trace, "commit_order": answer.commit_order}
    return fields


def as_bytes(fields: dict[str, Any]) -> bytes:
    """One object as a line of JSON."""
    text = json.dumps(fields, ensure_ascii=False)
    for end in "\x85\u2028\u2029":  # what str.splitlines would cut at; JSON escapes the others itself
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode() + b"\n"


def summary(outputs: Sequence[dict[str, Any]], usage: Usage, seconds: float, compile_seconds: float) -> str:
    """What was decoded and what it cost. Every rate is a total over a total, and speed does not count compiling.

    Answers of an earlier run count in all but the speed.
    """
    tokens, forwards, positions, padded = (
        sum(output["stats"][name] for output in outputs)
        for name in ("tokens", "forwards", "positions", "padded_positions")
    )
    stopped = sum(output["finish_reason"] == "stop" for output in outputs)
    decoding = max(seconds - compile_seconds, 1e-6)
    now = usage.tokens
    at_work, live = f"{usage.occupancy:.0%} of the rows were at work", f"{usage.live:.0%} of the computed positions"
    shares = f"\n{at_work}; {live} carried something" if usage.places else ""
    return (
        f"{len(outputs)} answers: {stopped} ended, {len(outputs) - stopped} cut by the budget\n"
        f"{now / decoding:.1f} tokens/s: {now} tokens in {decoding:.2f} s, without {compile_seconds:.2f} s of "
        "compiling\n"
        f"{tokens / forwards:.2f} tokens per forward: {tokens} tokens in {forwards} forwards\n"
        f"{positions / tokens:.2f} positions and {padded / tokens:.2f} padded positions per token"
        f"{shares}"
    )


if __name__ == "__main__":
    sys.exit(main())
