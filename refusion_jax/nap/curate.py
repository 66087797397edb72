"""Make a corpus of canvases from ordinary examples.

    python -m refusion_jax.nap.curate split-chain DATA --model DIR --output FILE.jsonl
    python -m refusion_jax.nap.curate sample-paths DATA (--model DIR | --endpoint URL --name MODEL) --output FILE.jsonl

Every line of the output is {"query": str, "paths": [str], "summary": str}, or with "messages" in place of the query
where a conversation comes before the answer. What was dropped stands in FILE.jsonl.dropped, with its reason. Canvases
are kept in FILE.jsonl.partial until all of them are there: the same command goes on where it was interrupted, and the
file comes out the same, by one worker or by many.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tqdm
from tyro.conf import FlagCreatePairsOff, Positional, arg

from refusion_jax.cli.options import UserError, parse
from refusion_jax.cli.output import STDOUT, check_output, write_output
from refusion_jax.cli.process import exit_code, keep_compiled_programs, warnings_in_one_line
from refusion_jax.cli.resume import Finished
from refusion_jax.config import DecodeConfig, check_seed
from refusion_jax.data.sources import File, Problem, Record, Several, open_source
from refusion_jax.decoding.prompts import tokenizer_of
from refusion_jax.model.hf import load
from refusion_jax.nap.curators import Curator, Dropped, SamplePaths, SplitChain, Teacher
from refusion_jax.nap.seqdep import check_rating, left_to_right
from refusion_jax.nap.teachers import Endpoint, own_model

DROPPED = ".dropped"


class Curated(NamedTuple):
    """What became of a corpus."""

    canvases: int
    dropped: Counter[str]  # by kind


def curate(
    data: str,
    curator: Curator,
    output: str,
    *,
    seed: int = 0,
    workers: int = 1,
    settings: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Curated:
    """Write the canvases that ``curator`` makes of the examples in ``data`` (as training reads it) to ``output``.

    Args:
      workers: examples that are worked on at the same time, by threads: a teacher far away takes many.
      settings: what the canvases depend on beside ``data`` and ``seed``; a run does not go on with others.

    Raises:
      UserError: the data cannot be read, the output not be written, the run there had other settings, the teacher
        cannot be reached, or no example made a canvas.
    """
    if workers < 1:
        raise UserError(f"--workers must be at least 1, not {workers}")
    if output == STDOUT:
        raise UserError("canvases are kept beside a file until all are there: give --output FILE")
    check_output(output, io.BytesIO())
    try:
        source = open_source(data)
        if Path(output).exists() and any(
            isinstance(part, File) and os.path.realpath(part.name) == os.path.realpath(output)
            for part in (source.sources if isinstance(source, Several) else [source])
        ):
            raise UserError(f"--output {output} is a file that the examples are read from; name another")
        finished = Finished(output, {"data": source.digest(), "seed": seed, **(settings or {})})
        done: list[dict[str, Any]] = []
        try:
            with (
                concurrent.futures.ThreadPoolExecutor(workers) as pool,
                tqdm.tqdm(desc="curate", unit=" examples", disable=not progress) as bar,
            ):
                for entry in _in_order(pool, workers, enumerate(source), finished, curator, seed):
                    done.append(entry)
                    bar.update()
        except BaseException:
            finished.close(remove=False)
            raise
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from error
    canvases = [entry for entry in done if "dropped" not in entry]
    drops = [entry for entry in done if "dropped" in entry]
    dropped = Counter(entry["dropped"] for entry in drops)
    write_output(f"{output}{DROPPED}", (f"{json.dumps(entry)}\n".encode() for entry in drops))
    if not canvases:
        finished.close(remove=False)
        raise UserError(f"no example of {data} made a canvas: {counts(dropped)}; {output}{DROPPED} says why")
    write_output(output, (f"{json.dumps(entry)}\n".encode() for entry in canvases))
    finished.close(remove=True)
    return Curated(len(canvases), dropped)


def _in_order(
    pool: concurrent.futures.Executor,
    workers: int,
    examples: Iterator[tuple[int, Record | Problem]],
    finished: Finished,
    curator: Curator,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """The entry of every example, in order; a few examples ahead are at work meanwhile."""
    waiting: list[tuple[int, str, concurrent.futures.Future[dict[str, Any]] | dict[str, Any]]] = []

    def next_entry() -> dict[str, Any]:
        index, digest, entry = waiting.pop(0)
        if isinstance(entry, concurrent.futures.Future):
            entry = entry.result()
            finished.add((index, 0), digest, entry)
        return entry

    try:
        for index, example in examples:
            content = (
                (example.prompt, example.answer) if isinstance(example, Record) else (example.kind, example.message)
            )
            digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
            there = finished.get((index, 0), digest)
            waiting.append((index, digest, there or pool.submit(_entry, example, curator, f"{seed} {index}")))
            if len(waiting) >= 2 * workers:
                yield next_entry()
        while waiting:
            yield next_entry()
    finally:
        for _, _, entry in waiting:
            if isinstance(entry, concurrent.futures.Future):
                entry.cancel()


def _entry(example: Record | Problem, curator: Curator, seed: str) -> dict[str, Any]:
    """A line of the output, or of what was dropped."""
    if isinstance(example, Problem):
        return {"place": example.place, "dropped": example.kind, "reason": example.message}
    try:
        canvas = curator(example, seed)
    except Dropped as dropped:
        return {"place": example.place, "dropped": dropped.kind, "reason": dropped.message}
    messages = [dict(message) for message in example.prompt]
    asked = {"query": messages[0]["content"]} if _is_query(messages) else {"messages": messages}
    return {**asked, "paths": list(canvas.paths), "summary": canvas.summary}


def _is_query(messages: Sequence[Mapping[str, Any]]) -> bool:
    return len(messages) == 1 and messages[0].keys() == {"role", "content"} and messages[0]["role"] == "user"


def counts(dropped: Counter[str]) -> str:
    """How many of each kind, in words."""
    return ", ".join(f"{number} {kind}" for kind, number in dropped.most_common()) or "none"


# ---- The command ----


@dataclasses.dataclass(frozen=True)
class Common:
    """What both curators take."""

    data: Annotated[Positional[str], arg(metavar="DATA")] = ""
    """Files (.json, .jsonl, .parquet), or tfds:NAME, as for training."""
    output: Annotated[str, arg(metavar="FILE")] = ""
    """The canvases, as JSON lines."""
    model: Annotated[str, arg(metavar="DIR")] = ""
    """A directory in Hugging Face layout, or a hub id: the causal model that rates, or the teacher."""
    paths: int = 3
    """How many paths a canvas has (split-chain: at most)."""
    workers: int = 1
    """Examples that are worked on at the same time; the output does not depend on it."""
    seed: int = 0
    """Another seed gives other solutions."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON in place of a line."""

    def __post_init__(self) -> None:
        check_seed(self.seed, "--seed")
        if self.workers < 1:
            raise ValueError(f"--workers must be at least 1, not {self.workers}")


@dataclasses.dataclass(frozen=True)
class SplitOptions(Common):
    """Cut chains of thought in parts that do not need each other, as a left-to-right model rates them."""

    split: Annotated[str, arg(metavar="REGEX")] = r"\n+"
    """A segment ends behind each match of this regular expression."""
    threshold: float = 1.0
    """Nats that a segment gains from one that it needs."""
    batch_size: int = 8
    """Texts that are rated together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rating(self.batch_size, self.split)


@dataclasses.dataclass(frozen=True)
class SampleOptions(Common):
    """Have a teacher write solutions, and a summary that is given them and the right answer."""

    endpoint: Annotated[str, arg(metavar="URL")] = ""
    """A teacher that speaks OpenAI's protocol, such as http://localhost:8000/v1; its key is in OPENAI_API_KEY."""
    name: str = ""
    """What the endpoint calls the model."""
    temperature: float = 1.0
    """Of the teacher (NAP, section 4.1: 1)."""
    max_tokens: int = 1024
    """Longest reply."""
    timeout: float = 120
    """Seconds that a reply of the endpoint may take."""
    attempts: int = 3
    """How often a reply is asked for until its example is dropped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens < 1:
            raise ValueError(f"--max-tokens must be at least 1, not {self.max_tokens}")
        if not self.timeout > 0:
            raise ValueError(f"--timeout must be above 0, not {self.timeout}")


def split_chain(options: SplitOptions) -> Curator:
    """The curator that the options ask for. Raises UserError and ValueError."""
    if not options.model:
        raise UserError("name the causal model that rates with --model DIR")
    model = load(options.model)
    tokenizer = tokenizer_of(model)
    scorer = left_to_right(model, options.batch_size)
    encode = tokenizer.encode, tokenizer.encode_chat
    return SplitChain(scorer, *encode, pattern=options.split, threshold=options.threshold, paths=options.paths)


def sample_paths(options: SampleOptions) -> Curator:
    """The curator that the options ask for. Raises UserError and ValueError."""
    if bool(options.endpoint) == bool(options.model):
        raise UserError("name one teacher: --model DIR, or --endpoint URL with --name MODEL")
    if bool(options.endpoint) != bool(options.name):
        raise UserError("--endpoint URL and --name, what the endpoint calls the model, go together")
    teacher: Teacher
    if options.endpoint:
        teacher = Endpoint(options.endpoint, options.name, max_tokens=options.max_tokens, timeout=options.timeout)
    else:
        teacher = own_model(load(options.model), DecodeConfig(max_new_tokens=options.max_tokens))
    return SamplePaths(teacher, options.paths, options.temperature, options.attempts)


def run(args: Sequence[str]) -> None:
    """Do what ``args`` ask for. Raises UserError and ValueError."""
    name, *rest = args or [""]
    kinds: dict[str, type[SplitOptions] | type[SampleOptions]] = {
        "split-chain": SplitOptions,
        "sample-paths": SampleOptions,
    }
    if name not in kinds:
        raise UserError(
            f"name a curator first, {' or '.join(kinds)} (--help behind it lists its options), not {name!r}"
        )
    options = parse(kinds[name], rest, kinds[name]())
    if not options.data:
        raise UserError("name the examples to make canvases of")
    if not options.output:
        raise UserError("name the file to write with --output FILE")
    keep_compiled_programs()
    curator = split_chain(options) if isinstance(options, SplitOptions) else sample_paths(options)
    apart = ("data", "output", "workers", "batch_size", "timeout", "json", "seed")  # what canvases do not depend on
    settings = {field: value for field, value in dataclasses.asdict(options).items() if field not in apart}
    found = curate(
        options.data,
        curator,
        options.output,
        seed=options.seed,
        workers=options.workers,
        settings={"curator": name, **settings},
        progress=sys.stderr.isatty(),
    )
    if options.json:
        print(json.dumps({"canvases": found.canvases, "dropped": dict(found.dropped)}))
    else:
        print(f"{found.canvases} canvases in {options.output}; dropped: {counts(found.dropped)}")


if __name__ == "__main__":
    with warnings_in_one_line():
        sys.exit(exit_code(run, None))
