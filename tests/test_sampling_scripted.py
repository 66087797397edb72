"""Sampling and planners whatever the model says: scripted models against the sequential process with the same noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.decoding import engine
from refusion_jax.decoding.autoregressive import Autoregressive
from refusion_jax.decoding.exact import Exact
from refusion_jax.decoding.plan import certainties
from refusion_jax.decoding.sampling import Sampling
from refusion_jax.decoding.threshold import Threshold
from tests import drive
from tests.test_scripted import CAPACITY, EOS, MASK, HashModel, lengths, models, more, prompt_of, thresholds
from tests.twins import autoregressive, exact
from tests.twins.noise import PLANNERS

NEAR_TIE = 1e-4  # decisions closer than this may turn with the order of float sums


# --- sampling -----------------------------------------------------------------------------------------------

few = hypothesis.settings(max_examples=40)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    """Always with a top-k and a top-p, so that one program serves them all; 99 and 1 leave everything."""
    return Sampling(
        jnp.float32(draw(st.sampled_from([1e-3, 0.3, 1.0, 2.5, 100.0]))),
        jnp.int32(draw(st.sampled_from([99, 99, 1, 2, 4]))),
        jnp.float32(draw(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.01]))),
    )


requests = st.tuples(*[st.integers(0, 5)] * 3)  # seed, request, sample


@pytest.mark.parametrize(
    ("slot_size", "block_size"),
    [(4, 8), *more((1, 1), (1, 5), (2, 2), (3, 9), (2, 8), (4, 4), (5, 10), (8, 8), (4, 32), (16, 32))],
)
@few
@hypothesis.given(models(), lengths, thresholds, samplings(), requests)
def test_sampled_decoding_writes_the_tokens_of_the_sequential_process_in_its_order(
    slot_size: int,
    block_size: int,
    model: HashModel,
    length: tuple[int, int],
    threshold: float,
    drawing: Sampling,
    numbers: tuple[int, int, int],
) -> None:
    prompt, new = prompt_of(length[0]), length[1]
    method = Exact(jnp.float32(threshold), slot_size, block_size, MASK, (EOS,), drawing)
    driven = drive.decode(method, model, prompt, new, CAPACITY, numbers)
    choose = drive.choice_of(drawing, numbers)
    twin = exact.decode(
        model,
        prompt,
        slot_size=slot_size,
        block_size=block_size,
        max_new_tokens=new,
        slot_threshold=threshold,
        choose=choose,
    )
    assert driven.token_ids == twin.token_ids
    assert driven.committed == twin.committed
    assert driven.plans == [(plan.open, plan.chosen) for plan in twin.plans]
    assert driven.forwards <= len(driven.committed) + driven.plan_forwards
    expected = [choose.drawn[len(prompt) + offset].logprobs[0] for offset in range(len(twin.token_ids))]
    np.testing.assert_allclose(driven.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("slot_size", [3, *more(1, 2, 8)])
@pytest.mark.parametrize("first", ["mask", "token"])
@few
@hypothesis.given(models(), lengths, samplings(), requests)
def test_sampled_decoding_from_left_to_right_writes_the_tokens_of_one_at_a_time(
    slot_size: int,
    first: Any,
    model: HashModel,
    length: tuple[int, int],
    drawing: Sampling,
    numbers: tuple[int, int, int],
) -> None:
    prompt, new = prompt_of(length[0]), length[1]
    method = Autoregressive(slot_size, MASK if first == "mask" else None, (EOS,), drawing)
    driven = drive.decode(method, model, prompt, new, CAPACITY, numbers)
    choose = drive.choice_of(drawing, numbers)
    twin = autoregressive.decode(model, prompt, max_new_tokens=new, first=first, slot_size=slot_size, choose=choose)
    assert driven.token_ids == twin.token_ids
    expected = [choose.drawn[len(prompt) + offset].logprobs[0] for offset in range(len(twin.token_ids))]
    np.testing.assert_allclose(driven.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize(("slot_size", "block_size"), [(2, 8), *more((3, 9), (8, 8), (1, 5))])
@few
@hypothesis.given(models(), lengths, thresholds, thresholds, samplings(), requests)
def test_sampled_threshold_decoding_writes_no_mask_no_hole_and_nothing_behind_an_eos(
    slot_size: int,
    block_size: int,
    model: HashModel,
    length: tuple[int, int],
    threshold: float,
    token_threshold: float,
    drawing: Sampling,
    numbers: tuple[int, int, int],
) -> None:
    method = Threshold(
        jnp.float32(threshold), jnp.float32(token_threshold), slot_size, block_size, MASK, (EOS,), drawing
    )
    driven = drive.decode(method, model, prompt_of(length[0]), length[1], CAPACITY, numbers)
    tokens = driven.token_ids
    assert MASK not in tokens and max(tokens) < model.tokenizer_length
    assert EOS not in tokens[:-1]
    assert len(tokens) == length[1] or tokens[-1] == EOS
    assert [token for offset, token in sorted(driven.committed) if offset < len(tokens)] == tokens
    assert np.all(np.isfinite(driven.logprobs)) and max(driven.logprobs) <= 1e-6


# --- planners -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", ["mean", "entropy", "random", "left_to_right"])
@hypothesis.settings(max_examples=30)
@hypothesis.given(models(), lengths, st.sampled_from([-1.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.5]), requests)
def test_slots_are_chosen_by_the_planner_whatever_the_model(
    planner: str, model: HashModel, length: tuple[int, int], threshold: float, numbers: tuple[int, int, int]
) -> None:
    model, prompt, new = dataclasses.replace(model, ties=False), prompt_of(length[0]), length[1]
    method = Exact(jnp.float32(threshold), 3, 9, MASK, (EOS,), None, planner)
    driven = drive.decode(method, model, prompt, new, CAPACITY, numbers)
    twin = exact.decode(
        model,
        prompt,
        slot_size=3,
        block_size=9,
        max_new_tokens=new,
        slot_threshold=threshold,
        planner=PLANNERS[planner](*numbers),
    )
    plans = [(plan.open, plan.chosen) for plan in twin.plans]
    assert (driven.committed, driven.plans) == (twin.committed, plans) or twin.margin < NEAR_TIE


@pytest.mark.parametrize("verify", ["exact", "threshold"])
@few
@hypothesis.given(models(), lengths, st.sampled_from([0.9, 0.37, 1.5]))
def test_from_left_to_right_slots_are_written_one_after_the_other(
    verify: str, model: HashModel, length: tuple[int, int], threshold: float
) -> None:
    sizes, alpha = (3, 9, MASK, (EOS,)), jnp.float32(threshold)
    method: engine.Method = Exact(alpha, *sizes, None, "left_to_right")
    if verify == "threshold":
        method = Threshold(alpha, jnp.float32(0.4), *sizes, None, "left_to_right")
    driven = drive.decode(method, model, prompt_of(length[0]), length[1], CAPACITY)
    assert all(chosen == is_open[:1] for is_open, chosen in driven.plans)
    assert [offset for offset, _ in driven.committed] == list(range(len(driven.token_ids)))


def test_what_planners_are_by_hand() -> None:
    """Two slots of two masks, the second one short: logarithms of 1/2, 1/8, 1/3."""
    certainty, live = jnp.log(jnp.array([1 / 2, 1 / 8, 1 / 3])), jnp.ones(3, bool)
    key = jax.random.fold_in(jax.random.key(7), 0)

    def rated(planner: str) -> list[float]:
        return np.exp(certainties(planner, certainty, live, jnp.int32(40), jax.random.key_data(key), 2)).tolist()

    assert rated("confidence") == pytest.approx([1 / 2, 1 / 3])
    assert rated("entropy") == pytest.approx([1 / 2, 1 / 3])
    assert rated("mean") == pytest.approx([1 / 4, 1 / 3])
    assert rated("left_to_right") == pytest.approx([np.exp(-1), np.exp(-2)])
    bits = [
        jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, position), 2**32 - 1))[0]
        for position in (40, 42)
    ]
    assert rated("random") == pytest.approx([int(word) / 2**32 for word in bits], abs=1e-6)
