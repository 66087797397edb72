"""Ways of decoding, measured in turn: how long a pass over all prompts takes, what it computes, where its time goes.

At every batch size every method decodes some prompts, which compiles, and then all of them ``repeats`` times, in turn
with the others, so that what else the machine does meets every method. Speed counts the tokens of answers, EOS
included, over the time from the first prompt to the last answer; prompts are computed in that time but not counted, and
compiling is not in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from refusion_jax import cache as kv
from refusion_jax.cli.decode import compiling, covered
from refusion_jax.cli.options import UserError
from refusion_jax.config import DecodeConfig, ModelConfig
from refusion_jax.decoding import engine
from refusion_jax.decoding.batch import Usage
from refusion_jax.decoding.generate import Generation, Job, batch_of, decode, generation, prepare, queue_of
from refusion_jax.decoding.prompts import Prompt
from refusion_jax.evaluation.roofline import Calibration, Decoding, Forward
from refusion_jax.model import Model, transformer

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


def family(method: str) -> str:
    """ar, exact, threshold or mdm."""
    return method.split("-")[0]


class Prompts(NamedTuple):
    """What is decoded."""

    name: str
    prompts: list[Prompt]
    is_right: list[Callable[[Generation], bool]] | None  # of each answer; None: not known


# ---- One pass ----


class Pass(NamedTuple):
    """Prompts decoded once."""

    answers: list[Generation]
    usage: Usage
    seconds: float  # compiling not among them
    compiling: float


def decode_once(job: Job, count: int | None = None, *, refill: bool = True) -> Pass:
    """Decode all prompts, or the first ``count``, as ``generate`` does."""
    usage = Usage()
    answers: dict[int, Generation] = {}
    skip = frozenset() if count is None else frozenset(range(count, job.answers))
    with compiling() as spans:
        started = time.perf_counter()
        for ended in decode(job, skip=skip, refill=refill, usage=usage):
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


def largest_of(draws: int, values: Sequence[float]) -> float:
    """The largest of ``draws`` values drawn with replacement, on the mean."""
    n = len(values)
    return sum(value * (((i + 1) / n) ** draws - (i / n) ** draws) for i, value in enumerate(sorted(values)))


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
        capacity = engine.capacity(max(map(len, job.prompts)) + job.config.max_new_tokens)
        reach = largest_of(rows, [len(prompt) + usage.tokens / job.answers / 2 for prompt in job.prompts])
        return Decoding(
            tokens=usage.tokens / usage.places,
            positions=usage.computed / usage.places,
            window=next((width for width, size in sizes if size >= usage.computed / usage.steps), sizes[-1][0]),
            cached=next(length for length in kv.lengths(capacity) if reach <= length),
            capacity=capacity,
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


def measure(
    model: Model,
    prompts: Prompts,
    configs: Mapping[str, DecodeConfig],
    batch_sizes: Sequence[int],
    repeats: int,
    calibration: Calibration,
    advance: Callable[[str], object],
) -> Iterator[list[Entry]]:
    """The entries of every batch size, one batch size after another.

    Args:
      configs: the settings of every method.
      advance: called before every pass, with what it is.

    Raises:
      ValueError: a method cannot decode the model, or a prompt.
      UserError: the memory does not suffice.
    """
    for rows in batch_sizes:
        jobs = [prepare(model, prompts.prompts, config, batch_size=rows) for config in configs.values()]
        entries = []
        for name, job in zip(configs, jobs, strict=True):
            advance(f"{name}, batch {rows}, compiling")
            with out_of_memory(name, rows):
                first = decode_once(job, some(job))
            entries.append(Entry(name, job, first.compiling, peak_memory()))
        calibration.compile()
        for _ in range(repeats):
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
