"""The compiled loop: rows that do not know of each other, donated state, statistics, and its twin in plain Python."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refusion_jax as rf
from refusion_jax.decoding import engine
from refusion_jax.decoding.autoregressive import Autoregressive
from refusion_jax.decoding.exact import Exact
from refusion_jax.decoding.methods import method_of
from tests import drive
from tests.twins import autoregressive, exact, golden, official

EOS, MASK = 2, 4  # of the golden models
NEAR_TIE = 1e-4  # decisions closer than this may turn with the order of float sums

pytestmark = pytest.mark.parametrize("model_name", ["A"], indirect=True)


def start(
    model: rf.Model, method: engine.Method, prompts: Sequence[Sequence[int]], budgets: Sequence[int], capacity: int
) -> engine.State:
    """A batch whose prompts are cached. What stands behind a prompt is no pad but nonsense."""
    tokens = np.random.default_rng(0).integers(5, 200, (len(prompts), capacity)).astype(np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    return drive.begin(model, method, tokens, lengths, np.array(budgets, np.int32))


def run(model: rf.Model, method: engine.Method, state: engine.State, limit: int = 1000) -> engine.State:
    rows = jnp.int32(len(state.rows.end))
    return engine.run(model.params, method, state, jnp.int32(limit), rows, config=model.config)


def answer(state: engine.State, row: int) -> list[int]:
    """What was written in a row before its end."""
    rows = state.rows
    P, end = int(rows.prompt_length[row]), int(rows.end[row])
    assert rows.committed[row, P:end].all(), "there is a hole"
    return rows.tokens[row, P:end].tolist()


# --- twenty rows of all lengths (traps D1, D2, D8, D13, D14, D16, D22) ----------------------------------------

LENGTHS, BUDGETS = (1, 127, 128, 129, 257), (1, 7, 52, 100)
CAPACITY = 257 + 100  # the longest row fills the cache to its last position
NEW = [budget for _ in LENGTHS for budget in BUDGETS]


def exact_method(slot_size: int = 4, block_size: int = 8, slot_threshold: float = 0.9) -> Exact:
    return Exact(jnp.float32(slot_threshold), slot_size, block_size, MASK, (EOS,))


@pytest.fixture(scope="module")
def texts(prompts: list[list[int]]) -> list[list[int]]:
    """One prompt for each row: golden prompts one behind the other, cut to length at the left."""
    text = [token for prompt in prompts for token in prompt]
    rows = [(length, 5 * row) for row, length in enumerate(length for length in LENGTHS for _ in BUDGETS)]
    return [text[shift + 300 - length : shift + 300] for length, shift in rows]


@pytest.fixture(scope="module")
def finished(model: rf.Model, texts: list[list[int]]) -> engine.State:
    return run(model, exact_method(), start(model, exact_method(), texts, NEW, CAPACITY))


def check_twin(state: engine.State, data: golden.Golden, texts: list[list[int]], method: Exact) -> None:
    for row, prompt in enumerate(texts):
        twin = exact.decode(
            data.model, prompt, slot_size=method.slot_size, block_size=method.block_size, max_new_tokens=NEW[row]
        )
        assert answer(state, row) == twin.token_ids or twin.margin < NEAR_TIE
        assert len(answer(state, row)) == NEW[row] or answer(state, row)[-1] == EOS


def test_rows_of_all_lengths_equal_the_sequential_process(
    finished: engine.State, data: golden.Golden, texts: list[list[int]]
) -> None:
    """Trap D13: every prompt length beside every budget; budgets that slots do not divide."""
    check_twin(finished, data, texts, exact_method())


@pytest.mark.slow
@pytest.mark.parametrize(("slot_size", "block_size"), [(8, 8), (32, 32)])
def test_rows_of_all_lengths_in_larger_slots(
    model: rf.Model, data: golden.Golden, texts: list[list[int]], slot_size: int, block_size: int
) -> None:
    method = exact_method(slot_size, block_size)
    check_twin(run(model, method, start(model, method, texts, NEW, CAPACITY)), data, texts, method)


def test_the_cache_holds_what_an_uncached_forward_in_commit_order_gives(
    finished: engine.State, data: golden.Golden
) -> None:
    """Trap D16: rejected drafts and other rows leave nothing behind, up to more than 300 positions."""
    state = jax.device_get(finished)
    assert np.max(state.rows.end) > 300
    for row in range(len(NEW)):
        P, pending = int(state.rows.prompt_length[row]), int(state.rows.pending[row])
        written = np.flatnonzero(state.rows.committed[row])[P:]
        written = written[np.argsort(state.rows.order[row][written])]
        written = written[written != pending]  # it waits for its keys and values
        positions = np.concatenate([np.arange(P), written])
        tokens = state.rows.tokens[row][positions]
        _, keys, values = data.model.forward(tokens, positions, np.tri(len(positions), dtype=bool))
        for cached, expected in ((state.cache.keys, keys), (state.cache.values, values)):
            cached = cached[:, row][:, :, positions].swapaxes(1, 2)  # [L, T, K, H]
            np.testing.assert_allclose(cached, expected, atol=1e-4, rtol=0)


def test_garbage_in_the_cache_changes_no_row(model: rf.Model, finished: engine.State, texts: list[list[int]]) -> None:
    """Trap D2."""
    state = start(model, exact_method(), texts, NEW, CAPACITY)
    after = run(model, exact_method(), poisoned(state))
    assert_same_rows(after, finished)


def poisoned(state: engine.State) -> engine.State:
    """1e4 in every cache entry that no token of the prompt owns."""
    empty = ~state.rows.committed[None, :, None, :, None]
    return state.replace(cache=jax.tree.map(lambda array: jnp.where(empty, 1e4, array), state.cache))


def assert_same_rows(one: engine.State, other: engine.State) -> None:
    for row in range(len(one.rows.end)):
        assert answer(one, row) == answer(other, row)
    np.testing.assert_array_equal(one.rows.forwards, other.rows.forwards)
    np.testing.assert_array_equal(one.rows.order, other.rows.order)


def test_a_row_does_not_depend_on_its_place(model: rf.Model, finished: engine.State, texts: list[list[int]]) -> None:
    """Trap D1: the batch shuffled."""
    order = np.random.default_rng(1).permutation(len(texts))
    shuffled = [texts[row] for row in order]
    state = run(model, exact_method(), start(model, exact_method(), shuffled, [NEW[row] for row in order], CAPACITY))
    for place, row in enumerate(order):
        assert answer(state, place) == answer(finished, row)


@hypothesis.settings(max_examples=5)
@hypothesis.given(
    rows=st.lists(st.tuples(st.integers(1, 257), st.integers(1, 60)), min_size=len(NEW), max_size=len(NEW)),
    alone=st.integers(0, len(NEW) - 1),
    seed=st.integers(0, 1000),
    slot_threshold=st.sampled_from([-1.0, 0.3, 0.9, 1.5]),
)
def test_a_row_does_not_depend_on_its_batch(
    model: rf.Model, rows: list[tuple[int, int]], alone: int, seed: int, slot_threshold: float
) -> None:
    """Trap D1: a row among others equals the same row among rows that are done at once; prompts make no sense."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(5, 224, length).tolist() for length, _ in rows]
    budgets = [budget for _, budget in rows]
    method = exact_method(slot_threshold=slot_threshold)
    together = run(model, method, start(model, method, texts, budgets, CAPACITY))
    others = [rng.integers(5, 224, length).tolist() for length in rng.permutation([length for length, _ in rows])]
    others[alone] = texts[alone]
    budgets = [budget if row == alone else 0 for row, budget in enumerate(budgets)]
    single = run(model, method, start(model, method, others, budgets, CAPACITY))
    assert answer(single, alone) == answer(together, alone)


def test_twenty_calls_with_donated_state_give_the_same(model: rf.Model, prompts: list[list[int]]) -> None:
    """Trap D14."""
    method = Autoregressive(8, MASK, (EOS,))
    first = None
    for _ in range(20):
        state = start(model, method, prompts[:4], [16] * 4, 128)
        after = run(model, method, state)
        assert state.cache.keys.is_deleted()
        after = jax.device_get(after)
        assert np.isfinite(after.cache.keys).all()
        first = after if first is None else first
        jax.tree.map(np.testing.assert_array_equal, after, first)


def test_the_loop_ends_at_its_limit_and_goes_on_from_there(
    model: rf.Model, finished: engine.State, texts: list[list[int]]
) -> None:
    """Trap D22: rows that need longer do not hold up the caller."""
    state = start(model, exact_method(), texts, NEW, CAPACITY)
    while not np.all(state.rows.done):
        before = int(state.step)
        state = run(model, exact_method(), state, limit=before + 16)
        assert int(state.step) == before + 16 or np.all(state.rows.done)
    assert_same_rows(state, finished)
    assert int(state.step) < engine.most_steps(max(NEW))


# --- the twin of the loop, statistics, traces ---------------------------------------------------------------

EXACT = rf.DecodeConfig(max_new_tokens=96, block_size=24)


@pytest.fixture(scope="module")
def answers(model: rf.Model, prompts: list[list[int]]) -> list[rf.Generation]:
    """The answers to one batch of 32, none of which has a near-tie."""
    assert np.all(exact.load("A", (8, 24))["margin"] > NEAR_TIE)
    return rf.generate(model, prompts[:32], EXACT, batch_size=32)


@pytest.mark.parametrize(
    "config",
    [
        EXACT,
        rf.DecodeConfig(max_new_tokens=96, method="ar"),
        rf.DecodeConfig(max_new_tokens=64, block_size=64, token_threshold=0.9, compat="official"),
    ],
    ids=["exact", "ar", "official"],
)
def test_the_compiled_loop_equals_its_twin_in_plain_python(
    model: rf.Model, data: golden.Golden, prompts: list[list[int]], config: rf.DecodeConfig
) -> None:
    near_tie = np.zeros(32, bool)
    if config.compat:
        near_tie = golden.arrays("A", "generate")["s03_fragile"]
    method = method_of(model.config, config)
    for row, out in enumerate(rf.generate(model, prompts[:32], config, batch_size=32)):
        driven = drive.decode(method, data.model, prompts[row], config.max_new_tokens)
        kept = [(offset, token) for offset, token in driven.committed if config.compat or offset < len(out.token_ids)]
        expected = [token for _, token in sorted(kept)], [offset for offset, _ in kept]
        stats, forwards = out.stats, (driven.plan_forwards, driven.verify_forwards, driven.draft_forwards)
        equal = (out.token_ids, out.commit_order) == expected
        equal &= (stats.plan_forwards, stats.verify_forwards, stats.draft_forwards) == forwards
        assert (equal and stats.positions == sum(driven.live)) or near_tie[row]


def test_statistics_are_those_of_a_plain_count(
    answers: list[rf.Generation], model: rf.Model, data: golden.Golden, prompts: list[list[int]]
) -> None:
    """Every step computes the smallest size that holds the windows of all rows; they share what is empty of it."""
    method = method_of(model.config, EXACT)
    live = [drive.decode(method, data.model, prompt, 96).live for prompt in prompts[:32]]
    steps = max(map(len, live))
    sizes = [(28, 156), (28, 235), (28, 353), (56, 530), (56, 796), (56, 1194), (56, 1792)]
    empty = []
    for step in range(steps):
        working = [entries[step] for entries in live if step < len(entries)]
        size = next(size for width, size in sizes if max(working) <= width and sum(working) <= size)
        empty.append(math.ceil((size - sum(working)) / len(working)))
    for row, out in enumerate(answers):
        assert out.stats.forwards == len(live[row])
        assert out.stats.positions == sum(live[row])
        assert out.stats.padded_positions == sum(live[row]) + sum(empty[: len(live[row])])
        assert out.stats.tokens == len(out.token_ids)
        assert out.stats.committed >= out.stats.tokens
        assert out.stats.prefill_positions == len(prompts[row])
        assert out.stats.seconds > 0


TRACED = rf.DecodeConfig(max_new_tokens=24, slot_size=4, block_size=8, token_threshold=0.9)


def test_a_trace_of_exact_decoding_tells_the_plans_of_the_sequential_process(
    model: rf.Model, data: golden.Golden, prompts: list[list[int]]
) -> None:
    for prompt, out in zip(prompts, rf.generate(model, prompts[:4], TRACED, trace=True), strict=False):
        twin = exact.decode(data.model, prompt, slot_size=4, block_size=8, max_new_tokens=24)
        check_trace(out, twin.committed)
        plans = [event for event in out.trace or [] if "open" in event]
        assert [event["open"] for event in plans] == [[first // 4 for first in plan.open] for plan in twin.plans]
        assert [event["chosen"] for event in plans] == [[first // 4 for first in plan.chosen] for plan in twin.plans]
        for event, plan in zip(plans, twin.plans, strict=True):
            np.testing.assert_allclose(event["certainties"], plan.certainties, atol=1e-4)


def test_a_trace_of_threshold_decoding(model: rf.Model, data: golden.Golden, prompts: list[list[int]]) -> None:
    config = dataclasses.replace(TRACED, verify="threshold")
    for prompt, out in zip(prompts, rf.generate(model, prompts[:4], config, trace=True), strict=False):
        twin = official.decode_threshold(
            data.model,
            prompt,
            max_new_tokens=24,
            slot_size=4,
            block_size=8,
            slot_threshold=0.9,
            token_threshold=0.9,
        )
        check_trace(out, twin.committed)
        assert sum("open" in event for event in out.trace or []) == twin.calls["plan"]


def test_a_trace_of_left_to_right_decoding(model: rf.Model, data: golden.Golden, prompts: list[list[int]]) -> None:
    config = dataclasses.replace(TRACED, method="ar")
    for prompt, out in zip(prompts, rf.generate(model, prompts[:4], config, trace=True), strict=False):
        twin = autoregressive.decode(data.model, prompt, max_new_tokens=24, first="mask", slot_size=4)
        check_trace(out, list(enumerate(twin.token_ids)))


def check_trace(out: rf.Generation, committed: list[tuple[int, int]]) -> None:
    """Steps taken one by one commit what the twin does, and the statistics count them."""
    events = out.trace
    assert events is not None
    assert [pair for event in events for pair in event["committed"]] == committed
    assert len(committed) == out.stats.committed
    counts = [sum(event["kind"] == kind for event in events) for kind in ("plan", "verify", "draft")]
    assert counts == [out.stats.plan_forwards, out.stats.verify_forwards, out.stats.draft_forwards]
    for event in events:
        assert set(event["accepted"]) <= {offset for offset, _ in event["drafts"]}
        assert set(event.get("chosen", [])) <= set(event.get("open", []))


# --- programs -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def compiled() -> Iterator[list[str]]:
    """The list of what is compiled inside, whether or not it is found in the cache on disk."""
    events: list[str] = []

    def listen(event: str, seconds: float, **attributes: Any) -> None:
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            events.append(str(attributes.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_settings_and_weights_of_one_bucket_share_one_program(
    answers: list[rf.Generation], model: rf.Model, prompts: list[list[int]]
) -> None:
    """Trap D23: another threshold, budget or checkpoint of the same shape compiles nothing."""
    other = rf.load(golden.DIRECTORY / "modelA0")
    rf.generate(model, prompts[:32], EXACT, batch_size=32)  # its programs may have been dropped since
    with compiled() as programs:
        jax.jit(lambda x: 2 * x)(1.0)
    assert len(programs) == 1  # they are counted
    others_prompts = [prompt.prompt_ids for prompt in golden.load("A0").prompts[:32]]
    with compiled() as programs:
        for change in ({"slot_threshold": 1.5}, {"slot_threshold": -1}, {"max_new_tokens": 90}):
            rf.generate(model, prompts[:32], dataclasses.replace(EXACT, **change), batch_size=32)
        outs = rf.generate(model.replace(params=other.params), others_prompts, EXACT, batch_size=32)
    assert programs == []
    twin = exact.load("A0", (8, 24))
    for row, out in enumerate(outs):
        assert out.token_ids == twin["token_ids"][row][: len(out.token_ids)].tolist() or twin["margin"][row] < NEAR_TIE
