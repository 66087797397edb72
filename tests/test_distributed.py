"""Meshes and several processes: batches, losses, parameters and answers of one device; and what can go wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from refusion_jax.cli.options import UserError
from refusion_jax.cli.process import company
from refusion_jax.corrupt import left_to_right
from refusion_jax.data.pipeline import Layout
from refusion_jax.distributed import DistributedConfig, join
from refusion_jax.training.checkpoint import Checkpoints
from tests import sharded
from tests.sharded import ROOT, free_port, in_processes, manual, on_mesh, said, start, wait
from tests.test_cli_train import CONFIG
from tests.twins import exact

MESHES = [(8, 1, 1), (1, 8, 1), (2, 4, 1), (2, 2, 2)]
PROCESSES = [((2, 2, 2), 2), ((4, 1, 2), 2), ((1, 8, 1), 4)]


@pytest.fixture(scope="module")
def one_device() -> dict[str, NDArray]:
    return on_mesh("steps", (1, 1, 1))


def check_steps(found: dict[str, NDArray], expected: dict[str, NDArray]) -> None:
    """Noise to the bit; losses, gradients and parameters to rounding."""
    assert found.keys() == expected.keys()

    def norm(array: NDArray) -> float:
        return float(np.linalg.norm(array.astype(np.float64)))

    for name, array in expected.items():
        kind = name.partition("/")[0]
        if kind == "batch":
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        elif kind in ("loss", "first"):
            np.testing.assert_allclose(found[name], array, rtol=1e-5, err_msg=name)
        else:
            assert norm(found[name] - array) <= 1e-4 * norm(array), name


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_training_on_a_mesh_is_that_of_one_device(one_device: dict[str, NDArray], mesh: tuple[int, int, int]) -> None:
    """Trap T4."""
    check_steps(on_mesh("steps", mesh), one_device)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "count"), PROCESSES, ids=str)
def test_training_in_processes_is_that_of_one_device(
    one_device: dict[str, NDArray], tmp_path: Path, mesh: tuple[int, int, int], count: int
) -> None:
    """Trap T4."""
    check_steps(in_processes("steps", mesh, count, tmp_path / "steps"), one_device)


def check_answers(found: dict[str, NDArray]) -> None:
    """Those of the sequential process, which at these sizes has no near-tie."""
    twin = exact.load("A", sharded.SETTING)
    assert np.all(twin["margin"] > 1e-4)
    np.testing.assert_array_equal(found["token_ids"], twin["token_ids"])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), *MESHES], ids=str)
def test_answers_on_a_mesh_are_those_of_the_sequential_process(mesh: tuple[int, int, int]) -> None:
    check_answers(on_mesh("decode", mesh))


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "count"), PROCESSES, ids=str)
def test_answers_of_processes_are_those_of_the_sequential_process(
    tmp_path: Path, mesh: tuple[int, int, int], count: int
) -> None:
    check_answers(in_processes("decode", mesh, count, tmp_path / "decode"))


@pytest.mark.parametrize("packed", [True, False])
def test_parts_of_processes_are_the_whole_batch(packed: bool) -> None:
    """Each process makes the rows of its own shards alone, in every piece of the step."""
    rng = np.random.default_rng(0)
    lengths = [int(length) for length in rng.integers(5, 60, 37)]
    examples = [left_to_right(rng.integers(1, 200, length), 3) for length in lengths]
    whole = Layout(64, packed, 2, 4)(lengths, examples.__getitem__)
    for processes in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        parts = [Layout(64, packed, 2, 4, local)(lengths, examples.__getitem__) for local in processes]
        for name in whole._fields:
            array = getattr(whole, name)
            shards = array.reshape(2, 4, -1, 64)
            for local, part in zip(processes, parts, strict=True):
                np.testing.assert_array_equal(getattr(part, name), shards[:, local].reshape(2, -1, 64), err_msg=name)


# ---- Elastic resume ----


def losses(run: Path) -> dict[int, float]:
    """Step -> loss, as a run wrote them down."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings of a run of 20 steps, a checkpoint every five, that two and four devices share out evenly."""
    directory = tmp_path_factory.mktemp("settings")
    text = CONFIG.replace("CACHE", repr(str(directory / "cache")))
    text = text.replace("max_length=192", "max_length=128, pack=False, max_left_out=0.5").replace(
        "answers=2", "answers=0"
    )
    (directory / "config.py").write_text(text)
    return directory / "config.py"


@pytest.fixture(scope="module")
def uninterrupted(config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process on one device."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    assert wait([train(config, directory, [])], 180) == [0]
    return losses(directory / "run")


def train(config: Path, directory: Path, options: list[object], devices: int = 1) -> Any:
    return start([ROOT / "train.py", "--config", config, "--run", "run", *options], directory, devices)


def train_together(config: Path, directory: Path, count: int, *options: object) -> list[Any]:
    """As many processes of one device each."""
    port = free_port()
    timeouts = ["--startup-timeout", 60, "--heartbeat-timeout", 20]
    return [
        train(config, directory, manual(count, number, port, "--mesh.data", count, *timeouts, *options))
        for number in range(count)
    ]


def until(happened: Callable[[], bool], processes: list[Any]) -> None:
    """Wait for something that running processes do."""
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end and all(p.poll() is None for p in processes), "\n".join(map(said, processes))
        time.sleep(0.05)


def wrote_step(run: Path, step: int) -> bool:
    """Whether a run has written down a step."""
    return (run / "metrics.jsonl").exists() and step in losses(run)


def check_goes_on(found: dict[str, NDArray], uninterrupted: dict[str, NDArray], first: int, last: int) -> None:
    """Batches to the bit, losses to rounding, of the steps from ``first`` to ``last``."""
    expected = {name: array for name, array in uninterrupted.items() if first <= int(name.split("/")[1]) < last}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        if name.startswith("batch/"):
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        else:
            np.testing.assert_allclose(found[name], array, rtol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NDArray]:
    """All batches and losses of one device that nothing interrupts."""
    return on_mesh("resume", (1, 1, 1), tmp_path_factory.mktemp("one") / "run", 23)


@pytest.mark.slow
@pytest.mark.parametrize("saved", [(4, 1, 2), (1, 4, 2)], ids=str)
def test_a_checkpoint_goes_on_on_other_meshes(
    tmp_path: Path, one_run: dict[str, NDArray], saved: tuple[int, int, int]
) -> None:
    """Trap T4. The next ten batches, and what is learned from them."""
    check_goes_on(on_mesh("resume", saved, tmp_path / "run", 3), one_run, 0, 3)
    for mesh in [(2, 1, 4), (1, 2, 4), (8, 1, 1), (1, 8, 1), (1, 1, 1)]:
        copy = shutil.copytree(tmp_path / "run", tmp_path / str(mesh))
        check_goes_on(on_mesh("resume", mesh, copy, 13), one_run, 3, 13)


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_other_processes(tmp_path: Path, one_run: dict[str, NDArray]) -> None:
    """Traps T4 and T7. Two, then one, then four."""
    run = tmp_path / "run"
    check_goes_on(in_processes("resume", (2, 1, 1), 2, tmp_path / "two", run, 3), one_run, 0, 3)
    check_goes_on(on_mesh("resume", (1, 1, 1), run, 13), one_run, 3, 13)
    check_goes_on(in_processes("resume", (1, 4, 1), 4, tmp_path / "four", run, 23), one_run, 13, 23)


@pytest.mark.slow
def test_two_processes_then_one_then_four(config: Path, tmp_path: Path, uninterrupted: dict[int, float]) -> None:
    """Traps T4 and T7. A signal to one of them stops all behind the same step, with the code that says so."""
    for count, step in ((2, 4), (1, 9)):
        processes = train_together(config, tmp_path, count) if count > 1 else [train(config, tmp_path, [])]
        until(lambda step=step: wrote_step(tmp_path / "run", step), processes)
        processes[-1].send_signal(signal.SIGTERM)
        assert wait(processes, 60) == [75] * count, "\n".join(map(said, processes))
        stops = {re.findall(r"stopped by SIGTERM at step (\d+)", said(process))[0] for process in processes}
        assert len(stops) == 1
        with Checkpoints(tmp_path / "run") as checkpoints:
            assert str(checkpoints.latest()) in stops
    processes = train_together(config, tmp_path, 4)
    assert wait(processes, 180) == [0] * 4, "\n".join(map(said, processes))
    assert losses(tmp_path / "run") == pytest.approx(uninterrupted, rel=1e-5)


@pytest.mark.slow
def test_train_on_two_kill_one_resume_on_one_decode_on_two(
    config: Path, tmp_path: Path, uninterrupted: dict[int, float]
) -> None:
    """The whole of it: nobody waits for the dead, the run goes on bitwise from its checkpoint, and what two processes
    decode is what one does."""
    processes = train_together(config, tmp_path, 2)
    saved = tmp_path / "run" / "checkpoints"
    until(lambda: (saved / "5").exists(), processes)
    processes[1].kill()
    killed = time.monotonic()
    codes = wait(processes, 60)
    assert time.monotonic() - killed < 30
    # A closed connection, a checkpoint that cannot be written together, or JAX's own abort: whatever comes first.
    assert codes in ([1, -signal.SIGKILL], [-signal.SIGABRT, -signal.SIGKILL]), said(processes[0])
    assert re.search("error: |another task died", said(processes[0]))

    last = max(int(path.name) for path in saved.iterdir() if path.name.isdigit())  # others are half written
    alone = train(config, tmp_path, [])
    assert wait([alone], 180) == [0]
    assert f"going on from step {last} of 20" in said(alone)
    assert losses(tmp_path / "run") == pytest.approx(uninterrupted, rel=1e-5)

    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n} + {n} ="}}\n' for n in range(10, 20)))
    port = free_port()
    options = ["--model", "run", "--prompts", "prompts.jsonl", "--slot-size", 4, "--block-size", 4]
    options += ["--max-new-tokens", 8, "--batch-size", 2, "--logprobs"]
    commands = [[ROOT / "decode.py", *options, "--output", "one.jsonl"]]
    commands += [
        [ROOT / "decode.py", *options, "--output", "two.jsonl", *manual(2, number, port, "--mesh.data", 2)]
        for number in range(2)
    ]
    processes = [start(command, tmp_path) for command in commands]
    assert wait(processes, 180) == [0] * 3, "\n".join(map(said, processes))
    one, two = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("one.jsonl", "two.jsonl")
    )
    assert [line["id"] for line in two] == list(range(10))
    assert [line["token_ids"] for line in two] == [line["token_ids"] for line in one]


# ---- What can go wrong ----


@pytest.mark.slow
def test_a_missing_process_is_told_with_how_many_came(tmp_path: Path) -> None:
    """Trap T13."""
    options = manual(3, 0, free_port(), "--startup-timeout", 5)
    process = start([ROOT / "decode.py", *options], tmp_path)
    assert wait([process], 60) == [2], said(process)
    assert "error: 1 of 3 processes came within 5 s, and number 1, 2 did not" in said(process)


@pytest.mark.slow
def test_a_wrong_address_is_told(tmp_path: Path) -> None:
    """Trap T13."""
    port = free_port()
    process = start([ROOT / "decode.py", *manual(2, 1, port, "--startup-timeout", 5)], tmp_path)
    assert wait([process], 60) == [2], said(process)
    assert f"error: the coordinator localhost:{port} did not answer within 5 s" in said(process)


@pytest.mark.slow
def test_processes_with_other_options_are_refused(tmp_path: Path) -> None:
    """And none of them waits for an answer that cannot come."""
    port = free_port()
    processes = [
        start(
            [ROOT / "decode.py", *manual(2, number, port, "--mesh.data", 2, "--max-new-tokens", 8 + number)], tmp_path
        )
        for number in range(2)
    ]
    assert wait(processes, 60) == [2, 2], "\n".join(map(said, processes))
    for process in processes:
        assert "error: process 1 was given prompts or options other than those of process 0" in said(process)


@pytest.mark.slow
def test_a_mesh_that_leaves_a_process_out_is_refused(tmp_path: Path) -> None:
    """And process 0 does not end before one that is late has said so too."""
    late = (
        "import sys, time; from refusion_jax.cli import decode, process; use_mesh = process.use_mesh; "
        "process.use_mesh = lambda mesh: time.sleep(3) or use_mesh(mesh); sys.exit(decode.main())"
    )
    port = free_port()
    processes = [
        start([*program, *manual(2, number, port)], tmp_path)
        for number, program in enumerate([[ROOT / "decode.py"], ["-c", late]])
    ]
    assert wait(processes, 60) == [2, 2], "\n".join(map(said, processes))
    sentence = (
        "error: a mesh of data=1, fsdp=1, tensor=1 has 1 of the 2 devices of 2 processes; all of them must take part"
    )
    assert all(sentence in said(process) for process in processes)


@pytest.mark.slow
def test_slurm_says_who_is_there(tmp_path: Path) -> None:
    job = free_port()
    program = (
        "from refusion_jax.distributed import *; join(DistributedConfig('slurm', startup_timeout=60)); meet('end')"
    )
    processes = [
        start(
            ["-c", program],
            tmp_path,
            SLURM_JOB_ID=job,
            SLURM_STEP_NODELIST="localhost",
            SLURM_NTASKS=2,
            SLURM_PROCID=number,
            SLURM_LOCALID=number,
        )
        for number in range(2)
    ]
    assert wait(processes, 60) == [0, 0], "\n".join(map(said, processes))
    for number, process in enumerate(processes):
        assert f"process {number} of 2: 1 of 2 devices (cpu)" in said(process)


@pytest.mark.parametrize("kind", [UserError, ValueError, jax.errors.JaxRuntimeError], ids=lambda kind: kind.__name__)
def test_a_lost_connection_is_not_the_users_setting(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """JAX raises it as one kind of error or another, and the exit code is 1 each time."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", ended := mock.Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit), company():
        raise kind("UNKNOWN: Gloo all-reduce failed: Read error: Connection reset by peer")
    ended.assert_called_once_with(1)
    assert "error: process 0 of 1 cannot go on: UNKNOWN: Gloo all-reduce failed" in capsys.readouterr().err


def test_a_setting_is_the_users_also_in_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(UserError, match=r"data\.path is missing"), company():
        raise UserError("data.path is missing: give files of examples")


def test_no_launcher_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="--distributed slurm: no such launcher is around this process"):
        join(DistributedConfig("slurm"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"distributed": "manual"}, "needs coordinator and num_processes and process_id"),
        ({"coordinator": "a:1"}, "coordinator is for distributed='manual', and distributed is 'off'"),
        (
            {"distributed": "manual", "coordinator": "a", "num_processes": 2, "process_id": 0},
            "coordinator='a' must be HOST:PORT",
        ),
        (
            {"distributed": "manual", "coordinator": "a:1", "num_processes": 2, "process_id": 2},
            "process_id=2 must be from 0 to num_processes - 1, and num_processes is 2",
        ),
        ({"startup_timeout": 0}, "startup_timeout=0 must be at least 1 second"),
    ],
    ids=str,
)
def test_settings_of_processes_are_checked(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        DistributedConfig(**settings)
