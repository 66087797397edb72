"""Several processes that compute together, each on the devices of its own host.

They are joined on request only (``join``). Arrays then lie on the devices of all processes, and every process has to
run the same compiled programs in the same order. What one of them finds out by itself, such as a signal or a file, is
therefore agreed on before anything follows from it. With one process every function here is trivial.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple

import jax
import numpy as np

# What jax.distributed.initialize asks, and what it makes: nothing public tells the address, or waits for all processes.
from jax._src.clusters import ClusterEnv
from jax._src.distributed import global_state
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from tyro.conf import arg

from refusion_jax.sharding import AXES

LONG = 7 * 24 * 3600 * 1000
"""Milliseconds that processes wait for each other once they have met."""

_meetings = itertools.count()

Launcher = Literal["off", "auto", "tpu", "slurm", "manual"]


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """How the processes of a job find each other.

    Raises:
      ValueError: what "manual" needs is missing or out of its range, or is given beside another launcher.
    """

    distributed: Launcher = "off"
    """Whether several processes compute together, and who started them: a TPU pod (Cloud TPU or GKE), Slurm, whatever
    JAX finds around it (auto: these, Kubernetes and Open MPI), or you (manual)."""
    coordinator: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """manual: address of process 0, and a port that is free there."""
    num_processes: Annotated[int | None, arg(metavar="N")] = None
    """manual: how many processes there are."""
    process_id: Annotated[int | None, arg(metavar="I")] = None
    """manual: the number of this one, from 0."""
    startup_timeout: int = 300
    """Seconds that processes wait for each other at the start."""
    heartbeat_timeout: int = 100
    """Seconds after which a process that is not heard of counts as dead, and the others end."""

    def __post_init__(self) -> None:
        for name in ("startup_timeout", "heartbeat_timeout"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1 second")
        manual = {name: getattr(self, name) for name in ("coordinator", "num_processes", "process_id")}
        if self.distributed != "manual":
            if given := [name for name, value in manual.items() if value is not None]:
                raise ValueError(f"{given[0]} is for distributed='manual', and distributed is {self.distributed!r}")
            return
        if missing := [name for name, value in manual.items() if value is None]:
            raise ValueError(f"distributed='manual' needs {' and '.join(missing)}")
        assert self.coordinator is not None and self.num_processes is not None and self.process_id is not None
        if not re.fullmatch(r"\S+:\d+", self.coordinator):
            raise ValueError(f"coordinator={self.coordinator!r} must be HOST:PORT, such as 10.0.0.1:1234")
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process_id={self.process_id} must be from 0 to num_processes - 1, and num_processes is "
                f"{self.num_processes}"
            )


def join(config: DistributedConfig) -> None:
    """Find the other processes, and tell who is there; before anything else is done with JAX.

    Raises:
      ValueError: there is no such launcher around this process, or the coordinator's port is taken.
      TimeoutError: not all processes came in time.
    """
    if config.distributed == "off":
        return
    place = Place(config.coordinator, config.num_processes, config.process_id, None)
    if config.distributed != "manual":
        method = {"slurm": "slurm", "tpu": _tpu(), "auto": None}[config.distributed]
        if method is None or any(kind.name == method and kind.is_env_present() for kind in ClusterEnv._cluster_types):
            place = Place(*ClusterEnv.auto_detect_unset_distributed_params(*place, method, config.startup_timeout))
    if place.coordinator is None or place.processes is None or place.number is None:
        raise ValueError(
            f"--distributed {config.distributed}: no such launcher is around this process; start it with one, or give "
            "--distributed manual, --coordinator, --num-processes and --process-id"
        )
    roll_call(place.coordinator, place.processes, place.number, config.startup_timeout)
    jax.distributed.initialize(
        *place,
        cluster_detection_method="deactivate",
        initialization_timeout=config.startup_timeout,
        heartbeat_timeout_seconds=config.heartbeat_timeout,
    )
    print(
        f"process {jax.process_index()} of {jax.process_count()}: {jax.local_device_count()} of {jax.device_count()} "
        f"devices ({jax.devices()[0].device_kind})",
        file=sys.stderr,
    )


class Place(NamedTuple):
    """Of a process among the others."""

    coordinator: str | None  # HOST:PORT of process 0
    processes: int | None  # how many there are
    number: int | None  # of this one
    local_devices: Sequence[int] | None  # those of the host that are its own; None: all


def _tpu() -> str:
    on_gke = "TPU_WORKER_HOSTNAMES" in os.environ or "TPU_PROCESS_ADDRESSES" in os.environ
    return "gketpu" if on_gke else "gcetpu"


def roll_call(coordinator: str, count: int, number: int, seconds: float) -> None:
    """Wait until all processes have come, at the address where process 0 then coordinates them.

    When one is missing JAX aborts the others, after twice the time, and does not say how many came.

    Raises:
      ValueError: the port is taken.
      TimeoutError: some did not come in ``seconds``.
    """
    host, _, port = coordinator.rpartition(":")
    end = time.monotonic() + seconds
    missing = _call(int(port), count, end) if number == 0 else _answer(host.strip("[]"), int(port), number, end)
    advice = "see that all processes are started, with the same coordinator, and that its port can be reached"
    if missing is None:
        raise TimeoutError(f"the coordinator {coordinator} did not answer within {seconds:g} s: {advice}")
    if missing:
        raise TimeoutError(
            f"{count - len(missing)} of {count} processes came within {seconds:g} s, and number "
            f"{', '.join(map(str, missing))} did not: {advice}"
        )


def _call(port: int, count: int, end: float) -> list[int]:
    """Process 0: take the numbers of the others, and tell them who is missing. Returns who is missing."""
    came: dict[int, socket.socket] = {}
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ValueError(
            f"port {port}, where process 0 coordinates the others, cannot be used: {error.strerror}"
        ) from error
    with contextlib.closing(server):
        while len(came) < count - 1 and (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, ValueError):  # nobody came, or somebody else
                connection, _ = server.accept()
                connection.settimeout(1)
                if 0 < (number := int(connection.recv(16))) < count:
                    came[number] = connection
    missing = sorted(set(range(1, count)) - came.keys())
    for connection in came.values():
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.sendall(json.dumps(missing).encode())
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # the other side closes first: so the port is free at once
    return missing


def _answer(host: str, port: int, number: int, end: float) -> list[int] | None:
    """Another process: give our number. Returns who is missing; None: process 0 does not answer."""
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=left) as connection:
            connection.sendall(str(number).encode())
            connection.settimeout(max(end - time.monotonic(), 0) + 5)  # process 0 may have begun to wait later
            if answer := connection.makefile("rb").read():
                return list(json.loads(answer))
        time.sleep(0.2)
    return None


def is_first() -> bool:
    """Whether this is process 0, which writes what all have in common."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def meet(place: str) -> None:
    """Wait until all processes are at this place of the program, or until one of them is no more.

    It is no program of the devices: those give up where one process comes half a minute after another (Gloo).
    """
    if (client := global_state.client) is not None:
        client.wait_at_barrier(f"refusion_jax {next(_meetings)}: {place}", LONG)


def meet_at_the_end(seconds: float = 10) -> None:
    """Wait, not for long, for those that fail of the same cause: JAX aborts them, unheard, when process 0 ends."""
    if (client := global_state.client) is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the others did not fail, or are no more
            client.wait_at_barrier("refusion_jax: failed", int(1000 * seconds))
        if is_first():
            time.sleep(1)  # the others are told, and end first


def in_first_process(action: Callable[[], object]) -> None:
    """Call ``action`` in process 0; all call this together, and go on when it is done.

    Raises:
      Exception: in process 0, what ``action`` raises.
      OSError: in the others, if it failed.
    """
    error: BaseException | None = None
    if is_first():
        try:
            action()
        except BaseException as caught:  # whatever it is, the others must not wait for ever
            error = caught
    failed = of_first(np.asarray(error is not None))
    if error is not None:
        raise error
    if failed:
        raise OSError("process 0, which writes for all, could not; its own error says why")


def check_same(what: str, digest: bytes) -> None:
    """Raise ValueError, in all processes, unless ``what`` is the same for all of them; ``digest`` tells."""
    if jax.process_count() == 1:
        return
    meet(f"compare {what}")
    digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    if others := [number for number, other in enumerate(digests) if not np.array_equal(other, digests[0])]:
        raise ValueError(
            f"process {' and '.join(map(str, others))} was given {what} other than those of process 0; start all "
            "processes with the same arguments and files"
        )


def of_first(values: np.ndarray) -> np.ndarray:
    """The values that process 0 has. Shape and dtype are the same in all processes."""
    if jax.process_count() == 1:
        return values
    meet("tell")
    return np.asarray(multihost_utils.broadcast_one_to_all(values))


class Agreement:
    """A number on which the processes agree without waiting for each other, with a current mesh.

    Called by all of them equally often. The largest number that was given by any in the call before; with one process
    that of this call.
    """

    def __init__(self) -> None:
        self._before: jax.Array | None = None

    def __call__(self, number: int) -> int:
        if jax.process_count() == 1:
            return number
        mesh = jax.sharding.get_mesh()
        mine = np.full((1,) * len(AXES), number, np.int32)
        numbers = jax.make_array_from_callback(
            mesh.devices.shape, NamedSharding(mesh, PartitionSpec(*AXES)), lambda _: mine
        )
        before, self._before = self._before, _largest(numbers)
        return 0 if before is None else int(before)


@jax.jit
def _largest(numbers: jax.Array) -> jax.Array:
    return numbers.max()
