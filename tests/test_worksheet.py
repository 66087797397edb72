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
    "add 7 8 ; last": "7 + 8 = 15 ; 15 done",
    "add 0 0 ; last": "0 + 0 = 0 ; 0 done",
    "add 9 9 ; last": "9 + 9 = 18 ; 18 done",
    "copy lamp fish road ; last": "lamp fish road ; road done",
    "next 41 7 60 ; last": "42 8 61 ; 61 done",
    "next 0 98 9 ; last": "1 99 10 ; 10 done",
    "chain 3 4 2 9 ; last": "3 7 9 8 ; 8 done",
    "chain 0 9 1 5 5 ; last": "0 9 0 5 0 ; 0 done",
    "sort 52 7 31 ; last": "7 31 52 ; 52 done",
    "sort 10 9 99 0 9 ; last": "0 9 9 10 99 ; 99 done",  # by size, not by spelling
    "add 7 8 ; copy lamp fish road ; chain 3 4 2 9 ; echo 2 ; last": (
        "7 + 8 = 15 ; lamp fish road ; 3 7 9 8 ; lamp fish road ; 15 road 8 road done"
    ),
    "sort 5 4 ; echo 1 ; echo 2 ; next 5 ; echo 3 ; last": "4 5 ; 4 5 ; 4 5 ; 6 ; 4 5 ; 5 5 5 6 5 done",
}


def block(split: str, seed: int, start: int, count: int = 1000) -> list[dict[str, str]]:
    return [example(split, seed, index) for index in range(start, start + count)]


def dependent_tokens(query: str, response: str) -> int:
    """How many tokens of the response depend on earlier ones, by the table of the specification."""
    count = 0
    for job, answer in zip(query.split(" ; "), response.split(" ; "), strict=True):
        tokens = len(answer.split())
        count += {"chain": tokens - 1, "sort": tokens - 1, "echo": tokens, "last": tokens - 1}.get(job.split()[0], 0)
    return count


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("seed", "start"), [(0, 0), (0, 1_000), (1, 123_456), (977, 10**12)])
def test_every_thousand_worksheets_mix_long_short_parallel_and_sequential(split: str, seed: int, start: int) -> None:
    examples = block(split, seed, start)
    lengths = [len(each["response"].split()) for each in examples]
    prompts = [len(each["query"].split()) for each in examples]
    jobs = [each["query"].count(" ; ") + 1 for each in examples]
    assert 40 <= sum(lengths) / 1000 <= 80
    assert sum(dependent_tokens(**each) for each in examples) / sum(lengths) >= 0.3
    assert max(lengths) >= 4 * min(lengths)
    assert sum(length < 12 for length in lengths) >= 100
    assert {3, 4, 5, 6} <= set(jobs) <= {2, 3, 4, 5, 6}
    assert all(length < 12 for length, count in zip(lengths, jobs, strict=True) if count == 2)
    assert max(map(sum, zip(lengths, prompts, strict=True))) + 3 <= 192  # 3: the chat template and EOS
    kinds = {job.split()[0] for each in examples for job in each["query"].split(" ; ")}
    assert kinds == {"add", "copy", "next", "chain", "sort", "echo", "last"}


def test_short_worksheets_come_at_no_fixed_period() -> None:
    """Or one of eight hosts that share the data would see nothing else."""
    short = [index % 8 for index, each in enumerate(block("train", 0, 0)) if each["query"].count(" ; ") == 1]
    assert set(short) == set(range(8))


def test_a_worksheet_depends_on_split_seed_and_index_only() -> None:
    forwards = block("train", 5, 0, 200)
    assert [example("train", 5, index) for index in reversed(range(200))] == forwards[::-1]
    for other in (block("train", 6, 0, 200), block("train", 5, 200, 200), block("test", 5, 0, 200)):
        assert len({each["query"] for each in [*other, *forwards]}) > 380  # a few short ones may be the same


@pytest.mark.parametrize(
    ("split", "digest"),
    [("train", "3adbf29fee4ea9b9"), ("validation", "f0ed88e7c62aab08"), ("test", "75363203d9e4b5a7")],
)
def test_worksheets_are_the_same_in_every_release(split: str, digest: str) -> None:
    """Reported figures name a split and a seed, which must go on to mean the same worksheets."""
    written = json.dumps(block(split, 1, 0, 200)).encode()
    assert hashlib.sha256(written).hexdigest()[:16] == digest


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
    for other in ("", answer + " done", answer + " ;", answer.removesuffix(" done"), answer.replace(" ;", ";")):
        assert not is_right(query, other)
    assert not any(is_right(query, wrong) for wrong in with_one_token_wrong(answer, random.Random(query)))


@pytest.mark.parametrize("split", SPLITS)
def test_generated_answers_are_right_and_not_with_one_token_wrong(split: str) -> None:
    for index, each in enumerate(block(split, 3, 0, 300)):
        assert is_right(each["query"], each["response"])
        assert not any(
            is_right(each["query"], wrong) for wrong in with_one_token_wrong(each["response"], random.Random(index))
        )


def with_one_token_wrong(answer: str, rng: random.Random) -> list[str]:
    """The answer with another token in each place, and without each of its tokens."""
    tokens = answer.split()
    wrong = []
    for place, token in enumerate(tokens):
        other = rng.choice([text for text in VOCABULARY if text != token])
        wrong.append(" ".join([*tokens[:place], other, *tokens[place + 1 :]]))
        wrong.append(" ".join([*tokens[:place], *tokens[place + 1 :]]))
    return wrong


@pytest.mark.parametrize(
    "query",
    [
        "",
        "last",
        "add 7 8",
        "last ; add 7 8",
        "last ; last",
        "add 7 8; last",
        "add 7 8 ; ; last",
        "add 7 ; last",
        "add 7 8 9 ; last",
        "add 7 10 ; last",
        "add 7 -1 ; last",
        "copy ; last",
        "copy zebra ; last",
        "copy 7 ; last",
        "copy lamp  fish ; last",
        "next ; last",
        "next 99 ; last",
        "chain ; last",
        "chain 10 ; last",
        "sort ; last",
        "sort 07 ; last",
        "sort lamp ; last",
        "echo 1 ; last",
        "add 7 8 ; echo 0 ; last",
        "add 7 8 ; echo 2 ; last",
        "add 7 8 ; echo 1 1 ; last",
        "multiply 7 8 ; last",
    ],
)
def test_what_is_no_worksheet_is_refused(query: str) -> None:
    with pytest.raises(ValueError, match=r"is no (worksheet|job of a worksheet): "):
        is_right(query, "7 + 8 = 15 ; 15 done")


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
    query = {"role": "user", "content": "add 7 8 ; last"}
    answer = {"role": "assistant", "content": "7 + 8 = 15 ; 15 done"}
    assert texts([query]) == "<|user|> add 7 8 ; last <|assistant|>"
    assert texts([query, answer, query]) == (
        "<|user|> add 7 8 ; last <|assistant|> 7 + 8 = 15 ; 15 done <|im_end|> <|user|> add 7 8 ; last <|assistant|>"
    )
    assert TOKENIZER.decode(TOKENIZER.encode_chat([query])) == query["content"]
    with pytest.raises(ValueError, match="there are only the roles user and assistant, not system"):
        TOKENIZER.encode_chat([{"role": "system", "content": "add 7 8 ; last"}])


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
