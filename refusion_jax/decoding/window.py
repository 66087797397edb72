"""The window of one forward pass: which tokens a row feeds, where, and what each of them sees.

Every mode of decoding is a window. Its entries are of two kinds:

* the *trunk*, a sequence: an entry sees the trunk entries before it (committed but uncached tokens, drafts);
* *branches*, which hang on a prefix of the trunk and do not see each other (the masks of an open slot, a probe, one
  slot of a parallel infill): an entry sees the first ``sees`` trunk entries, and the entries of its own branch up to
  its own position.

What an entry sees of the cache is told by ``scope``, per cache position: everybody (SHARED), one branch, or nobody.
Block-diagonal planning, verification, parallel infill and left-to-right decoding are all built from these.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

SHARED = -1  # scope of a cache entry that every window entry sees; branch of a trunk entry
HIDDEN = -2  # scope of a cache entry that nobody sees
ABSENT = -3  # branch of a window entry that is not live
OFF_TRUNK = 1 << 30  # place of a branch entry: behind every trunk entry
WHOLE_TRUNK = 1 << 29  # sees: every trunk entry


class Window(flax.struct.PyTreeNode):
    """The window of one row: T entries in a fixed layout, of which some are live. Batched, every field gains [B]."""

    tokens: jax.Array  # [T] int32
    positions: jax.Array  # [T] int32, true positions
    live: jax.Array  # [T] bool; the others are not computed
    place: jax.Array  # [T] int32: rank in the trunk, or OFF_TRUNK
    sees: jax.Array  # [T] int32: how many trunk entries it sees, itself included
    branch: jax.Array  # [T] int32 >= 0: its branch; SHARED on the trunk
    scope: jax.Array  # [S] int32: SHARED, HIDDEN, or the one branch that sees this cache position
    asked: jax.Array | None = None  # [T] int32: token whose probability after this entry is wanted


class Entries(flax.struct.PyTreeNode):
    """A run of window entries of one role, concatenated by ``assemble``."""

    tokens: jax.Array
    positions: jax.Array
    live: jax.Array
    place: jax.Array
    sees: jax.Array
    branch: jax.Array


def on_trunk(tokens: jax.Array, positions: jax.Array, live: jax.Array, before: jax.Array | int = 0) -> Entries:
    """Entries that continue the trunk in their order, behind ``before`` entries."""
    place = before + jnp.cumsum(live.astype(jnp.int32)) - 1
    return Entries(tokens, positions, live, place, place + 1, jnp.full_like(positions, SHARED))


def on_branches(
    tokens: jax.Array, positions: jax.Array, live: jax.Array, sees: jax.Array | int, branch: jax.Array
) -> Entries:
    """Entries of branches that hang on the first ``sees`` entries of the trunk."""
    place = jnp.full_like(positions, OFF_TRUNK)
    return Entries(tokens, positions, live, place, jnp.broadcast_to(sees, positions.shape), branch)


def assemble(runs: list[Entries], scope: jax.Array, asked: jax.Array | None = None) -> Window:
    """One window of several runs of entries."""
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts).astype(parts[0].dtype), *runs)
    return Window(**vars(joined), scope=scope, asked=asked)


def compact(window: Window, width: int) -> tuple[Window, jax.Array]:
    """The live entries of one row moved to the front of a window of ``width``, and where each entry went, [T] int32.

    ``width`` must hold the live entries; the others go behind its end. Entries behind the live ones see nothing and
    are seen by nobody.
    """
    T = window.live.shape[0]
    went = jnp.where(window.live, jnp.cumsum(window.live.astype(jnp.int32)) - 1, T + jnp.arange(T))
    source = move(jnp.arange(T), went)[:width]
    front = jax.tree.map(lambda field: field[source], window.replace(scope=None))
    live = jnp.arange(width) < jnp.sum(window.live)
    packed = front.replace(
        live=live,
        place=jnp.where(live, front.place, OFF_TRUNK),
        sees=jnp.where(live, front.sees, 0),
        branch=jnp.where(live, front.branch, ABSENT),
        scope=window.scope,
    )
    return packed, went


def move(values: jax.Array, went: jax.Array) -> jax.Array:
    """A value of every entry [T] moved to where the entry went; zero where none did."""
    return jnp.zeros_like(values).at[went].set(values, mode="drop", unique_indices=True)


def sees_window(window: Window) -> jax.Array:
    """[T, T] bool of one row: entry (first axis) sees entry (second axis)."""
    trunk = window.place[None, :] < window.sees[:, None]
    same = (window.branch[:, None] == window.branch[None, :]) & (window.branch >= 0)[:, None]
    return trunk | (same & (window.positions[None, :] <= window.positions[:, None]))


def sees_cache(window: Window) -> jax.Array:
    """[T, S] bool of one row: entry sees cache position. What is not live sees none."""
    seen = (window.scope == SHARED)[None, :] | (window.scope[None, :] == window.branch[:, None])
    return seen & window.live[:, None]
