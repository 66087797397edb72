"""The key/value cache: a preallocated array, indexed by true position, threaded through the decoding loop.

Order is a matter of when, rotary position a matter of where: a token sees what was committed before it, whatever
its place in the text. So the entry of position p stands at index p, and ``valid`` says which are written. Nothing
is compacted, cropped or copied, and the output is already sorted.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from refusion_jax.config import ModelConfig
from refusion_jax.sharding import ROWS, TENSOR, spec


@flax.struct.dataclass
class KVCache:
    """Keys and values of every committed token of every row."""

    keys: jax.Array  # [L, B, K, S, H], after norm and rotation
    values: jax.Array  # [L, B, K, S, H]
    valid: jax.Array  # [B, S] bool


def empty(config: ModelConfig, rows: int, capacity: int) -> KVCache:
    """A cache of ``rows`` x ``capacity`` positions with nothing in it."""
    shape = (config.num_layers, rows, config.num_kv_heads, capacity, config.head_dim)
    place = spec(None, ROWS, TENSOR, None, None)
    return KVCache(
        keys=jnp.zeros(shape, config.dtype, out_sharding=place),
        values=jnp.zeros(shape, config.dtype, out_sharding=place),
        valid=jnp.zeros((rows, capacity), bool, out_sharding=spec(ROWS, None)),
    )


def commit(
    cache: KVCache,
    keys: jax.Array,  # [L, B, K, T, H]
    values: jax.Array,  # [L, B, K, T, H]
    positions: jax.Array,  # [B, T] int32
    accepted: jax.Array,  # [B, T] bool; the positions of a row's accepted entries are distinct
) -> KVCache:
    """Write the accepted entries of a window; the others are dropped.

    Dropped entries are aimed at distinct indices past the end, so that indices stay unique and the scatter runs in
    place.
    """
    S, T = cache.valid.shape[1], positions.shape[1]
    index = jnp.where(accepted, positions, S + jnp.arange(T, dtype=positions.dtype))

    def write(stored: jax.Array, window: jax.Array, index: jax.Array) -> jax.Array:  # of one row and layer, [K, S, H]
        return stored.at[:, index].set(window, mode="drop", unique_indices=True)

    write_rows = jax.vmap(jax.vmap(write), in_axes=(0, 0, None))
    valid = jax.vmap(lambda v, i: v.at[i].set(True, mode="drop", unique_indices=True))(cache.valid, index)
    return KVCache(write_rows(cache.keys, keys, index), write_rows(cache.values, values, index), valid)
