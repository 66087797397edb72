"""Windows of several rows packed behind each other, so that only what carries something is computed.

In a batch the rows' windows are of different lengths. All that a transformer does to single tokens (embedding,
projections, feed-forward, head: most of its work) is done on the packed tokens [G, M]; attention alone is done row by
row [B, T]. G is the number of row shards: each packs its own rows, and nothing moves between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from refusion_jax.sharding import ROWS, per_shard


class Packing(NamedTuple):
    """Where the entries of windows [B, T] are in packed ones [G, M]."""

    entries: jax.Array  # [B, T] int32: place of an entry among those of its shard; M: none
    places: jax.Array  # [G, M] int32: row of the shard times T plus place in the window; beyond the last: none


def packing_of(counts: jax.Array, width: int, size: int) -> Packing:
    """The packing of rows that begin with ``counts`` [B] live entries each, of ``width``, to ``size`` = M places.

    ``size`` must hold the sum of each shard's counts.
    """

    def of_shard(counts: jax.Array) -> tuple[jax.Array, jax.Array]:
        R = counts.shape[0]
        place = jnp.arange(width)
        starts = jnp.cumsum(counts) - counts
        entries = jnp.where(place < counts[:, None], starts[:, None] + place, size).astype(jnp.int32)
        dropped = size + jnp.arange(R * width)  # all indices are distinct
        index = jnp.where(entries.ravel() < size, entries.ravel(), dropped)
        places = jnp.full(size, R * width, jnp.int32)
        places = places.at[index].set(jnp.arange(R * width), mode="drop", unique_indices=True)
        return entries, places[None]

    return Packing(*per_shard(of_shard, ((ROWS,),), (ROWS,))(counts))


def pack(packing: Packing, x: jax.Array, *axes: Any) -> jax.Array:
    """``x`` [B, T, ...] as [G, M, ...]; ``axes`` are the mesh axes of the dimensions behind the first two."""

    def of_shard(x: jax.Array, places: jax.Array) -> jax.Array:
        flat = x.reshape(-1, *x.shape[2:])
        return flat.at[places[0]].get(mode="fill", fill_value=0)[None]

    return per_shard(of_shard, ((ROWS, None, *axes), (ROWS,)), (ROWS, None, *axes))(x, packing.places)


def unpack(packing: Packing, x: jax.Array, *axes: Any) -> jax.Array:
    """``x`` [G, M, ...] as [B, T, ...], zero where a row has no entry."""

    def of_shard(x: jax.Array, entries: jax.Array) -> jax.Array:
        return x[0].at[entries].get(mode="fill", fill_value=0)

    return per_shard(of_shard, ((ROWS, None, *axes), (ROWS,)), (ROWS, None, *axes))(x, packing.entries)
