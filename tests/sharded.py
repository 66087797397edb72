"""What must be the same on every mesh and for any number of processes, computed on one mesh, here or by several.

python -m tests.sharded steps|resume|decode DATA,FSDP,TENSOR OUTPUT.npz COORDINATOR COUNT NUMBER [RUN STEPS]
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

import refusion_jax as rf
from refusion_jax.data import worksheet
from refusion_jax.data.batches import Batch
from refusion_jax.data.dataset import Dataset, prepare
from refusion_jax.data.pipeline import Batches, Layout
from refusion_jax.distributed import DistributedConfig, is_first, join
from refusion_jax.model.transformer import abstract_params, flatten, parameter_specs
from refusion_jax.sharding import MeshConfig, fetch, local_row_shards, place, row_shards, use_mesh
from refusion_jax.training.checkpoint import Checkpoints
from refusion_jax.training.config import DataConfig, ForwardConfig, LoopConfig, StartConfig, TrainConfig
from refusion_jax.training.step import TrainState, gradients, make_step, put_batch
from tests import runs
from tests.twins import exact, golden

MODEL = golden.DIRECTORY / "modelA"
STEPS = 5
TRAIN = TrainConfig("run", StartConfig("checkpoint"), DataConfig("data"), LoopConfig(steps=STEPS))
SETTING = 8, 8  # slot and block of exact.load


@contextlib.contextmanager
def begun() -> Iterator[tuple[rf.ModelConfig, Any, Dataset]]:
    """A random model, its parameters on the mesh, and 64 worksheets."""
    config = dataclasses.replace(
        runs.SHAPE, hidden_size=64, num_heads=8, num_kv_heads=4, eos_token_ids=(1,), mask_token_id=255
    )
    rng = np.random.default_rng(0)
    shapes = abstract_params(config)
    numbers = jax.tree.map(lambda x: rng.normal(0, 0.05, x.shape).astype(np.float32), shapes)
    params = jax.tree.map(jnp.asarray, place(numbers, parameter_specs(shapes)))
    with tempfile.TemporaryDirectory() as cache:
        dataset = prepare(
            "worksheet:0:64",
            worksheet.tokenizer(),
            max_length=128,  # of all batches, so that few programs are compiled
            eos_token_id=1,
            mask_token_id=255,
            max_left_out=0.5,
            cache=cache,
        )
        yield config, params, dataset


def batches(config: rf.ModelConfig, dataset: Dataset, first: int, steps: int) -> Iterator[tuple[int, Batch]]:
    """Eight worksheets a step, on the devices."""
    layout = Layout(128, False, 1, row_shards(), local_row_shards())
    made = Batches(dataset, ForwardConfig(), config.mask_token_id, layout, steps, batch_size=8, seed=0)
    for number, batch in enumerate(made.read(first), first):
        yield number, put_batch(batch)


def arrays(found: dict[str, Any]) -> dict[str, NDArray]:
    return {name: np.asarray(array) for name, array in fetch(found).items()}


def steps() -> dict[str, NDArray]:
    """All batches, the loss and gradient of the first, the parameters behind five steps of SGD."""
    with begun() as (config, params, dataset):
        found: dict[str, Any] = {}
        sgd = optax.sgd(0.1)
        step = make_step(config, TRAIN, sgd)
        state = TrainState(place(jnp.int32(0), jax.sharding.PartitionSpec()), params, sgd.init(params))
        for number, batch in batches(config, dataset, 0, STEPS):
            found |= {f"batch/{number}/{name}": array for name, array in batch._asdict().items()}
            if number == 0:
                gradient, measures = jax.jit(lambda params, batch: gradients(config, TRAIN, params, None, batch))(
                    state.params, batch
                )
                found |= {f"gradient/{name}": array for name, array in flatten(gradient).items()}
                found |= {f"first/{name}": array for name, array in measures._asdict().items()}
            state, measures = step(state, None, batch)
            found[f"loss/{number}"] = measures.loss
        return arrays(found | {f"params/{name}": array for name, array in flatten(state.params).items()})


def resume(run: str, last: str) -> dict[str, NDArray]:
    """The batches and losses from the checkpoint in ``run``, or the beginning, to step ``last``, saved there again."""
    with begun() as (config, params, dataset):
        found: dict[str, Any] = {}
        sgd = optax.sgd(0.1, momentum=0.9)
        step = make_step(config, TRAIN, sgd)
        state = TrainState(place(jnp.int32(0), jax.sharding.PartitionSpec()), params, jax.jit(sgd.init)(params))
        with Checkpoints(Path(run), keep=1) as checkpoints:
            first = checkpoints.latest() or 0
            if first:
                like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
                state = checkpoints.restore(first, like)
            for number, batch in batches(config, dataset, first, int(last)):
                found |= {f"batch/{number}/{name}": array for name, array in batch._asdict().items()}
                state, measures = step(state, None, batch)
                found[f"loss/{number}"] = measures.loss
            checkpoints.save(int(last), state)
        return arrays(found)


def decode() -> dict[str, NDArray]:
    """The answers to the 64 golden prompts, exactly."""
    model = rf.load(MODEL)
    slot, block = SETTING
    config = rf.DecodeConfig(max_new_tokens=exact.MAX_NEW_TOKENS, slot_size=slot, block_size=block)
    prompts = [prompt.prompt_ids for prompt in golden.load("A").prompts]
    outs = rf.generate(model, prompts, config, batch_size=24)
    return {"token_ids": golden.padded([out.token_ids for out in outs], exact.MAX_NEW_TOKENS)}


def on_mesh(what: str, mesh: Sequence[int], *arguments: object) -> dict[str, NDArray]:
    """One of the functions above, by name, on a mesh of (data, fsdp, tensor) devices."""
    with use_mesh(MeshConfig(*mesh)):
        return {"steps": steps, "resume": resume, "decode": decode}[what](*map(str, arguments))  # type: ignore[operator]


def main(what: str, mesh: str, output: str, coordinator: str, count: str, number: str, *arguments: str) -> None:
    join(DistributedConfig("manual", coordinator, int(count), int(number), startup_timeout=60, heartbeat_timeout=20))
    found = on_mesh(what, [int(size) for size in mesh.split(",")], *arguments)
    if is_first():
        np.savez(output, **found)


# ---- Several processes ----

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def start(command: Sequence[object], directory: Path, devices: int = 1, **settings: object) -> subprocess.Popen[bytes]:
    """Start a command of Python, in an environment with ``settings``; what it says, ``said`` tells."""
    settings |= {"JAX_NUM_CPU_DEVICES": devices, "PYTHONPATH": ROOT}
    environment = os.environ | {name: str(value) for name, value in settings.items()}
    number = len(list(directory.glob("said-*")))
    with open(directory / f"said-{number}", "wb") as file:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], cwd=directory, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    process.said = directory / f"said-{number}"  # type: ignore[attr-defined]
    return process


def said(process: subprocess.Popen[bytes]) -> str:
    """What a process said so far."""
    return Path(process.said).read_text(errors="replace")  # type: ignore[attr-defined]


def manual(count: int, number: int, port: int, *options: object) -> list[object]:
    """Options of a command that is one of several processes."""
    own = ["--distributed", "manual", "--coordinator", f"localhost:{port}", "--num-processes", count]
    return [*own, "--process-id", number, *options]


def wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """The exit codes; those that still run then are killed, and what they said is in the error."""
    end = time.monotonic() + seconds
    try:
        return [process.wait(max(end - time.monotonic(), 0.1)) for process in processes]
    except subprocess.TimeoutExpired:
        raise AssertionError("\n".join(f"---- {process.args}\n{said(process)}" for process in processes)) from None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def in_processes(what: str, mesh: Sequence[int], count: int, directory: Path, *arguments: object) -> dict[str, NDArray]:
    """As ``on_mesh``, by ``count`` processes, which share the devices of the mesh out."""
    directory.mkdir()
    port, output = free_port(), directory / "found.npz"
    devices = int(np.prod(mesh)) // count
    commands = [
        ["-m", "tests.sharded", what, ",".join(map(str, mesh)), output, f"localhost:{port}", count, number, *arguments]
        for number in range(count)
    ]
    processes = [start(command, directory, devices) for command in commands]
    codes = wait(processes, 240)
    assert codes == [0] * count, "\n".join(map(said, processes))
    with np.load(output) as found:
        return dict(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
