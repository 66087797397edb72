"""The sums that NAP is tried on: what they hold, and that solutions are independent and mostly right."""

from __future__ import annotations

import json

import pytest

from refusion_jax.cli.process import exit_code
from refusion_jax.data import worksheet
from refusion_jax.nap import sums
from refusion_jax.nap.canvas import Canvas
from refusion_jax.nap.seqdep import cut

EXAMPLES = [sums.example("train", 1, index) for index in range(400)]


def test_a_step_adds_a_digit_to_the_result_before_and_rarely_slips() -> None:
    slips = steps = 0
    for drawn in EXAMPLES:
        digits = sorted(drawn.query.split()[1:])
        for path in drawn.paths:
            words = [step.split() for step in path]
            assert sorted([words[0][0], *(digit for _, _, digit, _, _ in words)]) == digits
            assert [total for total, *_ in words[1:]] == [result for *_, result in words[:-1]]
            for total, plus, digit, equals, result in words:
                off = (int(result) - int(total) - int(digit)) % 10
                assert (plus, equals) == ("+", "=") and off in (0, 1, 9)
                slips += off != 0
                steps += 1
    assert 0.02 < slips / steps < 0.06


def test_a_summary_takes_the_majority_which_is_right() -> None:
    for drawn in EXAMPLES:
        last, *results, equals, answer = drawn.summary.split()
        assert (last, equals) == ("last", "=")
        assert results == [path[-1].split()[-1] for path in drawn.paths]
        assert results.count(answer) == max(map(results.count, results))
        assert int(answer) == sum(map(int, drawn.query.split()[1:])) % 10
    assert any(len({*drawn.summary.split()[1:-2]}) > 1 for drawn in EXAMPLES)


def test_sums_follow_from_the_arguments_and_splits_share_none() -> None:
    assert sums.example("train", 1, 7) == EXAMPLES[7] != sums.example("train", 2, 7)
    queries = {split: {sums.example(split, 0, index).query for index in range(300)} for split in worksheet.SHARES}
    assert not queries["train"] & queries["test"] and not queries["validation"] & queries["test"]
    with pytest.raises(ValueError, match="there is no split 'dev'"):
        sums.example("dev", 0, 0)


def test_every_form_is_judged_by_its_result() -> None:
    for drawn in EXAMPLES[:20]:
        canvas = sums.fields(drawn, "canvas")
        rendered = Canvas(tuple(canvas["paths"]), canvas["summary"]).render()
        for answer in (rendered, *(sums.fields(drawn, form)["response"] for form in ("plain", "chain"))):
            assert sums.is_right(drawn.query, answer)
            assert not sums.is_right(f"{drawn.query} 1", answer)
    assert not sums.is_right("add 1 2", "")
    with pytest.raises(ValueError, match="'add 1' is no sum"):
        sums.is_right("add 1", "1")


def test_the_chain_is_cut_in_its_steps() -> None:
    for drawn in EXAMPLES[:20]:
        segments = cut(sums.fields(drawn, "chain")["response"], sums.STEP)
        assert [segment.strip() for segment in segments] == [
            *(step for path in drawn.paths for step in path),
            drawn.summary,
        ]


def test_every_token_is_one_of_the_worksheets() -> None:
    tokens = {
        token for drawn in EXAMPLES for token in f"{drawn.query} {sums.fields(drawn, 'chain')['response']}".split()
    }
    assert tokens <= set(worksheet.VOCABULARY)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(sums.run, ["--form", "plain", "--split", "test", "--seed", "3", "--count", "2"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    drawn = [sums.example("test", 3, index) for index in range(2)]
    assert lines == [{"query": one.query, "response": one.answer} for one in drawn]
    assert exit_code(sums.run, ["--count", "0"]) == 2
    assert "--count must be at least 1, not 0" in capsys.readouterr().err
