"""The bundled task: worksheets of small jobs, endless, and checkable to the token.

    python -m refusion_jax.data.worksheet --split test --seed 1 --count 500 --output FILE.jsonl

A query is a numbered list of jobs; the response names and does them in order. Every number and word is one token.

    query     1. add 7 8 2. chain 3 4 2 9 3. echo 2 4. last
    response  1. add 7 + 8 = 15 2. chain 3 7 9 8 3. echo 3 7 9 8 4. last 15 8 8 done

    job             answer                                    depends on
    add 7 8         7 + 8 = 15                                the query (two digits)
    copy lamp fish  the words                                 the query
    next 41 7       42 8                                      the query (numbers to 98)
    chain 3 4 2 9   3 7 9 8, the running sum modulo 10        the query, each step on the one before (digits)
    sort 52 7 31    7 31 52                                   the query, each step on those before
    echo 2          the answer of job 2                       an earlier answer, perhaps an echo itself
    last            the last token of every answer, and done  all answers (it ends every worksheet)
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from refusion_jax.cli.options import UserError, parse
from refusion_jax.cli.output import STDOUT, check_output, write_output
from refusion_jax.model.tokenizer import Tokenizer

T = TypeVar("T")
Split = Literal["train", "validation", "test"]
# Of a random.Random only random() is promised to give the same numbers in every version of Python.
Uniform = Callable[[], float]

SHARES: dict[str, range] = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}
"""The tenths of all queries that belong to each split."""

# How worksheets are drawn; an entry that stands twice is drawn twice as often. Job counts are without ``last``.
JOB_COUNTS = (2, 3, 4, 5, 5, 5, 5, 5, 5)
ECHOES = (0, 1, 1, 1, 2)
"""Jobs that are echoes; they come last, as what is behind an echo stands at a place that depends on its length."""
KINDS = ("add", "copy", "copy", "next", "next", "chain", "chain", "chain", "sort", "sort")
OPERANDS = {"copy": range(10, 15), "next": range(10, 15), "chain": range(3, 6), "sort": range(2, 5)}
# One worksheet of every eight is short: its answer has fewer than 12 tokens.
SHORT_EVERY = 8
SHORT_TOKENS = 12
SHORT_JOB_COUNTS = (1, 2)
SHORT_OPERANDS = {"copy": range(1, 7), "next": range(1, 7), "chain": range(1, 6), "sort": range(2, 5)}

NUMBERS = tuple(str(number) for number in range(100))
LABELS = tuple(f"{number}." for number in range(1, 7))
"""Of the jobs of a worksheet, and of their answers."""
# fmt: off
WORDS = (
    "lamp", "fish", "road", "tree", "bird", "ship", "rain", "wind", "moon", "star", "lake", "hill", "rock", "sand",
    "gold", "iron", "salt", "milk", "corn", "rice", "cake", "soup", "bell", "drum", "flag", "boat", "door", "wall",
    "roof", "room", "desk", "book", "page", "bear", "wolf", "deer", "frog", "goat", "duck", "crow", "leaf", "root",
    "seed", "rose", "fern", "moss", "wood", "coal", "wool", "silk", "rope", "knot", "ring", "coin", "cart", "gate",
    "path", "farm", "town", "king", "cook", "poet", "hand", "foot", "face", "hair", "coat", "shoe", "belt", "game",
    "song", "tale", "fire", "snow", "dust", "wave", "cave", "reef", "red", "blue", "pink", "gray", "big", "tall",
    "wide", "thin", "warm", "cold", "soft", "hard", "fast", "slow", "loud", "calm", "dark", "pale", "rich", "wise",
    "kind", "bold",
)
# fmt: on

PAD, EOS, BOS, MASK, USER, ASSISTANT, UNKNOWN = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|im_end|>",
    "<|bos|>",
    "<|mask|>",
    "<|user|>",
    "<|assistant|>",
    "<|unk|>",
)
VOCABULARY = (
    *SPECIAL_TOKENS,
    *NUMBERS,
    *LABELS,
    *("+", "=", "done"),
    *("add", "copy", "next", "chain", "sort", "echo", "last"),
    *WORDS,
)
"""All tokens, by id."""

# A user's turn takes a multiple of 32 tokens, up to <|assistant|>. The answer to an operand then stands at one of a few
# distances behind it, which is all that a mask amid others can go by.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- set space = (-2 - message.content.split() | length) % 32 -%}
{{ '<|user|> ' + message.content + ' ' + '<|pad|> ' * space }}
{%- elif message.role == 'assistant' -%}{{ '<|assistant|> ' + message.content + ' <|im_end|> ' }}
{%- else -%}{{ raise_exception('there are only the roles user and assistant, not ' + message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""


def example(split: str, seed: int, index: int) -> dict[str, str]:
    """Worksheet number ``index`` of an endless sequence, a pure function of the arguments.

    Worksheets are drawn until one belongs to the split, which is a matter of its query alone: no query is in two
    splits, whatever their seeds.

    Returns:
      {"query": str, "response": str}

    Raises:
      ValueError: there is no such split.
    """
    if split not in SHARES:
        raise ValueError(f"there is no split {split!r}; choose one of {', '.join(SHARES)}")
    share = SHARES[split]
    short = index % SHORT_EVERY == hashed(f"{split} {seed} {index // SHORT_EVERY}") % SHORT_EVERY
    uniform = random.Random(hashed(f"{split} {seed} {index}.")).random
    while True:
        query, response = _draw_worksheet(uniform, short)
        if hashed(query) % 10 in share and not (short and response.count(" ") + 1 >= SHORT_TOKENS):
            return {"query": query, "response": response}


def hashed(text: str) -> int:
    """A number below 2**64 that follows from ``text``, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _draw_worksheet(uniform: Uniform, short: bool) -> tuple[str, str]:
    """A query and its response."""
    jobs = choice(uniform, SHORT_JOB_COUNTS if short else JOB_COUNTS)
    echoes = min(choice(uniform, ECHOES), jobs - 1)
    kinds = [*(choice(uniform, KINDS) for _ in range(jobs - echoes)), *["echo"] * echoes, "last"]
    sizes = SHORT_OPERANDS if short else OPERANDS
    words, numbers = shuffled(uniform, len(WORDS)), shuffled(uniform, 99)  # no word or number is drawn twice
    queries: list[list[str]] = []
    answers: list[list[str]] = []
    for kind in kinds:
        if kind == "last":
            operands, answer = [], [*(answer[-1] for answer in answers), "done"]
        elif kind == "echo":
            job = int(uniform() * len(answers))
            operands, answer = [NUMBERS[job + 1]], answers[job]
        else:
            count = choice(uniform, sizes[kind]) if kind in sizes else 2
            operands, answer = _draw_job(uniform, kind, count, words, numbers)
        queries.append(operands)
        answers.append(answer)
    return _numbered(kinds, queries), _numbered(kinds, answers)


def _numbered(kinds: Iterable[str], lines: Iterable[Sequence[str]]) -> str:
    return " ".join(" ".join([label, kind, *line]) for label, kind, line in zip(LABELS, kinds, lines, strict=False))


def _draw_job(
    uniform: Uniform, kind: str, count: int, words: Iterator[int], numbers: Iterator[int]
) -> tuple[list[str], list[str]]:
    """Operands and answer of a job. The answer comes first where it can, so that ``solve`` is another way."""
    if kind == "add":
        a, b = integers(uniform, 10, 2)
        return [NUMBERS[a], NUMBERS[b]], [NUMBERS[a], "+", NUMBERS[b], "=", NUMBERS[a + b]]
    if kind == "copy":
        copied = [WORDS[word] for word in itertools.islice(words, count)]
        return copied, copied
    if kind == "chain":
        sums = integers(uniform, 10, count)
        steps = [(after - before) % 10 for before, after in itertools.pairwise([0, *sums])]
        return [NUMBERS[step] for step in steps], [NUMBERS[total] for total in sums]
    drawn = list(itertools.islice(numbers, count))
    answer = sorted(drawn) if kind == "sort" else [number + 1 for number in drawn]
    return [NUMBERS[number] for number in drawn], [NUMBERS[number] for number in answer]


def shuffled(uniform: Uniform, below: int) -> Iterator[int]:
    """All numbers from 0 to ``below`` - 1, in random order, and then again."""
    while True:
        left = list(range(below))
        while left:
            place = int(uniform() * len(left))
            left[place], left[-1] = left[-1], left[place]
            yield left.pop()


def integers(uniform: Uniform, below: int, count: int) -> list[int]:
    """``count`` numbers from 0 to ``below`` - 1."""
    return [int(uniform() * below) for _ in range(count)]


def choice(uniform: Uniform, among: Sequence[T]) -> T:
    """One of them."""
    return among[int(uniform() * len(among))]


def is_right(query: str, answer: str) -> bool:
    """Whether ``answer`` is right in every token. White space around it does not matter.

    Raises:
      ValueError: the query is not a worksheet.
    """
    return answer.strip() == solve(query)


def solve(query: str) -> str:
    """The right answer, computed from the query.

    Raises:
      ValueError: the query is not a worksheet.
    """
    start, *lines = re.split(r"(?:^| )(\d\.) ", query.strip())
    labels, jobs = lines[::2], lines[1::2]
    if start or jobs[-1:] != ["last"] or not 2 <= len(jobs) <= len(LABELS) or tuple(labels) != LABELS[: len(labels)]:
        raise ValueError(
            f"{query!r} is no worksheet: it must be a list of one to {len(LABELS) - 1} jobs and then last, numbered "
            f"{LABELS[0]}, {LABELS[1]}, ..."
        )
    answers: list[str] = []
    for job in jobs[:-1]:
        answers.append(_solve_job(job, answers))
    answers.append(" ".join([*(answer.split()[-1] for answer in answers), "done"]))
    kinds = [job.split(" ")[0] for job in jobs]
    return " ".join(" ".join(line) for line in zip(labels, kinds, answers, strict=True))


def _solve_job(job: str, answers: Sequence[str]) -> str:
    """The answer of a job that comes after those with ``answers``."""
    kind, *operands = job.split(" ")
    if kind == "add" and len(operands) == 2:
        a, b = _numbers(job, operands, range(10))
        return f"{a} + {b} = {a + b}"
    if kind == "copy" and operands:
        if strange := [word for word in operands if word not in WORDS]:
            raise ValueError(f"{job!r} is no job of a worksheet: {strange[0]!r} is not one of its words")
        return " ".join(operands)
    if kind == "next" and operands:
        return " ".join(str(number + 1) for number in _numbers(job, operands, range(99)))
    if kind == "chain" and operands:
        return " ".join(str(total % 10) for total in itertools.accumulate(_numbers(job, operands, range(10))))
    if kind == "sort" and operands:
        return " ".join(str(number) for number in sorted(_numbers(job, operands, range(100))))
    if kind == "echo" and len(operands) == 1 and answers:
        (number,) = _numbers(job, operands, range(1, len(answers) + 1))
        return answers[number - 1]
    raise ValueError(
        f"{job!r} is no job of a worksheet: it must be add with two digits, copy with words, next, chain or sort with "
        "numbers, or echo with the number of an earlier job"
    )


def _numbers(job: str, operands: Sequence[str], allowed: range) -> list[int]:
    for operand in operands:
        if operand not in NUMBERS or int(operand) not in allowed:
            raise ValueError(
                f"{job!r} is no job of a worksheet: {operand!r} is not a number from {allowed[0]} to {allowed[-1]}"
            )
    return [int(operand) for operand in operands]


def tokenizer_files() -> dict[str, bytes]:
    """The files of a Hugging Face tokenizer in which every word and number is one token, by name."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "bos_token": BOS,
        "mask_token": MASK,
        "unk_token": UNKNOWN,
        "additional_special_tokens": [USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": (tokenizer.to_str(pretty=True) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
    }


def tokenizer() -> Tokenizer:
    """The tokenizer that ``tokenizer_files`` describes."""
    with tempfile.TemporaryDirectory() as directory:
        for name, content in tokenizer_files().items():
            Path(directory, name).write_bytes(content)
        loaded = Tokenizer.load(directory)
    assert loaded is not None
    return loaded


@dataclasses.dataclass(frozen=True)
class Options:
    """Write worksheets as JSON lines {"query", "response"}."""

    split: Split = "train"
    """Splits never share a query."""
    seed: int = 0
    """Another seed gives other worksheets."""
    count: int = 1000
    """How many worksheets."""
    output: str = STDOUT
    """File to write, or - for standard output."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"--count must be at least 1, not {self.count}")


def main(args: Sequence[str] | None = None) -> int:
    """Write the worksheets that ``args`` (of the process, if None) ask for. Returns the exit code."""
    try:
        options = parse(Options, sys.argv[1:] if args is None else args, Options())
        check_output(options.output, io.BytesIO())
        worksheets = (example(options.split, options.seed, index) for index in range(options.count))
        write_output(options.output, (f"{json.dumps(worksheet)}\n".encode() for worksheet in worksheets))
        return 0
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails again when it flushes
        return 1


if __name__ == "__main__":
    sys.exit(main())
