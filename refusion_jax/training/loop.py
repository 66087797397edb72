"""The training loop: batches in, checkpoints and metrics out, until the last step or a signal."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shutil
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from refusion_jax.data.dataset import Dataset, prepare
from refusion_jax.data.pipeline import Batches, Layout
from refusion_jax.data.sources import open_source
from refusion_jax.distributed import Agreement, in_first_process, is_first
from refusion_jax.model import Model
from refusion_jax.model.hf import export_hf, write_skeleton
from refusion_jax.model.transformer import Params
from refusion_jax.sharding import local_row_shards, place, row_shards
from refusion_jax.training import lora, optimizer
from refusion_jax.training.checkpoint import Checkpoints
from refusion_jax.training.config import DataConfig, LoopConfig, TrainConfig
from refusion_jax.training.evaluate import Evaluation
from refusion_jax.training.identity import check_identity, lock
from refusion_jax.training.report import Report
from refusion_jax.training.start import start
from refusion_jax.training.step import TrainState, all_parameters, make_step, put_batch

EXPORT = "model"
"""Where in the run's directory the trained model is, in Hugging Face layout."""


class Interrupted(Exception):
    """Training was told to stop by a signal; a checkpoint of where it stopped is there."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(number).name} at step {step}; the same command goes on from there"
        )
        self.number = number


def train(config: TrainConfig) -> Model:
    """Train, or go on training, in ``config.run``; returns the trained model.

    Resuming is bitwise: batches, parameters and optimizer state are those of a run that was never interrupted.

    Raises:
      ValueError, FileNotFoundError: the settings, the model or the data cannot be used, or the directory holds
        another run.
      Interrupted: by SIGTERM or SIGINT, after a checkpoint was saved.
      FloatingPointError: the loss is no number any more.
      OSError: a file cannot be written.
    """
    run, data = Path(config.run), config.data
    check_directory(run)

    # ---- Model and data ----
    for path, split in sources(data):
        open_source(path, split)  # before the model is read, which may take long
    model = start(config)
    examples, held_out = read_data(data, model)
    steps = number_of_steps(config.train, len(examples))
    compute = dataclasses.replace(model.config, dtype=config.train.dtype)
    evaluation = None
    if held_out is not None and config.evaluation.every:
        evaluation = Evaluation.make(dataclasses.replace(model, config=compute, params=None), config, held_out)

    def due(number: int) -> bool:
        return number == steps or number % config.evaluation.every == 0

    with lock(run) if is_first() else contextlib.nullcontext():
        own = identity(config, model, examples, steps)
        in_first_process(lambda: check_identity(run, own))
        if not is_first():
            check_identity(run, own, begin=False)
        write_skeleton(model, run)
        # ---- State ----
        adamw = optimizer.make(config.optimizer, steps)
        state, frozen = fresh_state(config, model, adamw)
        model = dataclasses.replace(model, config=compute, params=None)  # the state has them, and donates them
        with stop_signals() as received, Checkpoints(run, keep=config.train.keep) as checkpoints:
            agreement = Agreement()

            def stopped() -> int:
                return agreement(received())

            first = checkpoints.latest() or 0
            if first:
                like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
                del state
                state = checkpoints.restore(first, like)

            # ---- Steps ----
            step = make_step(compute, config, adamw)
            batches = Batches(
                dataset=examples,
                forward=config.forward,
                mask_token_id=compute.mask_token_id,
                layout=Layout(data.max_length, data.pack, config.train.accumulate, row_shards(), local_row_shards()),
                steps=steps,
                batch_size=config.train.batch_size,
                seed=config.train.seed,
            )
            with Report(config, compute, first, steps) as report, Profile(config) as profile:
                if evaluation is not None and first and due(first) and not report.evaluated:  # a signal cut it off
                    report.evaluation(first, functools.partial(evaluation, state.params, frozen, stopped))
                    if stop := stopped():
                        raise Interrupted(stop, first)
                for number, batch in enumerate(batches.read(first, data.workers), first + 1):
                    with profile.step(number):
                        batch = put_batch(batch)
                        state, measures = step(state, frozen, batch)
                    report.step(number, batch, measures)
                    loss = None
                    if evaluation is not None and due(number):
                        loss = report.evaluation(number, functools.partial(evaluation, state.params, frozen, stopped))
                    stop = stopped()
                    if stop or loss is not None or number == steps or number % config.train.save_every == 0:
                        report.check(number, measures)
                        checkpoints.save(number, state, metric=loss)
                    if stop:
                        checkpoints.wait()
                        raise Interrupted(stop, number)

        params = all_parameters(state.params, frozen, config)
    trained = dataclasses.replace(model, params=jax.tree.map(lambda x: x.astype(compute.dtype), params))
    export(trained, run / EXPORT)
    return trained


# ---- What a run is made of ----


def check_directory(run: Path) -> None:
    """Raise ValueError where a run would overwrite what is something else."""
    if run.exists() and not run.is_dir():
        raise ValueError(f"{run} is a file; give the directory of the run")
    if (run / "config.json").exists() and not (run / "run.json").exists():
        raise ValueError(f"{run} holds a model that is no run, and would be overwritten; give another --run directory")


def sources(data: DataConfig) -> list[tuple[str, str]]:
    """The paths of the examples and of the held-out ones, if there are any, each with its split."""
    if not data.path:
        raise ValueError("data.path is missing: give files of examples, such as --data.path FILE.jsonl")
    paths = [(data.path, "train")]
    if data.validation_path is not None:
        paths.append((data.validation_path, "validation"))
    return paths


def read_data(data: DataConfig, model: Model) -> tuple[Dataset, Dataset | None]:
    """The examples, and the held-out ones."""
    assert model.tokenizer is not None
    datasets = []
    for path, split in sources(data):
        dataset = prepare(
            path,
            model.tokenizer,
            split=split,
            max_length=data.max_length,
            eos_token_id=model.config.eos_token_ids[0],
            mask_token_id=model.config.mask_token_id,
            max_left_out=data.max_left_out,
            cache=data.cache,
        )
        if is_first():
            print(dataset.report(), file=sys.stderr)
        datasets.append(dataset)
    return datasets[0], datasets[1] if len(datasets) > 1 else None


def number_of_steps(config: LoopConfig, examples: int) -> int:
    """Steps of a run; the last one of whole epochs takes examples of the next, if the batch size does not divide."""
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    return max(math.ceil(config.epochs * examples / config.batch_size), 1)


def identity(config: TrainConfig, model: Model, examples: Dataset, steps: int) -> dict[str, Any]:
    """What must be the same when a run goes on: all that its parameters depend on.

    Packing, accumulation, rematerialisation, meshes and workers are left out: they only change rounding.
    """
    assert model.tokenizer is not None
    shape = {name: value for name, value in dataclasses.asdict(model.config).items() if name != "dtype"}
    return {
        "start": {
            "checkpoint": _anywhere(config.model.checkpoint),
            "tokenizer": _anywhere(config.model.tokenizer),
            "mask_token": config.model.mask_token,
        },
        "model": shape,
        "tokenizer": model.tokenizer.fingerprint,
        "data": {"path": config.data.path, "fingerprint": examples.fingerprint},
        "forward": dataclasses.asdict(config.forward),
        "optimizer": dataclasses.asdict(config.optimizer),
        "lora": dataclasses.asdict(config.lora) if config.lora.rank else None,
        "train": {
            "steps": steps,
            "batch_size": config.train.batch_size,
            "dtype": config.train.dtype,
            "seed": config.train.seed,
        },
    }


def _anywhere(source: str | None) -> str | None:
    """A directory as it is found from anywhere: adapters are of no use without their checkpoint."""
    return str(Path(source).absolute()) if source is not None and Path(source).is_dir() else source


def fresh_state(
    config: TrainConfig, model: Model, adamw: optax.GradientTransformation
) -> tuple[TrainState, Params | None]:
    """The state before the first step, and with LoRA the parameters that stay as they are."""
    trained, frozen = model.params, None
    if config.lora.rank:
        frozen = jax.tree.map(lambda x: x.astype(config.train.dtype), model.params)
        trained = lora.init(model.config, config.lora, jax.random.key(config.train.seed))
        trained = place(trained, lora.specs(trained))
    return TrainState(place(jnp.int32(0), PartitionSpec()), trained, jax.jit(adamw.init)(trained)), frozen


def export(model: Model, directory: Path) -> None:
    """Write the trained model, in the place of one that is there."""
    draft = directory.with_name(f".{directory.name}.new")

    def put() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        draft.rename(directory)

    in_first_process(lambda: shutil.rmtree(draft, ignore_errors=True))
    export_hf(model, draft)
    in_first_process(put)


# ---- Signals and profiles ----


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """A function that gives the number of the signal by which the process was told to stop, or 0.

    A second SIGINT interrupts at once.
    """
    received: list[int] = []

    def receive(number: int, frame: types.FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():  # only it may handle signals
        yield lambda: 0
        return
    before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: received[0] if received else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Profile(contextlib.AbstractContextManager["Profile"]):
    """Profiles the steps that the settings name, into RUN/profile."""

    def __init__(self, config: TrainConfig) -> None:
        self._steps = config.train.profiled() if is_first() else range(0)
        self._directory = Path(config.run) / "profile"
        self._running = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around each step."""
        if number in self._steps and not self._running:
            jax.profiler.start_trace(str(self._directory))
            self._running = True
        yield
        if number + 1 not in self._steps:
            self.__exit__()

    def __exit__(self, *error: object) -> None:
        if self._running:
            jax.effects_barrier()
            jax.profiler.stop_trace()
            self._running = False
