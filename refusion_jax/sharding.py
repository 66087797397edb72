"""The mesh axes, and how arrays lie on them. Without a mesh every function here is the identity.

Rows of a batch are split over ``data`` and ``fsdp``; heads, feed-forward units and vocabulary over ``tensor``;
the width of weights over ``fsdp``. A mesh is made current with ``jax.set_mesh(make_mesh(...))``; its axes are
explicit, so an array that drifts to another layout in a loop is an error while tracing, not a slow program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
TENSOR = "tensor"

Axes = tuple[Any, ...]  # of each dimension of an array: a mesh axis, several, or None


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """A mesh of data x fsdp x tensor devices with explicit axes (ValueError if it cannot be made).

    ``devices`` are those of this job, if None.
    """
    sizes = (data, fsdp, tensor)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(
            f"a mesh of data={data!r}, fsdp={fsdp!r}, tensor={tensor!r}: each must be an integer, at least 1"
        )
    there = jax.device_count() if devices is None else len(devices)
    if data * fsdp * tensor > there:
        raise ValueError(
            f"a mesh of data={data}, fsdp={fsdp}, tensor={tensor} needs {data * fsdp * tensor} devices, and there are "
            f"{there}"
        )
    return jax.make_mesh((data, fsdp, tensor), AXES, (AxisType.Explicit,) * 3, devices=devices)


def has_mesh() -> bool:
    """Whether a mesh is current."""
    return not jax.sharding.get_abstract_mesh().empty


def platform() -> str:
    """The platform that programs are compiled for: "cpu", "gpu", "tpu". With a mesh, that of its devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def usual_dtype() -> Literal["float32", "bfloat16"]:
    """What dtype="auto" stands for: bfloat16 on accelerators and float32 on CPU."""
    return "float32" if platform() == "cpu" else "bfloat16"


def check_mesh(params: Any) -> None:
    """Raise ValueError unless the current mesh, if any, is one of ours, and ``params`` lie on it or on one device."""
    mesh = jax.sharding.get_mesh()
    if not mesh.empty and (mesh.axis_names != AXES or any(t != AxisType.Explicit for t in mesh.axis_types)):
        raise ValueError(f"the current mesh has the axes {mesh.axis_names}; set one that make_mesh gives")
    for leaf in jax.tree.leaves(params):
        theirs = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if theirs is not None and theirs.size > 1 and theirs != mesh:
            here = "no mesh is current" if mesh.empty else f"the current mesh is {dict(mesh.shape)}"
            raise ValueError(
                f"the parameters lie on the mesh {dict(theirs.shape)} and {here}: use the model under jax.set_mesh of "
                "the mesh that it was loaded on"
            )


def row_shards() -> int:
    """Into how many parts the rows of a batch are split."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape["data"] * mesh.shape["fsdp"]


def vocabulary_shards() -> int:
    """Into how many parts the vocabulary is split."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape[TENSOR]


def spec(*axes: Any) -> PartitionSpec | None:
    """The partition of an array whose dimensions lie on ``axes``; None without a mesh."""
    return PartitionSpec(*axes) if has_mesh() else None


def einsum(equation: str, a: jax.Array, b: jax.Array, axes: Axes, **options: Any) -> jax.Array:
    """``jnp.einsum`` of two operands whose result lies on ``axes``."""
    return jnp.einsum(equation, a, b, out_sharding=spec(*axes), **options)


def reshard(array: jax.Array, *axes: Any) -> jax.Array:
    """``array`` moved to ``axes``."""
    return jax.sharding.reshard(array, PartitionSpec(*axes)) if has_mesh() else array


def per_shard(function: Callable[..., Any], in_axes: tuple[Axes, ...], out_axes: Axes) -> Callable[..., Any]:
    """``function`` run by every device on its own part of the arguments, without communication.

    ``in_axes`` has one entry an argument (every array of a tree lies on it); ``out_axes`` serves all results.
    """
    if not has_mesh():
        return function
    return jax.shard_map(
        function,
        in_specs=tuple(PartitionSpec(*axes) for axes in in_axes),
        out_specs=PartitionSpec(*out_axes),
        check_vma=False,
    )


def per_row(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(shared, *one row)`` -> ``function(shared, *all rows)``: vmapped, and local to each shard of rows."""

    def apply(shared: Any, *rows: Any) -> Any:
        batched = jax.vmap(function, in_axes=(None, *(0 for _ in rows)))
        return per_shard(batched, ((), *((ROWS,) for _ in rows)), (ROWS,))(shared, *rows)

    return apply


def put_rows(tree: Any) -> Any:
    """Arrays with a leading [B], their rows split over the current mesh."""
    return place(tree, jax.tree.map(lambda _: PartitionSpec(ROWS), tree))


def place(tree: Any, specs: Any) -> Any:
    """``tree`` put on the current mesh by ``specs``, a tree of PartitionSpec."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return tree
    return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, specs)


def on_mesh(shapes: Any, specs: Any) -> Any:
    """Abstract arrays that lie on the current mesh, if there is one, by ``specs``, a tree of PartitionSpec."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return shapes

    def placed(shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(placed, shapes, specs)
