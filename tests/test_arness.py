"""How autoregressive a course is, computed by hand, and by definition."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_jax.cli.process import exit_code
from refusion_jax.nap.arness import (
    global_arness,
    kendall_tau,
    local_arness,
    of_slots,
    one_by_one,
    read,
    run,
)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_left_to_right_is_exactly_one(k: int) -> None:
    course = one_by_one(range(7))
    assert global_arness(course, k) == local_arness(course, k) == kendall_tau(course) == 1.0


def test_right_to_left() -> None:
    course = one_by_one([3, 2, 1, 0])
    assert global_arness(course) == 1 / 4  # the last one is the smallest that is left
    assert global_arness(course, 2) == 2 / 4
    assert local_arness(course) == 0
    assert kendall_tau(course) == -1


def test_a_fixed_order_by_hand() -> None:
    course = one_by_one([3, 1, 0, 2])
    assert global_arness(course, 1) == 2 / 4  # 0 of {0, 2}, 2 of {2}
    assert global_arness(course, 2) == 3 / 4  # and 1 of {0, 1, 2}
    assert global_arness(course, 4) == 1
    assert local_arness(course) == 0
    assert kendall_tau(course) == pytest.approx(-2 / 6)  # 1-2 and 0-2 ascend, the other four pairs descend


def test_neighbours_count_in_any_order() -> None:
    """0, then 2 and 1, then 3: what came just before 3 is {1, 2}, though not ascending."""
    course = one_by_one([0, 2, 1, 3])
    assert local_arness(course, 1) == 1 / 4  # 0 alone, behind the prompt
    assert local_arness(course, 2) == 2 / 4  # and 3


@pytest.mark.parametrize("width", [1, 2, 4])
def test_of_what_comes_together_only_the_first_had_all_before_it(width: int) -> None:
    course = [list(range(start, start + width)) for start in range(0, 8, width)]
    assert global_arness(course) == local_arness(course) == 1 / width
    assert global_arness(course, width) == 1
    assert local_arness(course, width) == 1 / width


def test_ties_of_kendall_by_hand() -> None:
    assert kendall_tau([[0, 1], [2, 3]]) == pytest.approx(4 / (4 * 6) ** 0.5)  # four pairs ascend, two are tied
    assert kendall_tau([[0, 1, 2]]) == 0
    assert kendall_tau([[5]]) == 0


def by_definition(order: Sequence[int], k: int) -> tuple[float, float]:
    """Global and local ARness@k of one offset a step, as the papers write them."""
    among = neighbours = 0
    prompt = list(range(-k, 0))
    for number, offset in enumerate(order):
        among += offset in sorted(order[number:])[:k]
        before = [*prompt, *order[:number]]
        neighbours += set(before[-k:]) == set(range(offset - k, offset))
    return among / len(order), neighbours / len(order)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_order_of_five_is_measured_by_definition(k: int) -> None:
    for order in itertools.permutations(range(5)):
        course = one_by_one(order)
        assert (global_arness(course, k), local_arness(course, k)) == by_definition(order, k)


@given(st.permutations(range(9)), st.lists(st.integers(1, 3), min_size=9), st.integers(1, 3))
def test_steps_give_less_than_their_best_order_alone(order: list[int], widths: list[int], k: int) -> None:
    """Whatever is right of a token in a step is right of it when the step is undone one by one, ascending."""
    numbers = iter(order)
    course = [step for width in widths if (step := sorted(itertools.islice(numbers, width)))]
    alone = one_by_one([offset for step in course for offset in step])
    assert global_arness(course, k) <= global_arness(alone, k)


def test_a_slot_is_written_when_its_first_token_is() -> None:
    assert of_slots([[8, 9], [0, 10], [1], [4, 5]], 4) == [[2], [0], [1]]


@pytest.mark.parametrize(
    ("course", "says"),
    [
        ([], "nothing was written"),
        ([[0], [0]], "offset 0 is written twice"),
        ([[-1]], "offset -1 is not in the answer"),
    ],
)
def test_what_is_no_course_is_refused(course: list[list[int]], says: str) -> None:
    for measure in (global_arness, local_arness, kendall_tau):
        with pytest.raises(ValueError, match=says):
            measure(course)
    with pytest.raises(ValueError, match="k=0 must be at least 1"):
        global_arness([[0]], 0)


LINE = {"commit_order": [1, 0], "trace": [{"committed": [[1, 7], [5, 7]]}, {"committed": []}, {"committed": [[0, 7]]}]}


def test_what_an_end_of_text_cut_off_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(f"{json.dumps(LINE)}\n\n{json.dumps({'commit_order': [], 'trace': []})}\n")
    assert list(read(str(file))) == [([[1], [0]], [1, 0])]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(f"{json.dumps(LINE)}\n")
    assert exit_code(run, [str(file), "--json", "--k", "1,2", "--slot-size", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answers"] == 1
    assert found["measures"]["tokens, by pass"]["global ARness@1"] == {"mean": 0.5, "deviation": 0}
    assert found["measures"]["slots, one by one"]["global ARness@1"] == {"mean": 1, "deviation": 0}
    assert exit_code(run, [str(file)]) == 0
    assert "Kendall's tau" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text('{"id": 0, "text": ""}\n')
    for args, says in (
        ([str(file)], "line 1 holds no trace (KeyError: 'commit_order'): give what decode.py wrote with --trace"),
        ([str(tmp_path / "none")], "cannot be read"),
        ([], "name a file"),
        ([str(file), "--k", "0"], "--k 0 must be integers, at least 1"),
        ([str(file), "--slot-size", "-1"], "--slot-size must be at least 0"),
    ):
        assert exit_code(run, args) == 2
        assert says in capsys.readouterr().err
