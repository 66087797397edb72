"""Sampled answers: those of the sequential process with the same noise, in any batch.

Every draw is argmax(log p' + g). The twins draw one token at a time, in float64, with the same random bits; so sampled
texts, orders and log-probabilities are compared one by one, as greedy ones are.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import refusion_jax as rf
from tests.test_engine import compiled
from tests.test_scripted import more
from tests.twins import autoregressive, exact, golden
from tests.twins.context import Model
from tests.twins.noise import PLANNERS, Sampled, sampled
from tests.twins.qwen3 import Qwen3

NEAR_TIE = 1e-4  # decisions closer than this may turn with the order of float sums


# --- answers against the twin -------------------------------------------------------------------------------

# Every setting here has a top-p, and all batches have eight rows, so that few programs serve most tests.
CONFIG = rf.DecodeConfig(max_new_tokens=52, slot_size=8, block_size=16, temperature=0.7, top_p=0.9)
CUT = dataclasses.replace(CONFIG, slot_size=4, block_size=8, temperature=1.5, top_k=8, untempered_logprobs=True)
AR = dataclasses.replace(CONFIG, method="ar")


@pytest.fixture(scope="session")
def eight(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts to whose answers there are many alternatives."""
    return prompts[8:16]


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


@pytest.mark.parametrize("model_name", ["A0"], indirect=True)
@pytest.mark.parametrize("planner", ["entropy", *more("mean", "random", "left_to_right")])
def test_slots_are_chosen_by_the_planner(
    model: rf.Model, data: golden.Golden, eight: list[list[int]], planner: Any
) -> None:
    config = dataclasses.replace(CONFIG, slot_size=4, block_size=12, planner=planner)
    for threshold in (0.9, 0.4):
        config = dataclasses.replace(config, slot_threshold=threshold)
        assert few_turned(check(rf.generate(model, eight, config), data.model, eight, config))


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
