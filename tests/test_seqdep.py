"""Sequential dependence: of a model whose probabilities are known, and of a transformer against its twin."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import log
from pathlib import Path

import numpy as np
import pytest

import refusion_jax as rf
from refusion_jax import demo
from refusion_jax.cli.process import exit_code
from refusion_jax.nap.seqdep import Tokens, cut, left_to_right, run, seqdep, seqdeps
from tests.twins import golden, qwen3

NEXT = {0: (0.5, 0.25, 0.25), 1: (0.1, 0.8, 0.1), 2: (0.125, 0.125, 0.75)}
"""A Markov chain: what follows token 0, 1, 2."""


def chain(pairs: Sequence[tuple[Tokens, Tokens]]) -> list[float]:
    def of(before: Tokens, text: Tokens) -> float:
        return sum(log(NEXT[last][token]) for last, token in zip([before[-1], *text], text, strict=False))

    return [of(before, text) for before, text in pairs]


def coin(pairs: Sequence[tuple[Tokens, Tokens]]) -> list[float]:
    """Every token by itself, whatever is before it."""
    return [sum(log((0.5, 0.25, 0.25)[token]) for token in text) for _, text in pairs]


def test_independent_segments_have_none() -> None:
    assert seqdep([0], [[1, 2], [2], [0, 0, 1]], coin).total == 0


def test_dependent_segments_by_hand() -> None:
    """Only the first token of a segment reads what is before it: the last token of the segment before, or a 0."""
    found = seqdep([2, 0], [[0, 1], [1, 1], [2, 2, 2]], chain)
    gains = [log(0.8) - log(0.25), log(0.1) - log(0.25)]
    assert found.total == pytest.approx(sum(gains) / 2)
    assert found.per_token == pytest.approx(sum(gains) / 5)
    assert found.segments == 3
    assert seqdep([0], [[1], [1]], chain).total > 0


def test_many_texts_are_each_their_own() -> None:
    texts: list[tuple[Tokens, list[Tokens]]] = [([0], [[1], [1]]), ([1], [[2], [0], [1]])]
    assert seqdeps(texts, chain) == [seqdep(*text, chain) for text in texts]


@pytest.mark.parametrize(
    ("segments", "says"), [([[1]], "a text of 1 segments has no sequential dependence"), ([[1], []], "is empty")]
)
def test_what_has_no_dependence_is_refused(segments: list[Tokens], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        seqdep([0], segments, chain)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_model_rates_as_its_twin(batch_size: int) -> None:
    directory = golden.DIRECTORY / "modelA"
    twin = qwen3.Qwen3(directory, np.float64)
    rng = np.random.default_rng(0)
    pairs = [
        (rng.integers(0, 250, before).tolist(), rng.integers(0, 250, text).tolist())
        for before, text in ((1, 1), (40, 3), (2, 70), (9, 9), (5, 0))
    ]

    def rate(before: list[int], text: list[int]) -> float:
        tokens = np.array([*before, *text])
        T = len(tokens)
        logits = twin.forward(tokens, np.arange(T), np.tril(np.ones((T, T), bool)))[0]
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return float(sum(log_probs[place - 1, tokens[place]] for place in range(len(before), T)))

    found = left_to_right(rf.load(directory), batch_size)(pairs)
    np.testing.assert_allclose(found, [rate(*pair) for pair in pairs], rtol=1e-5, atol=1e-4)


def test_pairs_that_do_not_fit_are_refused() -> None:
    score = left_to_right(rf.load(golden.DIRECTORY / "modelA"))
    with pytest.raises(ValueError, match="at least one token before it"):
        score([([], [1])])
    with pytest.raises(ValueError, match="more than the model's"):
        score([([1] * 100_000, [1])])


def test_segments_end_behind_a_match() -> None:
    assert cut("a\n\nb\nc", r"\n+") == ["a\n\n", "b\n", "c"]
    assert cut("a\n \n", r"\n+") == ["a\n \n"]
    assert cut("1. x 2. y", r" (?=\d\. )") == ["1. x ", "2. y"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(demo.ASSETS / "model")
    lines = [{"query": "1. echo", "response": "1 2\n3 4\n5"}, {"query": "1. echo", "response": "1"}]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.warns(UserWarning, match="has a mask token"):
        assert exit_code(run, [str(data), "--model", model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["texts"], found["of_one_segment"], found["segments"]) == (1, 1, 3)

    loaded = rf.load(model)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode_chat([{"role": "user", "content": "1. echo"}])
    by_hand = seqdep(prompt, [tokenizer.encode(text) for text in ("1 2", "3 4", "5")], left_to_right(loaded))
    assert found["seqdep"] == pytest.approx(by_hand.total)
    with pytest.warns(UserWarning):
        assert exit_code(run, [str(data), "--model", model]) == 0
    assert "1 texts, 3 segments; 1 with one segment left out" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*has a mask token")
def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(demo.ASSETS / "model")
    data = tmp_path / "data.jsonl"
    data.write_text('{"query": "1. echo"}\n')
    for args, says in (
        ([], "name a corpus"),
        ([str(data)], "name a model with --model"),
        ([str(data), "--model", model], "line 1: it has no response"),
        ([str(data), "--model", model, "--split", "("], "--split ( is no regular expression"),
        (["worksheet:0:2", "--model", model], "no answer has two segments"),
        (["worksheet:0:2", "--model", model, "--batch-size", "0"], "--batch-size must be at least 1"),
    ):
        assert exit_code(run, args) == 2
        assert says in capsys.readouterr().err
