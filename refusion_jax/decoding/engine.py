"""The engine: one forward pass for all rows, whatever each of them is doing, in one jitted ``lax.while_loop``.

A *method* (exact.py, threshold.py, autoregressive.py) is a small pytree with three functions written for one row:

* ``init(tokens, prompt_length, budget) -> Row``
* ``window(row) -> Window``: what the row feeds next, in a fixed layout of which some entries are live;
* ``update(row, window, scores) -> (Row, stored, Report)``: what follows from the scores, and which entries' keys and
  values are kept.

The engine vmaps them over rows, moves the live entries of every row to the front, runs the transformer at the
narrowest width that holds the longest of them, and commits what is stored. The cache and the rows are donated; the
loop never copies them.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from refusion_jax import cache as kv
from refusion_jax.cache import KVCache
from refusion_jax.config import ModelConfig
from refusion_jax.decoding import window as windows
from refusion_jax.decoding.row import Report
from refusion_jax.decoding.sampling import Scores, allowed_tokens, score
from refusion_jax.decoding.window import Window
from refusion_jax.model import transformer
from refusion_jax.model.transformer import Params, causal
from refusion_jax.sharding import ROWS, TENSOR, has_mesh, per_row, per_shard, reshard

PREFILL_WIDTH = 256  # tokens of a prompt that are cached in one pass


class Method(Protocol):
    """How a row is decoded. A pytree; its static fields and class variables select the compiled program."""

    candidates: ClassVar[int]  # how many of the most likely tokens ``update`` reads

    @property
    def restricted(self) -> bool: ...  # whether the mask and ids beyond the tokenizer are banned

    @property
    def entries(self) -> int: ...  # T, entries of the window

    def init(self, tokens: jax.Array, prompt_length: jax.Array, budget: jax.Array) -> Any: ...

    def window(self, row: Any) -> Window: ...

    def update(self, row: Any, window: Window, scores: Scores) -> tuple[Any, jax.Array, Report]: ...


class State(flax.struct.PyTreeNode):
    """The carry of the loop."""

    rows: Any  # a Row of the method, every field with a leading [B]
    cache: KVCache
    step: jax.Array  # int32: forward passes so far
    finite: jax.Array  # bool: no logit was NaN so far


def widths(entries: int) -> list[int]:
    """The window widths that are compiled for up to ``entries`` live entries, in one place.

    On a CPU time follows the computed positions, so a window is at most half as wide again as needed; elsewhere it
    follows the weights that are read, and fewer programs compile sooner.
    """
    fine = [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    coarse = [16, 32, 64, 128, 256, 512, 1024]
    steps = [1, 2] if entries <= 4 else fine if jax.default_backend() == "cpu" else coarse
    return [width for width in steps if width < entries] + [entries]


def capacity(longest: int) -> int:
    """The cache capacity S for rows of up to ``longest`` positions, prompt and answer: few distinct sizes."""
    step = 64 if longest <= 512 else 256 if longest <= 2048 else 1024
    return -(-longest // step) * step


def most_steps(budget: int) -> int:
    """More forward passes than any method needs for ``budget`` tokens (the worst slot of k costs 2 + 2(k - 1))."""
    return 4 * budget + 8


def prefill_width(longest: int) -> int:
    """The window width with which prompts of up to ``longest`` tokens are cached."""
    return min(PREFILL_WIDTH, -(-longest // 32) * 32)


@functools.partial(jax.jit, static_argnames=("config", "width"))
def prefill(
    params: Params,
    tokens: jax.Array,  # [B, S] int32: prompts, padded
    lengths: jax.Array,  # [B] int32: their lengths
    *,
    config: ModelConfig,
    width: int,
) -> KVCache:
    """Cache the prompts, ``width`` tokens at a time. What is written behind a shorter prompt, nobody sees."""
    B, S = tokens.shape
    sees = reshard(jnp.broadcast_to(causal(width), (B, width, width)), ROWS, None, None)

    def chunk(i: jax.Array | int, cache: KVCache | None) -> tuple[transformer.Output, jax.Array]:
        place = i * width + jnp.arange(width)
        inputs = tokens.at[:, place].get(mode="fill", fill_value=0)
        positions = jnp.broadcast_to(place, (B, width))
        earlier = jnp.broadcast_to(jnp.arange(S) < i * width, (B, width, S))
        sees_cache = None if cache is None else reshard(earlier, ROWS, None, None)
        return transformer.apply(config, params, inputs, positions, sees, cache, sees_cache, head=False), positions

    def body(i: jax.Array, cache: KVCache) -> KVCache:
        out, positions = chunk(i, cache)
        return kv.commit(cache, out.keys, out.values, positions, positions < S)

    out, _ = chunk(0, None)
    cache = kv.fill(out.keys, out.values, S)
    if width < PREFILL_WIDTH:  # then it holds the longest prompt
        return cache
    return jax.lax.fori_loop(1, -(-jnp.max(lengths) // width), body, cache)


@jax.jit
def init_rows(method: Method, tokens: jax.Array, lengths: jax.Array, budgets: jax.Array) -> Any:
    """Rows of the method before their first step, every field with a leading [B]."""
    return per_row(lambda m, *row: m.init(*row))(method, tokens, lengths, budgets)


def begin(
    params: Params,
    method: Method,
    tokens: jax.Array,  # [B, S] int32: prompts, padded
    lengths: jax.Array,  # [B] int32: their lengths
    budgets: jax.Array,  # [B] int32: how many tokens may follow; 0: the row is done at once
    *,
    config: ModelConfig,
    width: int,
) -> State:
    """Every prompt cached, before the first step."""
    cache = prefill(params, tokens, lengths, config=config, width=width)
    rows = init_rows(method, tokens, lengths, budgets)
    return State(rows, cache, jnp.zeros((), jnp.int32), jnp.ones((), bool))


class Pass(NamedTuple):
    """What one forward pass over a window [B, T] gives."""

    scores: Scores  # of every entry, [B, T]; zero where it is not live
    went: jax.Array  # [B, T] int32: the place of every live entry in the compact window
    keys: jax.Array  # [L, B, K, T, H], of the compact window
    values: jax.Array  # [L, B, K, T, H]
    width: jax.Array  # int32: of the compact window, as it was computed


def forward(params: Params, config: ModelConfig, method: Method, window: Window, cache: KVCache) -> Pass:
    """Run the live entries of ``window`` at the narrowest compiled width that holds those of every row."""
    T = method.entries
    sizes = widths(T)
    allowed = reshard(allowed_tokens(config), TENSOR) if method.restricted else None
    rate = per_shard(
        functools.partial(score, candidates=method.candidates, axis=TENSOR if has_mesh() else None),
        ((ROWS, None, TENSOR), (TENSOR,), (ROWS,)),
        (ROWS,),
    )

    def at_width(width: int, params: Params, window: Window, cache: KVCache) -> Pass:
        def pack(_: None, row: Window) -> tuple[Window, jax.Array, jax.Array, jax.Array]:
            front, went = windows.compact(row, width)
            return front, went, windows.sees_window(front), windows.sees_cache(front)

        def unpack(_: None, scores: Scores, went: jax.Array) -> Scores:
            return jax.tree.map(lambda x: x.at[went].get(mode="fill", fill_value=0), scores)

        front, went, sees, sees_cache = per_row(pack)(None, window)
        out = transformer.apply(config, params, front.tokens, front.positions, sees, cache, sees_cache)
        scores = per_row(unpack)(None, rate(out.logits, allowed, front.asked), went)
        widen = [(0, 0)] * 3 + [(0, T - width), (0, 0)]
        return Pass(scores, went, jnp.pad(out.keys, widen), jnp.pad(out.values, widen), jnp.int32(width))

    needed = jnp.max(jnp.sum(window.live, axis=1))
    index = sum((needed > width for width in sizes[:-1]), start=jnp.int32(0))
    return jax.lax.switch(index, [functools.partial(at_width, width) for width in sizes], params, window, cache)


def advance(params: Params, config: ModelConfig, method: Method, state: State) -> tuple[State, Report]:
    """One step: every row that is not done takes part in one forward pass."""
    window = per_row(lambda m, row: m.window(row))(method, state.rows)
    out = forward(params, config, method, window, state.cache)

    def update(shared: Any, row: Any, window: Window, scores: Scores, went: jax.Array) -> Any:
        method, width, step = shared
        new, stored, report = method.update(row, window, scores)
        new = new.replace(
            positions=row.positions + jnp.sum(window.live),
            padded_positions=row.padded_positions + width,
            finished_at=jnp.where(new.done, step + 1, -1),
        )
        frozen = jax.tree.map(lambda old, new: jnp.where(row.done, old, new), row, new)
        return frozen, windows.move(window.positions, went), windows.move(stored & ~row.done, went), report

    shared = (method, out.width, state.step)
    rows, positions, stored, report = per_row(update)(shared, state.rows, window, out.scores, out.went)
    cache = kv.commit(state.cache, out.keys, out.values, positions, stored)
    finite = state.finite & ~jnp.any(jnp.isnan(out.scores.logprob))
    return State(rows, cache, state.step + 1, finite), report


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def run(params: Params, method: Method, state: State, limit: jax.Array, *, config: ModelConfig) -> State:
    """Steps until every row is done or ``limit`` forward passes have been made in all. ``state`` is donated."""

    def unfinished(state: State) -> jax.Array:
        return (state.step < limit) & ~jnp.all(state.rows.done)

    return jax.lax.while_loop(unfinished, lambda state: advance(params, config, method, state)[0], state)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def run_once(params: Params, method: Method, state: State, *, config: ModelConfig) -> tuple[State, Report]:
    """One step, and what it did to every row: the loop of ``run`` as a trace sees it. ``state`` is donated."""
    return advance(params, config, method, state)
