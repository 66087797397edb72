"""The forward process: what the network is fed and asked, against the official code and its slow twin."""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from numpy.typing import NDArray

from refusion_jax.corrupt import LEAST_RATE, Corrupted, arrange, corrupt, left_to_right
from tests.twins import golden, training

MASK = 999  # no token of an example
BATCHES = range(9)


def labels(example: Corrupted) -> NDArray:
    """As in the official code: the target where it counts, NO_LABEL elsewhere."""
    return np.where((example.ar_weights > 0) | (example.masked_weights > 0), example.targets, training.NO_LABEL)


def check(example: Corrupted, expected: training.Row, rate: float, answer_length: int) -> None:
    """Everything is the twin's; weights are those that the twin's loss uses."""
    np.testing.assert_array_equal(example.inputs, expected.input_ids)
    np.testing.assert_array_equal(example.positions, expected.position_ids)
    np.testing.assert_array_equal(labels(example), expected.labels)
    np.testing.assert_array_equal(example.slots, expected.slots)
    masked = np.array(expected.masked, bool)
    predicted = np.array(expected.labels) != training.NO_LABEL
    np.testing.assert_array_equal(example.ar_weights, predicted & ~masked)
    np.testing.assert_allclose(example.masked_weights, masked / (rate * max(answer_length, 1)), rtol=1e-6)
    for array, dtype in zip(example, [np.int32] * 3 + [np.float32] * 2 + [np.int32], strict=True):
        assert array.dtype == dtype


# --- the official code --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", BATCHES)
def test_recorded_noise_gives_the_official_arrays(model_name: str, number: int) -> None:
    """Must-show a. Also that the twin is the official process, down to its draws from Python's generator."""
    arrays = golden.arrays(model_name, "train_forward")
    table = json.loads((golden.DIRECTORY / f"golden{model_name}" / "train_forward.json").read_text())
    record = table["batches"][number]
    rng = random.Random(record["python_random_seed"])
    for index, row in enumerate(record["rows"]):
        official = {name: arrays[f"b{number}_{name}"][index] for name in ("input_ids", "position_ids", "labels")}
        real = int(arrays[f"b{number}_in_attention_mask"][index].sum())
        tokens = arrays[f"b{number}_in_input_ids"][index, :real]
        prompt_length = int(arrays[f"b{number}_in_prompt_lengths"][index, 0])

        clean = np.array(row["clean_order"], int)
        example = arrange(tokens, prompt_length, row["slot_size"], row["p_mask"], clean, mask_token_id=4)
        np.testing.assert_array_equal(example.inputs, official["input_ids"][:real])
        np.testing.assert_array_equal(example.positions, official["position_ids"][:real])
        np.testing.assert_array_equal(labels(example), official["labels"][:real])
        assert np.all(official["labels"][real:] == training.NO_LABEL)
        masked = arrays[f"b{number}_masked_indices"][index]
        np.testing.assert_array_equal(example.masked_weights > 0, masked[:real])
        weight = 1 / (arrays[f"b{number}_p_mask"][index] * arrays[f"b{number}_answer_lengths"][index])
        np.testing.assert_allclose(example.masked_weights, masked[:real] * weight[:real], rtol=1e-6)

        noise = training.draw(rng, real - prompt_length)
        assert noise == training.Noise(row["slot_size"], row["p_mask"], row["u"], row["clean_order"])
        twin = training.forward_process(tokens.tolist(), prompt_length, noise.slot_size, noise.clean_order, mask_id=4)
        check(example, twin, noise.p_mask, real - prompt_length)


# --- any example --------------------------------------------------------------------------------------------


@st.composite
def examples(draw: st.DrawFn) -> dict[str, Any]:
    prompt_length = draw(st.integers(0, 9))
    answer_length = draw(st.integers(0, 40))
    token = st.integers(0, 20)  # so few that many are equal
    tokens = draw(st.lists(token, min_size=prompt_length + answer_length, max_size=prompt_length + answer_length))
    slot_size = draw(st.integers(1, 9) | st.sampled_from([answer_length or 1, answer_length + 1, 64]))
    return {"tokens": np.array(tokens, np.int32), "prompt_length": prompt_length, "slot_size": slot_size}


@hypothesis.given(examples(), st.data())
def test_any_noise_gives_the_twins_arrays(example: dict[str, Any], data: st.DataObject) -> None:
    tokens, prompt_length, slot_size = example.values()
    answer_length = len(tokens) - prompt_length
    slots = list(range(-(-answer_length // slot_size)))
    clean = data.draw(st.permutations(slots))[: data.draw(st.integers(0, len(slots)))]
    rate = data.draw(st.floats(LEAST_RATE, 1))
    ours = arrange(tokens, prompt_length, slot_size, rate, np.array(clean, int), MASK)
    twin = training.forward_process(tokens.tolist(), prompt_length, slot_size, clean, MASK)
    check(ours, twin, rate, answer_length)


@hypothesis.given(examples(), st.integers(0, 2**32), st.booleans())
def test_an_example_is_reordered_and_masked_by_whole_slots(example: dict[str, Any], seed: int, permute: bool) -> None:
    tokens, prompt_length, slot_size = example.values()
    answer_length = len(tokens) - prompt_length
    before = tokens.copy()
    out = corrupt(**example, rng=np.random.default_rng(seed), mask_token_id=MASK, permute=permute)
    np.testing.assert_array_equal(tokens, before)
    again = corrupt(**example, rng=np.random.default_rng(seed), mask_token_id=MASK, permute=permute)
    for one, other in zip(out, again, strict=True):
        np.testing.assert_array_equal(one, other)

    # Every token is there once, at its own position, or its mask is.
    assert sorted(out.positions) == list(range(len(tokens)))
    masked = out.inputs == MASK
    np.testing.assert_array_equal(np.where(masked, out.targets, out.inputs), tokens[out.positions])
    # The prompt is as it was, and asked nothing.
    prompt = slice(0, prompt_length)
    np.testing.assert_array_equal(out.inputs[prompt], tokens[prompt])
    np.testing.assert_array_equal(out.positions[prompt], np.arange(prompt_length))
    assert not out.ar_weights[prompt].any() and not out.masked_weights[prompt].any()
    assert np.all(out.slots[prompt] == -1)
    # Slots are whole, in one piece, and the masked ones ascend behind the clean ones.
    order = list(dict.fromkeys(out.slots[prompt_length:].tolist()))
    assert sorted(order) == list(range(-(-answer_length // slot_size)))
    states = []
    for slot in order:
        places = np.flatnonzero(out.slots == slot)
        start = prompt_length + slot * slot_size
        np.testing.assert_array_equal(out.positions[places], np.arange(start, min(start + slot_size, len(tokens))))
        np.testing.assert_array_equal(places, np.arange(places[0], places[0] + len(places)))
        states.append(bool(masked[places[0]]))
        assert np.all(masked[places] == states[-1])
    assert states == sorted(states)
    behind = order[states.count(False) :]
    assert behind == sorted(behind)
    if not permute:
        assert order[: states.count(False)] == sorted(order[: states.count(False)])
    # What is asked: every masked token in its place, and of a clean slot every token but the first.
    asked = collections.Counter(out.positions[masked & (out.masked_weights > 0)].tolist())
    asked.update((out.positions[out.ar_weights > 0] + 1).tolist())
    first = set(range(prompt_length, len(tokens), slot_size))
    clean_first = first & set(out.positions[~masked].tolist())
    assert asked == collections.Counter(set(range(prompt_length, len(tokens))) - clean_first)
    np.testing.assert_array_equal(out.targets[out.ar_weights > 0], tokens[out.positions[out.ar_weights > 0] + 1])
    # One masking rate for all of the answer.
    weights = set(out.masked_weights[masked].tolist())
    assert len(weights) <= 1
    for weight in weights:
        assert LEAST_RATE * (1 - 1e-6) <= 1 / (weight * answer_length) <= 1 + 1e-6


class Scripted:
    """A generator that draws what it is told to: the rate's uniform, then those of the slots."""

    def __init__(self, of_rate: float, of_slots: list[float]):
        self.draws: list[Any] = [of_rate, np.array(of_slots)]

    def random(self, size: int | None = None) -> Any:
        draw = self.draws.pop(0)
        assert np.shape(draw) == (() if size is None else (size,))
        return draw

    def shuffle(self, clean: NDArray) -> None:
        clean[:] = clean[::-1].copy()


def test_a_slot_is_masked_if_its_draw_is_below_the_rate() -> None:
    """By hand: uniform 0.5 gives the rate 0.999 / 2 + 0.001 = 0.5005, and a draw that equals it is not below it."""
    rng: Any = Scripted(0.5, [0.4, 0.5005, 0.6, 0.1])
    out = corrupt(np.arange(10, 19, dtype=np.int32), 2, 2, rng, mask_token_id=MASK)
    assert out.inputs.tolist() == [10, 11, 16, 17, 14, 15, MASK, MASK, MASK]
    assert labels(out).tolist() == [-100, -100, 17, -100, 15, -100, 12, 13, 18]
    np.testing.assert_allclose(out.masked_weights, [0] * 6 + [1 / (0.5005 * 7)] * 3, rtol=1e-6)


def test_the_least_rate_is_a_thousandth() -> None:
    """So that no weight is larger than 1,000 / answer length."""
    rng: Any = Scripted(0.0, [0.0, 0.001])
    out = corrupt(np.arange(4, dtype=np.int32), 0, 2, rng, mask_token_id=MASK)
    np.testing.assert_allclose(out.masked_weights, [0, 0, 250, 250], rtol=1e-6)


# --- how noise is distributed -------------------------------------------------------------------------------


def chi_square(counts: Sequence[int]) -> float:
    """Against equal shares."""
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 for count in counts) / expected


AT_MOST = {1: 10.8, 3: 16.3, 4: 18.5, 5: 20.5, 9: 27.9}
"""Degrees of freedom -> the chi-square that one in 1,000 right distributions exceeds. Seeds here are fixed."""


@pytest.fixture(scope="module")
def drawn() -> list[Corrupted]:
    """Four slots of one token behind a prompt of one."""
    rng = np.random.default_rng(0)
    return [corrupt(np.arange(5, dtype=np.int32), 1, 1, rng, mask_token_id=MASK) for _ in range(10_000)]


def clean_order(example: Corrupted) -> tuple[int, ...]:
    return tuple(example.slots[1:][example.inputs[1:] != MASK].tolist())


def test_every_slot_is_masked_half_of_the_time(drawn: list[Corrupted]) -> None:
    for slot in range(4):
        clean = sum(slot in clean_order(example) for example in drawn)
        assert chi_square([clean, len(drawn) - clean]) < AT_MOST[1]


def test_every_number_of_masked_slots_is_as_likely(drawn: list[Corrupted]) -> None:
    """It follows from one uniform rate per example; a rate per slot, or a fixed one, would favour two of four."""
    counts = collections.Counter(len(clean_order(example)) for example in drawn)
    assert chi_square([counts[number] for number in range(5)]) < AT_MOST[4]


def test_every_order_of_the_clean_slots_is_as_likely(drawn: list[Corrupted]) -> None:
    orders = collections.Counter(order for order in map(clean_order, drawn) if sorted(order) == [0, 1, 2])
    assert len(orders) == 6
    assert chi_square(list(orders.values())) < AT_MOST[5]


def test_masking_rates_are_uniform() -> None:
    """Rates show in the weights. An answer of 400 slots has a masked one, but for the smallest rates."""
    rng = np.random.default_rng(0)
    tokens = np.arange(400, dtype=np.int32)
    weights = [corrupt(tokens, 0, 1, rng, mask_token_id=MASK).masked_weights.max() for _ in range(2_000)]
    rates = np.array([1 / (400 * weight) if weight else LEAST_RATE for weight in weights])
    assert rates.min() >= LEAST_RATE * (1 - 1e-6) and rates.max() <= 1 + 1e-6
    assert chi_square(np.histogram(rates, bins=10, range=(0, 1 + 1e-6))[0].tolist()) < AT_MOST[9]


# --- left to right ------------------------------------------------------------------------------------------


def test_left_to_right_asks_every_token_of_the_answer_from_the_one_before() -> None:
    out = left_to_right(np.array([7, 8, 9, 5, 2], np.int32), 2)
    assert out.inputs.tolist() == [7, 8, 9, 5, 2]
    assert out.positions.tolist() == [0, 1, 2, 3, 4]
    assert labels(out).tolist() == [-100, 9, 5, 2, -100]
    assert out.ar_weights.tolist() == [0, 1, 1, 1, 0]
    assert not out.masked_weights.any()


@pytest.mark.parametrize(("tokens", "prompt_length", "asked"), [([7, 8], 2, []), ([7, 2], 0, [2]), ([2], 0, [])])
def test_left_to_right_with_an_empty_prompt_or_answer(tokens: list[int], prompt_length: int, asked: list[int]) -> None:
    out = left_to_right(np.array(tokens, np.int32), prompt_length)
    assert out.targets[out.ar_weights > 0].tolist() == asked


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"slot_size": 0}, "slot_size=0 must be at least 1"),
        ({"slot_size": -4}, "slot_size=-4 must be at least 1"),
        ({"prompt_length": 6}, "prompt_length=6 must lie in 0..5, the length of the example"),
        ({"prompt_length": -1}, "prompt_length=-1 must lie in 0..5"),
    ],
)
def test_what_cannot_be_corrupted_is_refused_in_a_sentence(arguments: dict[str, int], sentence: str) -> None:
    settings: dict[str, Any] = {"prompt_length": 2, "slot_size": 2} | arguments
    with pytest.raises(ValueError, match=sentence):
        corrupt(np.arange(5, dtype=np.int32), **settings, rng=np.random.default_rng(0), mask_token_id=MASK)
