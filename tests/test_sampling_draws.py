"""Draws: what is read off the logits, noise that is fair, and whole texts that are as frequent as they are likely.

That the process as a whole has the right distribution is shown on a toy model, all of whose outcomes can be counted.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from numpy.typing import NDArray

import refusion_jax as rf
from refusion_jax.decoding import engine, sampling
from refusion_jax.decoding.methods import method_of
from refusion_jax.decoding.sampling import Sampling
from refusion_jax.model import transformer
from refusion_jax.sharding import ROWS, TENSOR, per_shard, put_rows, reshard
from tests import drive
from tests.twins import autoregressive, exact, noise
from tests.twins.context import Choice, Choose
from tests.twins.noise import PLANNERS, sampled
from tests.twins.qwen3 import Qwen3

NEAR_TIE = 1e-4  # decisions closer than this may turn with the order of float sums
SURE = 1e-4  # an event less likely than this does not happen by chance


# --- what score reads off the logits ------------------------------------------------------------------------

V = 40


@jax.jit
def scored(logits: jax.Array, allowed: jax.Array, drawing: Sampling, keys: jax.Array) -> sampling.Scores:
    return sampling.score(logits, allowed, None, drawing, keys, candidates=5)


def keys_of(request: tuple[int, int, int], positions: int) -> jax.Array:
    return jnp.stack([sampling.fold_in(sampling.request_key(*request), jnp.int32(p)) for p in range(positions)])


@hypothesis.given(
    seed=st.integers(0, 10**6),
    levels=st.sampled_from([1, 2, 5, 1000]),
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
    top_k=st.sampled_from([1, 2, 3, 10, 39, 40, 41, 2**31 - 1]),
    top_p=st.sampled_from([1e-30, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_draws_are_those_of_a_plain_sort(seed: int, levels: int, temperature: float, top_k: int, top_p: float) -> None:
    """Equally likely ids stay or go together, banned ids never come, and what is left is as likely as it should be."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, (3, V)).astype(np.float32) * np.float32(8 / levels)
    allowed = rng.random(V) < 0.8
    allowed[rng.integers(0, V)] = True
    drawing = Sampling(jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p))
    scores = jax.device_get(scored(logits, allowed, drawing, keys_of((seed, 1, 2), 3)))
    choose = sampled(seed, 1, 2, temperature, top_k, top_p)
    for row in range(3):
        own = np.where(allowed, logits[row].astype(np.float64), -np.inf)
        own -= np.log(np.exp(own).sum())
        ranked, log_p = choose.scores(own, row)
        if any(not np.array_equal(np.isinf(near), np.isinf(log_p)) for near in choose.nearby(own)):
            continue
        order = np.argsort(-ranked, kind="stable")[: min(5, np.isfinite(log_p).sum())]
        assert np.isfinite(log_p[scores.tokens[row, : len(order)]]).all()
        gaps = -np.diff(np.append(ranked[order], np.sort(ranked)[::-1][len(order) : len(order) + 1]))
        if np.all(gaps > NEAR_TIE):
            assert scores.tokens[row, : len(order)].tolist() == order.tolist()
            assert scores.logprob[row] == pytest.approx(log_p[order[0]], abs=1e-4)
        assert scores.certainty[row] == pytest.approx(own.max(), abs=1e-4)


@pytest.mark.parametrize(
    ("top_k", "top_p", "left"),
    [
        (1, 1.0, [1, 2]),
        (2, 1.0, [1, 2]),
        (3, 1.0, [1, 2, 4, 6]),
        (4, 1.0, [1, 2, 4, 6]),
        (5, 1.0, [0, 1, 2, 4, 6]),
        (6, 1.0, [0, 1, 2, 4, 6]),
        (2**31 - 1, 1.0, [0, 1, 2, 4, 6]),
        (9, 1e-38, [1, 2]),
        (9, 0.65, [1, 2]),
        (9, 0.67, [1, 2, 4, 6]),
        (9, 0.98, [1, 2, 4, 6]),
        (9, 0.99, [0, 1, 2, 4, 6]),
        (3, 0.70, [1, 2, 4, 6]),  # of what top-k leaves
        (2, 0.99, [1, 2]),
    ],
)
def test_what_top_k_and_then_top_p_leave(top_k: int, top_p: float, left: list[int]) -> None:
    """Of weights 2, 60, 60, -, 30, -, 30 (of 182: 0.66, 0.99, 1); two ids are banned."""
    logits = jnp.log(jnp.array([2.0, 60, 60, 1e9, 30, 1e9, 30]))
    allowed = jnp.array([True, True, True, False, True, False, True])
    drawing = Sampling(jnp.float32(1), jnp.int32(top_k), jnp.float32(top_p))
    keys = jax.vmap(sampling.fold_in, (None, 0))(sampling.request_key(0, 0, 0), jnp.arange(2000))
    scores = jax.device_get(scored(jnp.tile(logits, (2000, 1)), allowed, drawing, keys))
    assert sorted(set(scores.tokens[:, 0].tolist())) == left
    weights = np.array([2.0, 60, 60, 0, 30, 0, 30])
    expected = np.log(weights[scores.tokens[:, 0]] / weights[left].sum())
    np.testing.assert_allclose(scores.logprob, expected, atol=1e-5)


def test_parts_of_the_vocabulary_draw_the_same_tokens() -> None:
    """Every device draws for its own ids; top-k and top-p count over all of them."""
    rng = np.random.default_rng(0)
    logits = (rng.integers(0, 6, (4, 6, 32)) * 0.7).astype(np.float32)
    allowed = rng.random(32) < 0.8
    asked = rng.integers(0, 32, (4, 6)).astype(np.int32)
    keys = keys_of((3, 4, 5), 24).reshape(4, 6, 2)
    mesh = rf.make_mesh(4, 1, 2)

    def of_shard(
        logits: jax.Array, allowed: jax.Array, asked: jax.Array, drawing: Sampling, keys: jax.Array, axis: Any = TENSOR
    ) -> sampling.Scores:
        return sampling.score(logits, allowed, asked, drawing, keys, candidates=5, entropy=True, axis=axis)

    for top_k, top_p, untempered in ((7, 0.8, False), (1, 0.5, True), (99, 1.0, False)):
        drawing = Sampling(jnp.float32(1.3), jnp.int32(top_k), jnp.float32(top_p), untempered)
        expected = jax.jit(of_shard, static_argnames="axis")(logits, allowed, asked, drawing, keys, axis=None)
        with jax.set_mesh(mesh):
            scores = jax.jit(per_shard(of_shard, ((ROWS, None, TENSOR), (TENSOR,), (ROWS,), (), (ROWS,)), (ROWS,)))(
                reshard(jnp.asarray(logits), ROWS, None, TENSOR),
                reshard(jnp.asarray(allowed), TENSOR),
                put_rows(asked),
                drawing,
                put_rows(keys),
            )
        np.testing.assert_array_equal(scores.tokens[..., 0], expected.tokens[..., 0])
        if top_k == 99:
            np.testing.assert_array_equal(scores.tokens, expected.tokens)
        for name in ("logprob", "certainty", "asked"):
            np.testing.assert_allclose(getattr(scores, name), getattr(expected, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1.0, 1e6])
def test_a_large_vocabulary_at_any_temperature_gives_numbers_and_the_right_tokens(temperature: float) -> None:
    """Trap D19: 151,936 ids, logits of bfloat16 with equal maxima."""
    size, rows = 151_936, 3
    rng = np.random.default_rng(0)
    logits = (8 * rng.standard_normal((rows, size))).astype(jnp.bfloat16).astype(np.float32)
    ties = rng.integers(0, size, (rows, 2))
    for row in range(rows):
        logits[row, ties[row]] = logits[row].max()
    allowed = rng.random(size) < 0.9
    allowed[ties] = True
    for top_p in (1.0, 0.9):
        drawing = Sampling(jnp.float32(temperature), None, jnp.float32(top_p))
        keys = keys_of((0, 0, 0), rows)
        scores = jax.device_get(
            jax.jit(lambda *args: sampling.score(args[0], args[1], None, *args[2:], candidates=5))(
                logits, allowed, drawing, keys
            )
        )
        assert np.all(np.isfinite(scores.logprob)) and np.all(scores.logprob <= 0)
        assert np.all(np.isfinite(scores.certainty))
        assert allowed[scores.tokens[:, 0]].all()
        if temperature < 1:
            assert all(logits[row, scores.tokens[row, 0]] == logits[row][allowed].max() for row in range(rows))
            best = [np.sum(logits[row][allowed] == logits[row][allowed].max()) for row in range(rows)]
            np.testing.assert_allclose(np.exp(scores.logprob), 1 / np.array(best), rtol=1e-4)
        if temperature > 1 and top_p == 1:
            np.testing.assert_allclose(scores.logprob, -np.log(allowed.sum()), rtol=1e-4)


# --- the noise ----------------------------------------------------------------------------------------------


def wins(probabilities: NDArray, draws: int, seed: int) -> NDArray:
    """How often each token wins, over positions, requests and samples."""
    log_p, chunk = jnp.log(jnp.asarray(probabilities, jnp.float32)), 1 << 18

    @jax.jit
    def some(key: jax.Array, first: jax.Array) -> jax.Array:
        keys = jax.vmap(sampling.fold_in, (None, 0))(key, first + jnp.arange(chunk))
        noisy = log_p + sampling.gumbel(keys, jnp.arange(len(probabilities)))
        return jnp.bincount(jnp.argmax(noisy, axis=-1), length=len(probabilities))

    total = np.zeros(len(probabilities), int)
    for part in range(draws // chunk):
        total += np.asarray(some(sampling.request_key(seed, part, part % 3), jnp.int32(part * 7)))
    return total


@pytest.mark.parametrize("draws", [1 << 23, pytest.param(1 << 28, marks=pytest.mark.slow)])
def test_rare_tokens_come_as_often_as_they_should(draws: int) -> None:
    """Trap D19: down to a probability of one in a million, beside one token that is nearly certain."""
    rare = np.array([1e-6, 3e-6, 1e-5, 1e-4])
    probabilities = np.concatenate([rare, [1 - rare.sum()]])
    counts = wins(probabilities, draws, seed=draws % 1000)
    for token, p in enumerate(rare):
        expected = draws * p
        low, high = scipy.stats.poisson.ppf([SURE / 2, 1 - SURE / 2], expected)
        assert low <= counts[token] <= high, f"{counts[token]} times, not {expected}"


def test_noise_is_precise_where_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap D19: how often a rare token wins against another one, from the noise of all random bits in turn."""
    monkeypatch.setattr(sampling, "fold_in", lambda key, number: key)
    all_large, others = np.arange(2**20), np.arange(2**20 + 2**11, 2**32, 2**12)
    bits = np.concatenate([all_large, others]).astype(np.uint32)
    weight = np.repeat([1.0, 2.0**12], [len(all_large), len(others)]) / 2**32
    drawn = np.asarray(sampling.gumbel(jnp.stack([bits, bits], -1), jnp.arange(1)), np.float64)[:, 0]
    for p in (1e-6, 1e-5, 1e-3, 0.1, 0.5, 0.9):
        wins = np.exp(-np.exp(-(drawn + np.log(p / (1 - p)))))
        assert np.sum(weight * wins) == pytest.approx(p, rel=1e-3)


def test_tokens_of_any_probability_come_as_often_as_they_should() -> None:
    probabilities = np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.009, 0.001])
    counts = wins(probabilities, 1 << 20, seed=1)
    assert scipy.stats.chisquare(counts, probabilities * counts.sum()).pvalue > SURE


def test_noise_is_a_number_whatever_the_bits_and_as_precise_as_they_are() -> None:
    bits = np.array([0, 1, 2, 2**23, 2**24 + 1, 2**31, 2**32 - 129, 2**32 - 1], np.uint32)
    uniform = np.asarray(sampling.uniform(jnp.asarray(bits)))
    assert uniform.dtype == np.float32
    assert np.all((uniform > 0) & (uniform < 1))
    np.testing.assert_allclose(uniform[:3], [0.5 / 2**32, 1.5 / 2**32, 2.5 / 2**32], rtol=1e-6)
    np.testing.assert_array_equal(uniform, noise.uniform(bits))


def test_noise_of_a_token_is_that_of_the_twin() -> None:
    for request in ((0, 0, 0), (2**32 - 1, 2**32 - 1, 7), (5, 2**31, 0)):
        key = sampling.request_key(*(jnp.uint32(number) for number in request))
        for position in (0, 63, 64, 1000):
            ours = sampling.gumbel(sampling.fold_in(key, jnp.int32(position)), jnp.arange(V))
            np.testing.assert_allclose(ours, noise.gumbel(*request, position, V), atol=2e-6, rtol=2e-6)


def test_noise_of_neighbours_has_nothing_in_common() -> None:
    """Correlations over seeds, requests, samples, positions and tokens of noise that differs in one number alone."""
    base = np.array([3, 4, 5, 6])
    drawn = []
    for change in [(0, 0, 0, 0), *np.eye(4, dtype=int).tolist()]:
        seed, request, sample, position = base + change
        drawn.append(noise.gumbel(int(seed), int(request), int(sample), int(position), 20_000))
    drawn.append(np.roll(drawn[0], 1))
    correlations = np.corrcoef(drawn)[np.triu_indices(len(drawn), 1)]
    assert np.all(np.abs(correlations) < 5 / np.sqrt(20_000))


# --- the whole process, counted -----------------------------------------------------------------------------

TOY = rf.ModelConfig(
    vocab_size=6,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope_theta=100.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    max_position_embeddings=64,
    eos_token_ids=(1,),
    mask_token_id=0,
    slot_sizes=(2,),
    num_tokens=5,
)
TOY_PROMPT = [3, 2]
Outcome = tuple[tuple[int, int], ...]  # (offset, token) in commit order


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[rf.Model, Qwen3]:
    """Four tokens may be written; what is likely depends on all that is seen."""
    flat = transformer.flatten(transformer.init(TOY, jax.random.key(8)))
    scale = {name: 1.0 if name.endswith("norm") else 60.0 for name in flat} | {"embedding": 8.0, "head": 25.0}
    params = transformer.unflatten({name: leaf * scale[name] for name, leaf in flat.items()})
    directory = tmp_path_factory.mktemp("toy")
    rf.export_hf(rf.Model(params, dataclasses.replace(TOY, num_tokens=None)), directory)
    vocabulary = {"model": {"vocab": dict.fromkeys("abcde", 0)}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(vocabulary))
    return rf.Model(params, TOY), Qwen3(directory)


def all_outcomes(
    process: Callable[[Choose], Sequence[tuple[int, int]]], config: rf.DecodeConfig
) -> dict[Outcome, float]:
    """Every text that `process` can write, in its order of writing, and its probability.

    The process runs once for each of them, along the choices of the last one up to the last that can be another.
    """
    outcomes: dict[Outcome, float] = {}
    path: list[tuple[list[int], list[float]]] = []  # of every choice: tokens not tried yet, the current one last
    while True:
        depth = 0

        def choose(log_probabilities: NDArray, position: int) -> Choice:
            nonlocal depth
            if depth == len(path):
                log_p = noise.tempered(log_probabilities, config.temperature, config.top_k, config.top_p)
                path.append((np.flatnonzero(log_p > -np.inf).tolist(), log_p.tolist()))
            depth += 1
            return Choice(path[depth - 1][0][-1], 1.0)

        committed = tuple(process(choose))
        outcomes[committed] = float(np.exp(sum(log_p[left[-1]] for left, log_p in path)))
        while path and len(path[-1][0]) == 1:
            path.pop()
        if not path:
            return outcomes
        path[-1][0].pop()


def chi_square(observed: Counter[Any], probabilities: dict[Any, float]) -> float:
    """The p-value of what was observed; outcomes that are expected less than ten times are one."""
    draws = observed.total()
    cells = {outcome: p for outcome, p in probabilities.items() if p * draws >= 10}
    counts = [observed[outcome] for outcome in cells]
    expected = [p * draws for p in cells.values()]
    rest = draws - sum(expected)
    if rest >= 10:
        counts.append(draws - sum(counts))
        expected.append(rest)
    else:
        expected = [value * sum(counts) / sum(expected) for value in expected]
    return float(scipy.stats.chisquare(counts, expected).pvalue)


class Counted(NamedTuple):
    """Texts that the engine wrote, and how often the first token of a slot was another than its first draft."""

    outcomes: Counter[Outcome]
    mismatches: dict[int, float]  # by slot


def count(model: rf.Model, config: rf.DecodeConfig, seeds: Sequence[int], rows: int = 4096) -> Counted:
    """Answers to `rows` requests of each seed, by the compiled loop."""
    method, k, P = method_of(model.config, config), config.slot_size, len(TOY_PROMPT)
    tokens = np.zeros((rows, engine.capacity(P + config.max_new_tokens)), np.int32)
    tokens[:, :P] = TOY_PROMPT
    outcomes: Counter[Outcome] = Counter()
    drafted: Counter[int] = Counter()
    wrong: Counter[int] = Counter()
    for seed in seeds:
        budgets = np.full(rows, config.max_new_tokens, np.int32)
        state = drive.begin(model, method, tokens, np.full(rows, P, np.int32), budgets, seed=seed)
        state = engine.run(model.params, method, state, jnp.int32(1), jnp.int32(rows), config=model.config)
        plan = jax.device_get(state.rows)
        state = engine.run(model.params, method, state, jnp.int32(200), jnp.int32(rows), config=model.config)
        done = jax.device_get(state.rows)
        assert np.all(done.finished_at >= 0)
        for row in range(rows):
            written = np.flatnonzero(done.committed[row])[P:]
            written = written[np.argsort(done.order[row][written])]
            outcomes[tuple((int(p) - P, int(done.tokens[row, p])) for p in written)] += 1
        if config.method == "refusion":
            for slot in range(config.block_size // k):
                both = plan.chosen[:, P + slot * k] & done.committed[:, P + slot * k]
                drafted[slot] += int(both.sum())
                wrong[slot] += int((both & (plan.tokens != done.tokens)[:, P + slot * k]).sum())
    return Counted(outcomes, {slot: wrong[slot] / max(drafted[slot], 1) for slot in drafted})


def check_distribution(counted: Counter[Outcome], expected: dict[Outcome, float]) -> None:
    assert sum(expected.values()) == pytest.approx(1)
    assert set(counted) <= set(expected), "the process cannot write this"
    assert chi_square(counted, expected) > SURE
    for offset in {offset for path in expected for offset, _ in path}:
        at: Counter[int] = Counter()
        for path, number in counted.items():
            at[dict(path).get(offset, -1)] += number
        right: dict[int, float] = {}
        for path, p in expected.items():
            token = dict(path).get(offset, -1)
            right[token] = right.get(token, 0.0) + p
        assert chi_square(at, right) > SURE, f"the tokens at offset {offset}"


@pytest.mark.parametrize(
    "change",
    [
        {"slot_threshold": -1},  # all slots are chosen at once, and written behind each other
        {"slot_threshold": 0.6, "max_new_tokens": 5},  # which are chosen depends on what was written
        pytest.param({"method": "ar"}, marks=pytest.mark.slow),
        pytest.param({"top_p": 1.0, "temperature": 2.0, "slot_threshold": -1}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.8, "top_k": 3, "slot_threshold": 0.65}, marks=pytest.mark.slow),
        pytest.param({"planner": "mean", "slot_threshold": 0.55}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_texts_are_as_frequent_as_they_are_likely(toy: tuple[rf.Model, Qwen3], change: dict[str, Any]) -> None:
    """Trap D18: whole texts, in their order of writing, against all that the sequential process can write."""
    model, twin = toy
    config = rf.DecodeConfig(
        max_new_tokens=6, slot_size=2, block_size=6, temperature=1.2, top_p=0.97, slot_threshold=-1
    )
    config = dataclasses.replace(config, **change)
    sizes: dict[str, Any] = {"slot_size": config.slot_size, "max_new_tokens": config.max_new_tokens}
    margins, plans = [], set()

    def process(choose: Choose) -> Sequence[tuple[int, int]]:
        if config.method == "ar":
            written = autoregressive.decode(twin, TOY_PROMPT, first="mask", choose=choose, **sizes)
            return list(enumerate(written.token_ids))
        out = exact.decode(
            twin,
            TOY_PROMPT,
            block_size=config.block_size,
            slot_threshold=config.slot_threshold,
            choose=choose,
            planner=PLANNERS[config.planner](0, 0, 0),
            **sizes,
        )
        margins.append(out.margin)
        plans.add(tuple(tuple(plan.chosen) for plan in out.plans))
        return out.committed

    counted = count(model, config, seeds=range(8))
    check_distribution(counted.outcomes, all_outcomes(process, config))
    assert min(margins, default=1) > NEAR_TIE
    if config.slot_threshold == -1 and config.method == "refusion":
        assert counted.mismatches[0] == 0
        assert counted.mismatches[1] > 0.2
        assert counted.mismatches[2] > 0.2
    elif config.method == "refusion":
        assert len(plans) > 2
