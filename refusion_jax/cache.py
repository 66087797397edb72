"""The key/value cache: a preallocated array, indexed by true position, threaded through the decoding loop.

Order is a matter of when, rotary position a matter of where: a token sees what was committed before it, whatever
its place in the text. So the entry of position p stands at index p, and the row's state says which entries are
written and who sees them. Nothing is compacted, cropped or copied, and the output is already sorted.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from refusion_jax.config import ModelConfig
from refusion_jax.sharding import ROWS, TENSOR, per_shard, spec

CACHE_AXES = (None, ROWS, TENSOR, None, None)


class KVCache(flax.struct.PyTreeNode):
    """Keys (after norm and rotation) and values of the committed tokens of every row."""

    keys: jax.Array  # [L, B, K, S, H]
    values: jax.Array  # [L, B, K, S, H]

    @property
    def capacity(self) -> int:
        """S, the number of positions."""
        return self.keys.shape[3]


def lengths(capacity: int) -> list[int]:
    """The lengths to which a cache of ``capacity`` positions is read, the shortest first: up to five, by halves.

    A forward pass reads to the shortest that holds all that anybody sees: a budget that no answer uses up costs memory,
    not time.
    """
    halves = [capacity]
    while len(halves) < 5 and halves[0] > 128:
        halves.insert(0, -(-halves[0] // 128) * 64)  # in multiples of 64
    return halves


def empty(config: ModelConfig, rows: int, capacity: int) -> KVCache:
    """A cache of ``rows`` x ``capacity`` positions, all zero."""
    shape = (config.num_layers, rows, config.num_kv_heads, capacity, config.head_dim)
    place = spec(*CACHE_AXES)
    return KVCache(
        keys=jnp.zeros(shape, config.dtype, out_sharding=place),
        values=jnp.zeros(shape, config.dtype, out_sharding=place),
    )


def fill(
    keys: jax.Array,  # [L, B, K, T, H]
    values: jax.Array,  # [L, B, K, T, H]
    capacity: int,
) -> KVCache:
    """A cache of ``capacity`` positions that begins with a window of the positions 0..T-1."""
    kept = min(keys.shape[3], capacity)
    behind = [(0, 0)] * 3 + [(0, capacity - kept), (0, 0)]
    return KVCache(jnp.pad(keys[:, :, :, :kept], behind), jnp.pad(values[:, :, :, :kept], behind))


def commit(
    cache: KVCache,
    keys: jax.Array,  # [L, B, K, T, H]
    values: jax.Array,  # [L, B, K, T, H]
    positions: jax.Array,  # [B, T] int32
    stored: jax.Array,  # [B, T] bool; the positions of a row's stored entries are distinct
) -> KVCache:
    """Write the stored entries of a window at their positions; the others are dropped.

    Dropped entries are aimed at distinct indices past the end, so that all indices are unique and the scatter runs in
    place. Every axis but the head's is an index of the scatter: an axis taken whole would make a TPU keep the cache in
    another layout, and copy it in every step.
    """
    past_the_end = cache.capacity + jnp.arange(positions.shape[1], dtype=positions.dtype)
    index = jnp.where(stored, positions, past_the_end)

    def write(old: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:  # of one layer, row and head: [S, H]
        return old.at[index].set(new, mode="drop", unique_indices=True)

    def write_all(old: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
        index = jnp.broadcast_to(index[None, :, None, :], new.shape[:-1])
        return jax.vmap(jax.vmap(jax.vmap(write)))(old, new, index)

    write_shards = per_shard(write_all, (CACHE_AXES, CACHE_AXES, (ROWS,)), CACHE_AXES)
    return KVCache(write_shards(cache.keys, keys, index), write_shards(cache.values, values, index))
