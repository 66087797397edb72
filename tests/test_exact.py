"""Exact decoding through `refusion_jax.generate`: the text of the sequential process, in few forwards."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import refusion_jax as rf
from tests.twins import exact, golden

NEAR_TIE = 1e-4  # decisions closer than this may turn with the order of float sums

# (slot_size, block_size) -> tokens per forward that must be reached on the first 24 prompts.
TOKENS_PER_FORWARD = {
    "A": {(4, 96): 3.99, (4, 24): 3.36, (8, 96): 3.89, (8, 48): 3.74, (8, 24): 3.39, (16, 96): 3.97, (32, 96): 4.05},
    "A0": {(4, 96): 2.95, (4, 24): 2.66, (8, 96): 2.84, (8, 48): 2.74, (8, 24): 2.59, (16, 96): 2.74, (32, 96): 2.96},
}


def decode(model: rf.Model, prompts: list[list[int]], sizes: tuple[int, int], batch_size: int) -> list[rf.Generation]:
    slot_size, block_size = sizes
    config = rf.DecodeConfig(max_new_tokens=exact.MAX_NEW_TOKENS, slot_size=slot_size, block_size=block_size)
    return rf.generate(model, prompts, config, batch_size=batch_size)


def compare(outs: list[rf.Generation], name: str, sizes: tuple[int, int]) -> tuple[list[bool], NDArray]:
    """Which answers equal the twin's in tokens, order and what was committed in all; which have a near-tie."""
    twin = exact.load(name, sizes)
    equal = []
    for out, token_ids, offsets, reason in zip(
        outs, twin["token_ids"], twin["commit_offsets"], twin["finish_reason"], strict=True
    ):
        token_ids, offsets = token_ids[token_ids >= 0].tolist(), offsets[offsets >= 0].tolist()
        order = [offset for offset in offsets if offset < len(token_ids)]
        expected = token_ids, order, reason, len(offsets)
        equal.append((out.token_ids, out.commit_order, out.finish_reason, out.stats.committed) == expected)
    return equal, twin["margin"] < NEAR_TIE


def check_forwards(outs: list[rf.Generation]) -> None:
    for out in outs:
        assert out.stats.forwards <= out.stats.committed + out.stats.plan_forwards


def check_tokens_per_forward(outs: list[rf.Generation], name: str, sizes: tuple[int, int]) -> None:
    tokens = sum(out.stats.tokens for out in outs[:24])
    assert tokens / sum(out.stats.forwards for out in outs[:24]) >= TOKENS_PER_FORWARD[name][sizes]


@pytest.mark.parametrize(("sizes", "batch_size"), [((8, 24), 32), ((4, 16), 7)])
def test_answers_equal_the_sequential_process(
    model: rf.Model, model_name: str, prompts: list[list[int]], sizes: tuple[int, int], batch_size: int
) -> None:
    outs = decode(model, prompts, sizes, batch_size)
    equal, near_tie = compare(outs, model_name, sizes)
    assert np.all(equal | near_tie)
    check_forwards(outs)
    if sizes in TOKENS_PER_FORWARD[model_name]:
        check_tokens_per_forward(outs, model_name, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 7, 32])
def test_all_sizes_equal_the_sequential_process(batch_size: int) -> None:
    """Traps D1, D3: alone or in a batch, up to the largest slots."""
    equal: list[bool] = []
    near_tie: list[bool] = []
    for sizes in [(4, 16), (4, 96), (8, 8), (8, 24), (8, 96), (16, 48), (32, 96)]:
        for name in golden.MODELS:
            model = rf.load(golden.DIRECTORY / f"model{name}")
            outs = decode(model, [prompt.prompt_ids for prompt in golden.load(name).prompts], sizes, batch_size)
            check_forwards(outs)
            same, near = compare(outs, name, sizes)
            assert np.all(same | near), (name, sizes)
            equal.extend(same)
            near_tie.extend(near)
    turned = np.sum(near_tie) - np.sum(np.array(equal)[near_tie])
    assert turned <= 1  # at least 95 % of about 20


@pytest.mark.slow
@pytest.mark.parametrize("sizes", TOKENS_PER_FORWARD["A"])
def test_tokens_per_forward(model: rf.Model, model_name: str, prompts: list[list[int]], sizes: tuple[int, int]) -> None:
    check_tokens_per_forward(decode(model, prompts, sizes, 32), model_name, sizes)
