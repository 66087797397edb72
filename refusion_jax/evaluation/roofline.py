"""What decoding costs on a chip at best, from sizes: operations, bytes, and what the chip does of both in a second.

A forward pass computes M positions of B rows. It takes the longer of two times (Williams, Waterman and Patterson 2009,
"Roofline"): its operations over those that the chip does a second, and its bytes over those that the chip's memory
moves a second, and a fixed time on top of it.

* Operations: two for every number of a matrix and every position, and attention, in which every position of a window
  meets all cached positions and its whole window, seen or not.
* Bytes: every matrix once, the cache once, and the results of the matrix products, each written once and read once.

What is left out is what a chip does beside these: norms, rotations, softmax, the choice of tokens, the state of rows.

Letters: M positions of a forward pass, B rows, T window of a row, S cached positions of a row; L layers, D width,
N query heads, K key/value heads, H head size, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from refusion_jax.chips import CHIPS
from refusion_jax.config import ModelConfig
from refusion_jax.model.transformer import Params

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
LOGIT_BYTES = 4  # logits are float32, whatever the weights are


def layer_parameters(config: ModelConfig) -> int:
    """How many numbers the matrices of all layers have."""
    c = config
    attention = 2 * c.hidden_size * (c.num_heads + c.num_kv_heads) * c.head_dim
    feed_forward = 3 * c.hidden_size * c.intermediate_size
    return c.num_layers * (attention + feed_forward)


def matrix_parameters(config: ModelConfig) -> int:
    """The same with the head: all that activations are multiplied by. Embeddings are looked up, not multiplied."""
    return layer_parameters(config) + config.hidden_size * config.vocab_size


# ---- Costs ----


class Forward(NamedTuple):
    """The sizes of a forward pass. They may be means."""

    positions: float  # M, of all rows
    rows: float  # B
    window: float  # T, for which the attention of a row is computed
    cached: float  # S, positions of a row's cache that are read
    head: bool = True  # whether there are logits


class Operations(NamedTuple):
    """Of a forward pass."""

    layers: float  # 2 M P + 4 L N H B T (S + T), with P parameters of their matrices
    head: float  # 2 M D V


def operations(config: ModelConfig, forward: Forward) -> Operations:
    """Operations of a forward pass."""
    c, f = config, forward
    attention = 4 * c.num_layers * c.num_heads * c.head_dim * f.rows * f.window * (f.cached + f.window)
    head = 2 * f.positions * c.hidden_size * c.vocab_size if f.head else 0
    return Operations(2 * f.positions * layer_parameters(c) + attention, head)


def bytes_moved(config: ModelConfig, forward: Forward) -> float:
    """Bytes of a forward pass: parameters, the cache (2 L K H B S numbers), and the results of matrix products.

    A layer has results of N H + 2 K H (queries, keys, values), N H (attention), D, 2 F and D numbers a position.
    """
    c, f = config, forward
    size = ITEM_BYTES[c.dtype]
    parameters = matrix_parameters(c) if f.head else layer_parameters(c)
    cache = 2 * c.num_layers * c.num_kv_heads * c.head_dim * f.rows * f.cached
    of_layers = c.num_layers * (
        2 * (c.num_heads + c.num_kv_heads) * c.head_dim + 2 * c.hidden_size + 2 * c.intermediate_size
    )
    logits = c.vocab_size * LOGIT_BYTES if f.head else 0
    return size * (parameters + cache) + 2 * f.positions * (size * of_layers + logits)


def resident_bytes(config: ModelConfig, rows: float, capacity: float) -> float:
    """Bytes of memory that parameters and cache take."""
    c = config
    embedding = 0 if c.tie_word_embeddings else c.hidden_size * c.vocab_size
    cache = 2 * c.num_layers * c.num_kv_heads * c.head_dim * rows * capacity
    return ITEM_BYTES[c.dtype] * (matrix_parameters(c) + embedding + cache)


Rates = tuple[tuple[float, float], ...]
"""Operations a second in products of so many positions: (positions, operations a second), by positions."""


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What a device reaches at best."""

    name: str
    layers: Rates
    head: Rates
    bandwidth: float  # bytes a second
    memory: float | None = None  # bytes; None: not known
    overhead: float = 0.0  # seconds that a forward pass takes however small it is

    def seconds(self, config: ModelConfig, forward: Forward) -> float:
        """How long a forward pass takes."""
        work = operations(config, forward)
        computing = work.layers / rate(self.layers, forward.positions) + work.head / rate(self.head, forward.positions)
        moving = bytes_moved(config, forward) / self.bandwidth
        return max(computing, moving) + self.overhead


def rate(rates: Rates, positions: float) -> float:
    """Operations a second in products of so many positions.

    Between two that are known, the time of a product is interpolated; beyond the outermost, the rate stays.
    """
    known = np.array([positions for positions, _ in rates])
    seconds = np.array([positions / rate for positions, rate in rates])
    inside = float(np.clip(positions, known[0], known[-1]))
    return inside / float(np.interp(inside, known, seconds))


def published(kind: str, dtype: str) -> Peaks:
    """What the vendor of a chip publishes. Raises ValueError if that is not known here."""
    if kind not in CHIPS:
        raise ValueError(f"there is no chip {kind!r}: give one of {', '.join(CHIPS)}")
    chip = CHIPS[kind]
    peak = chip.bfloat16 if dtype == "bfloat16" else chip.float32
    if peak is None:
        raise ValueError(f"of {kind} no peak in float32 is published: take dtype bfloat16")
    return Peaks(f"published peaks of {kind}", ((1, peak),), ((1, peak),), chip.bandwidth, chip.memory)


# ---- Decoding ----


class Decoding(NamedTuple):
    """What a method was measured to do in a forward pass, of every row."""

    tokens: float  # of the answer
    positions: float  # computed, padding and ended rows included
    window: float
    cached: float  # that are read
    capacity: int  # that memory is held for


def tokens_per_second(config: ModelConfig, peaks: Peaks, decoding: Decoding, rows: float, prompt: float = 0.0) -> float:
    """Tokens a second of a batch of ``rows``.

    Args:
      prompt: seconds that the prompts take for every forward pass behind them.
    """
    d = decoding
    forward = Forward(d.positions * rows, rows, d.window, d.cached)
    return d.tokens * rows / (peaks.seconds(config, forward) + prompt)


def overtaken_at(one: Callable[[int], float], other: Callable[[int], float], limit: int) -> int | None:
    """The smallest batch, of 1 to ``limit``, at which ``other`` is as fast as ``one``; None: not up to there."""
    return next((rows for rows in range(1, limit + 1) if other(rows) >= one(rows)), None)


def largest_batch(config: ModelConfig, peaks: Peaks, capacity: float, limit: int = 1024) -> int:
    """The largest batch, up to ``limit``, whose parameters and cache fit into the memory, if that is known."""
    if peaks.memory is None:
        return limit
    free = peaks.memory - resident_bytes(config, 0, capacity)
    return max(min(int(free / (resident_bytes(config, 1, capacity) - resident_bytes(config, 0, capacity))), limit), 0)


# ---- What this machine reaches ----

COPIES = 8
COPY_BYTES = 2**26  # at least: more than a CPU's cache holds
POSITIONS = {"cpu": [2**k for k in range(10)], "else": [16**k for k in range(4)]}
"""Backend -> positions of the products that are measured; the first is 1. Each takes a program."""
MOST = {"cpu": 2**31, "else": 2**36}
"""Backend -> how many pairs of numbers one program multiplies at most, unless a single pass is more."""


class Calibration:
    """Measures what this device reaches, whenever it is asked to; medians count.

    Three measurements, none of them of a forward pass: products of M positions with the matrices of all layers, one
    layer after another, products with the head, and a copy of the embeddings, or of as much where they are small.
    """

    def __init__(self, config: ModelConfig, params: Params) -> None:
        backend = "cpu" if jax.default_backend() == "cpu" else "else"
        self.config = config
        self.positions, self.most = POSITIONS[backend], MOST[backend]
        embedding = params["embedding"]
        self.copied_array = embedding if embedding.nbytes >= COPY_BYTES else jnp.zeros(COPY_BYTES // 4, jnp.float32)
        self.matrices: dict[str, Any] = {
            "layers": {name: leaf for name, leaf in params["layers"].items() if not name.endswith("norm")},
            "head": embedding if config.tie_word_embeddings else params["head"],
        }
        self.sizes = {"layers": layer_parameters(config), "head": config.hidden_size * config.vocab_size}
        of_head = functools.partial(through_head, tied=config.tie_word_embeddings)
        self.products: dict[str, Callable[..., jax.Array]] = {"layers": through_layers, "head": of_head}
        self.seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)  # of (what, positions)

    def compile(self) -> None:
        """Measure without taking note of it."""
        self._sample()

    def measure(self) -> None:
        """Measure everything once."""
        for key, seconds in self._sample().items():
            self.seconds[key].append(seconds)

    def _sample(self) -> dict[tuple[str, int], float]:
        sample = {}
        for name, matrices in self.matrices.items():
            for positions in self.positions:
                x = jnp.ones((positions, self.config.hidden_size), self.config.dtype)
                # Starting a program takes long.
                passes = min(max(self.most // (positions * self.sizes[name]), 1), 64)
                sample[name, positions] = timed(self.products[name], x, matrices, passes=passes) / passes
        sample["copy", 0] = timed(copy, self.copied_array) / COPIES
        return sample

    def copied(self) -> float:
        """Bytes a second that a copy reads and writes."""
        return 2 * self.copied_array.nbytes / statistics.median(self.seconds["copy", 0])

    def peaks(self, overhead: float = 0.0) -> Peaks:
        """What was reached. The bandwidth is the largest of a copy's and those of reading matrices for one position."""
        seconds = {key: statistics.median(times) for key, times in self.seconds.items()}
        rates, bandwidths = {}, [self.copied()]
        for name, size in self.sizes.items():
            rates[name] = tuple((m, 2 * m * size / seconds[name, m]) for m in self.positions)
            bandwidths.append(ITEM_BYTES[self.config.dtype] * size / seconds[name, 1])
        device = jax.devices()[0]
        return Peaks(
            name=f"measured peaks of {device.device_kind}",
            layers=rates["layers"],
            head=rates["head"],
            bandwidth=max(bandwidths),
            memory=(device.memory_stats() or {}).get("bytes_limit"),
            overhead=overhead,
        )


@functools.partial(jax.jit, static_argnames="passes")
def through_layers(x: jax.Array, layers: Params, *, passes: int) -> jax.Array:
    """Products of x [M, D] with all matrices of all layers, ``passes`` times."""

    def layer(x: jax.Array, matrices: Params) -> tuple[jax.Array, None]:
        def product(name: str, x: jax.Array) -> jax.Array:
            return x @ matrices[name].reshape(x.shape[1], -1)

        mixed = product("output", product("query", x)) + jnp.sum(product("key", x) + product("value", x))
        y = product("down", product("gate", x) * product("up", x))
        return x + 0 * (mixed + y), None  # x stays what it is: powers of a matrix overflow

    return jax.lax.fori_loop(0, passes, lambda _, x: jax.lax.scan(layer, x, layers)[0], x)


@functools.partial(jax.jit, static_argnames=("tied", "passes"))
def through_head(x: jax.Array, head: jax.Array, *, tied: bool, passes: int) -> jax.Array:
    """Logits of x [M, D] by ``head`` [D, V], or [V, D] if it is ``tied``, ``passes`` times."""

    def once(_: int, x: jax.Array) -> jax.Array:
        logits = jnp.einsum("td,vd->tv" if tied else "td,dv->tv", x, head, preferred_element_type=jnp.float32)
        return x + 0 * jnp.max(logits, axis=-1, keepdims=True).astype(x.dtype)

    return jax.lax.fori_loop(0, passes, once, x)


@jax.jit
def copy(array: jax.Array) -> jax.Array:
    """COPIES copies that no compiler leaves out. A single one would count the time in which its memory is granted."""
    return jax.lax.fori_loop(0, COPIES, lambda _, array: array + 1, array)


def timed(function: Callable[..., jax.Array], *args: Any, **options: int) -> float:
    """The seconds of one call."""
    started = time.perf_counter()
    jax.block_until_ready(function(*args, **options))
    return time.perf_counter() - started
