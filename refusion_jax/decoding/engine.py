"""The engine: one forward pass for all rows, whatever each of them is doing, in one jitted ``lax.while_loop``.

A *method* (exact.py, threshold.py, autoregressive.py, masked_diffusion.py) is a small pytree with three functions
written for one row:

* ``init(tokens, prompt_length, budget, noise) -> Row``
* ``window(row) -> Window``: what the row feeds next, in a fixed layout of which some entries are live;
* ``update(row, window, scores) -> (Row, stored, Report)``: what follows from the scores, and which entries' keys and
  values are kept.

The engine vmaps them over rows, moves the live entries of every row to the front, packs those of all rows behind each
other (model/packing.py), runs the transformer at the smallest size that holds them, and commits what is stored. The
cache and the rows are donated; the loop never copies them.
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
from refusion_jax.decoding.sampling import Sampling, Scores, allowed_tokens, fold_in, request_key, score
from refusion_jax.decoding.window import Window
from refusion_jax.model import transformer
from refusion_jax.model.packing import pack, packing_of, unpack
from refusion_jax.model.transformer import Params, causal
from refusion_jax.sharding import ROWS, TENSOR, has_mesh, per_row, per_shard, platform, reshard, row_shards

PREFILL_WIDTH = 256  # tokens of a prompt that are cached in one pass


class Method(Protocol):
    """How a row is decoded. A pytree; its static fields and class variables select the compiled program."""

    candidates: ClassVar[int]  # how many of the most likely tokens ``update`` reads

    @property
    def sampling(self) -> Sampling | None: ...  # how tokens are drawn; None: greedily

    @property
    def slot_size(self) -> int: ...  # k, tokens of a slot

    @property
    def planner(self) -> str: ...  # name of the function that rates slots

    @property
    def restricted(self) -> bool: ...  # whether the mask and ids beyond the tokenizer are banned

    @property
    def entries(self) -> int: ...  # T, entries of the window

    def init(self, tokens: jax.Array, prompt_length: jax.Array, budget: jax.Array, noise: jax.Array) -> Any: ...

    def window(self, row: Any) -> Window: ...

    def update(self, row: Any, window: Window, scores: Scores) -> tuple[Any, jax.Array, Report]: ...


class State(flax.struct.PyTreeNode):
    """The carry of the loop."""

    rows: Any  # a Row of the method, every field with a leading [B]
    cache: KVCache
    step: jax.Array  # int32: forward passes so far
    computed: jax.Array  # int32: window positions that they computed for each shard of rows
    finite: jax.Array  # bool: no logit was NaN so far


def widths(entries: int) -> list[int]:
    """The window widths that are compiled for up to ``entries`` live entries, in one place.

    On a CPU time follows the computed positions, so a window is at most half as wide again as needed; elsewhere it
    follows the weights that are read, and fewer programs compile sooner.
    """
    fine = [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    coarse = [16, 32, 64, 128, 256, 512, 1024]
    steps = [1, 2] if entries <= 4 else fine if platform() == "cpu" else coarse
    return [width for width in steps if width < entries] + [entries]


def sizes(entries: int, rows: int) -> list[tuple[int, int]]:
    """What is compiled for windows of up to ``entries``, of ``rows`` rows a shard: width T, and M packed positions.

    The cheapest first. One row is as wide as its window; several are packed behind each other, where M = rows x T
    stands for no packing.
    """
    if rows == 1:
        return [(width, width) for width in widths(entries)]
    if entries <= 4:
        return sorted({(1, rows), *((entries, rows + rows * (entries - 1) * part // 4) for part in (1, 2, 4))})
    whole = rows * entries
    parts = [2 / 3] * 6 if platform() == "cpu" else [1 / 2] * 3
    packed = [whole]
    for part in parts:
        packed.append(max(int(packed[-1] * part), 8))
    half = (entries + 1) // 2
    return [(min(entries if size > whole // 4 else half, size), size) for size in sorted(set(packed))]


def capacity(longest: int) -> int:
    """The cache capacity S for rows of up to ``longest`` positions, prompt and answer: few distinct sizes."""
    step = 64 if longest <= 512 else 256 if longest <= 2048 else 1024
    return -(-longest // step) * step


def most_steps(budget: int) -> int:
    """More forward passes than any method needs for ``budget`` tokens (the worst slot of k costs 2 + 2(k - 1))."""
    return 4 * budget + 8


def prefill_width(longest: int) -> int:
    """The window width with which prompts of up to ``longest`` tokens are cached."""
    return next((width for width in (32, 64, 96, 128, 192) if width >= longest), PREFILL_WIDTH)


# ---- Rows come and go ----


def arrivals(rows: int) -> int:
    """R, how many prompts take places of ``rows`` of a shard together, in one program."""
    return min(max(rows // 8, 1), 8)


class Arrivals(NamedTuple):
    """Prompts that take places of a batch. With a mesh each shard of rows has R of its own, in order."""

    tokens: jax.Array  # [R, S] int32: prompts, padded
    lengths: jax.Array  # [R] int32: their lengths
    budgets: jax.Array  # [R] int32: how many tokens may follow; 0: the row is done at once
    noise: jax.Array  # [R, 3] uint32: seed, request and sample, of which every row's noise is made
    places: jax.Array  # [R] int32: the row of its shard that each takes; beyond the last: none


def nobody(rows: int, capacity: int) -> Arrivals:
    """Arrivals that are done at once."""
    nothing = Arrivals(
        tokens=jnp.zeros((rows, capacity), jnp.int32),
        lengths=jnp.ones(rows, jnp.int32),
        budgets=jnp.zeros(rows, jnp.int32),
        noise=jnp.zeros((rows, 3), jnp.uint32),
        places=jnp.zeros(rows, jnp.int32),
    )
    return jax.tree.map(lambda x: reshard(x, ROWS, *(None,) * (x.ndim - 1)), nothing)


@functools.partial(jax.jit, static_argnames=("config", "rows", "capacity"))
def idle(method: Method, *, config: ModelConfig, rows: int, capacity: int) -> State:
    """A batch all of whose places are free."""
    new = init_rows(method, nobody(rows, capacity))
    return State(new, kv.empty(config, rows, capacity), jnp.int32(0), jnp.int32(0), jnp.ones((), bool))


@functools.partial(jax.jit, static_argnames=("config", "width"), donate_argnames=("state",))
def admit(
    params: Params, method: Method, state: State, arrivals: Arrivals, prefix: KVCache | None, *, config: ModelConfig,
    width: int,
) -> State:  # fmt: skip
    """Cache prompts, ``width`` tokens at a time, and give them their places. ``state`` is donated.

    ``prefix`` [L, 1, K, P, H] holds the first P tokens of every prompt, which are not computed again.
    """
    capacity = state.cache.capacity
    cache = prefill(params, arrivals.tokens, arrivals.lengths, prefix, config=config, width=width, capacity=capacity)
    return put(state, cache, init_rows(method, arrivals), arrivals.places)


@functools.partial(jax.jit, donate_argnames=("state",))
def admit_again(method: Method, state: State, arrivals: Arrivals, sources: jax.Array) -> State:
    """Give places to prompts that rows of the batch have cached: ``sources`` [R], the row of the shard that each is in.

    A row never changes what is cached of its prompt, also when it is done. ``state`` is donated.
    """

    def take(array: jax.Array, sources: jax.Array) -> jax.Array:
        return array[:, sources]

    taken = per_shard(take, (kv.CACHE_AXES, (ROWS,)), kv.CACHE_AXES)
    cache = KVCache(taken(state.cache.keys, sources), taken(state.cache.values, sources))
    return put(state, cache, init_rows(method, arrivals), arrivals.places)


def put(state: State, cache: KVCache, rows: Any, places: jax.Array) -> State:
    """``state`` with new rows, and what is cached of them, at their places."""

    def at_places(old: jax.Array, new: jax.Array, places: jax.Array) -> jax.Array:
        return old.at[places].set(new, mode="drop", unique_indices=True)

    def at_places_of_cache(old: jax.Array, new: jax.Array, places: jax.Array) -> jax.Array:
        return old.at[:, places].set(new, mode="drop", unique_indices=True)

    def all_rows(old: Any, new: Any, places: jax.Array) -> Any:
        return jax.tree.map(lambda old, new: at_places(old, new, places), old, new)

    into_cache = per_shard(at_places_of_cache, (kv.CACHE_AXES, kv.CACHE_AXES, (ROWS,)), kv.CACHE_AXES)
    keys = into_cache(state.cache.keys, cache.keys, places)
    values = into_cache(state.cache.values, cache.values, places)
    rows = per_shard(all_rows, ((ROWS,), (ROWS,), (ROWS,)), (ROWS,))(state.rows, rows, places)
    return state.replace(rows=rows, cache=KVCache(keys, values))


def init_rows(method: Method, arrivals: Arrivals) -> Any:
    """Rows of the method before their first step, every field with a leading [R]."""

    def init(method: Method, tokens: jax.Array, length: jax.Array, budget: jax.Array, noise: jax.Array) -> Any:
        return method.init(tokens, length, budget, request_key(*noise))

    return per_row(init)(method, *arrivals[:4])


def prefill(
    params: Params,
    tokens: jax.Array,  # [R, S] int32: prompts, padded
    lengths: jax.Array,  # [R] int32: their lengths
    prefix: KVCache | None,
    *,
    config: ModelConfig,
    width: int,
    capacity: int,
) -> KVCache:
    """The prompts cached, ``width`` tokens at a time. What is written behind a shorter prompt, nobody sees."""
    R = tokens.shape[0]
    sees = reshard(jnp.broadcast_to(causal(width), (R, width, width)), ROWS, None, None)
    done = 0 if prefix is None else prefix.capacity

    def chunk(i: jax.Array | int, cache: KVCache | None) -> tuple[transformer.Output, jax.Array]:
        place = done + i * width + jnp.arange(width)
        inputs = tokens.at[:, place].get(mode="fill", fill_value=0)
        positions = reshard(jnp.broadcast_to(place, (R, width)), ROWS, None)
        earlier = jnp.broadcast_to(jnp.arange(capacity) < place[0], (R, width, capacity))
        sees_cache = None if cache is None else reshard(earlier, ROWS, None, None)
        return transformer.apply(config, params, inputs, positions, sees, cache, sees_cache, head=False), positions

    def body(i: jax.Array, cache: KVCache) -> KVCache:
        out, positions = chunk(i, cache)
        return kv.commit(cache, out.keys, out.values, positions, positions < capacity)

    if prefix is None:
        out, _ = chunk(0, None)
        cache = kv.fill(out.keys, out.values, capacity)
        if width < PREFILL_WIDTH:  # then it holds the longest prompt
            return cache
        return jax.lax.fori_loop(1, -(-jnp.max(lengths) // width), body, cache)

    def for_rows(x: jax.Array) -> jax.Array:
        return reshard(jnp.broadcast_to(x, (x.shape[0], R, *x.shape[2:])), *kv.CACHE_AXES)

    keys, values = for_rows(prefix.keys), for_rows(prefix.values)
    cache = kv.fill(keys, values, capacity)
    return jax.lax.fori_loop(0, -(-(jnp.max(lengths) - done) // width), body, cache)


@functools.partial(jax.jit, donate_argnames=("state",))
def stop(state: State, stopped: jax.Array) -> State:
    """End the rows that are ``stopped`` [B] bool where they stand. ``state`` is donated."""
    rows = state.rows
    return state.replace(rows=rows.replace(end=jnp.where(stopped, jnp.minimum(rows.end, rows.start), rows.end)))


class Pass(NamedTuple):
    """What one forward pass over a window [B, T] gives."""

    scores: Scores  # of every entry, [B, T]; zero where it is not live
    went: jax.Array  # [B, T] int32: the place of every live entry in the compact window
    keys: jax.Array  # [L, B, K, T, H], of the compact window
    values: jax.Array  # [L, B, K, T, H]
    computed: jax.Array  # int32: positions that were computed for each shard of rows


def forward(
    params: Params, config: ModelConfig, method: Method, window: Window, noise: jax.Array, cache: KVCache
) -> Pass:
    """Run the live entries of ``window`` in the smallest compiled size that holds them."""
    T, mask = method.entries, config.mask_token_id
    B, shards = window.live.shape[0], row_shards()
    compiled = sizes(T, B // shards)
    allowed = reshard(allowed_tokens(config), TENSOR) if method.restricted else None
    rate = per_shard(
        functools.partial(
            score,
            candidates=method.candidates,
            entropy=method.planner == "entropy",
            axis=TENSOR if has_mesh() else None,
        ),
        ((ROWS, None, TENSOR), (TENSOR,), (ROWS,), (), (ROWS,)),
        (ROWS,),
    )

    def decided(front: Window, noise: jax.Array) -> jax.Array | None:
        """Noise keys [T, 2] of the positions that the entries decide: a mask its own, a token the next."""
        if method.sampling is None:
            return None
        position = front.positions + (front.tokens != (-1 if mask is None else mask))
        return jax.vmap(fold_in, (None, 0))(noise, position)

    def at_size(
        width: int, size: int, params: Params, window: Window, counts: jax.Array, noise: jax.Array, cache: KVCache
    ) -> Pass:
        def compact(_: None, row: Window, noise: jax.Array) -> Any:
            front, went = windows.compact(row, width)
            return front, went, windows.sees_window(front), windows.sees_cache(front), decided(front, noise)

        def spread(_: None, scores: Scores, went: jax.Array) -> Scores:
            return jax.tree.map(lambda x: x.at[went].get(mode="fill", fill_value=0), scores)

        front, went, sees, sees_cache, keys = per_row(compact)(None, window, noise)
        inputs = front.tokens, front.positions, front.asked, keys
        packing = None if size == B // shards * width else packing_of(counts, width, size)
        if packing is not None:
            inputs = jax.tree.map(lambda x: pack(packing, x, *(None,) * (x.ndim - 2)), inputs)
        tokens, positions, asked, keys = inputs
        out = transformer.apply(config, params, tokens, positions, sees, cache, sees_cache, packing=packing)
        scores = rate(out.logits, allowed, asked, method.sampling, keys)
        if packing is not None:
            scores = jax.tree.map(lambda x: unpack(packing, x, *(None,) * (x.ndim - 2)), scores)
        scores = per_row(spread)(None, scores, went)
        widen = [(0, 0)] * 3 + [(0, T - width), (0, 0)]
        return Pass(scores, went, jnp.pad(out.keys, widen), jnp.pad(out.values, widen), jnp.int32(size))

    counts = jnp.sum(window.live, axis=1)
    of_shard = reshard(counts, None).reshape(shards, -1)
    longest, most = jnp.max(of_shard), jnp.max(jnp.sum(of_shard, axis=1))
    fits = jnp.array([(longest <= width) & (most <= size) for width, size in compiled])
    branches = [functools.partial(at_size, *size) for size in compiled]
    return jax.lax.switch(jnp.argmax(fits), branches, params, window, counts, noise, cache)


def padding(computed: jax.Array, live: jax.Array, rows: Any) -> jax.Array:
    """Each working row's share of the positions that were computed and carried nothing, rounded up, int32."""
    working = jnp.maximum(jnp.sum(~rows.done), 1)
    return -(-(computed * row_shards() - jnp.sum(live)) // working)


def advance(params: Params, config: ModelConfig, method: Method, state: State) -> tuple[State, Report]:
    """One step: every row that is not done takes part in one forward pass."""
    window = per_row(lambda m, row: m.window(row))(method, state.rows)
    out = forward(params, config, method, window, state.rows.noise, state.cache)

    def update(shared: Any, row: Any, window: Window, scores: Scores, went: jax.Array) -> Any:
        method, padding, step = shared
        new, stored, report = method.update(row, window, scores)
        new = new.replace(
            positions=row.positions + jnp.sum(window.live),
            padded_positions=row.padded_positions + jnp.sum(window.live) + padding,
            finished_at=jnp.where(new.done, step + 1, -1),
        )
        frozen = jax.tree.map(lambda old, new: jnp.where(row.done, old, new), row, new)
        return frozen, windows.move(window.positions, went), windows.move(stored & ~row.done, went), report

    shared = (method, padding(out.computed, window.live, state.rows), state.step)
    rows, positions, stored, report = per_row(update)(shared, state.rows, window, out.scores, out.went)
    cache = kv.commit(state.cache, out.keys, out.values, positions, stored)
    finite = state.finite & ~jnp.any(jnp.isnan(out.scores.logprob))
    return State(rows, cache, state.step + 1, state.computed + out.computed, finite), report


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def run(
    params: Params, method: Method, state: State, limit: jax.Array, enough: jax.Array, *, config: ModelConfig
) -> State:
    """Steps until ``enough`` rows are done or ``limit`` forward passes have been made in all. ``state`` is donated."""

    def unfinished(state: State) -> jax.Array:
        return (state.step < limit) & (jnp.sum(state.rows.done) < enough)

    return jax.lax.while_loop(unfinished, lambda state: advance(params, config, method, state)[0], state)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def run_once(params: Params, method: Method, state: State, *, config: ModelConfig) -> tuple[State, Report]:
    """One step, and what it did to every row: the loop of ``run`` as a trace sees it. ``state`` is donated."""
    return advance(params, config, method, state)
