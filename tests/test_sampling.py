"""Sampling: the draws are those of the sequential process with the same noise, and the noise is fair.

Every draw is argmax(log p' + g). The twins draw one token at a time, in float64, with the same random bits; so sampled
texts, orders and log-probabilities are compared one by one, as greedy ones are. That the process as a whole has the
right distribution is shown on a toy model, all of whose outcomes can be counted.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
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
from refusion_jax.decoding.autoregressive import Autoregressive
from refusion_jax.decoding.exact import Exact
from refusion_jax.decoding.methods import method_of
from refusion_jax.decoding.plan import certainties
from refusion_jax.decoding.sampling import Sampling
from refusion_jax.decoding.threshold import Threshold
from refusion_jax.model import transformer
from refusion_jax.sharding import ROWS, TENSOR, per_shard, put_rows, reshard
from tests import drive
from tests.test_engine import compiled
from tests.test_scripted import CAPACITY, EOS, MASK, HashModel, lengths, models, more, prompt_of, thresholds
from tests.twins import autoregressive, exact, golden, noise
from tests.twins.context import Choice, Choose, Model
from tests.twins.noise import Sampled, sampled
from tests.twins.qwen3 import Qwen3

NEAR_TIE = 1e-4  # decisions closer than this may turn with the order of float sums
SURE = 1e-4  # an event less likely than this does not happen by chance


# --- answers against the twin -------------------------------------------------------------------------------

# Every setting here has a top-p, and all batches have eight rows, so that few programs serve most tests.
CONFIG = rf.DecodeConfig(max_new_tokens=52, slot_size=8, block_size=16, temperature=0.7, top_p=0.9)
CUT = dataclasses.replace(CONFIG, slot_size=4, block_size=8, temperature=1.5, top_k=8, untempered_logprobs=True)
AR = dataclasses.replace(CONFIG, method="ar")


@pytest.fixture(scope="session")
def eight(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts to whose answers there are many alternatives."""
    return prompts[8:16]


PLANNERS: dict[str, Callable[..., exact.Planner]] = {
    "confidence": lambda *request: exact.confidence,
    "mean": lambda *request: exact.mean,
    "entropy": lambda *request: exact.entropy,
    "random": noise.random,
    "left_to_right": lambda *request: exact.left_to_right,
}


class Twin(NamedTuple):
    """What one prompt should give."""

    decoded: exact.Decoded | autoregressive.Decoded
    choose: Sampled

    @property
    def order(self) -> list[int]:
        """The offsets of the answer in the order in which they were written."""
        length = len(self.decoded.token_ids)
        return [offset for offset, _ in self.committed if offset < length]

    @property
    def committed(self) -> list[tuple[int, int]]:
        if isinstance(self.decoded, exact.Decoded):
            return self.decoded.committed
        return list(enumerate(self.decoded.token_ids))


def twin_of(model: Model, prompt: Sequence[int], config: rf.DecodeConfig, request: int, sample: int = 0) -> Twin:
    choose = sampled(config.seed, request, sample, config.temperature, config.top_k, config.top_p)
    options: dict[str, Any] = {
        "max_new_tokens": config.max_new_tokens,
        "slot_size": config.slot_size,
        "choose": choose,
    }
    if config.method == "ar":
        return Twin(autoregressive.decode(model, prompt, first=config.ar_first, **options), choose)
    options |= {"block_size": config.block_size, "slot_threshold": config.slot_threshold}
    planner = PLANNERS[config.planner](config.seed, request, sample)
    return Twin(exact.decode(model, prompt, planner=planner, **options), choose)


def check(
    outs: Sequence[rf.Generation], model: Model, prompts: Sequence[Sequence[int]], config: rf.DecodeConfig
) -> list[bool]:
    """Every answer equals the twin's, except near-ties: whether those do."""
    near_ties = []
    for request, (out, prompt) in enumerate(zip(outs, prompts, strict=True)):
        twin = twin_of(model, prompt, config, request)
        decoded = twin.decoded
        expected = decoded.token_ids, twin.order, decoded.finish_reason, len(twin.committed)
        equal = (out.token_ids, out.commit_order, out.finish_reason, out.stats.committed) == expected
        assert equal or decoded.margin < NEAR_TIE, f"request {request}: {out.token_ids} is not {decoded.token_ids}"
        assert out.stats.forwards <= out.stats.committed + out.stats.plan_forwards
        if equal:
            check_logprobs(out, twin.choose, len(prompt), untempered=config.untempered_logprobs)
        if decoded.margin < NEAR_TIE:
            near_ties.append(equal)
    return near_ties


def check_logprobs(out: rf.Generation, choose: Sampled, prompt_length: int, *, untempered: bool) -> None:
    """Of every token, and so of their sum. Where top-p or top-k could as well cut elsewhere, either value is right."""
    assert len(out.logprobs) == len(out.token_ids)
    for offset, logprob in enumerate(out.logprobs):
        drawn = choose.drawn[prompt_length + offset]
        right = [drawn.own] if untempered else drawn.logprobs
        assert min(abs(logprob - value) for value in right) < 1e-3


def few_turned(near_ties: list[bool]) -> bool:
    """At least 95 % of the near-ties are equal; one is allowed where there are few."""
    return near_ties.count(False) <= max(1, 0.05 * len(near_ties))


@pytest.mark.parametrize(
    "config",
    [CONFIG, dataclasses.replace(CONFIG, temperature=1.5, seed=1), CUT],
    ids=["0.7", "1.5", "top-k and top-p"],
)
def test_sampled_answers_equal_the_sequential_process_with_the_same_noise(
    model: rf.Model, data: golden.Golden, eight: list[list[int]], config: rf.DecodeConfig
) -> None:
    assert few_turned(check(rf.generate(model, eight, config), data.model, eight, config))


@pytest.mark.parametrize("model_name", ["A0"], indirect=True)
@pytest.mark.parametrize("first", ["mask", pytest.param("token", marks=pytest.mark.slow)])
def test_sampled_answers_from_left_to_right_equal_one_token_at_a_time(
    model: rf.Model, data: golden.Golden, eight: list[list[int]], first: Any
) -> None:
    for temperature in (0.7, 1.5):
        config = dataclasses.replace(AR, ar_first=first, temperature=temperature)
        assert few_turned(check(rf.generate(model, eight, config), data.model, eight, config))


def test_sampled_answers_of_the_bundled_model_equal_the_sequential_process() -> None:
    directory = Path(rf.__file__).parent / "assets" / "model"
    model, twin = rf.load(directory), Qwen3(directory)
    lines = (directory.parent / "prompts.jsonl").read_text().splitlines()[:8]
    prompts = [model.tokenizer.encode_chat(json.loads(line)["messages"]) for line in lines]
    for temperature in (0.7, 1.5):
        config = dataclasses.replace(CONFIG, temperature=temperature)
        assert few_turned(check(rf.generate(model, prompts, config), twin, prompts, config))


@pytest.mark.slow
def test_sampled_answers_of_all_settings_equal_the_sequential_process() -> None:
    near_ties = []
    for name in golden.MODELS:
        model, data = rf.load(golden.DIRECTORY / f"model{name}"), golden.load(name)
        prompts = [prompt.prompt_ids for prompt in data.prompts[:8]]
        for slot_size, block_size in ((4, 16), (8, 24), (16, 32)):
            for temperature in (0.7, 1.5):
                for top_p in (1.0, 0.9):
                    config = rf.DecodeConfig(
                        max_new_tokens=96,
                        slot_size=slot_size,
                        block_size=block_size,
                        temperature=temperature,
                        top_p=top_p,
                        seed=slot_size,
                    )
                    near_ties += check(rf.generate(model, prompts, config), data.model, prompts, config)
    print(f"{len(near_ties)} near-ties, {near_ties.count(False)} of them turned")
    assert few_turned(near_ties)


@pytest.mark.slow
def test_sampled_answers_with_top_k_alone_and_traced(
    model: rf.Model, data: golden.Golden, eight: list[list[int]]
) -> None:
    config = dataclasses.replace(CONFIG, top_k=3, top_p=1.0, temperature=3.0)
    assert few_turned(check(rf.generate(model, eight, config, trace=True), data.model, eight, config))
    assert few_turned(check(rf.generate(model, eight, config), data.model, eight, config))


@pytest.mark.parametrize("model_name", ["A0"], indirect=True)
@pytest.mark.parametrize("method", ["refusion", "ar"])
def test_log_probabilities_of_greedy_answers_are_the_models_own(
    model: rf.Model, data: golden.Golden, prompts: list[list[int]], method: Any
) -> None:
    config = rf.DecodeConfig(method=method, max_new_tokens=96, block_size=24)
    outs = rf.generate(model, prompts[:32], config, batch_size=32)[:8]
    assert few_turned(check(outs, data.model, prompts[:8], config))


# --- the same noise in any batch ----------------------------------------------------------------------------

ALONE = dataclasses.replace(CONFIG, temperature=1.0, top_p=0.999)


def texts(outs: Sequence[rf.Generation]) -> list[list[int]]:
    return [out.token_ids for out in outs]


@pytest.mark.parametrize("model_name", ["A0"], indirect=True)
def test_copies_of_a_prompt_get_different_answers_which_repeat_by_seed_in_any_batch(
    model: rf.Model, eight: list[list[int]]
) -> None:
    """Trap D5."""
    copies = [eight[4]] * 8
    base = texts(rf.generate(model, copies, ALONE))
    assert len({tuple(tokens) for tokens in base}) >= 7
    assert base == texts(rf.generate(model, copies, ALONE))
    assert base == texts(rf.generate(model, copies, ALONE, refill=False))
    order = [5, 2, 7, 0, 1, 6, 4, 3]
    assert [base[request] for request in order] == texts(rf.generate(model, copies, ALONE, seeds=order))
    again = texts(rf.generate(model, copies, ALONE, seeds=[None, 1, None, 0, 0, 0, 0, 7]))
    assert again == [base[request] for request in (0, 1, 2, 0, 0, 0, 0, 7)]
    other = texts(rf.generate(model, copies, dataclasses.replace(ALONE, seed=1)))
    assert sum(one == two for one, two in zip(base, other, strict=True)) <= 1
    # Behind other prompts, in places that are filled again.
    mixed = rf.generate(model, [*eight, *eight[:3], *copies], ALONE, seeds=[None] * 11 + list(range(8)))
    assert texts(mixed)[11:] == base


@pytest.mark.parametrize("model_name", ["A0"], indirect=True)
def test_samples_of_a_prompt_are_those_of_the_twin_and_differ(
    model: rf.Model, data: golden.Golden, eight: list[list[int]]
) -> None:
    config = dataclasses.replace(ALONE, num_samples=8)
    outs = rf.generate(model, eight[4:6], config)
    assert texts(outs[:1]) == texts(rf.generate(model, [eight[4]] * 8, ALONE)[:1])
    for request in range(2):
        answers = outs[8 * request : 8 * request + 8]
        assert len({tuple(out.token_ids) for out in answers}) >= 6
        for sample, out in enumerate(answers):
            twin = twin_of(data.model, eight[4 + request], config, request, sample).decoded
            assert out.token_ids == twin.token_ids or twin.margin < NEAR_TIE


@pytest.mark.slow
@pytest.mark.parametrize("model_name", ["A0"], indirect=True)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("options", [{}, {"method": "ar"}, {"verify": "threshold"}], ids=["exact", "ar", "threshold"])
def test_answers_repeat_by_seed_in_smaller_batches(
    model: rf.Model, eight: list[list[int]], batch_size: int, options: dict[str, Any]
) -> None:
    config = dataclasses.replace(ALONE, num_samples=2, **options)
    mixed = [eight[2], eight[3], eight[2], eight[4]]
    base = texts(rf.generate(model, mixed, config))
    assert base == texts(rf.generate(model, mixed, config, batch_size=batch_size))
    assert base == texts(rf.generate(model, mixed, config, batch_size=batch_size, refill=False))
    assert base[2:6] == texts(rf.generate(model, mixed[1:3], config, batch_size=batch_size, seeds=[1, 2]))


@pytest.mark.parametrize("model_name", ["A0"], indirect=True)
def test_the_largest_seeds_are_seeds_of_their_own(model: rf.Model, data: golden.Golden, eight: list[list[int]]) -> None:
    large = 2**32 - 1
    config = dataclasses.replace(ALONE, seed=large)
    outs = rf.generate(model, [eight[4]] * 3 + eight[:5], config, seeds=[large, 2**31, None, *[7] * 5])
    for out, request in zip(outs, (large, 2**31, 2), strict=False):
        twin = twin_of(data.model, eight[4], config, request).decoded
        assert out.token_ids == twin.token_ids or twin.margin < NEAR_TIE
    assert len({tuple(out.token_ids) for out in outs[:3]}) == 3


@pytest.mark.parametrize("model_name", ["A0"], indirect=True)
def test_threshold_decoding_at_a_temperature_varies_repeats_and_writes_no_mask(
    model: rf.Model, eight: list[list[int]]
) -> None:
    config = dataclasses.replace(ALONE, verify="threshold", temperature=1.5)
    base = [rf.generate(model, eight, dataclasses.replace(config, seed=seed)) for seed in range(8)]
    for outs in zip(*base, strict=True):
        assert len({tuple(out.token_ids) for out in outs}) >= 6
    again = rf.generate(model, eight[::-1], dataclasses.replace(config, seed=3), seeds=list(range(8))[::-1])
    assert texts(again)[::-1] == texts(base[3])
    for out in (out for outs in base for out in outs):
        assert model.config.mask_token_id not in out.token_ids
        assert max(out.token_ids) < model.config.num_tokens
        assert np.all(np.isfinite(out.logprobs)) and max(out.logprobs) <= 0
        assert len(out.logprobs) == len(out.token_ids)


@pytest.mark.parametrize("model_name", ["A"], indirect=True)
def test_other_weights_temperatures_bounds_and_seeds_compile_nothing(model: rf.Model, eight: list[list[int]]) -> None:
    """Trap D23."""
    rf.generate(model, eight, CONFIG)
    other, data = rf.load(golden.DIRECTORY / "modelA0"), golden.load("A0")
    others = [prompt.prompt_ids for prompt in data.prompts[8:16]]
    with compiled() as programs:
        for change in ({"temperature": 1.2}, {"top_p": 0.5}, {"seed": 5}, {"slot_threshold": 0.3}):
            rf.generate(model, eight, dataclasses.replace(CONFIG, **change))
        outs = rf.generate(model.replace(params=other.params), others, CONFIG)
    assert programs == []
    assert few_turned(check(outs, data.model, others, CONFIG))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 1e-3, 1e-6])
def test_bfloat16_models_draw_numbers_at_any_temperature(
    eight: list[list[int]], model_name: str, temperature: float
) -> None:
    """Trap D19."""
    half = rf.load(golden.DIRECTORY / f"model{model_name}", dtype="bfloat16")
    config = dataclasses.replace(CONFIG, temperature=temperature, untempered_logprobs=True)
    outs = rf.generate(half, eight, config)
    assert all(np.all(np.isfinite(out.logprobs)) for out in outs)
    if temperature < 1:
        greedy = rf.generate(half, eight, dataclasses.replace(config, temperature=0))
        assert sum(one.token_ids == two.token_ids for one, two in zip(outs, greedy, strict=True)) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("model_name", ["A0"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"method": "ar"}, {"verify": "threshold"}], ids=["exact", "ar", "threshold"])
def test_sampled_answers_on_a_mesh_are_those_of_one_device(
    model: rf.Model, eight: list[list[int]], options: dict[str, Any]
) -> None:
    """Rows over four devices, the vocabulary over two."""
    config = dataclasses.replace(CONFIG, temperature=1.0, top_k=50, **options)
    single = rf.generate(model, eight, config)
    with jax.set_mesh(rf.make_mesh(4, 1, 2)):
        outs = rf.generate(rf.load(golden.DIRECTORY / "modelA0"), eight, config)
    same = [one.token_ids == two.token_ids for one, two in zip(outs, single, strict=True)]
    assert sum(same) >= 7  # one near-tie
    for one, two, equal in zip(outs, single, same, strict=True):
        if equal:
            np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-3)


# --- adversaries --------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("model_name", ["A0"], indirect=True)
@pytest.mark.parametrize("planner", ["entropy", *more("mean", "random", "left_to_right")])
def test_slots_are_chosen_by_the_planner(
    model: rf.Model, data: golden.Golden, eight: list[list[int]], planner: Any
) -> None:
    config = dataclasses.replace(CONFIG, slot_size=4, block_size=12, planner=planner)
    for threshold in (0.9, 0.4):
        config = dataclasses.replace(config, slot_threshold=threshold)
        assert few_turned(check(rf.generate(model, eight, config), data.model, eight, config))


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
