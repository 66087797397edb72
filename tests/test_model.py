"""The network: logits, keys and values of the official model, and what an entry of a window may depend on."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import refusion_jax as rf
from refusion_jax import cache as kv
from refusion_jax.cache import KVCache
from refusion_jax.decoding import window as windows
from refusion_jax.model import transformer
from refusion_jax.model.transformer import Output, causal
from tests.twins import golden

LONGEST = 142  # tokens of the longest golden sequence; shorter ones are padded to it, so that one program serves all
CAPACITY = 160
TOLERANCE = {"atol": 1e-4, "rtol": 0}

apply = jax.jit(transformer.apply, static_argnums=0)


@pytest.fixture(scope="module")
def official(model_name: str) -> dict[str, NDArray]:
    return golden.arrays(model_name, "logits")


@pytest.fixture(scope="module")
def prompt_cache(model: rf.Model, official: dict[str, NDArray]) -> KVCache:
    """One row: the prompt of the parallel slots, cached."""
    prompt = official["rows_prompt"][None]
    P = prompt.shape[1]
    out = apply(model.config, model.params, prompt, np.arange(P)[None], causal(P))
    return kv.commit(empty(model, 1), out.keys, out.values, jnp.arange(P)[None], np.ones((1, P), bool))


def empty(model: rf.Model, rows: int) -> KVCache:
    return kv.empty(model.config, rows, CAPACITY)


def padded(array: NDArray, length: int = LONGEST) -> NDArray:
    return np.pad(array, (0, length - len(array)))


def seen(count: int, entries: int, rows: int = 1) -> NDArray:
    """Every entry sees the first `count` cache positions."""
    return np.broadcast_to(np.arange(CAPACITY) < count, (rows, entries, CAPACITY))


# --- the official numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain0", "plain1", "plain2", "perm0", "perm1", "perm2"])
def test_logits_equal_the_official_model(model: rf.Model, official: dict[str, NDArray], case: str) -> None:
    """Plain text, and a prompt with its answer's slots in another order, some of them masks."""
    tokens = official[f"{case}_ids"]
    positions = official.get(f"{case}_pos", np.arange(len(tokens)))
    out = apply(model.config, model.params, padded(tokens)[None], padded(positions)[None], causal(LONGEST))
    np.testing.assert_allclose(out.logits[0, : len(tokens)], official[f"{case}_logits"], **TOLERANCE)


def test_three_cached_chunks_equal_the_official_cache(
    model: rf.Model, official: dict[str, NDArray], golden_dir: Path, model_name: str
) -> None:
    tokens, positions = official["perm0_ids"], official["perm0_pos"]
    ends = json.loads((golden_dir / f"golden{model_name}" / "logits.json").read_text())["perm0"]["chunks"]
    width = ends[0]
    cache, cached, logits = empty(model, 1), np.zeros(CAPACITY, bool), []
    for begin, end in zip([0, *ends], ends, strict=False):
        chunk = padded(positions[begin:end], width)[None]
        sees_cache = np.broadcast_to(cached, (1, width, CAPACITY))
        out = apply(
            model.config, model.params, padded(tokens[begin:end], width)[None], chunk, causal(width), cache, sees_cache
        )
        logits.append(out.logits[0, : end - begin])
        cache = kv.commit(cache, out.keys, out.values, chunk, (np.arange(width) < end - begin)[None])
        cached[positions[begin:end]] = True
    np.testing.assert_allclose(np.concatenate(logits), official["perm0_cached_logits"], **TOLERANCE)
    for layer in range(model.config.num_layers):
        np.testing.assert_allclose(cache.keys[layer, 0][:, positions], official[f"perm0_k{layer}"], **TOLERANCE)
        np.testing.assert_allclose(cache.values[layer, 0][:, positions], official[f"perm0_v{layer}"], **TOLERANCE)


def test_rows_of_a_ragged_batch_equal_the_official_single_sequences(
    model: rf.Model, official: dict[str, NDArray]
) -> None:
    tokens, real = official["ragged_ids"], official["ragged_mask"].astype(bool)
    B, T = tokens.shape
    sees = causal(T) & real[:, None, :]
    out = apply(model.config, model.params, tokens, np.broadcast_to(np.arange(T), (B, T)), sees)
    for row in range(B):
        np.testing.assert_allclose(out.logits[row][real[row]], official[f"plain{row}_logits"], **TOLERANCE)


@pytest.mark.parametrize(("capacity", "lengths"), [(64, [64]), (192, [128, 192]), (2048, [128, 256, 512, 1024, 2048])])
def test_a_cache_is_read_to_few_lengths(capacity: int, lengths: list[int]) -> None:
    assert kv.lengths(capacity) == lengths


@pytest.mark.parametrize("reach", [0, 1, 128, 129, 192, 193, 384])
def test_the_cache_is_read_no_further_than_anybody_sees(model: rf.Model, reach: int) -> None:
    """What a cache of a large budget holds behind all rows is neither seen nor read: it may be anything, and costs
    nothing."""
    c, rng = model.config, np.random.default_rng(reach)
    read = next(length for length in (128, 192, 384) if reach <= length)
    keys, values = rng.normal(size=(2, c.num_layers, 2, c.num_kv_heads, 384, c.head_dim)).astype(np.float32)
    sees = np.arange(384) < np.array([reach, reach // 2])[:, None, None]
    tokens, positions = rng.integers(0, 100, (2, 4)), np.broadcast_to(np.arange(384, 388), (2, 4))

    def logits(behind: float, length: int) -> NDArray:
        cache = KVCache(
            *(np.where(np.arange(384)[:, None] < read, x, behind)[:, :, :, :length] for x in (keys, values))
        )
        sees_cache = np.broadcast_to(sees[:, :, :length], (2, 4, length))
        return np.asarray(apply(c, model.params, tokens, positions, causal(4), cache, sees_cache).logits)

    found = logits(np.nan, 384)
    np.testing.assert_allclose(found, logits(0.0, max(reach, 1)), **TOLERANCE)


# --- windows ------------------------------------------------------------------------------------------------


def slots_as_one_window(model: rf.Model, official: dict[str, NDArray], cache: KVCache) -> Output:
    """Three slots as branches of one window behind the cached prompt."""
    tokens, positions = jnp.asarray(official["rows_ids"]), jnp.asarray(official["rows_pos"])
    J, k = tokens.shape
    live = jnp.ones(J * k, bool)
    run = windows.on_branches(tokens.ravel(), positions.ravel(), live, 0, jnp.repeat(jnp.arange(J), k))
    P = len(official["rows_prompt"])
    scope = jnp.where(jnp.arange(CAPACITY) < P, windows.SHARED, windows.HIDDEN)
    window = windows.assemble([run], scope)
    return forward(model, window, cache)


def forward(model: rf.Model, window: windows.Window, cache: KVCache) -> Output:
    return apply(
        model.config,
        model.params,
        window.tokens[None],
        window.positions[None],
        windows.sees_window(window)[None],
        cache,
        windows.sees_cache(window)[None],
    )


def test_slots_of_one_window_equal_official_batch_rows(
    model: rf.Model, official: dict[str, NDArray], prompt_cache: KVCache
) -> None:
    logits = slots_as_one_window(model, official, prompt_cache).logits
    np.testing.assert_allclose(logits.reshape(official["rows_logits"].shape), official["rows_logits"], **TOLERANCE)


def test_slots_of_one_window_equal_the_forward_of_a_slot_vmapped_over_a_shared_cache(
    model: rf.Model, official: dict[str, NDArray], prompt_cache: KVCache
) -> None:
    """That the parallel infill may be one row with a block-diagonal mask, and the prefix is never copied."""
    slots, k = official["rows_ids"].shape
    P = len(official["rows_prompt"])

    def of_slot(tokens: jax.Array, positions: jax.Array, cache: KVCache) -> Output:
        return transformer.apply(
            model.config, model.params, tokens[None], positions[None], causal(k), cache, seen(P, k)
        )

    vmapped = jax.vmap(of_slot, in_axes=(0, 0, None))(
        jnp.asarray(official["rows_ids"]), jnp.asarray(official["rows_pos"]), prompt_cache
    )
    window = slots_as_one_window(model, official, prompt_cache)
    np.testing.assert_allclose(window.logits.reshape(slots, k, -1), vmapped.logits[:, 0], atol=1e-5, rtol=0)
    for one, many in ((window.keys, vmapped.keys), (window.values, vmapped.values)):
        L, _, K, _, H = one.shape
        by_slot = one[:, 0].reshape(L, K, slots, k, H).transpose(2, 0, 1, 3, 4)
        np.testing.assert_allclose(by_slot, many[:, :, 0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_name", ["A"], indirect=True)
def test_a_compiled_forward_equals_an_eager_one(
    model: rf.Model, official: dict[str, NDArray], prompt_cache: KVCache
) -> None:
    tokens, positions = official["rows_ids"][:1], official["rows_pos"][:1]
    arguments = (model.params, tokens, positions, causal(8), prompt_cache, seen(85, 8))
    eager = transformer.apply(model.config, *arguments)
    for one, other in zip(eager, apply(model.config, *arguments), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)


def test_what_is_not_seen_changes_nothing(model: rf.Model, official: dict[str, NDArray], prompt_cache: KVCache) -> None:
    """Trap D2: padding and rejected drafts leave garbage in the cache."""
    P = len(official["rows_prompt"])
    poisoned = jax.tree.map(lambda array: array.at[:, :, :, P:].set(1e4), prompt_cache)
    clean = slots_as_one_window(model, official, prompt_cache)
    dirty = slots_as_one_window(model, official, poisoned)
    for one, other in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_entry_that_sees_nothing_is_finite(model: rf.Model, prompt_cache: KVCache) -> None:
    """The entries behind the live ones of a window are computed, and must not spread NaN."""
    nothing = np.zeros((1, 8, 8), bool), np.zeros((1, 8, CAPACITY), bool)
    tokens = np.zeros((1, 8), np.int32)
    out = apply(model.config, model.params, tokens, tokens, nothing[0], prompt_cache, nothing[1])
    assert all(np.isfinite(array).all() for array in out)
