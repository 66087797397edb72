"""Sequential dependence: how much a text's segments need the ones before them (NAP, section 3).

    python -m refusion_jax.nap.seqdep DATA --model DIR [--split '\\n'] [--json]

SeqDep(x, s) is the mean over all segments but the first of log p(s_n | x, s_<n) - log p(s_n | x), in nats, as a
left-to-right model rates them: near 0 where segments could be written side by side. It says what that model makes of
the text, not what the segments truly need; it is not normalised by their lengths, so ``per_token`` stands beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tyro.conf import FlagCreatePairsOff, Positional, arg

from refusion_jax.cli.options import UserError, parse
from refusion_jax.cli.process import exit_code, keep_compiled_programs, warnings_in_one_line
from refusion_jax.config import ModelConfig
from refusion_jax.data.sources import Problem, open_source
from refusion_jax.decoding import engine
from refusion_jax.decoding.prompts import tokenizer_of
from refusion_jax.losses import cross_entropies
from refusion_jax.model import Model
from refusion_jax.model.hf import load
from refusion_jax.model.tokenizer import Tokenizer
from refusion_jax.model.transformer import Params, apply, causal
from refusion_jax.sharding import ROWS, fetch, put_rows, reshard, row_shards

Tokens = Sequence[int]

Scorer = Callable[[Sequence[tuple[Tokens, Tokens]]], Sequence[float]]
"""log p(text | before), in nats, of pairs (before, text) of token ids."""


class SeqDep(NamedTuple):
    """The sequential dependence of one text, in nats."""

    total: float  # of a segment, on average: NAP's SeqDep
    per_token: float  # the same sum, over all tokens of the segments but the first
    segments: int


def seqdep(prompt: Tokens, segments: Sequence[Tokens], scorer: Scorer) -> SeqDep:
    """The sequential dependence of a text's ``segments`` behind its ``prompt``, both token ids.

    Raises:
      ValueError: there are fewer than two segments, or one is empty.
    """
    return seqdeps([(prompt, segments)], scorer)[0]


def seqdeps(texts: Sequence[tuple[Tokens, Sequence[Tokens]]], scorer: Scorer) -> list[SeqDep]:
    """The same of many texts, scored together."""
    for _, segments in texts:
        if len(segments) < 2:
            raise ValueError(f"a text of {len(segments)} segments has no sequential dependence: it takes two")
        if not all(map(len, segments)):
            raise ValueError("a segment is empty")
    pairs = [
        (before, segment)
        for prompt, segments in texts
        for number, segment in enumerate(segments[1:], 1)
        for before in ([*prompt, *itertools.chain(*segments[:number])], list(prompt))
    ]
    scores = iter(scorer(pairs))
    found = []
    for _, segments in texts:
        gains = [next(scores) - next(scores) for _ in segments[1:]]
        tokens = sum(map(len, segments[1:]))
        found.append(SeqDep(math.fsum(gains) / len(gains), math.fsum(gains) / tokens, len(segments)))
    return found


def left_to_right(model: Model, batch_size: int = 8) -> Scorer:
    """What ``model`` says, each token read from the one before it: give a causal model.

    A ReFusion model reads the first token of a slot from its mask, and has not learnt to from the token before; take
    the causal model that it was made from.

    Raises (the scorer):
      ValueError: nothing stands before a text, or a pair is longer than the model's positions.
    """

    def score(pairs: Sequence[tuple[Tokens, Tokens]]) -> list[float]:
        most = model.config.max_position_embeddings
        for before, text in pairs:
            if not before:
                raise ValueError("a text needs at least one token before it, which its first token is read from")
            if len(before) + len(text) > most:
                raise ValueError(
                    f"{len(before)} tokens and {len(text)} behind them are more than the model's {most} positions"
                )
        rows = batch_size + -batch_size % row_shards()
        lengths = [len(before) + len(text) for before, text in pairs]
        by_length = np.argsort(lengths, kind="stable")
        scores = np.zeros(len(pairs))
        for start in range(0, len(pairs), rows):
            chosen = by_length[start : start + rows]
            length = min(engine.capacity(lengths[chosen[-1]]), most)
            tokens, counts = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.float32)
            for row, number in enumerate(chosen):
                before, text = pairs[number]
                tokens[row, : lengths[number]] = [*before, *text]
                counts[row, len(before) - 1 : lengths[number] - 1] = 1
            found = fetch(_log_probs(model.params, *put_rows((tokens, counts)), config=model.config))
            scores[chosen] = found[: len(chosen)]
        return scores.tolist()

    return score


@functools.partial(jax.jit, static_argnames="config")
def _log_probs(params: Params, tokens: jax.Array, counts: jax.Array, *, config: ModelConfig) -> jax.Array:
    """[R] float32: of the tokens behind those that ``counts`` [R, T] marks, each given all before it."""
    R, T = tokens.shape
    positions = reshard(jnp.broadcast_to(jnp.arange(T), (R, T)), ROWS, None)
    sees = reshard(jnp.broadcast_to(causal(T), (R, T, T)), ROWS, None, None)
    out = apply(config, params, tokens, positions, sees, head=False)
    head = params["embedding"] if config.tie_word_embeddings else params["head"].T
    entropies = cross_entropies(out.logits, head, jnp.roll(tokens, -1, axis=1))
    return -jnp.sum(entropies * counts, axis=1)


# ---- Of a corpus ----


@dataclasses.dataclass(frozen=True)
class Options:
    """How much the segments of answers need the ones before them, as a left-to-right model rates them."""

    data: Annotated[Positional[str], arg(metavar="DATA")] = ""
    """Files (.json, .jsonl, .parquet), tfds:NAME, or worksheet:SEED:COUNT, as for training."""
    model: Annotated[str, arg(metavar="DIR")] = ""
    """The causal model that rates: a directory in Hugging Face layout, or a hub id."""
    split: Annotated[str, arg(metavar="REGEX")] = r"\n+"
    """A segment ends behind each match of this regular expression."""
    batch_size: int = 8
    """Texts that are rated together."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON in place of a line."""

    def __post_init__(self) -> None:
        check_rating(self.batch_size, self.split)


def check_rating(batch_size: int, pattern: str) -> None:
    """Raise ValueError unless --batch-size and --split can be as they are."""
    if batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, not {batch_size}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--split {pattern} is no regular expression: {error}") from error


def cut(text: str, pattern: str) -> list[str]:
    """The segments of ``text``, each ending behind a match of ``pattern``; white space alone is no segment."""
    ends = [match.end() for match in re.finditer(pattern, text)]
    segments: list[str] = []
    for start, end in itertools.pairwise([0, *ends, len(text)]):
        if text[start:end].strip() or not segments:
            segments.append(text[start:end])
        else:
            segments[-1] += text[start:end]
    return segments


def read(path: str, tokenizer: Tokenizer, pattern: str) -> tuple[list[tuple[Tokens, list[Tokens]]], int]:
    """The texts of a corpus that have two segments or more, as token ids, and how many have fewer.

    Raises:
      UserError: the corpus cannot be read, or one of its examples.
    """
    texts: list[tuple[Tokens, list[Tokens]]] = []
    short = 0
    try:
        for record in open_source(path):
            if isinstance(record, Problem):
                raise UserError(f"{record.place}: {record.message}")
            segments = cut(record.answer, pattern)
            if len(segments) < 2:
                short += 1
                continue
            texts.append((tokenizer.encode_chat(record.prompt), list(map(tokenizer.encode, segments))))
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from error
    return texts, short


def run(args: Sequence[str]) -> None:
    """Do what ``args`` ask for. Raises UserError and ValueError."""
    options = parse(Options, args, Options())
    for name in ("data", "model"):
        if not getattr(options, name):
            raise UserError(f"name {'a corpus' if name == 'data' else 'a model with --model'}")
    keep_compiled_programs()
    model = load(options.model)
    if model.config.mask_token_id is not None:
        warnings.warn(
            f"{options.model} has a mask token: if it was trained for ReFusion it does not read the first token of a "
            "slot from the token before, and a causal model must rate",
            stacklevel=1,
        )
    texts, short = read(options.data, tokenizer_of(model), options.split)
    if not texts:
        raise UserError(f"{options.data}: no answer has two segments; --split {options.split} says where they end")
    found = seqdeps(texts, left_to_right(model, options.batch_size))
    figures = {
        "texts": len(texts),
        "of_one_segment": short,
        "segments": sum(one.segments for one in found),
        "seqdep": statistics.fmean(one.total for one in found),
        "seqdep_deviation": statistics.pstdev(one.total for one in found),
        "seqdep_per_token": statistics.fmean(one.per_token for one in found),
    }
    if options.json:
        print(json.dumps(figures))
        return
    left_out = f"; {short} with one segment left out" if short else ""
    print(
        f"SeqDep {figures['seqdep']:.3f} ± {figures['seqdep_deviation']:.3f} nats a segment, "
        f"{figures['seqdep_per_token']:.4f} a token ({len(texts)} texts, {figures['segments']} segments{left_out})"
    )


if __name__ == "__main__":
    with warnings_in_one_line():
        sys.exit(exit_code(run, None))
