"""Decoding on eight devices, rows over four of them and heads over two; what the compiled loop does to the cache."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refusion_jax as rf
from refusion_jax.decoding import engine, sampling
from refusion_jax.decoding.methods import method_of
from refusion_jax.sharding import ROWS, TENSOR, per_shard, put_rows, reshard
from tests import drive
from tests.twins import autoregressive, exact, golden, official

CONFIG = rf.DecodeConfig(max_new_tokens=exact.MAX_NEW_TOKENS, slot_size=8, block_size=8)
MODEL = golden.DIRECTORY / "modelA"


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return rf.make_mesh(4, 1, 2)


@pytest.fixture(scope="module")
def sharded(mesh: jax.sharding.Mesh) -> rf.Model:
    with jax.set_mesh(mesh):
        return rf.load(MODEL)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt.prompt_ids for prompt in golden.load("A").prompts]


def check(outs: list[rf.Generation]) -> None:
    """Answers are those of the sequential process, which at these sizes has no near-tie."""
    twin = exact.load("A", (8, 8))
    assert np.all(twin["margin"] > 1e-4)
    for out, tokens in zip(outs, twin["token_ids"], strict=False):
        assert out.token_ids == tokens[tokens >= 0].tolist()


def test_answers_on_a_mesh_are_those_of_one_device(
    mesh: jax.sharding.Mesh, sharded: rf.Model, prompts: list[list[int]]
) -> None:
    """Trap D24: four rows at least, so that a batch of three, and of one, is filled up with rows that are done."""
    with jax.set_mesh(mesh):
        check(rf.generate(sharded, prompts[:9], CONFIG, batch_size=3))
        check(rf.generate(sharded, prompts[:1], CONFIG, batch_size=1))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exact", "threshold", "official", "ar"])
def test_every_method_on_a_mesh(
    mesh: jax.sharding.Mesh, sharded: rf.Model, prompts: list[list[int]], method: str
) -> None:
    """In a batch of five, filled up to eight rows, and traced."""
    twin, sizes = golden.load("A").model, {"slot_size": 8, "block_size": 16}
    thresholds = {"slot_threshold": 0.9, "token_threshold": 0.9}
    options: dict[str, Any] = {
        "exact": {},
        "threshold": {"verify": "threshold"},
        "official": {"compat": "official"},
        "ar": {"method": "ar"},
    }[method]
    config = rf.DecodeConfig(max_new_tokens=32, **sizes, **thresholds, **options)
    with jax.set_mesh(mesh):
        outs = rf.generate(sharded, prompts[:9], config, batch_size=5)
        outs += rf.generate(sharded, prompts[9:12], config, trace=True)
    for out, prompt in zip(outs, prompts, strict=False):
        expected: Any
        if method == "exact":
            expected = exact.decode(twin, prompt, max_new_tokens=32, **sizes)
        elif method == "threshold":
            expected = official.decode_threshold(twin, prompt, max_new_tokens=32, **sizes, **thresholds)
        elif method == "official":
            expected = official.decode_official(
                twin, prompt, gen_length=32, slot_size=8, serial_num_blocks=2, **thresholds
            )
        else:
            expected = autoregressive.decode(twin, prompt, max_new_tokens=32, first="mask", slot_size=8)
        assert out.token_ids == expected.token_ids or expected.margin < 1e-4


def test_equal_logits_in_two_parts_of_the_vocabulary_go_to_the_lowest_id(mesh: jax.sharding.Mesh) -> None:
    """Trap D4: every device scores its own part of the vocabulary."""
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 3, (4, 6, 32)).astype(np.float32)
    allowed = rng.random(32) < 0.8
    asked = rng.integers(0, 32, (4, 6)).astype(np.int32)
    expected = sampling.score(jnp.asarray(logits), jnp.asarray(allowed), jnp.asarray(asked), candidates=5)

    def of_shard(logits: jax.Array, allowed: jax.Array, asked: jax.Array) -> sampling.Scores:
        return sampling.score(logits, allowed, asked, candidates=5, axis=TENSOR)

    with jax.set_mesh(mesh):
        scores = jax.jit(per_shard(of_shard, ((ROWS, None, TENSOR), (TENSOR,), (ROWS,)), (ROWS,)))(
            reshard(jnp.asarray(logits), ROWS, None, TENSOR), reshard(jnp.asarray(allowed), TENSOR), put_rows(asked)
        )
    np.testing.assert_array_equal(scores.tokens, expected.tokens)
    np.testing.assert_allclose(scores.logprob, expected.logprob, rtol=1e-6)
    np.testing.assert_allclose(scores.asked, expected.asked, rtol=1e-6)


def test_more_devices_than_heads_are_refused_with_both_numbers() -> None:
    """Trap D24."""
    with (
        jax.set_mesh(rf.make_mesh(1, 1, 4)),
        pytest.raises(ValueError, match="tensor=4 does not divide the dimension 2 of parameter layers/key"),
    ):
        rf.load(MODEL)


# --- the compiled loop --------------------------------------------------------------------------------------


def compiled_loop(model: rf.Model, config: rf.DecodeConfig, capacity: int) -> tuple[jax.stages.Compiled, engine.State]:
    """The loop over four rows; other tests run the same program."""
    tokens, lengths = np.zeros((4, capacity), np.int32), np.full(4, 80, np.int32)
    method = method_of(model.config, config)
    state = drive.begin(model, method, tokens, lengths, np.full(4, config.max_new_tokens, np.int32))
    args = model.params, method, state, jnp.int32(64), jnp.int32(4)
    return engine.run.lower(*args, config=model.config).compile(), state


def check_cache_stays_where_it_is(compiled: jax.stages.Compiled, state: engine.State) -> None:
    """Donation aliases the whole cache, and nothing as large as its keys is copied, selected or sent."""
    parts = [array.addressable_shards[0].data for array in (state.cache.keys, state.cache.values)]
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(part.nbytes for part in parts)
    check_text(compiled.as_text(), parts[0].size)


def check_text(text: str, keys: int) -> None:
    """Nothing as large as so many numbers is copied, selected or sent by a compiled program."""
    moved = [(name, shapes) for name, shapes in operations(text) if largest(shapes) >= keys]
    names = {name for name, _ in moved}
    assert "while" in names, "the text was not read"
    assert not names & {"copy", "copy-start", "select", "concatenate", "pad", "transpose"}, moved
    assert not [name for name in names if re.match("all-|collective-|reduce-scatter", name)], moved


def operations(text: str) -> Iterator[tuple[str, list[list[int]]]]:
    """Every instruction of an HLO module: its name, and the shapes of its results and operands."""
    shapes: dict[str, list[list[int]]] = {}
    for line in text.splitlines():
        found = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)", line)
        if found:
            result, types, name, operands = found.groups()
            shapes[result] = [
                [int(size) for size in dims.split(",") if size] for dims in re.findall(r"\[([\d,]*)\]", types)
            ]
            behind = [shape for operand in re.findall(r"%?([\w.-]+)", operands) for shape in shapes.get(operand, [])]
            yield name, shapes[result] + behind


def largest(shapes: list[list[int]]) -> int:
    return max((int(np.prod(shape)) for shape in shapes), default=0)


def test_the_loop_never_copies_the_cache() -> None:
    config = rf.DecodeConfig(max_new_tokens=7, slot_size=4, block_size=4)
    check_cache_stays_where_it_is(*compiled_loop(rf.load(MODEL), config, capacity=128))


def test_the_loop_on_a_mesh_never_copies_or_sends_the_cache(mesh: jax.sharding.Mesh, sharded: rf.Model) -> None:
    with jax.set_mesh(mesh):
        check_cache_stays_where_it_is(*compiled_loop(sharded, CONFIG, capacity=192))
