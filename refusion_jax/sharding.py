"""The mesh axes, and how arrays lie on them. Without a mesh every function here is the identity.

Rows of a batch are split over ``data`` and ``fsdp``; heads, feed-forward units and vocabulary over ``tensor``;
the width of weights over ``fsdp``. A mesh is made current with ``jax.set_mesh(make_mesh(...))``; its axes are
explicit, so an array that drifts to another layout in a loop is an error while tracing, not a slow program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
TENSOR = "tensor"

Axes = tuple[Any, ...]  # of each dimension of an array: a mesh axis, several, or None


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis."""

    data: int = 1
    """Copies of the weights, each with its own rows."""
    fsdp: int = 1
    """Parts that weights and optimizer state are cut in, each with its own rows."""
    tensor: int = 1
    """Parts that heads, feed-forward units and vocabulary are cut in."""

    def __post_init__(self) -> None:
        sizes = dataclasses.astuple(self)
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
            raise ValueError(f"{self.text}: each must be an integer, at least 1")

    @property
    def devices(self) -> int:
        """How many."""
        return self.data * self.fsdp * self.tensor

    @property
    def text(self) -> str:
        """As errors call it."""
        return f"a mesh of data={self.data!r}, fsdp={self.fsdp!r}, tensor={self.tensor!r}"


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """A mesh of data x fsdp x tensor devices with explicit axes (ValueError if it cannot be made).

    ``devices`` are those of this job, if None.
    """
    config = MeshConfig(data, fsdp, tensor)
    there = jax.device_count() if devices is None else len(devices)
    if config.devices > there:
        raise ValueError(f"{config.text} needs {config.devices} devices, and there are {there}")
    if devices is None and jax.process_count() > 1 and config.devices < there:
        raise ValueError(
            f"{config.text} has {config.devices} of the {there} devices of {jax.process_count()} processes; all of "
            "them must take part"
        )
    return jax.make_mesh((data, fsdp, tensor), AXES, (AxisType.Explicit,) * 3, devices=devices)


def use_mesh(config: MeshConfig) -> contextlib.AbstractContextManager[object]:
    """The mesh made current; none where one device is asked for, and one process is there."""
    if config == MeshConfig() and jax.process_count() == 1:
        return contextlib.nullcontext()
    return jax.set_mesh(make_mesh(config.data, config.fsdp, config.tensor))


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


def local_row_shards() -> list[int]:
    """The numbers of those of which this process has a device."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return [0]
    shards = mesh.devices.reshape(-1, mesh.shape[TENSOR])
    mine = jax.process_index()
    return [number for number, shard in enumerate(shards) if any(device.process_index == mine for device in shard)]


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
    """``tree`` put on the current mesh by ``specs``, a tree of PartitionSpec. All processes hold the same values."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return tree

    def put(array: Any, spec: PartitionSpec) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        if jax.process_count() == 1 or (isinstance(array, jax.Array) and not array.is_fully_addressable):
            return jax.device_put(array, sharding)
        array = np.asarray(array)
        # device_put would send the values of all processes around, to compare them.
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, tree, specs)


def fetch(tree: Any) -> Any:
    """``tree`` with numpy arrays, whatever processes its arrays lie on; all of these call it together."""

    def reachable(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        assert isinstance(leaf.sharding, NamedSharding)
        return _replicate(leaf.sharding.mesh)(leaf)

    return jax.device_get(jax.tree.map(reachable, tree))


@functools.cache
def _replicate(mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=NamedSharding(mesh, PartitionSpec()))


def on_mesh(shapes: Any, specs: Any) -> Any:
    """Abstract arrays that lie on the current mesh, if there is one, by ``specs``, a tree of PartitionSpec."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return shapes

    def placed(shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(placed, shapes, specs)
