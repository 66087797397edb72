"""Training runs: that they can be stopped at any moment and go on, and what they leave behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load

import refusion_jax as rf
from refusion_jax.data import worksheet
from refusion_jax.training import loop
from refusion_jax.training.checkpoint import Checkpoints
from refusion_jax.training.config import TrainConfig
from refusion_jax.training.evaluate import Evaluation
from tests import runs

ROOT = Path(__file__).parent.parent
STEPS = 20
HELD_OUT = {"validation_path": "worksheet:0:4"}

Configure = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def configure(tmp_path_factory: pytest.TempPathFactory) -> Configure:
    """``runs.settings``, with examples that are tokenised once for all tests."""
    cache = tmp_path_factory.mktemp("cache")

    def settings(directory: Path, **changes: dict[str, Any]) -> TrainConfig:
        changes["data"] = {"cache": str(cache), **changes.get("data", {})}
        return runs.settings(directory, **changes)

    return settings


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> runs.Watch:
    watch = runs.Watch()
    watch.stand_in(monkeypatch)
    return watch


class Run:
    """What is known of a run that nothing interrupted."""

    def __init__(self, config: TrainConfig) -> None:
        watch = runs.Watch()
        with pytest.MonkeyPatch.context() as patch:
            watch.stand_in(patch)
            loop.train(config)
        self.config, self.steps = config, watch.steps
        self.metrics, self.exported = runs.metrics(config), runs.exported(config)


@pytest.fixture(scope="module")
def uninterrupted(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """20 steps, evaluated every 10."""
    run = Run(configure(tmp_path_factory.mktemp("uninterrupted"), data=HELD_OUT))
    assert [number for number, *_ in run.steps] == list(range(1, STEPS + 1))
    return run


@pytest.fixture(scope="module")
def short(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """3 steps."""
    return Run(configure(tmp_path_factory.mktemp("short"), **SHORT))


# A large epsilon: AdamW turns a gradient of nothing but rounding into a whole step.
SHORT = {"train": {"steps": 3, "batch_size": 8}, "optimizer": {"learning_rate": 1e-3, "epsilon": 1e-4}}


def check(config: TrainConfig, watch: runs.Watch, expected: Run) -> None:
    """A run that was interrupted is the uninterrupted one to the last bit, but for evaluations that it has not."""
    assert watch.steps == expected.steps
    evaluated = config.data.validation_path is not None
    assert runs.metrics(config) == [line for line in expected.metrics if evaluated or "train/loss" in line]
    assert runs.exported(config) == expected.exported


def latest(config: TrainConfig) -> int | None:
    with Checkpoints(config.run) as checkpoints:
        return checkpoints.latest()


# ---- Signals ----


def stop_in(watch: runs.Watch, number: signal.Signals, *steps: int) -> None:
    """Have the process get a signal in these steps."""

    def before(step: int) -> None:
        if step in steps:
            signal.raise_signal(number)

    watch.before = before


def test_stopped_in_every_step(configure: Configure, tmp_path: Path, watch: runs.Watch, uninterrupted: Run) -> None:
    """Trap T5: one step each time, with all the evaluations."""
    config = configure(tmp_path, data=HELD_OUT)
    stop_in(watch, signal.SIGTERM, *range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        with pytest.raises(loop.Interrupted, match=f"stopped by SIGTERM at step {step}; the same command goes on"):
            loop.train(config)
        assert latest(config) == step
        assert not Path(config.run, "model").exists()
    loop.train(config)
    check(config, watch, uninterrupted)


def test_muon_is_stopped_in_every_step(configure: Configure, tmp_path: Path, watch: runs.Watch) -> None:
    """Its state has another form."""
    changes = {"train": SHORT["train"], "optimizer": {"algorithm": "muon"}}
    expected = Run(configure(tmp_path / "whole", **changes))
    config = configure(tmp_path / "stopped", **changes)
    stop_in(watch, signal.SIGTERM, 1, 2, 3)
    for _ in range(3):
        with pytest.raises(loop.Interrupted):
            loop.train(config)
    loop.train(config)
    check(config, watch, expected)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_stopped_in_one_step(
    configure: Configure,
    tmp_path: Path,
    watch: runs.Watch,
    uninterrupted: Run,
    step: int,
    number: signal.Signals,
) -> None:
    config = configure(tmp_path, data=HELD_OUT)
    stop_in(watch, number, step)
    with pytest.raises(loop.Interrupted, match=f"stopped by {number.name} at step {step};"):
        loop.train(config)
    watch.before = lambda number: None
    loop.train(config)
    check(config, watch, uninterrupted)


@pytest.mark.parametrize(
    ("part", "step"),
    [
        ("losses", STEPS),
        ("answers", 10),
        pytest.param("losses", 10, marks=pytest.mark.slow),
        pytest.param("answers", STEPS, marks=pytest.mark.slow),
    ],
)
def test_stopped_in_an_evaluation(
    configure: Configure,
    tmp_path: Path,
    watch: runs.Watch,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: Run,
    part: str,
    step: int,
) -> None:
    """Trap T8: it is made up for."""
    config = configure(tmp_path, data=HELD_OUT)
    original, calls = getattr(Evaluation, part), []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == step / 10:
            signal.raise_signal(signal.SIGTERM)
        return original(*args)

    monkeypatch.setattr(Evaluation, part, interrupted)
    with pytest.raises(loop.Interrupted, match=f"at step {step};"):
        loop.train(config)
    assert latest(config) == step
    loop.train(config)
    check(config, watch, uninterrupted)


@pytest.mark.parametrize("step", [10, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_stopped_in_a_save(
    configure: Configure,
    tmp_path: Path,
    watch: runs.Watch,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: Run,
    step: int,
) -> None:
    """Trap T8: the checkpoint is finished, and after the last step the run as well."""
    config = configure(tmp_path, train={"save_every": 5, "keep": 1})
    original = Checkpoints.save

    def interrupted(self: Checkpoints, number: int, *args: Any, **others: Any) -> None:
        original(self, number, *args, **others)
        if number == step:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Checkpoints, "save", interrupted)
    if step < STEPS:
        with pytest.raises(loop.Interrupted, match=f"at step {step + 1};"):
            loop.train(config)
        assert latest(config) == step + 1
    loop.train(config)
    check(config, watch, uninterrupted)


def test_a_second_ctrl_c_does_not_wait(
    configure: Configure, tmp_path: Path, watch: runs.Watch, uninterrupted: Run
) -> None:
    config = configure(tmp_path, train={"save_every": 3})
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def twice(step: int) -> None:
        if step == 8:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    watch.before = twice
    with pytest.raises(KeyboardInterrupt):
        loop.train(config)
    assert latest(config) == 6
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    watch.before = lambda number: None
    del watch.steps[6:]  # steps 7 and 8 are done again
    loop.train(config)
    check(config, watch, uninterrupted)


def test_trains_beside_the_main_thread(
    configure: Configure, tmp_path: Path, watch: runs.Watch, uninterrupted: Run
) -> None:
    """Where no signals can be handled."""
    config = configure(tmp_path)
    thread = threading.Thread(target=loop.train, args=(config,))
    thread.start()
    thread.join()
    check(config, watch, uninterrupted)


def test_finished_run_does_nothing_but_export_again(
    configure: Configure, tmp_path: Path, watch: runs.Watch, uninterrupted: Run
) -> None:
    before = runs.metrics(uninterrupted.config)
    Path(uninterrupted.config.run, "model", "model.safetensors").write_bytes(b"half")
    Path(uninterrupted.config.run, ".model.new").mkdir()  # of a process that was killed while it exported
    loop.train(uninterrupted.config)
    assert watch.steps == []
    assert runs.metrics(uninterrupted.config) == before
    assert runs.exported(uninterrupted.config) == uninterrupted.exported
    assert not Path(uninterrupted.config.run, ".model.new").exists()


# A process that forks others, as importing all they need takes longer than what they do.
KILLED = """
import json, os, random, shutil, signal, sys, threading, time
from pathlib import Path
from refusion_jax.data import builder, worksheet
from refusion_jax.training import loop
from tests import runs

worksheet.tokenizer()  # what it needs is imported as well
directory, cache, held_out, kills, every = Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:])
config = runs.settings(
    directory,
    data={"cache": cache, "validation_path": held_out},
    train={"save_every": 1 if every else 4, "keep": 1},
    evaluation={"every": every},
)

def train(delay):
    log = open(directory / "steps", "a", buffering=1)
    watch = loop.make_step = runs.Watch()

    def before(number):
        print(json.dumps(watch.steps[-1]), file=log)
        if delay is not None and len(watch.steps) == 1:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(0.02)

    watch.before = before
    loop.train(config)

def run(delay):
    process = os.fork()
    if process == 0:
        code = 1
        try:
            train(delay)
            code = 0
        finally:
            os._exit(code)
    code = os.waitpid(process, 0)[1]
    return code

moments, killed = random.Random(kills), 0
while killed < kills:
    shutil.rmtree(config.run, ignore_errors=True)
    while killed < kills and run(moments.uniform(0, 0.4)) == signal.SIGKILL:
        killed += 1
sys.exit(run(None))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.parametrize(("kills", "every"), [(2, 0), pytest.param(20, 10, marks=pytest.mark.slow)])
def test_killed_at_any_moment(configure: Configure, tmp_path: Path, uninterrupted: Run, kills: int, every: int) -> None:
    """kill -9: whatever was done again was done as before; ``every`` is 0 where there are no evaluations."""
    cache = uninterrupted.config.data.cache
    args = [tmp_path, cache, HELD_OUT["validation_path"], kills, every]
    result = subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8"},  # as here: threads are shared out by it, and sums with them
    )
    assert result.returncode == 0, result.stderr
    steps = [tuple(json.loads(line)) for line in (tmp_path / "steps").read_text().splitlines()]
    for step in steps:
        assert step == uninterrupted.steps[step[0] - 1]
    assert steps[-1][0] == STEPS
    config = configure(tmp_path)
    assert runs.metrics(config) == [line for line in uninterrupted.metrics if every or "train/loss" in line]
    assert runs.exported(config) == uninterrupted.exported


# ---- The same run, and another one ----


def test_another_run_is_refused_with_the_differences(configure: Configure, tmp_path: Path, uninterrupted: Run) -> None:
    """Trap T6."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name, content in worksheet.tokenizer_files().items():
        (tokenizer / name).write_bytes(content.replace(b" + message.content + ", b" + message.content  + "))
    digit = "[0-9a-f]{64}"
    others: list[tuple[dict[str, Any], list[str]]] = [
        ({"train": {"batch_size": 5}}, ["train.batch_size: there 4, now 5"]),
        ({"train": {"seed": 1}}, ["train.seed: there 0, now 1"]),
        ({"train": {"steps": 21}}, ["train.steps: there 20, now 21"]),
        ({"train": {"dtype": "bfloat16"}}, ['train.dtype: there "float32", now "bfloat16"']),
        ({"optimizer": {"learning_rate": 2e-2}}, ["optimizer.learning_rate: there 0.01, now 0.02"]),
        (
            {"forward": {"slot_sizes": (4, 8)}},
            [r"forward.slot_sizes: there \[4, 8, 16, 32\], now \[4, 8\]", "model.slot_sizes: "],
        ),
        ({"forward": {"ar_weight": 0.5}}, ["forward.ar_weight: there 1.0, now 0.5"]),
        (
            {"model": {"mask_token": "<|bos|>"}},
            ["model.mask_token_id: there 3, now 2", r'start.mask_token: there "<\|mask\|>", now "<\|bos\|>"'],
        ),
        ({"model": {"tokenizer": str(tokenizer)}}, [f'tokenizer: there "{digit}", now "{digit}"']),
        (
            {"data": {"path": "worksheet:1:200"}},
            ['data.path: there "worksheet:0:200", now "worksheet:1:200"', "data.fingerprint: "],
        ),
        ({"model": {"shape": dataclasses.replace(runs.SHAPE, rope_theta=1e5)}}, ["model.rope_theta: "]),
    ]
    run = Path(uninterrupted.config.run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for changes, differences in others:
        with pytest.raises(ValueError, match=f"{run} is a run with other settings:") as error:
            loop.train(runs.changed(uninterrupted.config, **changes))
        for difference in differences:
            assert any(line for line in str(error.value).splitlines() if re.match(f"  {difference}", line)), (
                difference,
                str(error.value),
            )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@contextlib.contextmanager
def mesh_of(sizes: tuple[int, int, int] | None) -> Any:
    if sizes is None:
        yield
    else:
        with jax.set_mesh(rf.make_mesh(*sizes)):
            yield


def check_close(config: TrainConfig, expected: Run) -> None:
    """Losses and parameters of a run are those of another, to rounding."""
    for line, other in zip(runs.metrics(config), expected.metrics, strict=True):
        for name in ("step", "train/loss", "train/ar", "train/masked", "train/gradient_norm", "train/learning_rate"):
            assert line[name] == pytest.approx(other[name], rel=1e-5), (line["step"], name)
    ours, theirs = (load(files["model.safetensors"]) for files in (runs.exported(config), expected.exported))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"pack": False}, "train": {"accumulate": 4, "remat": "full"}},
        {"train": {"accumulate": 2, "loss_chunk": 100}},
        pytest.param({"data": {"pack": False}}, marks=pytest.mark.slow),
        pytest.param({"data": {"max_length": 400}}, marks=pytest.mark.slow),
        pytest.param({"train": {"accumulate": 4}}, marks=pytest.mark.slow),
        pytest.param({"train": {"remat": "dots"}}, marks=pytest.mark.slow),
        pytest.param({"train": {"remat": "full"}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_how_a_step_is_computed_changes_only_rounding(
    configure: Configure, tmp_path: Path, watch: runs.Watch, short: Run, changes: dict[str, Any]
) -> None:
    config = runs.changed(configure(tmp_path, **SHORT), **changes)
    loop.train(config)
    check_close(config, short)


@pytest.mark.slow
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mesh", [(2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 4, 2)], ids=str)
def test_a_mesh_changes_only_rounding(
    configure: Configure,
    tmp_path: Path,
    watch: runs.Watch,
    short: Run,
    mesh: tuple[int, int, int],
    accumulate: int,
    pack: bool,
) -> None:
    config = runs.changed(configure(tmp_path, **SHORT), data={"pack": pack}, train={"accumulate": accumulate})
    with mesh_of(mesh):
        trained = loop.train(config)
        assert jax.tree.all(jax.tree.map(lambda x: len(x.devices()) == 8, trained.params))
        loaded = rf.load(config.run)
        assert runs.digest(loaded.params) == runs.digest(trained.params)
    check_close(config, short)


@pytest.mark.slow
@pytest.mark.parametrize("pack", [True, False])
def test_evaluations_on_a_mesh(configure: Configure, tmp_path: Path, watch: runs.Watch, pack: bool) -> None:
    found = []
    for name, mesh in (("one", None), ("mesh", (2, 2, 2))):
        config = runs.changed(configure(tmp_path / name, **SHORT), data={**HELD_OUT, "pack": pack})
        with mesh_of(mesh):
            loop.train(config)
        found.append(runs.metrics(config)[-1])
    assert "held_out/right" in found[0]
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_from_a_mesh_to_one_device_with_other_settings(
    configure: Configure, tmp_path: Path, watch: runs.Watch, short: Run
) -> None:
    """What only changes rounding may change on the way (traps T6 and T7)."""
    config = runs.changed(configure(tmp_path, **SHORT))
    stop_in(watch, signal.SIGTERM, 2)
    with mesh_of((2, 2, 2)):
        with pytest.raises(loop.Interrupted):
            loop.train(config)
        assert all(len(leaf.devices()) == 8 for leaf in jax.tree.leaves(rf.load(config.run).params))
    other = runs.changed(config, data={"pack": False}, train={"accumulate": 4, "remat": "full", "keep": 1})
    loop.train(other)
    check_close(config, short)


def test_the_last_metrics_of_a_line(configure: Configure, tmp_path: Path, watch: runs.Watch, short: Run) -> None:
    """Other lines than before: means over their steps."""
    config = runs.changed(configure(tmp_path, **SHORT), train={"log_every": 2})
    loop.train(config)
    (line,) = runs.metrics(config)
    assert line["step"] == 2
    mean = np.mean([line["train/loss"] for line in short.metrics[:2]])
    assert line["train/loss"] == pytest.approx(mean, rel=1e-6)
    assert line["train/learning_rate"] == short.metrics[1]["train/learning_rate"]


@pytest.mark.slow
def test_worker_processes_give_the_same_batches(
    configure: Configure, tmp_path: Path, watch: runs.Watch, short: Run
) -> None:
    config = runs.changed(configure(tmp_path, **SHORT), data={"workers": 2})
    loop.train(config)
    assert watch.steps == short.steps


# ---- What is measured ----


def test_metrics(uninterrupted: Run) -> None:
    training = [line for line in uninterrupted.metrics if "train/loss" in line]
    evaluations = [line for line in uninterrupted.metrics if "held_out/loss" in line]
    assert [line["step"] for line in training] == list(range(1, STEPS + 1))
    assert [line["step"] for line in evaluations] == [10, 20]
    names = ("loss", "ar", "masked", "gradient_norm", "learning_rate", "efficiency")
    for line in training:
        assert list(line) == ["step", *(f"train/{name}" for name in names)]
        assert line["train/loss"] == pytest.approx(line["train/ar"] + line["train/masked"], rel=1e-6)
        assert 0.2 < line["train/efficiency"] <= 1
    for line in evaluations:
        terms = [f"held_out/{term}/slot_{size}" for size in (4, 8, 16, 32) for term in ("ar", "masked")]
        assert list(line) == ["step", *terms, "held_out/loss", "held_out/right", "held_out/tokens_per_forward"]
        assert line["held_out/loss"] == pytest.approx(sum(line[name] for name in terms) / 4)
        assert line["held_out/right"] in (0, 0.5, 1)
    assert evaluations[-1]["held_out/loss"] < evaluations[0]["held_out/loss"]
    assert list(Path(uninterrupted.config.run, "tensorboard").glob("events.*"))


@pytest.mark.slow
def test_profile(configure: Configure, tmp_path: Path, watch: runs.Watch) -> None:
    """Also where the run ends before the last step that was to be profiled."""
    config = runs.changed(configure(tmp_path, **SHORT), train={"profile_steps": "2:9"})
    loop.train(config)
    assert list(Path(config.run, "profile").rglob("*.xplane.pb"))


def test_learning_rate(uninterrupted: Run) -> None:
    """It rises in two steps to its peak, and falls along half a cosine."""
    rates = [line["train/learning_rate"] for line in uninterrupted.metrics if "train/loss" in line]
    rise = [1e-2 / 3, 2e-2 / 3]
    fall = [1e-2 * (1 + math.cos(math.pi * step / 18)) / 2 for step in range(18)]
    assert rates == pytest.approx([*rise, *fall], rel=1e-5, abs=1e-9)


def test_a_run_directory_is_a_model(uninterrupted: Run) -> None:
    """rf.load takes it, and gives what was exported."""
    run = Path(uninterrupted.config.run)
    ours, theirs = rf.load(run), rf.load(run / "model")
    assert ours.config == theirs.config
    assert runs.digest(ours.params) == runs.digest(theirs.params)
