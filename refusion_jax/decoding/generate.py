"""From prompts to texts: checks, the queue, and the loop's results as plain Python."""

from __future__ import annotations

import dataclasses
import operator
import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from refusion_jax.config import DecodeConfig, check_seed
from refusion_jax.decoding import engine
from refusion_jax.decoding.batch import STEPS_PER_CALL, Batch, Ended, Request, Usage
from refusion_jax.decoding.methods import eos_of, method_of
from refusion_jax.decoding.prefix import Prefix
from refusion_jax.decoding.prompts import Prompt, encode, tokenizer_of
from refusion_jax.decoding.row import Row
from refusion_jax.model import Model
from refusion_jax.model.tokenizer import Tokenizer
from refusion_jax.sharding import check_mesh, row_shards

STEPS_TO_STOP = 8  # forward passes between two looks for stop strings


@dataclasses.dataclass(frozen=True)
class Stats:
    """What one answer cost."""

    tokens: int  # of the answer, up to and including EOS
    committed: int  # tokens written, those that an earlier EOS cut off included
    forwards: int  # forward passes after the prefill in which the row took part
    plan_forwards: int  # of these, the ones that only planned
    verify_forwards: int  # the ones that verified (and perhaps planned); every one of method="ar"
    draft_forwards: int  # the ones that drafted (verify="threshold")
    positions: int  # window positions that carried something for the row
    padded_positions: int  # window positions that were computed for it
    prefill_positions: int  # prompt tokens
    seconds: float  # from when the row took its place in the batch to its own end


@dataclasses.dataclass(frozen=True)
class Generation:
    """One answer."""

    text: str  # without special tokens; "" where the model has no tokenizer
    token_ids: list[int]  # EOS included
    logprobs: list[float]  # of each token, under the distribution that it was chosen from
    finish_reason: str  # "stop": the model, or a stop string, ended it; "length": the budget was spent
    stats: Stats
    trace: list[dict[str, Any]] | None = None  # see decoding/trace.py
    commit_order: list[int] = dataclasses.field(default_factory=list)  # offsets of token_ids, in order of writing


@dataclasses.dataclass(frozen=True)
class Update:
    """How far one answer has come."""

    number: int  # of the answer: that of its prompt times num_samples, plus that of the sample
    text: str  # committed without a gap from the begin: it only grows
    token_ids: list[int]  # of the text
    provisional: list[tuple[int, int]]  # (offset, token) behind a gap, or drafted: they may still change, or be dropped
    answer: Generation | None = None  # once it has ended; text and token_ids are those of the answer then


class Job(NamedTuple):
    """What is to be decoded, all of it checked."""

    model: Model
    method: engine.Method
    config: DecodeConfig
    prompts: list[list[int]]  # equal prompts are one object
    noise: list[int]  # of each prompt: what its noise follows from, beside the seed
    batch_size: int
    prefix: Prefix | None = None  # the prompts begin with its tokens

    @property
    def answers(self) -> int:
        """How many."""
        return len(self.prompts) * self.config.num_samples


def generate(
    model: Model,
    prompts: Iterable[Prompt],
    config: DecodeConfig | None = None,
    *,
    batch_size: int = 8,
    seeds: Sequence[int | None] | None = None,
    prefix: Prefix | None = None,
    trace: bool = False,
    refill: bool = True,
    on_progress: Callable[[list[Generation]], None] | None = None,
) -> list[Generation]:
    """Decode prompts in batches.

    A row that has ended is filled again from the prompts that wait. A program is compiled once per (rows, capacity,
    window) bucket and serves every model of the same shape. An answer depends on its prompt, the settings and, if
    tokens are sampled, on its place among the prompts (or its own seed), never on the batch.

    Args:
      model: what ``refusion_jax.load`` returned.
      prompts: plain texts (taken as they are), token ids, or lists of chat messages (the model's own template is
        applied, with the generation prompt).
      config: how to decode; the defaults are exact.
      batch_size: rows that are decoded together.
      seeds: for each prompt a number that takes the place of its index in what its noise follows from, or None.
      prefix: what ``cache_prefix`` computed; every prompt then stands behind it.
      trace: also record every iteration. Steps are then run one by one.
      refill: False decodes each batch to its end before the next begins.
      on_progress: called with the answers that ended since the last call, as they come.

    Returns:
      ``config.num_samples`` answers for each prompt, in order.

    Raises:
      ValueError: the model cannot be decoded in this way, or a prompt is empty, too long, holds the mask token or an
        id outside the vocabulary. All prompts are checked before anything is compiled.
    """
    job = prepare(model, prompts, config, batch_size=batch_size, seeds=seeds, prefix=prefix)
    answers: dict[int, Generation] = {}
    for ended in decode(job, trace=trace, refill=refill):
        answers |= ended
        if on_progress is not None:
            on_progress(list(ended.values()))
    return [answers[number] for number in range(job.answers)]


def stream(
    model: Model,
    prompts: Iterable[Prompt],
    config: DecodeConfig | None = None,
    *,
    batch_size: int = 8,
    seeds: Sequence[int | None] | None = None,
    prefix: Prefix | None = None,
    every: int = 1,
) -> Iterator[Update]:
    """Decode prompts in batches, and tell of every answer as it grows.

    Args:
      every: forward passes between two looks.
      others: as for ``generate``.

    Returns:
      An iterator of updates: of every answer that has changed since the last look. The last one of an answer holds it.

    Raises:
      As ``generate``, before the first update.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r} must be an integer, at least 1")
    job = prepare(model, prompts, config, batch_size=batch_size, seeds=seeds, prefix=prefix)
    return updates(job, every)


def prepare(
    model: Model,
    prompts: Iterable[Prompt],
    config: DecodeConfig | None = None,
    *,
    batch_size: int,
    seeds: Sequence[int | None] | None = None,
    prefix: Prefix | None = None,
    names: Sequence[str] | None = None,
) -> Job:
    """Check everything. Errors (ValueError) call prompts by ``names``, or by their numbers."""
    config = DecodeConfig() if config is None else config
    check_arguments(model, prompts, config, batch_size)
    method = method_of(model.config, config)
    before: tuple[int, ...] = ()
    if prefix is not None:
        prefix.check(model)
        before = prefix.token_ids
    known: dict[tuple[int, ...], list[int]] = {}
    encoded = []
    for number, prompt in enumerate(prompts):
        ids = encode(model, prompt, config, f"prompt {number}" if names is None else names[number], before)
        encoded.append(known.setdefault(tuple(ids), ids))
    noise = list(range(len(encoded)))
    if seeds is not None:
        if not isinstance(seeds, Iterable):
            raise ValueError(f"seeds={seeds!r} must be a list with an integer or None for each prompt")
        seeds = list(seeds)
        if len(seeds) != len(encoded):
            raise ValueError(f"there are {len(seeds)} seeds for {len(encoded)} prompts; give one each, or None")
        for number, seed in enumerate(seeds):
            if seed is not None:
                check_seed(seed, f"seeds[{number}]")
                noise[number] = int(seed)
    return Job(model, method, config, encoded, noise, operator.index(batch_size), prefix)


def check_arguments(model: Any, prompts: Any, config: Any, batch_size: Any) -> None:
    """Raise ValueError if an argument of ``generate`` is of the wrong kind."""
    if not isinstance(model, Model) or not isinstance(config, DecodeConfig):
        raise ValueError(
            "generate takes what load returns and a DecodeConfig, not "
            f"{type(model).__name__} and {type(config).__name__}"
        )
    if jnp.asarray(0).dtype != jnp.int32:
        raise ValueError("decoding counts in 32 bits: turn jax_enable_x64 off for it")
    check_mesh(model.params)
    if config.stop:
        tokenizer_of(model)
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__"):
        raise ValueError(f"batch_size={batch_size!r} must be an integer")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a list of prompts, not {reprlib.repr(prompts)}; put a single one in a list")


# ---- The queue ----


def decode(
    job: Job,
    *,
    skip: frozenset[int] = frozenset(),
    trace: bool = False,
    refill: bool = True,
    usage: Usage | None = None,
) -> Iterator[dict[int, Generation]]:
    """The answers to a job, by number, as they end; those in ``skip`` are not wanted."""
    queue = queue_of(job, skip)
    if not queue:
        return
    usage = Usage() if usage is None else usage
    batch = batch_of(job, len(queue), trace, refill, usage)
    looked: dict[int, int] = {}
    while queue or batch.active():
        batch.fill(queue)
        batch.advance(len(queue), STEPS_TO_STOP if job.config.stop else STEPS_PER_CALL)
        ended = {end.request.number: generation(job, end) for end in batch.ended()}
        if job.config.stop:
            ended |= stopped(job, batch, looked)
        for answer in ended.values():
            usage.tokens += answer.stats.tokens
            usage.forwards += answer.stats.forwards
            usage.positions += answer.stats.positions
        if ended:
            yield ended


def updates(job: Job, every: int) -> Iterator[Update]:
    """The answers to a job as they grow."""
    queue = queue_of(job, frozenset())
    if not queue:
        return
    batch = batch_of(job, len(queue), False, True, Usage())
    looked: dict[int, int] = {}
    told: dict[int, Update] = {}
    while queue or batch.active():
        batch.fill(queue)
        batch.advance(len(queue), every)
        ended = {end.request.number: generation(job, end) for end in batch.ended()}
        if job.config.stop:
            ended |= stopped(job, batch, looked)
        for number, answer in ended.items():
            yield Update(number, answer.text, answer.token_ids, [], answer)
        for end in batch.look(batch.active()):
            update = update_of(job, end)
            if told.get(update.number) != update:
                told[update.number] = update
                yield update


def queue_of(job: Job, skip: frozenset[int]) -> deque[Request]:
    """The answers that are wanted, in order."""
    config = job.config
    requests = (
        Request(index * config.num_samples + sample, prompt, (config.seed, job.noise[index], sample))
        for index, prompt in enumerate(job.prompts)
        for sample in range(config.num_samples)
    )
    return deque(request for request in requests if request.number not in skip)


def batch_of(job: Job, wanted: int, trace: bool, refill: bool, usage: Usage) -> Batch:
    """Free places for ``wanted`` answers, or for as many as are decoded together."""
    budget = job.config.max_new_tokens if job.config.method == "ar" else job.config.blocks()[1]
    rows = min(job.batch_size, wanted)
    return Batch(
        job.model,
        job.method,
        budget=budget,
        capacity=engine.capacity(max(map(len, job.prompts)) + budget),
        rows=rows + -rows % row_shards(),
        usage=usage,
        prefix=None if job.prefix is None else job.prefix.cache,
        slot_size=job.method.slot_size if trace else None,
        refill=refill,
    )


# ---- Answers ----


def generation(job: Job, ended: Ended, cut: Cut | None = None) -> Generation:
    """The answer of a finished row. With compat="official" it is not cut at EOS and may have holes."""
    row = ended.row
    P = int(row.prompt_length)
    written = np.flatnonzero(row.committed)
    written = written[written >= P]
    kept = written if job.config.compat == "official" else written[written < row.end]
    if job.config.stop and cut is None:
        assert job.model.tokenizer is not None
        cut = cut_of(job.model.tokenizer, row.tokens[kept].tolist(), job.config.stop)
    if cut is not None:
        kept = kept[: cut.tokens]
    ids = [int(token) for token in row.tokens[kept]]
    ends = [place for place, token in enumerate(ids) if token in eos_of(job.model.config, job.config)]
    plan, verify, draft = (int(count) for count in row.forwards)
    stats = Stats(
        tokens=ends[0] + 1 if ends else len(ids),
        committed=len(written),
        forwards=plan + verify + draft,
        plan_forwards=plan,
        verify_forwards=verify,
        draft_forwards=draft,
        positions=int(row.positions),
        padded_positions=int(row.padded_positions),
        prefill_positions=P,
        seconds=ended.seconds,
    )
    text = "" if job.model.tokenizer is None else job.model.tokenizer.decode(ids)
    return Generation(
        text=text if cut is None else cut.text,
        token_ids=ids,
        logprobs=[float(value) for value in row.logprob[kept]],
        finish_reason="stop" if ends or cut is not None else "length",
        stats=stats,
        trace=ended.events,
        commit_order=[int(p) - P for p in kept[np.argsort(row.order[kept])]],
    )


def without_gap(row: Row) -> list[int]:
    """The tokens that are committed from the begin of the answer to the first gap."""
    P = int(row.prompt_length)
    written = row.committed[P : int(row.end)]
    length = len(written) if written.all() else int(np.argmin(written))
    return [int(token) for token in row.tokens[P : P + length]]


def update_of(job: Job, end: Ended) -> Update:
    """How far a row has come. What might be the begin of a stop string is not told yet."""
    row, P = end.row, int(end.row.prompt_length)
    ids = without_gap(row)
    text = "" if job.model.tokenizer is None else job.model.tokenizer.decode(ids)
    held = max((n for stop in job.config.stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
    position = np.arange(len(row.tokens))
    provisional = (row.committed | end.drafted) & (position >= P + len(ids)) & (position < row.end)
    pairs = [(int(p) - P, int(row.tokens[p])) for p in np.flatnonzero(provisional)]
    return Update(end.request.number, text[: len(text) - held], ids, pairs)


class Cut(NamedTuple):
    """Where a stop string ends an answer."""

    text: str  # before the stop string
    tokens: int  # that lie wholly before it


def cut_of(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> Cut | None:
    """Where the first stop string ends the text of ``ids``, if one does."""

    def place(count: int) -> int | None:
        text = tokenizer.decode(ids[:count])
        return min((at for string in stop if (at := text.find(string)) >= 0), default=None)

    if place(len(ids)) is None:
        return None
    # The text as it was when the first stop string was complete: what came later cannot move the cut.
    count = next(count for count in range(len(ids) + 1) if place(count) is not None)
    at = place(count)
    assert at is not None
    tokens = max(n for n in range(count + 1) if len(tokenizer.decode(ids[:n])) <= at)
    return Cut(tokenizer.decode(ids[:count])[:at], tokens)


def stopped(job: Job, batch: Batch, looked: dict[int, int]) -> dict[int, Generation]:
    """The answers that a stop string has ended; their rows are stopped.

    ``looked`` has, by number, how many tokens of an answer hold no stop string.
    """
    tokenizer = tokenizer_of(job.model)
    rows, answers = [], {}
    active = batch.active()
    for row, end in zip(active, batch.look(active), strict=True):
        ids = without_gap(end.row)
        if len(ids) > looked.get(end.request.number, 0):
            looked[end.request.number] = len(ids)
            cut = cut_of(tokenizer, ids, job.config.stop)
            if cut is not None:
                rows.append(row)
                answers[end.request.number] = generation(job, end, cut)
    batch.stop(rows)
    for _ in batch.take(rows):
        pass
    return answers
