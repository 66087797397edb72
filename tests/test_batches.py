"""Which examples a step takes, their noise, and how they lie in rows."""

from __future__ import annotations

import collections

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from refusion_jax.corrupt import Corrupted, arrange
from refusion_jax.data import batches, worksheet
from refusion_jax.data.dataset import Example
from refusion_jax.training.config import ForwardConfig
from tests.twins import training

MASK = 999  # no token of an example


def epoch_of(examples: int, seed: int, epoch: int) -> list[int]:
    places = range(epoch * examples, (epoch + 1) * examples)
    found = [batches.example_at(place, examples, seed) for place in places]
    assert {number for number, _ in found} == {epoch}
    return [index for _, index in found]


# --- which examples -----------------------------------------------------------------------------------------


@hypothesis.given(st.integers(1, 60), st.integers(0, 2**40), st.integers(0, 1000))
def test_every_example_comes_once_an_epoch(examples: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_of(examples, seed, epoch)) == list(range(examples))


def test_every_epoch_and_every_seed_has_its_own_order() -> None:
    orders = {tuple(epoch_of(50, seed, epoch)) for seed in range(8) for epoch in range(8)}
    assert len(orders) == 64
    assert tuple(range(50)) not in orders


def test_a_place_gives_the_same_example_whatever_was_asked_before() -> None:
    """A resumed run starts in the middle, and hosts ask for different places."""
    forwards = [batches.example_at(place, 7, seed=3) for place in range(70)]
    assert [batches.example_at(place, 7, seed=3) for place in reversed(range(70))] == forwards[::-1]


# --- their noise --------------------------------------------------------------------------------------------

EXAMPLE = Example(np.arange(100, dtype=np.int32), 20)


def noisy(
    seed: int = 0, epoch: int = 0, index: int = 0, progress: float = 1.0, config: ForwardConfig | None = None
) -> Corrupted:
    return batches.noisy(EXAMPLE, config or ForwardConfig(), MASK, batches.noise(seed, epoch, index), progress)


def slot_size_of(example: Corrupted) -> int:
    """Of an answer that has more than one slot."""
    return int(np.sum(example.slots == 0))


def test_noise_is_the_same_for_the_same_seed_epoch_and_example_and_for_no_others() -> None:
    keys = [(seed, epoch, index) for seed in range(5) for epoch in range(5) for index in range(5)]
    keys += [(2**32, 0, 0), (0, 2**32, 0), (0, 0, 2**32)]
    seen = {key: (noisy(*key).inputs.tobytes(), noisy(*key).masked_weights.tobytes()) for key in keys}
    assert len(set(seen.values())) >= len(keys) - 1  # with all masked, or nothing, and the same size, two may be equal
    assert {key: (noisy(*key).inputs.tobytes(), noisy(*key).masked_weights.tobytes()) for key in keys[::-1]} == seen


def test_noise_does_not_follow_the_order_of_examples() -> None:
    """Both come from the same seed: an example drawn early would always get the noise of early draws."""
    streams = [batches.noise(seed, 0, 0).random(4).tolist() for seed in range(20)]
    orders = [np.random.default_rng([batches.ORDER, seed, 0]).random(4).tolist() for seed in range(20)]
    assert not {tuple(stream) for stream in streams} & {tuple(order) for order in orders}


def test_slot_sizes_are_drawn_equally_often() -> None:
    sizes = collections.Counter(slot_size_of(noisy(index=index)) for index in range(2_000))
    assert sorted(sizes) == [4, 8, 16, 32]
    assert sum((count - 500) ** 2 for count in sizes.values()) / 500 < 16.3  # chi-square of one in 1,000


def test_a_single_slot_size_is_a_fixed_one() -> None:
    config = ForwardConfig(slot_sizes=(6,))
    assert {slot_size_of(noisy(index=index, config=config)) for index in range(50)} == {6}


@pytest.mark.parametrize("permute", [True, False])
def test_clean_slots_are_permuted_only_if_asked(permute: bool) -> None:
    ascend = []
    for index in range(50):
        out = noisy(index=index, config=ForwardConfig(slot_sizes=(4,), permute=permute))
        ascend.append(bool(np.all(np.diff(out.positions[out.inputs != MASK]) > 0)))
    assert all(ascend) if not permute else sum(ascend) < 25


def test_the_curriculum_admits_sizes_one_after_another_the_smallest_first() -> None:
    config = ForwardConfig(slot_sizes=(4, 8, 16, 32), curriculum=0.5)
    admitted = [batches.slot_sizes_at(config, step / 64) for step in range(64)]
    changes = [step for step in range(1, 64) if admitted[step] != admitted[step - 1]]
    assert changes == [8, 16, 24]
    assert [admitted[step] for step in [0, *changes]] == [(4,), (4, 8), (4, 8, 16), (4, 8, 16, 32)]
    assert {slot_size_of(noisy(index=index, progress=0.2, config=config)) for index in range(50)} == {4, 8}


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_without_a_curriculum_all_sizes_are_admitted_from_the_start(progress: float) -> None:
    assert batches.slot_sizes_at(ForwardConfig(slot_sizes=(2, 4)), progress) == (2, 4)


@hypothesis.given(st.integers(1, 7), st.floats(0, 1), st.floats(0, 1))
def test_at_any_time_of_any_curriculum_a_size_is_admitted(number: int, curriculum: float, progress: float) -> None:
    config = ForwardConfig(slot_sizes=tuple(range(1, number + 1)), curriculum=curriculum)
    now = batches.slot_sizes_at(config, progress)
    assert now and now == config.slot_sizes[: len(now)]
    if progress >= curriculum:
        assert now == config.slot_sizes


def test_plain_left_to_right_training_needs_no_mask() -> None:
    out = batches.noisy(EXAMPLE, ForwardConfig(objective="ar"), None, batches.noise(0, 0, 0), 0.0)
    np.testing.assert_array_equal(out.inputs, EXAMPLE.tokens)
    np.testing.assert_array_equal(np.flatnonzero(out.ar_weights), np.arange(19, 99))


# --- rows ---------------------------------------------------------------------------------------------------


@hypothesis.given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 100))
def test_packing_never_exceeds_loses_or_doubles(lengths: list[int], row_length: int) -> None:
    rows = batches.pack(lengths, row_length)
    assert sorted(example for row in rows for example in row) == list(range(len(lengths)))
    used = [sum(lengths[example] for example in row) for row in rows]
    assert all(0 < tokens <= row_length for tokens in used)
    # Two rows that would fit into one are never both there.
    assert all(one + other > row_length for i, one in enumerate(used) for other in used[:i])


def test_packed_worksheets_leave_little_room() -> None:
    """192 tokens hold the longest worksheet."""
    lengths = [
        sum(len(text.split()) for text in worksheet.example("train", 0, index).values()) + 3 for index in range(512)
    ]
    for row_length, least in ((192, 0.87), (384, 0.97), (512, 0.98)):
        rows = batches.pack(lengths, row_length)
        assert sum(lengths) / (len(rows) * row_length) > least


def test_an_example_longer_than_a_row_is_refused_with_both_lengths() -> None:
    with pytest.raises(ValueError, match="an example of 12 tokens does not fit into a row of 10"):
        batches.pack([3, 12, 5], 10)


@hypothesis.given(st.data())
def test_rows_are_laid_out_as_in_the_twin(data: st.DataObject) -> None:
    number = data.draw(st.integers(0, 8))
    ours: list[Corrupted] = []
    twins: list[training.Row] = []
    for _ in range(number):
        length = data.draw(st.integers(1, 20))
        prompt_length = data.draw(st.integers(0, length))
        slot_size = data.draw(st.integers(1, 8))
        slots = list(range(-(-(length - prompt_length) // slot_size)))
        clean = data.draw(st.permutations(slots))[: data.draw(st.integers(0, len(slots)))]
        tokens = np.arange(1, length + 1, dtype=np.int32)
        ours.append(arrange(tokens, prompt_length, slot_size, 0.5, np.array(clean, int), MASK))
        twins.append(training.forward_process(tokens.tolist(), prompt_length, slot_size, clean, MASK))
    rows = batches.pack([len(example.inputs) for example in ours], 24)
    row_count = len(rows) + data.draw(st.integers(0, 2))

    batch = batches.lay_out(ours.__getitem__, rows, row_count, 24)
    twin = training.lay_out([[twins[example] for example in row] for row in rows], row_count, 24)
    shape = (row_count, 24)
    for array, dtype in zip(batch, [np.int32] * 4 + [np.float32] * 2, strict=True):
        assert array.shape == shape and array.dtype == dtype
    np.testing.assert_array_equal(batch.inputs, np.reshape(twin.input_ids, shape))
    np.testing.assert_array_equal(batch.positions, np.reshape(twin.position_ids, shape))
    np.testing.assert_array_equal(batch.segments, np.reshape(twin.segments, shape))
    labels = np.where((batch.ar_weights > 0) | (batch.masked_weights > 0), batch.targets, training.NO_LABEL)
    np.testing.assert_array_equal(labels, np.reshape(twin.labels, shape))
    for name in ("ar_weights", "masked_weights"):
        got, given = getattr(batch, name), [getattr(example, name) for example in ours]
        assert collections.Counter(got[got > 0].tolist()) == collections.Counter(
            weight for weights in given for weight in weights[weights > 0].tolist()
        )
