"""Windows, the sizes they are compiled at, and what is read off their logits."""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from refusion_jax.decoding import engine, sampling
from refusion_jax.decoding import window as windows

T = 10  # entries


@hypothesis.given(live=st.lists(st.booleans(), min_size=T, max_size=T), width=st.sampled_from([5, T]))
def test_live_entries_move_to_the_front_and_the_others_are_not_seen(live: list[bool], width: int) -> None:
    hypothesis.assume(sum(live) <= width)
    front, went, sees, sees_cache = jax.device_get(compact(live, width))
    entries = [entry for entry in range(T) if live[entry]]
    n = len(entries)
    assert went[entries].tolist() == list(range(n))
    assert all(went[entry] >= T for entry in range(T) if not live[entry])
    assert front.tokens[:n].tolist() == [100 + entry for entry in entries]
    assert front.positions[:n].tolist() == [50 + entry for entry in entries]
    assert front.live.tolist() == [place < n for place in range(width)]
    # The trunk of before, in its order; nothing else.
    assert sees.tolist() == [[other <= place < n for other in range(width)] for place in range(width)]
    assert sees_cache[:n].all()
    assert not sees_cache[n:].any()  # or the cache would be read as far as rows reach that have ended


@functools.partial(jax.jit, static_argnums=1)
def compact(live: list[bool], width: int) -> tuple[windows.Window, jax.Array, jax.Array, jax.Array]:
    """A window of trunk entries made compact, where they went, and what they see."""
    trunk = windows.on_trunk(jnp.arange(T) + 100, jnp.arange(T) + 50, jnp.array(live))
    front, went = windows.compact(windows.assemble([trunk], jnp.full(4, windows.SHARED)), width)
    return front, went, windows.sees_window(front), windows.sees_cache(front)


@hypothesis.given(seed=st.integers(0, 10**6), candidates=st.sampled_from([1, 5]), levels=st.sampled_from([2, 1000]))
def test_scores_are_those_of_a_plain_sort(seed: int, candidates: int, levels: int) -> None:
    """Trap D4: equal logits go to the lowest id; banned ids are neither written nor counted."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, (3, 40)).astype(np.float32) * (8 / levels)
    allowed = rng.random(40) < 0.8
    asked = rng.choice(np.flatnonzero(allowed), 3)
    scores = sampling.score(jnp.asarray(logits), jnp.asarray(allowed), jnp.asarray(asked), candidates=candidates)
    for row in range(3):
        order = sorted(np.flatnonzero(allowed), key=lambda token: (-logits[row, token], token))
        assert scores.tokens[row].tolist() == order[:candidates]
        weights = np.where(allowed, np.exp(logits[row].astype(np.float64)), 0)
        probabilities = weights / weights.sum()
        np.testing.assert_allclose(np.exp(scores.logprob[row]), probabilities.max(), rtol=1e-5)
        np.testing.assert_allclose(scores.asked[row], probabilities[asked[row]], rtol=1e-5)


def test_certainties_close_to_one_keep_their_order() -> None:
    """As float32 probabilities both are 1, and the earlier slot would be taken for the more certain one."""
    logits = jnp.array([[30.0, 0, 0], [31.0, 0, 0]])
    scores = sampling.score(logits, None, None, candidates=1)
    assert np.exp(scores.logprob).tolist() == [1, 1]
    assert scores.logprob[1] > scores.logprob[0]


def test_every_window_has_a_width_that_holds_it_and_is_at_most_half_as_wide_again() -> None:
    for entries in range(1, 1500):
        sizes = engine.widths(entries)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == entries
        for live in range(8, min(entries, 1024) + 1):
            assert min(width for width in sizes if width >= live) <= max(1.5 * live, 8)


def test_capacities_hold_the_longest_row_in_few_steps() -> None:
    sizes = {longest: engine.capacity(longest) for longest in range(1, 40_000)}
    assert all(longest <= size for longest, size in sizes.items())
    assert all(size < max(longest + 64, 1.5 * longest) for longest, size in sizes.items())
    assert len(set(sizes.values())) < 60
    assert all(engine.prefill_width(longest) <= size for longest, size in sizes.items())


def test_two_short_windows_need_not_be_computed_as_one_of_full_width() -> None:
    """Sixty places and then two thirds, six times; never under 8, and no row is wider than all that is packed."""
    assert engine.sizes(30, 2) == [(8, 8), (11, 11), (17, 17), (26, 26), (30, 40), (30, 60)]
