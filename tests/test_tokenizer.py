"""Prompts become the token ids that the checkpoint was trained on, and ids become text again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from refusion_jax.model.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "golden"
MODEL = GOLDEN / "modelA"
CHAT = [{"role": "user", "content": "sums 2 + 6"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.load(MODEL)
    assert found is not None
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of a golden model's tokenizer files, to be changed."""
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    for name in names:
        shutil.copy(MODEL / name, tmp_path)
    return tmp_path


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_chats_become_the_golden_prompts(golden_dir: Path, model_name: str, model_dir: Path) -> None:
    prompts = json.loads((golden_dir / f"golden{model_name}" / "prompts.json").read_text())["prompts"]
    tokenizer = Tokenizer.load(model_dir)
    assert tokenizer is not None
    for prompt in prompts:
        assert tokenizer.encode_chat([{"role": "user", "content": prompt["query"]}]) == prompt["prompt_ids"]
        assert tokenizer.decode(prompt["response_ids"]) == prompt["response"]


def test_plain_text_gets_no_template_and_no_special_tokens(tokenizer: Tokenizer) -> None:
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    assert tokenizer.encode("sums 2 + 6") == [vocabulary[word] for word in ("sums", "2", "+", "6")]
    assert tokenizer.encode("") == []


def test_special_tokens_in_a_text_are_special_and_never_decoded(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("2 <|mask|> 6") == [10, 4, 14]
    assert tokenizer.decode([1, 10, 4, 14, 2, 0]) == "2 6"


def test_tokens_by_text_and_by_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(4) == "<|mask|>"
    assert tokenizer.token_id("<|mask|>") == 4
    assert tokenizer.token_text(224) is None
    assert tokenizer.token_id("<|nothing|>") is None
    assert tokenizer.eos_token_id == 2
    assert len(tokenizer) == 224


def test_a_gap_in_the_ids_does_not_shorten_the_tokenizer(directory: Path) -> None:
    raw = json.loads((directory / "tokenizer.json").read_text())
    far = raw["added_tokens"][-1] | {"id": 230, "content": "<|far|>"}
    edit(directory / "tokenizer.json", added_tokens=[*raw["added_tokens"], far],
         model=raw["model"] | {"vocab": raw["model"]["vocab"] | {"<|far|>": 230}})  # fmt: skip
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    assert tokenizer.token_id("<|far|>") == 230
    assert len(tokenizer) == 231


def test_a_template_in_tokenizer_config_is_used(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    edit(directory / "tokenizer_config.json", chat_template="{{ messages[0]['content'] }} <|im_end|>")
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    assert tokenizer.encode_chat(CHAT) == [*tokenizer.encode("sums 2 + 6"), 2]


def test_a_missing_template_is_said_in_a_sentence(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    with pytest.raises(ValueError, match="the checkpoint has no chat template"):
        tokenizer.encode_chat(CHAT)


def test_a_template_that_refuses_or_fails_is_named(directory: Path) -> None:
    for template, message in [
        ("{{ raise_exception('no system here') }}", "template refuses the messages: no system here"),
        ("{{ messages[7]['content'] }}", "template refuses the messages: "),
        ("{% if %}", "template refuses the messages: "),
    ]:
        (directory / "chat_template.jinja").write_text(template)
        tokenizer = Tokenizer.load(directory)
        assert tokenizer is not None
        with pytest.raises(ValueError, match=message):
            tokenizer.encode_chat(CHAT)


def test_a_template_runs_no_code(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    with pytest.raises(ValueError, match="unsafe"):
        tokenizer.encode_chat(CHAT)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"\[\] is no conversation"),
        ("hello", "'hello' is no conversation"),
        ({"role": "user", "content": "a"}, "is no conversation"),
        (["hello"], "message 1 of the conversation is 'hello'"),
        ([*CHAT, {"content": "a"}], "message 2 of the conversation has no 'role'"),
        ([{"role": "user"}], "message 1 of the conversation has no 'content'"),
        ([{"role": "user", "content": ["a"]}], r"message 1 of the conversation has content=\['a'\]"),
        ([{"role": 1, "content": "a"}], "message 1 of the conversation has role=1, which is not a string"),
        ([{"role": "user", "content": None}], "message 1 of the conversation has content=None"),
    ],
)
def test_a_malformed_conversation_is_named(tokenizer: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer.encode_chat(messages)


def test_text_that_is_no_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="must be a string, not 3"):
        tokenizer.encode(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")


def test_truncation_and_padding_of_the_file_do_not_touch_prompts(directory: Path) -> None:
    edit(
        directory / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "<|endoftext|>"},
    )  # fmt: skip
    edit(directory / "tokenizer_config.json", model_max_length=3)
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    assert tokenizer.encode("2 2 2 2 2") == [10] * 5


def test_files_are_saved_byte_for_byte(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    }  # fmt: skip
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (MODEL / path.name).read_bytes()


def test_an_older_byte_pair_vocabulary_is_read(tmp_path: Path) -> None:
    words = ["h", "e", "l", "o", "w", "r", "d", "\u0120", "he", "ll", "hell", "hello", "\u0120w"]
    words.append("<|im_end|>")
    (tmp_path / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nl l\nhe ll\nhell o\n\u0120 w\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "unk_token": null}'
    )  # fmt: skip
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    ids = [words.index(piece) for piece in ("hello", "\u0120w", "o", "r", "l", "d")]
    assert tokenizer.encode("hello world<|im_end|>") == [*ids, words.index("<|im_end|>")]
    assert tokenizer.decode(tokenizer.encode("hello world<|im_end|>")) == "hello world"


def test_no_tokenizer_files_or_broken_ones(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert Tokenizer.load(tmp_path_factory.mktemp("empty")) is None
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="the tokenizer files cannot be read: "):
        Tokenizer.load(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer.json, which holds the vocabulary"):
        Tokenizer.load(directory)


def test_start_up_is_silent_and_takes_nothing_heavy() -> None:
    """Importing the library must not import transformers, and loading a tokenizer must not import torch."""
    program = f"""
import sys
import refusion_jax.model.hf
assert "transformers" not in sys.modules
assert refusion_jax.model.hf.load({str(MODEL)!r}).tokenizer.encode_chat({CHAT!r})
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
