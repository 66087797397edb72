"""The mesh axes, and how arrays lie on them. Without a mesh every function here is the identity.

Rows of a batch are split over ``data`` and ``fsdp``; heads, feed-forward units and vocabulary over ``tensor``;
the width of weights over ``fsdp``. A mesh is made current with ``jax.set_mesh(make_mesh(...))``; its axes are
explicit, so an array that drifts to another layout in a loop is an error while tracing, not a slow program.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
TENSOR = "tensor"


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    """A mesh of data x fsdp x tensor devices with explicit axes."""
    return jax.make_mesh((data, fsdp, tensor), AXES, (AxisType.Explicit,) * 3)


def current_mesh() -> jax.sharding.AbstractMesh | None:
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def spec(*axes: Any) -> PartitionSpec | None:
    """The partition of an array whose dimensions lie on ``axes``; None without a mesh."""
    return PartitionSpec(*axes) if current_mesh() is not None else None


def einsum(equation: str, a: jax.Array, b: jax.Array, axes: tuple[Any, ...], **options: Any) -> jax.Array:
    """``jnp.einsum`` of two operands whose result lies on ``axes``."""
    return jnp.einsum(equation, a, b, out_sharding=spec(*axes), **options)


def constrain(array: jax.Array, *axes: Any) -> jax.Array:
    """``array`` laid out on ``axes``."""
    mesh = current_mesh()
    return array if mesh is None else jax.sharding.reshard(array, PartitionSpec(*axes))


def place(tree: Any, specs: Any) -> Any:
    """``tree`` of arrays put on the current mesh by ``specs``, a tree of PartitionSpec."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return tree
    return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, specs)
