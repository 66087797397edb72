"""Left-to-right decoding through `refusion_jax.generate`: the baseline."""

from __future__ import annotations

from typing import Any

import refusion_jax as rf
from tests.twins import autoregressive, exact, golden

NEAR_TIE = 1e-4  # decisions closer than this may turn with the order of float sums


def decode(model: rf.Model, prompts: list[list[int]], first: Any) -> list[rf.Generation]:
    return rf.generate(model, prompts, rf.DecodeConfig(method="ar", max_new_tokens=96, ar_first=first), batch_size=32)


def test_next_token_decoding_equals_official_greedy_generation(
    model: rf.Model, data: golden.Golden, model_name: str, prompts: list[list[int]]
) -> None:
    expected = golden.arrays(model_name, "baselines")["ar_tokens"]
    for prompt, out in enumerate(decode(model, prompts, "token")):
        tokens = expected[prompt][expected[prompt] >= 0].tolist()
        if out.token_ids != tokens:  # the golden file knows no margins
            twin = autoregressive.decode(data.model, prompts[prompt], max_new_tokens=96, first="token")
            assert twin.margin < NEAR_TIE
        assert out.finish_reason == "stop"
        assert out.commit_order == list(range(len(out.token_ids)))
        assert out.stats.forwards == out.stats.verify_forwards == out.stats.tokens == len(out.token_ids)


def test_first_tokens_through_masks_equal_exact_decoding_of_one_slot_at_a_time(
    model: rf.Model, model_name: str, prompts: list[list[int]]
) -> None:
    twin = exact.load(model_name, (8, 8))
    for prompt, out in enumerate(decode(model, prompts, "mask")):
        tokens = twin["token_ids"][prompt]
        assert out.token_ids == tokens[tokens >= 0].tolist() or twin["margin"][prompt] < NEAR_TIE
        assert out.finish_reason == twin["finish_reason"][prompt]


def test_first_tokens_through_masks_equal_the_twin(
    model: rf.Model, data: golden.Golden, prompts: list[list[int]]
) -> None:
    outs = decode(model, prompts, "mask")
    for prompt in range(0, 64, 8):
        twin = autoregressive.decode(data.model, prompts[prompt], max_new_tokens=96, first="mask", slot_size=8)
        assert outs[prompt].token_ids == twin.token_ids or twin.margin < NEAR_TIE
