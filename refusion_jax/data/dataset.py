"""Tokenised examples: made once from any source, kept on disk, read in any order."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tqdm

from refusion_jax.data.sources import Problem, Record, Source, open_source
from refusion_jax.model.tokenizer import Tokenizer

FORMAT = 1  # of the directory, and of the tokens in it: a change of either makes old ones unknown
SUMMARY = "summary.json"
LEFT_OUT = "left_out.jsonl"
INCOMPLETE = ".incomplete"
DEFAULT_CACHE = "~/.cache/refusion_jax/data"


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One tokenised example."""

    tokens: np.ndarray  # [T] int32: the prompt in the chat template, the answer, EOS
    prompt_length: int


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Tokenised examples on disk, with random access; a pickle of it is the name of its directory."""

    directory: Path
    fingerprint: str  # sha256 of all that the tokens depend on
    lengths: np.ndarray  # [examples] int32: tokens of every example, prompt and answer
    prompt_lengths: np.ndarray  # [examples] int32
    left_out: Mapping[str, int]  # examples of the source that are not there, by kind of problem

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Dataset:
        """The dataset in a directory that ``prepare`` made."""
        directory = Path(directory)
        summary = json.loads((directory / SUMMARY).read_text())
        lengths, prompt_lengths = (np.load(directory / f"{name}.npy") for name in ("lengths", "prompt_lengths"))
        return cls(directory, summary["fingerprint"], lengths, prompt_lengths, summary["left_out"])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        index = index.__index__()
        if not 0 <= index < len(self):
            raise IndexError(f"there is no example {index}; there are {len(self):,}, counted from 0")
        example = self._examples[index]
        return Example(example["tokens"], int(example["prompt_length"]))

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset.open, (self.directory,)

    @functools.cached_property
    def _examples(self) -> Sequence[Mapping[str, Any]]:
        from refusion_jax.data import builder

        return builder.read(self.directory / json.loads((self.directory / SUMMARY).read_text())["examples"])

    def report(self) -> str:
        """What is there and what is not, for a person: one or two lines."""
        lengths = self.lengths
        lines = [
            f"{len(self):,} examples of {lengths.mean():,.1f} tokens (at most {lengths.max():,}): {self.directory}"
        ]
        if self.left_out:
            lines.append(f"left out {_counts(self.left_out, len(self))}: {self.directory / LEFT_OUT}")
        return "\n".join(lines)


def prepare(
    path: str,
    tokenizer: Tokenizer,
    *,
    split: str = "train",
    max_length: int,
    eos_token_id: int,
    mask_token_id: int | None,
    max_left_out: float,
    cache: str | os.PathLike[str] | None = None,
) -> Dataset:
    """The tokenised examples of a source: from the cache if they are there, otherwise made and put there.

    The prompt is in the tokenizer's chat template; the answer ends with EOS, once. Nothing is cut off: examples that
    are too long or otherwise unfit are left out, counted by kind and listed by place.

    Args:
      path, split: see ``open_source``.
      max_length: most tokens of an example, EOS included.
      eos_token_id: ends every answer.
      mask_token_id: no text may contain it; None: the model has none.
      max_left_out: largest share of the source's examples that may be left out.
      cache: directory, which is made if need be; None: ~/.cache/refusion_jax/data.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the source cannot be read, too many of its examples are left out, or none are left.
    """
    if eos_token_id == mask_token_id:
        raise ValueError(f"token {eos_token_id} is both EOS and the mask; a mask is never written")
    source = open_source(path, split)
    ingredients = {
        "format": FORMAT,
        "source": source.digest(),
        "tokenizer": _digest(tokenizer.files),
        "max_length": max_length,
        "eos_token_id": eos_token_id,
        "mask_token_id": mask_token_id,
    }
    fingerprint = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()
    directory = _cache(cache) / fingerprint
    if not (directory / SUMMARY).exists():
        tokenise = _Tokeniser(tokenizer, max_length, eos_token_id, mask_token_id)
        _build(directory, source, tokenise, path, max_left_out, {"fingerprint": fingerprint, **ingredients})
    dataset = Dataset.open(directory)
    _check(path, dataset.left_out, len(dataset), max_left_out, directory / LEFT_OUT)
    return dataset


def _build(
    directory: Path,
    source: Source,
    tokenise: _Tokeniser,
    path: str,
    max_left_out: float,
    summary: dict[str, Any],
) -> None:
    """Make the directory; whoever sees it sees all of it."""
    from refusion_jax.data import builder

    incomplete = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", suffix=INCOMPLETE, dir=directory.parent))
    lengths, prompt_lengths = array.array("i"), array.array("i")
    left_out: collections.Counter[str] = collections.Counter()

    def examples() -> Iterator[dict[str, Any]]:
        with (
            open(incomplete / LEFT_OUT, "w", encoding="utf-8") as file,
            tqdm.tqdm(source, "tokenising", unit=" examples", leave=False, disable=None) as bar,
        ):
            for record in bar:
                example = tokenise(record) if isinstance(record, Record) else record
                if isinstance(example, Problem):
                    left_out[example.kind] += 1
                    file.write(json.dumps(dataclasses.asdict(example)) + "\n")
                else:
                    lengths.append(len(example.tokens))
                    prompt_lengths.append(example.prompt_length)
                    yield {"tokens": example.tokens, "prompt_length": example.prompt_length}

    try:
        _sweep(directory.parent)
        inner = builder.write(examples(), incomplete)
        _check(path, left_out, len(lengths), max_left_out, incomplete / LEFT_OUT)
        np.save(incomplete / "lengths.npy", np.array(lengths, np.int32))
        np.save(incomplete / "prompt_lengths.npy", np.array(prompt_lengths, np.int32))
        (incomplete / SUMMARY).write_text(json.dumps(summary | {"examples": inner, "left_out": left_out}, indent=2))
        try:
            os.replace(incomplete, directory)
        except OSError:
            if not (directory / SUMMARY).exists():
                raise
            # Somebody else was faster, and has built the same.
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)


def _cache(given: str | os.PathLike[str] | None) -> Path:
    """The directory of all datasets, which is made if need be. Raises ValueError."""
    if given is not None and "://" in os.fspath(given):
        raise ValueError(f"the cache {given} must be a local directory: random access needs local files")
    cache = Path(DEFAULT_CACHE if given is None else given).expanduser()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the cache {cache} cannot be made: {error.strerror}; name another directory") from error
    return cache


def _sweep(cache: Path) -> None:
    """Remove what builders left behind that were killed: what nobody has written to for a day."""
    for directory in cache.glob(f"*{INCOMPLETE}"):
        try:
            latest = max(path.stat().st_mtime for path in (directory, *directory.rglob("*")))
        except FileNotFoundError:  # it has just been finished
            continue
        if time.time() - latest > 24 * 3600:
            shutil.rmtree(directory, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class _Tokeniser:
    """A record as tokens, or what is wrong with them."""

    tokenizer: Tokenizer
    max_length: int
    eos_token_id: int
    mask_token_id: int | None

    def __post_init__(self) -> None:
        # Without a chat template every example would have a problem, and it is none of theirs.
        self.tokenizer.encode_chat([{"role": "user", "content": "text"}])

    def __call__(self, record: Record) -> Example | Problem:
        try:
            prompt = self.tokenizer.encode_chat(record.prompt)
        except ValueError as error:
            return Problem(record.place, "chat template", str(error))
        answer = self.tokenizer.encode(record.answer)
        if answer[-1:] == [self.eos_token_id]:
            answer.pop()
        if not answer:
            return Problem(record.place, "empty", "the answer has no tokens")
        for part, tokens, forbidden in (
            ("prompt", prompt, [self.mask_token_id]),
            ("answer", answer, [self.eos_token_id, self.mask_token_id, self._pad_token_id]),
        ):
            for token in forbidden:
                if token is not None and token in tokens:
                    text = self.tokenizer.token_text(token)
                    return Problem(record.place, "special token in the text", f"the {part} contains {text}")
        answer.append(self.eos_token_id)
        length = len(prompt) + len(answer)
        if length > self.max_length:
            return Problem(
                record.place,
                "too long",
                f"{length:,} tokens ({len(prompt):,} of the prompt, {len(answer):,} of the answer) "
                f"are more than max_length={self.max_length:,}",
            )
        return Example(np.array(prompt + answer, np.int32), len(prompt))

    @functools.cached_property
    def _pad_token_id(self) -> int | None:
        token = json.loads(self.tokenizer.files.get("tokenizer_config.json", b"{}")).get("pad_token")
        text = token["content"] if isinstance(token, Mapping) else token
        return None if text is None else self.tokenizer.token_id(text)


def _check(path: str, left_out: Mapping[str, int], number: int, max_left_out: float, file: Path) -> None:
    """Raises ValueError where too many are left out, or all."""
    total = number + sum(left_out.values())
    if number and total - number <= max_left_out * total:
        return
    with open(file, encoding="utf-8") as lines:
        first = [Problem(**json.loads(line)) for line, _ in zip(lines, range(3), strict=False)]
    rule = f"more than max_left_out={max_left_out:g} allows" if number else "there is none left"
    places = "".join(f"\n  {problem.place}: {problem.message}" for problem in first)
    raise ValueError(f"{path}: {_counts(left_out, number)} cannot be used, {rule}. The first of them:{places}")


def _counts(left_out: Mapping[str, int], number: int) -> str:
    """Such as: 3 of 100 examples (2 too long, 1 empty)."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(left_out.items(), key=lambda item: -item[1]))
    wrong = sum(left_out.values())
    return f"{wrong:,} of {wrong + number:,} examples ({kinds})"


def _digest(files: Mapping[str, bytes]) -> str:
    """A hash of files: of their names and their content."""
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
