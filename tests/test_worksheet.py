"""The bundled task: what is trained and measured on it can be trusted."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from refusion_jax.data import worksheet
from refusion_jax.data.worksheet import SHARES, VOCABULARY, example, is_right

SPLITS = tuple(SHARES)
TOKENIZER = worksheet.tokenizer()

# Worked out by hand.
ANSWERS = {
    "1. add 7 8 2. last": "1. add 7 + 8 = 15 2. last 15 done",
    "1. add 0 0 2. last": "1. add 0 + 0 = 0 2. last 0 done",
    "1. add 9 9 2. last": "1. add 9 + 9 = 18 2. last 18 done",
    "1. copy lamp fish road 2. last": "1. copy lamp fish road 2. last road done",
    "1. next 41 7 60 2. last": "1. next 42 8 61 2. last 61 done",
    "1. next 0 98 9 2. last": "1. next 1 99 10 2. last 10 done",
    "1. chain 3 4 2 9 2. last": "1. chain 3 7 9 8 2. last 8 done",
    "1. chain 0 9 1 5 5 2. last": "1. chain 0 9 0 5 0 2. last 0 done",
    "1. sort 52 7 31 2. last": "1. sort 7 31 52 2. last 52 done",
    "1. sort 10 9 99 0 9 2. last": "1. sort 0 9 9 10 99 2. last 99 done",  # by size, not by spelling
    "1. next 1 2. next 2 3. last": "1. next 2 2. next 3 3. last 2 3 done",  # the label 2. is not the number 2
    "1. add 7 8 2. chain 3 4 2 9 3. echo 2 4. last": (
        "1. add 7 + 8 = 15 2. chain 3 7 9 8 3. echo 3 7 9 8 4. last 15 8 8 done"
    ),
    "1. add 7 8 2. copy lamp fish road 3. chain 3 4 2 9 4. echo 2 5. last": (
        "1. add 7 + 8 = 15 2. copy lamp fish road 3. chain 3 7 9 8 4. echo lamp fish road 5. last 15 road 8 road done"
    ),
    "1. sort 5 4 2. echo 1 3. echo 2 4. next 5 5. echo 3 6. last": (
        "1. sort 4 5 2. echo 4 5 3. echo 4 5 4. next 6 5. echo 4 5 6. last 5 5 5 6 5 done"
    ),
}

# Of 200 worksheets of each split. Another way of drawing changes them, and what all reported figures mean.
DIGESTS = {"train": "5677e34cc0b208c1", "validation": "492dc6639a576fe8", "test": "6593121f85d6ae68"}


def lines(text: str) -> list[list[str]]:
    """The tokens of each line of a query or response, without the labels."""
    found: list[list[str]] = []
    for token in text.split(" "):
        if token == f"{len(found) + 1}.":
            found.append([])
        else:
            found[-1].append(token)
    return found


def block(split: str, seed: int, start: int, count: int = 1000) -> list[dict[str, str]]:
    return [example(split, seed, index) for index in range(start, start + count)]


def dependent_tokens(query: str, response: str) -> int:
    """How many tokens of the response depend on earlier ones, by the table of the specification."""
    count = 0
    for (kind, *_), (named, *answer) in zip(lines(query), lines(response), strict=True):
        assert named == kind
        tokens = len(answer)
        count += {"chain": tokens - 1, "sort": tokens - 1, "echo": tokens, "last": tokens - 1}.get(kind, 0)
    return count


def test_dependent_tokens_are_counted_as_by_hand() -> None:
    query = "1. add 7 8 2. chain 3 4 2 9 3. echo 2 4. sort 5 4 5. copy lamp 6. last"
    assert dependent_tokens(query, worksheet.solve(query)) == 0 + 3 + 4 + 1 + 0 + 5


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("seed", "start"),
    [
        *((0, 0), (0, 1_000), (1, 123_456), (2, 0), (977, 10**12), (2**63, 5)),
        *(pytest.param(seed, 0, marks=pytest.mark.slow) for seed in range(10, 40)),
    ],
)
def test_every_thousand_worksheets_mix_long_short_parallel_and_sequential(split: str, seed: int, start: int) -> None:
    examples = block(split, seed, start)
    lengths = [len(each["response"].split()) for each in examples]
    prompts = [len(each["query"].split()) for each in examples]
    jobs = [lines(each["query"]) for each in examples]
    assert 40 <= sum(lengths) / 1000 <= 80
    assert sum(dependent_tokens(**each) for each in examples) / sum(lengths) >= 0.3
    assert max(lengths) >= 4 * min(lengths)
    assert sum(length < 12 for length in lengths) >= 100
    assert {3, 4, 5, 6} <= set(map(len, jobs)) <= {2, 3, 4, 5, 6}
    assert all(length < 12 for length, each in zip(lengths, jobs, strict=True) if len(each) == 2)
    rendered = [(2 + prompt + 31) // 32 * 32 for prompt in prompts]
    assert max(map(sum, zip(lengths, rendered, strict=True))) + 1 <= 192  # 1: EOS
    assert {kind for each in jobs for kind, *_ in each} == {"add", "copy", "next", "chain", "sort", "echo", "last"}
    assert {kind for each in jobs for kind, *_ in each[:-1]} == {"add", "copy", "next", "chain", "sort", "echo"}
    assert all(each[-1] == ["last"] for each in jobs)


def test_short_worksheets_come_at_no_fixed_period() -> None:
    """Or one of eight hosts that share the data would see nothing else."""
    short = [index % 8 for index, each in enumerate(block("train", 0, 0)) if len(each["response"].split()) < 12]
    assert set(short) == set(range(8))


def test_a_worksheet_depends_on_split_seed_and_index_only() -> None:
    forwards = block("train", 5, 0, 200)
    assert [example("train", 5, index) for index in reversed(range(200))] == forwards[::-1]
    for other in (block("train", 6, 0, 200), block("train", 5, 200, 200), block("test", 5, 0, 200)):
        assert len({each["query"] for each in [*other, *forwards]}) > 380  # a few short ones may be the same


def test_worksheets_are_the_same_in_every_release() -> None:
    """Reported figures name a split and a seed, which must go on to mean the same worksheets."""
    written = {split: json.dumps(block(split, 1, 0, 200)).encode() for split in SPLITS}
    assert {split: hashlib.sha256(text).hexdigest()[:16] for split, text in written.items()} == DIGESTS


def test_splits_share_no_query_whatever_the_seeds() -> None:
    queries = {split: {each["query"] for seed in (0, 1) for each in block(split, seed, 0, 3_500)} for split in SPLITS}
    assert sum(map(len, queries.values())) > 17_000
    assert len(set.union(*queries.values())) == sum(map(len, queries.values()))


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="no split 'dev'; choose one of train, validation, test"):
        example("dev", 0, 0)


@pytest.mark.parametrize("query", ANSWERS)
def test_answers_worked_out_by_hand_are_right_and_no_others(query: str) -> None:
    answer = ANSWERS[query]
    assert is_right(query, answer)
    assert is_right(query, f"  {answer}\n")
    unnumbered = " ".join(token for line in lines(answer) for token in line)
    for other in (
        "",
        answer + " done",
        "1. " + answer,
        answer.replace(" ", "  ", 1),
        answer.replace(".", ")"),
        unnumbered,
    ):
        assert not is_right(query, other)
    tokens = answer.split()
    for place, right in enumerate(tokens):
        for token in VOCABULARY:
            assert is_right(query, " ".join([*tokens[:place], token, *tokens[place + 1 :]])) == (token == right)
    assert not any(is_right(query, wrong) for wrong in with_one_token_wrong(answer, random.Random(query)))


@pytest.mark.parametrize("split", SPLITS)
def test_generated_answers_are_right_and_not_with_one_token_wrong(split: str) -> None:
    for index, each in enumerate(block(split, 3, 0, 300)):
        assert is_right(each["query"], each["response"])
        assert not any(
            is_right(each["query"], wrong) for wrong in with_one_token_wrong(each["response"], random.Random(index))
        )


def with_one_token_wrong(answer: str, rng: random.Random) -> list[str]:
    """The answer with another token in each place, without each of its tokens, and with each twice."""
    tokens = answer.split()
    wrong = []
    for place, token in enumerate(tokens):
        other = rng.choice([text for text in VOCABULARY if text != token])
        for instead in ([other], [], [token, token]):
            wrong.append(" ".join([*tokens[:place], *instead, *tokens[place + 1 :]]))
    return wrong


@pytest.mark.parametrize(
    "query",
    [
        "",
        "last",
        "1. last",
        "1. add 7 8",
        "1. last 2. add 7 8",
        "1. last 2. last",
        "1. add 7 8 2. last 3. last",
        "1. add 7 8 2. last last",
        "1. add 7 8 2. last 1",
        "1. add 7 8 last",
        "add 7 8 2. last",
        "add 7 8 ; last",
        "do 1. add 7 8 2. last",
        "2. add 7 8 1. last",
        "1. add 7 8 1. last",
        "1. add 7 8 3. last",
        "0. add 7 8 1. last",
        "2. add 7 8 3. last",
        "1. add 7 8 3. next 5 2. last",
        "1. add 7 8 2 last",
        "1 add 7 8 2 last",
        "1.add 7 8 2.last",
        "01. add 7 8 02. last",
        "\N{ARABIC-INDIC DIGIT ONE}. add 7 8 2. last",
        "1. add 7 8 2.  last",
        "1. add 7 8  2. last",
        "1. add 7 8\n2. last",
        "1. 2. last",
        "1. add 7 8 2. 3. last",
        "1. add 7 8 2. last 3.",
        "1. next 1 2. next 2 3. next 3 4. next 4 5. next 5 6. next 6",
        "1. next 1 2. next 2 3. next 3 4. next 4 5. next 5 6. next 6 7. last",
        "1. add 7 2. last",
        "1. add 7 8 9 2. last",
        "1. add 7 10 2. last",
        "1. add 7 -1 2. last",
        "1. copy 2. last",
        "1. copy zebra 2. last",
        "1. copy 7 2. last",
        "1. copy lamp  fish 2. last",
        "1. next 2. last",
        "1. next 99 2. last",
        "1. chain 2. last",
        "1. chain 10 2. last",
        "1. sort 2. last",
        "1. sort 07 2. last",
        "1. sort lamp 2. last",
        "1. echo 1 2. last",
        "1. add 7 8 2. echo 0 3. last",
        "1. add 7 8 2. echo 2 3. last",
        "1. add 7 8 2. echo 1. 3. last",
        "1. add 7 8 2. echo 1 1 3. last",
        "1. add 7 8 2. echo 3. last",
        "1. multiply 7 8 2. last",
    ],
)
def test_what_is_no_worksheet_is_refused(query: str) -> None:
    with pytest.raises(ValueError, match=r"is no (worksheet|job of a worksheet): "):
        is_right(query, "1. add 7 + 8 = 15 2. last 15 done")


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("1. add 7 8 3. last", "must be a list of one to 5 jobs and then last, numbered 1., 2., ..."),
        ("1. next 99 2. last", "'next 99' is no job of a worksheet: '99' is not a number from 0 to 98"),
        ("1. add 7 8 2. echo 2 3. last", "'echo 2' is no job of a worksheet: '2' is not a number from 1 to 1"),
        ("1. copy lamp zebra 2. last", "'copy lamp zebra' is no job of a worksheet: 'zebra' is not one of its words"),
        ("1. add 7 8 2. last 3. last", "'last' is no job of a worksheet: it must be add with two digits, copy"),
    ],
)
def test_a_refusal_says_what_is_wrong_with_the_query(query: str, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        is_right(query, "")
    assert sentence in str(error.value)


def test_every_text_comes_back_from_the_tokenizer_with_one_token_per_word() -> None:
    for split in SPLITS:
        for each in block(split, 4, 0, 300):
            for text in each.values():
                ids = TOKENIZER.encode(text)
                assert [TOKENIZER.token_text(token) for token in ids] == text.split(" ")
                assert TOKENIZER.decode(ids) == text


def test_the_vocabulary_is_small_and_has_no_token_twice() -> None:
    assert len(TOKENIZER) == len(set(VOCABULARY)) == len(VOCABULARY) <= 256
    assert [TOKENIZER.token_text(token) for token in range(len(TOKENIZER))] == list(VOCABULARY)
    assert all(text.isascii() and " " not in text for text in VOCABULARY)
    assert TOKENIZER.token_text(0) == "<|pad|>"
    assert TOKENIZER.eos_token_id == TOKENIZER.token_id("<|im_end|>")
    assert TOKENIZER.token_id("<|mask|>") not in (None, TOKENIZER.eos_token_id)


def test_a_chat_has_one_token_per_role_and_one_after_answers() -> None:
    query = {"role": "user", "content": "1. add 7 8 2. last"}
    answer = {"role": "assistant", "content": "1. add 7 + 8 = 15 2. last 15 done"}
    asked = "<|user|> 1. add 7 8 2. last" + 24 * " <|pad|>" + " <|assistant|>"  # 32 tokens
    assert texts([query]) == asked
    assert texts([query, answer, query]) == f"{asked} 1. add 7 + 8 = 15 2. last 15 done <|im_end|> {asked}"
    assert TOKENIZER.decode(TOKENIZER.encode_chat([query])) == query["content"]
    with pytest.raises(ValueError, match="there are only the roles user and assistant, not system"):
        TOKENIZER.encode_chat([{"role": "system", "content": "1. add 7 8 2. last"}])


def texts(messages: list[dict[str, str]]) -> str:
    return " ".join(str(TOKENIZER.token_text(token)) for token in TOKENIZER.encode_chat(messages))


def test_the_command_writes_the_worksheets_of_the_split(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    command = f"-m refusion_jax.data.worksheet --split test --seed 7 --count 50 --output {file}"
    subprocess.run([sys.executable, *command.split()], check=True)
    assert [json.loads(line) for line in file.read_text().splitlines()] == block("test", 7, 0, 50)


def test_the_command_writes_to_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert worksheet.main(["--count", "3"]) == 0
    assert [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()] == block("train", 0, 0, 3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--split dev", "--split must be one of 'train', 'validation', 'test', not 'dev'"),
        ("--count 0", "--count must be at least 1, not 0"),
        ("--count many", "--count must be an integer, not 'many'"),
        ("--sead 3", "there is no option --sead"),
        ("--output missing/file", "the directory of --output missing/file does not exist; make it first"),
        ("--output .", "--output . is a directory; name a file"),
    ],
)
def test_what_the_command_cannot_do_it_says_in_a_sentence(
    arguments: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert worksheet.main(["--output", "file.jsonl", *arguments.split()]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {sentence}") and errors.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_interrupted_command_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.jsonl"
    file.write_text("old\n")

    def interrupt(split: str, seed: int, index: int) -> dict[str, str]:
        if index == 2:
            raise KeyboardInterrupt
        return example(split, seed, index)

    monkeypatch.setattr(worksheet, "example", interrupt)
    assert worksheet.main(["--output", str(file)]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file.jsonl"] and file.read_text() == "old\n"
