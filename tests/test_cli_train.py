"""train.py: its options and settings files, its exit codes, and one clear sentence for everything it cannot do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import refusion_jax as rf
from refusion_jax.cli import train as command
from refusion_jax.training.checkpoint import Checkpoints
from refusion_jax.training.identity import lock
from tests import runs
from tests.twins import golden

ROOT = Path(__file__).parent.parent

CONFIG = """
from refusion_jax import DecodeConfig
from refusion_jax.config import ModelConfig
from refusion_jax.training.config import (
    DataConfig, EvaluationConfig, LoopConfig, OptimizerConfig, StartConfig, TrainConfig
)

SHAPE = ModelConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    rope_theta=10_000.0, rms_norm_eps=1e-6, tie_word_embeddings=True, max_position_embeddings=512,
    eos_token_ids=(), mask_token_id=None,
)

def get_config():
    return TrainConfig(
        run="run",
        model=StartConfig(shape=SHAPE, tokenizer="worksheet"),
        data=DataConfig(path="worksheet:0:200", max_length=192, cache=CACHE),
        train=LoopConfig(steps=20, batch_size=4, save_every=5, log_every=1),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup=0.1, weight_decay=0.01),
        evaluation=EvaluationConfig(
            every=5, examples=4, answers=2, decode=DecodeConfig(max_new_tokens=8, slot_size=4, block_size=8)
        ),
    )
"""

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of settings."""
    directory = tmp_path_factory.mktemp("settings")
    (directory / "config.py").write_text(CONFIG.replace("CACHE", repr(str(directory / "cache"))))
    return directory / "config.py"


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> runs.Watch:
    watch = runs.Watch()
    watch.stand_in(monkeypatch)
    return watch


@pytest.fixture
def call(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: runs.Watch
) -> Call:
    """Run the command in this process and in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*args: object) -> tuple[int, str, str]:
        code = command.main([str(arg) for arg in args])
        return code, *capsys.readouterr()

    return run


# ---- What it does ----


def test_settings_from_a_file_changed_by_options(call: Call, config: Path, tmp_path: Path, watch: runs.Watch) -> None:
    data = tmp_path / "own.jsonl"
    lines = [{"query": "1. copy lamp fish 2. last", "response": "1. copy lamp fish 2. last fish done"}] * 20
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, output, errors = call(
        "--config", config, "--data.path", data, "--train.steps", 3, "--run", "other", "--optimizer.learning-rate=0.03"
    )
    assert (code, output) == (0, ""), errors
    assert errors.startswith("20 examples of 41.0 tokens (at most 41): ")
    assert [number for number, *_ in watch.steps] == [1, 2, 3]
    identity = json.loads((tmp_path / "other" / "run.json").read_text())
    assert identity["data"]["path"] == str(data)
    assert (identity["train"]["steps"], identity["train"]["batch_size"]) == (3, 4)
    assert identity["optimizer"]["learning_rate"] == 0.03
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == [
        "chat_template.jinja",
        "checkpoints",
        "config.json",
        "lock",
        "metrics.jsonl",
        "model",
        "run.json",
        "tensorboard",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in (tmp_path / "other" / "checkpoints").iterdir()] == ["3"]
    assert rf.load(tmp_path / "other" / "model").config.mask_token_id is not None

    code, output, errors = call("--config", config, "--data.path", data, "--train.steps", 3, "--run", "other")
    assert code == 2
    assert errors.splitlines()[1:] == [
        "error: other is a run with other settings:",
        "  optimizer.learning_rate: there 0.03, now 0.01",
        "Give another --run directory, or go back to the settings that are there.",
    ]


def test_epochs_in_place_of_steps(call: Call, config: Path, watch: runs.Watch, tmp_path: Path) -> None:
    """As many steps as whole batches take, the last one filled up from the next epoch."""
    args = ["--config", config, "--data.path", "worksheet:0:10", "--train.steps", "None", "--train.epochs", 1]
    watch.before = lambda number: signal.raise_signal(signal.SIGTERM)
    assert call(*args)[0] == 75
    assert json.loads((tmp_path / "run" / "run.json").read_text())["train"]["steps"] == 3


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_stopped_by_a_signal(
    call: Call, config: Path, watch: runs.Watch, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    watch.before = lambda step: signal.raise_signal(number) if step == 7 else None
    found, output, errors = call("--config", config)
    assert (found, output) == (code, "")
    assert errors.splitlines()[-1] == f"stopped by {number.name} at step 7; the same command goes on from there"
    assert call("--config", config)[0] == 0
    assert [number for number, *_ in watch.steps] == list(range(1, 21))


def test_a_second_ctrl_c(call: Call, config: Path, watch: runs.Watch) -> None:
    def twice(step: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    watch.before = twice
    code, _, errors = call("--config", config)
    assert (code, errors.splitlines()[-1]) == (130, "interrupted")


def test_a_loss_that_is_no_number(call: Call, config: Path, tmp_path: Path) -> None:
    code, output, errors = call("--config", config, "--optimizer.learning-rate", 1e30)
    assert (code, output) == (1, "")
    assert re.fullmatch(
        r"error: at step \d+ the loss is .* and the norm of its gradient (nan|inf), and so it will be again: "
        r"give another --run directory, with a lower optimizer.learning_rate or optimizer.clip",
        errors.splitlines()[-1],
    )
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert not (tmp_path / "run" / "model").exists()


def test_a_full_disk(call: Call, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap T9: whoever started it can see that a checkpoint failed, and the one before is there."""
    original, rename = Checkpoints.save, os.rename

    def save(self: Checkpoints, number: int, *args: Any, **others: Any) -> None:
        self.wait()

        def full(*paths: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "rename", rename if number < 10 else full)
        original(self, number, *args, **others)

    monkeypatch.setattr(Checkpoints, "save", save)
    code, _, errors = call("--config", config)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(Checkpoints, "save", original)
    assert code == 1
    assert re.fullmatch(
        r"error: .*/run/checkpoints/10 could not be written: .*No space left on device.*", errors.splitlines()[-1]
    )
    assert call("--config", config)[0] == 0


# ---- What it cannot do ----


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), r"--run and --model.checkpoint and --data.path missing: give them, or a --config file that has them"),
        (("--run", "run", "--model.checkpoint", "x"), r"--data.path missing: give them, or a --config .*"),
        (("--config", "none.py"), r"--config none.py gives no settings: FileNotFoundError: .*"),
        (("--config", "broken.py"), r"--config broken.py gives no settings: ZeroDivisionError: division by zero"),
        (("--config", "empty.py"), r"--config empty.py gives no settings: KeyError: 'get_config'"),
        (("--config", "decode.py"), r"--config decode.py: get_config\(\) must return a TrainConfig, not .*"),
        (("--config",), r"--config needs a value .*"),
        (("CONFIG", "--nope", 3), r"there is no option --nope .*"),
        (("CONFIG", "--train.steps", "x"), r"--train.steps must be an integer, not 'x' .*"),
        (("CONFIG", "--train.steps"), r"--train.steps needs a value .*"),
        (("CONFIG", "--train.steps", 0), r"train.steps=0 must be at least 1 .*"),
        (("CONFIG", "--train.batch-size", 1.5), r"--train.batch-size must be an integer, not '1.5' .*"),
        (("CONFIG", "--optimizer.learning-rate", "fast"), r"--optimizer.learning-rate must be a number, not 'fast' .*"),
        (("CONFIG", "--optimizer.schedule", "step"), r"--optimizer.schedule must be one of 'cosine', .*"),
        (
            ("CONFIG", "--train.epochs", 2),
            r"train.steps=20 and epochs=2.0: give one of the two, None for the other .*",
        ),
        (("CONFIG", "--lora.rank", -1), r"lora.rank=-1 must be at least 0 .*"),
        (("CONFIG", "--lora.targets", "head"), r"lora.targets has head; a layer has query, .*"),
        (("CONFIG", "--forward.slot-sizes", 8, 4), r"forward.slot_sizes=\(8, 4\) must ascend.*"),
        (
            ("CONFIG", "--evaluation.decode.slot-size", 5),
            r"evaluation.decode.slot_size=5 does not divide block_size=8.*",
        ),
        (("CONFIG", "--model.checkpoint", "nowhere"), r"there is no directory nowhere, .*"),
        (("CONFIG", "--model.tokenizer", "nowhere"), r"there is no directory nowhere, .*"),
        (("CONFIG", "--data.path", "nowhere.jsonl"), r".*nowhere.jsonl.*"),
        (("CONFIG", "--data.validation-path", "nowhere.jsonl"), r".*nowhere.jsonl.*"),
        (("CONFIG", "--data.path", "empty.jsonl"), r".*empty.jsonl.*"),
        (("CONFIG", "--data.path", "data.txt"), r".*data.txt.*"),
        (("CONFIG", "--data.max-length", 20), r"worksheet:0:200: .* too long.* cannot be used(?s:.*)"),
        (("CONFIG", "--mesh.data", 99), r"a mesh of data=99, fsdp=1, tensor=1 needs 99 devices.*"),
        (
            ("CONFIG", "--mesh.tensor", 8),
            r"the mesh axis tensor=8 does not divide the dimension 4 of parameter layers/query.*",
        ),
        (("CONFIG", "--run", "decode.py"), r"decode.py is a file; give the directory of the run"),
        (("CONFIG", "--run", "model"), r"model holds a model that is no run, and would be overwritten; .*"),
        (("CONFIG", "--lora.rank", 2), r"lora.rank=2 adapts a checkpoint, and model.checkpoint is missing"),
        (
            ("CONFIG", "--data.validation-path", "worksheet:0:4", "--evaluation.decode.max-new-tokens", 600),
            r"held-out prompt 0.*600.*512.*",
        ),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_one_sentence_and_nothing_left(
    call: Call, config: Path, tmp_path: Path, args: tuple[object, ...], sentence: str
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "decode.py").write_text("def get_config(): return 5")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "data.txt").write_text("text")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    args = tuple(part for arg in args for part in (("--config", config) if arg == "CONFIG" else (arg,)))
    code, output, errors = call(*args)
    assert (code, output) == (2, ""), errors
    found = errors[errors.index("error: ") :]
    assert re.fullmatch(f"error: {sentence}\n", found), found
    assert "Traceback" not in errors
    assert sorted(tmp_path.rglob("*")) == before


def test_too_many_bad_lines_are_counted_and_named(call: Call, config: Path, tmp_path: Path) -> None:
    """Trap T12."""
    good = json.dumps({"query": "1. copy lamp 2. last", "response": "1. copy lamp 2. last lamp done"})
    lines = [good, "{", json.dumps({"query": "text"}), good, json.dumps({"query": "a", "response": ""}), good]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    code, _, errors = call("--config", config, "--data.path", "bad.jsonl")
    assert code == 2
    assert errors.startswith("error: bad.jsonl: 3 of 6 examples (")
    assert "more than max_left_out=0.05 allows" in errors
    for line in (2, 3, 5):
        assert f"bad.jsonl, line {line}: " in errors
    code, _, errors = call(
        "--config", config, "--data.path", "bad.jsonl", "--data.max-left-out", 0.6, "--train.steps=1"
    )
    assert code == 0
    assert errors.splitlines()[1].startswith("left out 3 of 6 examples (")


def test_where_another_process_trains(call: Call, config: Path) -> None:
    with lock("run"):
        code, _, errors = call("--config", config)
    assert code == 2
    assert errors.splitlines()[-1] == (
        f"error: process {os.getpid()} is training in run; wait for it, or give another --run directory"
    )


def test_help(call: Call, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It explains the exit codes and every option, with the values of the settings file."""
    with pytest.raises(SystemExit) as end:
        call("--config", config, "--help")
    assert end.value.code == 0
    output = re.sub(r"\s+", " ", capsys.readouterr().out.replace("│", " "))
    for text in (
        "75 when SIGTERM stopped it",
        "decode.py takes the directory as --model",
        "--data.path STR Files (.json, .jsonl, .parquet,",
        "--train.steps {None}|INT Optimizer steps; None: as many as epochs take. (default: 20)",
        "--lora.rank INT",
        "--evaluation.decode.slot-size INT",
    ):
        assert text in output, text
    assert "shape" not in output.partition("usage")[2].partition("options")[0], "no subcommands"


# ---- As a process ----


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the command in an empty directory, and in a session of its own; a test leaves no process behind."""
    processes = []

    def run(*args: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "train.py"), *map(str, args)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_stops_the_process(
    start: Start, tmp_path: Path, config: Path, number: signal.Signals, code: int
) -> None:
    process = start("--config", config, "--train.steps", 100_000)
    wait_for(tmp_path / "run" / "checkpoints" / "5", process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (code, ""), errors
    step = int(re.fullmatch(rf"stopped by {number.name} at step (\d+); the same .*", errors.splitlines()[-1])[1])
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.latest() == step
    assert not list((tmp_path / "run" / "checkpoints").glob("*tmp*"))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_to_the_workers_as_well(
    start: Start, tmp_path: Path, config: Path, number: signal.Signals, code: int
) -> None:
    """Ctrl-C on a terminal, and some schedulers, signal every process of the command."""
    process = start("--config", config, "--train.steps", 100_000, "--data.workers", 2)
    wait_for(tmp_path / "run" / "checkpoints" / "5", process)
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (code, ""), errors
    # Behind it, Python may warn of shared memory that it has to clean up.
    assert errors.splitlines()[1].startswith(f"stopped by {number.name} at step "), errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="children are looked up in /proc")
def test_workers_end_with_the_process_that_was_killed(start: Start, tmp_path: Path, config: Path) -> None:
    process = start("--config", config, "--train.steps", 100_000, "--data.workers", 2)
    wait_for(tmp_path / "run" / "checkpoints" / "5", process)
    children: list[int] = []
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has just ended
            children += map(int, (task / "children").read_text().split())
    assert len(children) >= 2
    process.kill()
    process.communicate()
    end = time.monotonic() + 20
    while [child for child in children if Path(f"/proc/{child}").exists()]:
        assert time.monotonic() < end
        time.sleep(0.1)


INSTALLED = "import sys; from refusion_jax.cli.train import main; sys.exit(main())"  # what refusion-train runs


@pytest.mark.slow
def test_a_checkpoint_is_trained_from_a_file_of_examples(tmp_path: Path) -> None:
    """As a user does it, without a settings file: only what must be said."""
    prompts = json.loads((golden.DIRECTORY / "goldenA" / "prompts.json").read_text())["prompts"]
    lines = [json.dumps({"query": prompt["query"], "response": prompt["response"]}) for prompt in prompts]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    args = ["--model.checkpoint", golden.DIRECTORY / "modelA", "--data.path", "data.jsonl", "--run", "run"]
    process = subprocess.run(
        [sys.executable, "-c", INSTALLED, *map(str, args), "--data.cache", "cache"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (process.returncode, process.stdout) == (0, ""), process.stderr
    decode = [sys.executable, ROOT / "decode.py", "--model", tmp_path / "run", "--max-new-tokens=8", "--block-size=8"]
    result = subprocess.run(decode, input='{"prompt": "1 2 3"}\n', capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
