"""Examples become the tokens that the model is to learn, once; whatever is left out is counted and named."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refusion_jax.data import builder, dataset, sources, worksheet
from refusion_jax.data.dataset import Dataset, prepare
from refusion_jax.model.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "golden"
MODEL = GOLDEN / "modelA"
PAD, START, EOS, MASK = 0, 1, 2, 4
# Of modelA: one token for every word; the prompt of "2" is START user 2 EOS START assistant.
WORDS = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
PROMPT = [START, WORDS["user"], WORDS["2"], EOS, START, WORDS["assistant"]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.load(MODEL)
    assert found is not None
    return found


@pytest.fixture
def make(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., Dataset]:
    """``prepare`` of examples: pairs of query and response, or bytes as they are to stand in a JSONL file."""

    def prepare_examples(examples: list[Any], **settings: Any) -> Dataset:
        path = tmp_path / "examples.jsonl"
        lines = [
            example
            if isinstance(example, bytes)
            else json.dumps({"query": example[0], "response": example[1]}).encode()
            for example in examples
        ]
        path.write_bytes(b"\n".join(lines))
        return prepare(str(path), **defaults(tokenizer, tmp_path) | settings)

    return prepare_examples


def defaults(tokenizer: Tokenizer, directory: Path) -> dict[str, Any]:
    return {
        "tokenizer": tokenizer,
        "max_length": 64,
        "eos_token_id": EOS,
        "mask_token_id": MASK,
        "max_left_out": 0.5,
        "cache": directory / "cache",
    }


def tokens(data: Dataset) -> list[list[int]]:
    return [data[index].tokens.tolist() for index in range(len(data))]


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_examples_become_the_golden_tokens_in_order(
    make: Callable[..., Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "EXAMPLES_PER_SHARD", 10)  # several shards
    prompts = json.loads((GOLDEN / "goldenA" / "prompts.json").read_text())["prompts"]
    data = make([(prompt["query"], prompt["response"]) for prompt in prompts], max_length=256)
    assert len(data) == len(prompts) > 30
    for index in np.random.default_rng(0).permutation(len(prompts)):
        example, prompt = data[index], prompts[index]
        assert example.tokens.dtype == np.int32
        assert example.tokens.tolist() == [*prompt["prompt_ids"], *prompt["response_ids"]]
        assert example.prompt_length == data.prompt_lengths[index] == len(prompt["prompt_ids"])
        assert data.lengths[index] == len(example.tokens)
    assert data.lengths.dtype == data.prompt_lengths.dtype == np.int32


def test_conversations_are_in_the_chat_template(make: Callable[..., Dataset]) -> None:
    roles = ("system", "2"), ("user", "3"), ("assistant", "4"), ("user", "5"), ("assistant", "6")
    messages = [{"role": role, "content": content} for role, content in roles]
    data = make([json.dumps({"messages": messages}).encode()])
    text = (
        "<|im_start|> system 2 <|im_end|> <|im_start|> user 3 <|im_end|> <|im_start|> assistant 4 <|im_end|> "
        "<|im_start|> user 5 <|im_end|> <|im_start|> assistant 6 <|im_end|>"
    )
    special = {"<|im_start|>": START, "<|im_end|>": EOS}
    assert tokens(data) == [[special[word] if word in special else WORDS.get(word, 5) for word in text.split()]]
    assert data.prompt_lengths.tolist() == [len(text.split()) - 2]


@pytest.mark.parametrize("number", [1, 6, 7, 8, 9, 31])  # with EOS: a slot of eight less one, a whole one, one more
@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_eos_is_the_last_token_of_every_answer_once(
    make: Callable[..., Dataset], tmp_path: Path, number: int, pad_is_eos: bool
) -> None:
    settings = {}
    if pad_is_eos:
        settings["tokenizer"] = changed(tmp_path, pad_token="<|im_end|>")
    answer = " ".join(["3"] * number)
    data = make([("2", answer), ("2", f"{answer} <|im_end|>")], **settings)
    expected = [*PROMPT, *[WORDS["3"]] * number, EOS]
    assert tokens(data) == [expected, expected]
    assert data.left_out == {}


def changed(directory: Path, **settings: Any) -> Tokenizer:
    """The tokenizer with other settings."""
    copy = directory / "tokenizer"
    copy.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, copy)
    config = copy / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    found = Tokenizer.load(copy)
    assert found is not None
    return found


# --- what is left out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "response", "kind", "message"),
    [
        ("2", "3 <|im_end|> 4", "special token in the text", "the answer contains <|im_end|>"),
        ("2", "3 <|im_end|> <|im_end|>", "special token in the text", "the answer contains <|im_end|>"),
        ("2", "3 <|mask|>", "special token in the text", "the answer contains <|mask|>"),
        ("2", "<|endoftext|> 3", "special token in the text", "the answer contains <|endoftext|>"),
        ("2 <|mask|>", "3", "special token in the text", "the prompt contains <|mask|>"),
        ("2", "<|im_end|>", "empty", "the answer has no tokens"),
        ("2", " ", "empty", "the answer has no text"),
        (
            "2",
            "3 " * 58,
            "too long",
            "65 tokens (6 of the prompt, 59 of the answer) are more than max_length=64",
        ),
        ("2 " * 59, "3", "too long", "66 tokens (64 of the prompt, 2 of the answer) are more than max_length=64"),
    ],
)
def test_texts_that_cannot_be_learned_are_left_out_and_named(
    make: Callable[..., Dataset], tmp_path: Path, query: str, response: str, kind: str, message: str
) -> None:
    longest = "3 " * 57  # 64 tokens
    data = make([("2", longest), (query, response), ("2", "4")])
    assert tokens(data) == [[*PROMPT, *[WORDS["3"]] * 57, EOS], [*PROMPT, WORDS["4"], EOS]]
    assert data.left_out == {kind: 1}
    place = f"{tmp_path / 'examples.jsonl'}, line 2"
    listed = [json.loads(line) for line in (data.directory / "left_out.jsonl").read_text().splitlines()]
    assert listed == [{"place": place, "kind": kind, "message": message}]


def test_a_template_that_refuses_a_conversation_is_a_problem_of_the_example(
    make: Callable[..., Dataset], tmp_path: Path
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}2"
    )
    tokenizer = changed(tmp_path)
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path / "tokenizer")  # type: ignore[assignment]
    chat = [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "3"}]
    data = make([("2", "3"), json.dumps({"messages": chat}).encode()], tokenizer=tokenizer)
    assert tokens(data) == [[WORDS["2"], WORDS["3"], EOS]]
    assert data.left_out == {"chat template": 1}
    assert "no tools" in (data.directory / "left_out.jsonl").read_text()


def test_a_tokenizer_without_a_chat_template_is_refused_at_once(make: Callable[..., Dataset], tmp_path: Path) -> None:
    changed(tmp_path)
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="the checkpoint has no chat template"):
        make([("2", "3")], tokenizer=Tokenizer.load(tmp_path / "tokenizer"))


def test_more_than_the_allowed_share_is_an_error_with_counts_and_places(
    make: Callable[..., Dataset], tmp_path: Path
) -> None:
    examples = [("2", "3")] * 96 + [b"{"] + [("2", "")] * 3
    expected = {"empty": 3, "malformed": 1}
    data = make(examples, max_left_out=0.04)
    assert data.left_out == expected
    assert data.report().splitlines() == [
        f"96 examples of 8.0 tokens (at most 8): {data.directory}",
        f"left out 4 of 100 examples (3 empty, 1 malformed): {data.directory / 'left_out.jsonl'}",
    ]
    message = (
        r"4 of 100 examples \(3 empty, 1 malformed\) cannot be used, more than max_left_out=0.03 allows\. "
        r"The first of them:\n  .*examples.jsonl, line 97: not JSON.*\n  .*line 98: the answer.*\n  .*line 99: .*"
    )
    for cache in ("cache", "other"):  # also where a laxer run has made it
        with pytest.raises(ValueError, match=message):
            make(examples, max_left_out=0.03, cache=tmp_path / cache)
    assert list((tmp_path / "other").iterdir()) == []


def test_no_examples_at_all_are_an_error(make: Callable[..., Dataset]) -> None:
    with pytest.raises(ValueError, match=r"2 of 2 examples \(2 empty\) cannot be used, there is none left"):
        make([("2", ""), ("", "2")], max_left_out=1)


def test_eos_and_mask_must_differ(make: Callable[..., Dataset]) -> None:
    with pytest.raises(ValueError, match="token 2 is both EOS and the mask"):
        make([("2", "3")], mask_token_id=EOS)


def test_a_cache_that_cannot_be_is_refused(make: Callable[..., Dataset], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"the cache .*file/cache cannot be made: Not a directory; name another"):
        make([("2", "3")], cache=tmp_path / "file" / "cache")
    with pytest.raises(ValueError, match="the cache gs://bucket/cache must be a local directory"):
        make([("2", "3")], cache="gs://bucket/cache")


# --- the cache ------------------------------------------------------------------------------------------------------


def test_the_fingerprint_depends_on_all_that_makes_the_tokens_and_on_nothing_else(
    make: Callable[..., Dataset], tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = [("2", "3")]
    first = make(examples)
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    shutil.copy(tmp_path / "examples.jsonl", directory / "renamed.jsonl")
    same = [
        make(examples),
        make(examples, max_left_out=0.1),
        make(examples, split="validation"),
        make(examples, cache=tmp_path / "other"),
        prepare(str(directory / "renamed.jsonl"), **defaults(tokenizer, tmp_path)),
    ]
    assert {data.fingerprint for data in same} == {first.fingerprint}
    (tmp_path / "examples.json").write_text(json.dumps([{"query": "2", "response": "3"}]))
    other = [
        make([("2", "4")]),
        make(examples * 2),
        make(examples, max_length=65),
        make(examples, eos_token_id=EOS + 1),
        make(examples, mask_token_id=MASK + 1),
        make(examples, mask_token_id=None),
        make(examples, tokenizer=changed(tmp_path, pad_token="<|im_end|>")),
        *(prepare(path, **defaults(tokenizer, tmp_path) | {"max_length": 256}) for path in worksheets()),
        prepare(str(tmp_path / "examples.json"), **defaults(tokenizer, tmp_path)),
    ]
    monkeypatch.setattr(dataset, "FORMAT", dataset.FORMAT + 1)
    other.append(make(examples))
    assert len({data.fingerprint for data in [first, *other]}) == 1 + len(other)


def worksheets() -> list[str]:
    return ["worksheet:1:5", "worksheet:2:5", "worksheet:1:6", "worksheet:1:5:validation"]


def test_another_generator_of_worksheets_is_another_source(monkeypatch: pytest.MonkeyPatch) -> None:
    source = sources.open_source("worksheet:1:5")
    before = source.digest()
    monkeypatch.setattr(worksheet, "example", lambda *key: {"query": "2", "response": "3"})
    assert source.digest() != before


def test_what_is_there_is_not_made_again(make: Callable[..., Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    before = make([("2", "3"), ("2", "")])
    monkeypatch.setattr(sources.File, "__iter__", lambda self: pytest.fail("the source is read again"))
    after = make([("2", "3"), ("2", "")])
    assert tokens(after) == tokens(before)
    assert after.left_out == before.left_out == {"empty": 1}


def test_an_interrupted_build_leaves_nothing(
    make: Callable[..., Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = [("2", "3")] * 2000
    with monkeypatch.context() as patch:
        encode, calls = Tokenizer.encode, iter(range(1500))

        def interrupted(self: Tokenizer, text: str) -> list[int]:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return encode(self, text)

        patch.setattr(Tokenizer, "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(examples)
    assert list((tmp_path / "cache").iterdir()) == []
    assert len(make(examples)) == 2000


def test_what_a_killed_build_leaves_is_not_taken_for_whole_and_swept_after_a_day(tmp_path: Path) -> None:
    tokenizer = worksheet.tokenizer()
    program = f"""if True:
        import os, signal
        from refusion_jax.data import worksheet
        from refusion_jax.data.dataset import prepare
        draw = worksheet.example
        def example(split, seed, index):
            if index == 1200:
                os.kill(os.getpid(), signal.SIGKILL)
            return draw(split, seed, index)
        worksheet.example = example
        prepare("worksheet:1:1300", worksheet.tokenizer(), max_length=256, eos_token_id={tokenizer.eos_token_id},
                mask_token_id=None, max_left_out=0, cache={str(tmp_path)!r})
    """
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    assert left.name.endswith(".incomplete")
    settings = defaults(tokenizer, tmp_path) | {
        "max_length": 256,
        "eos_token_id": tokenizer.eos_token_id,
        "mask_token_id": None,
        "cache": tmp_path,
    }
    data = prepare("worksheet:1:1300", **settings)
    assert len(data) == 1300
    assert left.exists(), "somebody may still write to it"
    for path in (left, *left.rglob("*")):
        os.utime(path, (0, time.time() - 25 * 3600))
    prepare("worksheet:1:1", **settings)
    assert not left.exists()


def test_two_builds_at_once_both_work(make: Callable[..., Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=30)
    write, found = builder.write, []

    def together(examples: Iterator[Any], directory: Path) -> str:
        inner = write(examples, directory)
        both.wait()
        return inner

    monkeypatch.setattr(builder, "write", together)
    examples = [("2", "3"), ("2", "4")]
    make_one = threading.Thread(target=lambda: found.append(make(examples)))
    make_one.start()
    found.append(make(examples))
    make_one.join()
    one, other = found
    assert one.directory == other.directory
    assert tokens(one) == tokens(other) == [[*PROMPT, WORDS["3"], EOS], [*PROMPT, WORDS["4"], EOS]]
    assert list(one.directory.parent.iterdir()) == [one.directory]


# --- reading --------------------------------------------------------------------------------------------------------


def test_a_pickle_of_a_dataset_is_its_name(make: Callable[..., Dataset]) -> None:
    data = make([("2", "3")] * 1000)
    assert data[0].prompt_length == len(PROMPT)  # with its files open
    content = pickle.dumps(data)
    assert len(content) < 1000
    assert tokens(pickle.loads(content)) == tokens(data)


def test_an_example_that_is_not_there_is_an_index_error(make: Callable[..., Dataset]) -> None:
    data = make([("2", "3"), ("2", "4")])
    for index in (2, -1):
        with pytest.raises(IndexError, match=f"there is no example {index}; there are 2, counted from 0"):
            data[index]
    assert [example.tokens[-2] for example in data] == [WORDS["3"], WORDS["4"]]


def test_tfds_is_imported_when_it_is_needed_and_tensorflow_never() -> None:
    modules = {"tensorflow", "tensorflow_datasets", "pyarrow"}
    program = f"import sys, refusion_jax.data.dataset; sys.exit(len({modules} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
