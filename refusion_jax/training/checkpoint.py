"""Checkpoints: the state of a run as it was behind a step, whole or not there."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from orbax.checkpoint.checkpoint_managers import preservation_policy

from refusion_jax.model.transformer import unflatten

State = Any  # tree of arrays: NamedTuples, dataclasses, dictionaries, as optax and flax nest them


class Checkpoints:
    """The checkpoints of a run: the latest ones, and the best.

    A context manager. What is written in the background is waited for at its end; what failed there raises OSError
    from the next method that is called, or from the end.
    """

    def __init__(self, run: str | os.PathLike[str], *, keep: int | None = None) -> None:
        """Open RUN/checkpoints.

        Args:
          run: directory of the run.
          keep: how many of the latest checkpoints are kept, beside the best; what a killed process left half-written
            is removed. None: checkpoints are only read, and another process may write them.
        """
        logging.getLogger("absl").addFilter(_not_from_orbax)
        self.directory = Path(run).absolute() / "checkpoints"
        self._saving: int | None = None
        best = preservation_policy.BestN(
            get_metric_fn=_metric, reverse=True, n=1, keep_checkpoints_without_metrics=False
        )
        options = ocp.CheckpointManagerOptions(
            best_fn=_metric,
            best_mode="min",
            preservation_policy=preservation_policy.AnyPreservationPolicy([preservation_policy.LatestN(keep), best]),
            cleanup_tmp_directories=keep is not None,
            read_only=keep is None,
            # In the background, a directory that cannot be made keeps the process waiting for it for 20 minutes.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        handler = ocp.PyTreeCheckpointHandler()
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handler)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.wait()
        finally:
            self._manager.close()

    def save(self, step: int, state: State, *, metric: float | None = None) -> None:
        """Begin to save ``state``; its arrays may be donated as soon as this returns.

        A checkpoint that is there already is left as it is: after a resume, a step has the state it had before.

        Args:
          metric: held-out loss, by which the best is found; None or not a number: not measured.

        Raises:
          OSError: this checkpoint could not be written, or the one before.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        self._saving = step
        metrics = None if metric is None or not math.isfinite(metric) else {"metric": float(metric)}
        with self._failure():
            self._manager.save(step, args=ocp.args.PyTreeSave(unflatten(_named(state))), metrics=metrics, force=True)

    def wait(self) -> None:
        """Wait until all checkpoints are whole. Raises OSError: one could not be written."""
        with self._failure():
            self._manager.wait_until_finished()

    def latest(self) -> int | None:
        """The last step that has a checkpoint."""
        self.wait()
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step with the lowest metric, the later one of equals; None where none was measured."""
        self.wait()
        return self._manager.best_step()

    def restore(self, step: int, like: State, *, partial: bool = False) -> State:
        """The state of a step, bitwise as it was saved, whatever the mesh was.

        Args:
          like: a tree of jax.ShapeDtypeStruct, such as jax.eval_shape gives. An array lies as its NamedSharding says,
            on the current mesh where that is abstract; without one it is replicated on the current mesh. Where there
            is neither, it is on the default device, not committed to it, like any fresh array.
          partial: whether the checkpoint may have arrays that ``like`` lacks.

        Raises:
          ValueError: there is no such checkpoint, or it has other arrays than ``like``.
        """
        self.wait()
        if step not in self._manager.all_steps():
            there = ", ".join(map(str, self._manager.all_steps())) or "none"
            raise ValueError(f"{self.directory} has no checkpoint of step {step}; there are: {there}")
        leaves = _named(like)
        self._check(step, leaves, partial)
        item = unflatten(leaves)
        args = ocp.args.PyTreeRestore(item, jax.tree.map(_restore_args, item), partial_restore=partial)
        restored = _named(self._manager.restore(step, args=args))
        return jax.tree.unflatten(jax.tree.structure(like), [_own(restored.pop(name)) for name in leaves])

    def _check(self, step: int, leaves: Mapping[str, Any], partial: bool) -> None:
        saved = _named(self._manager.item_metadata(step))
        where = f"the checkpoint of step {step} in {self.directory}"
        if missing := [name for name in leaves if name not in saved]:
            raise ValueError(f"{where} lacks {', '.join(missing)}")
        if not partial and (extra := [name for name in saved if name not in leaves]):
            raise ValueError(f"{where} has {', '.join(extra)}, which this run does not know")
        for name, leaf in leaves.items():
            if (tuple(saved[name].shape), saved[name].dtype) != (leaf.shape, leaf.dtype):
                raise ValueError(
                    f"{where} has {name} as {saved[name].dtype}{list(saved[name].shape)}, "
                    f"where this run needs {leaf.dtype}{list(leaf.shape)}"
                )

    @contextlib.contextmanager
    def _failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise OSError(f"{self.directory / str(self._saving)} could not be written: {error}") from error


def _named(tree: State) -> dict[str, Any]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}


def _metric(metrics: Mapping[str, float]) -> float:
    return metrics["metric"]


def _restore_args(leaf: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
    mesh, sharding = jax.sharding.get_mesh(), leaf.sharding
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, AbstractMesh):
        target = sharding
    elif mesh.empty:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    else:
        target = NamedSharding(mesh, sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec())
    return ocp.ArrayRestoreArgs(sharding=target, global_shape=leaf.shape, dtype=leaf.dtype)


def _own(array: np.ndarray | jax.Array) -> jax.Array:
    # On a CPU arrays share memory with numpy where they can (even with device_put's may_alias=False); a step cannot be
    # donated that memory.
    if isinstance(array, jax.Array) and all(device.platform != "cpu" for device in array.devices()):
        return array
    return jnp.array(array, copy=True)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    # Its tracebacks say what we raise anyway.
    return f"{os.sep}orbax{os.sep}" not in record.pathname
