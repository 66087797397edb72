"""The masked-diffusion baseline through `refusion_jax.generate`, held to its sequential twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refusion_jax as rf
from tests.twins import golden, masked_diffusion

NEAR_TIE = 1e-4  # decisions closer than this may turn with the order of float sums


def check(model: rf.Model, data: golden.Golden, prompts: list[list[int]], **options: Any) -> None:
    threshold = options.pop("slot_threshold", 0.9)
    config = rf.DecodeConfig(method="mdm", slot_threshold=threshold, **options)
    near_ties = 0
    for prompt, out in zip(prompts, rf.generate(model, prompts, config), strict=True):
        twin = masked_diffusion.decode(data.model, prompt, threshold=threshold, **options)
        order = [offset for offset, _ in twin.committed if offset < len(twin.token_ids)]
        found = out.token_ids, out.commit_order, out.stats.forwards, out.stats.positions
        if twin.margin < NEAR_TIE:
            near_ties += 1
            continue
        assert found == (twin.token_ids, order, twin.forwards, twin.positions)
        assert out.stats.committed == len(twin.committed)
    assert near_ties < len(prompts) / 2


@pytest.mark.parametrize("tokens_per_step", [0, 1, 4])
def test_answers_equal_the_sequential_process(
    model: rf.Model, data: golden.Golden, prompts: list[list[int]], tokens_per_step: int
) -> None:
    check(model, data, prompts[:8], tokens_per_step=tokens_per_step, block_size=8, max_new_tokens=20)


@pytest.mark.slow
@pytest.mark.parametrize("tokens_per_step", [0, 1, 2, 4])
@pytest.mark.parametrize("block_size", [8, 32, 96])
def test_whole_answers_equal_the_sequential_process(
    model: rf.Model, data: golden.Golden, prompts: list[list[int]], tokens_per_step: int, block_size: int
) -> None:
    check(model, data, prompts[:24], tokens_per_step=tokens_per_step, block_size=block_size, max_new_tokens=96)


@pytest.mark.parametrize("model_name", ["A"], indirect=True)
def test_thresholds_that_nothing_reaches_write_one_token_a_step(model: rf.Model, prompts: list[list[int]]) -> None:
    """Trap D11."""
    config = rf.DecodeConfig(method="mdm", slot_threshold=1.5, block_size=8, max_new_tokens=20)
    for out in rf.generate(model, prompts[:8], config):
        assert out.stats.forwards == out.stats.committed
        assert model.config.mask_token_id not in out.token_ids
        assert np.isfinite(out.logprobs).all()


def test_settings_of_other_methods_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens_per_step=2 is a setting of method='mdm' alone"):
        rf.DecodeConfig(tokens_per_step=2)
    with pytest.raises(ValueError, match="kv_reuse='none' is a way of verify='threshold' alone"):
        rf.DecodeConfig(kv_reuse="none")
    rf.DecodeConfig(method="mdm", slot_size=8, block_size=20)  # it has no slots that must divide a block
