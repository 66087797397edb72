"""The command line: what goes in, what comes out, and one sentence for everything that cannot be done."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refusion_jax as rf
from refusion_jax.cli import decode as command
from refusion_jax.cli.output import write_output
from refusion_jax.data import worksheet
from refusion_jax.decoding.batch import Usage
from refusion_jax.distributed import DistributedConfig
from refusion_jax.presets import PRESETS
from tests.twins import exact

ROOT = Path(__file__).parent.parent
MODEL = str(ROOT / "tests" / "golden" / "modelA")
GOLDEN_ROWS = [0, 1, 10, 26]  # short; with a hole; the budget is spent; long
OFFICIAL = {
    "compat": "official",
    "slot-size": 4,
    "serial-num-blocks": 1,
    "slot-threshold": 0.6,
    "token-threshold": 0.3,
    "max-new-tokens": 64,
    "batch-size": 4,
}
EXACT = {"slot-size": 8, "block-size": 8, "max-new-tokens": 96, "batch-size": 4}

STATS = [  # of the contract, in this order
    "tokens",
    "committed",
    "forwards",
    "plan_forwards",
    "verify_forwards",
    "draft_forwards",
    "positions",
    "padded_positions",
    "prefill_positions",
    "seconds",
]


def flags(settings: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


class Result:
    """What one call of the command gave."""

    def __init__(self, code: int, output: str, errors: str) -> None:
        self.code, self.output, self.errors = code, output, errors

    @property
    def lines(self) -> list[dict[str, Any]]:
        assert self.code == 0, self.errors
        assert self.output.endswith("\n")
        return [json.loads(line) for line in self.output[:-1].split("\n")]

    @property
    def sentence(self) -> str:
        """The only line on stderr of a call that was refused."""
        assert self.code == 2, (self.code, self.errors)
        assert self.output == ""
        assert self.errors.count("\n") == 1, self.errors
        assert self.errors.startswith("error: ") and self.errors.endswith("\n")
        return self.errors[len("error: ") : -1]


Call = Callable[..., Result]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command in this process; ``stdin`` is piped in."""

    def run(*args: str | Path, stdin: bytes | None = None) -> Result:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(command.sys, "stdin", Piped(stdin))
            code = command.main([str(arg) for arg in args])
        return Result(code, *capsys.readouterr())

    return run


class Piped(io.TextIOWrapper):
    """Standard input with ``content`` behind it; with None it is a terminal."""

    def __init__(self, content: bytes | None) -> None:
        super().__init__(io.BytesIO(content or b""))
        self.content = content

    def fileno(self) -> int:
        if self.content is None:
            raise io.UnsupportedOperation
        if not hasattr(self, "ends"):
            self.ends = os.pipe()
        return self.ends[0]


@pytest.fixture(scope="session")
def model() -> rf.Model:
    return rf.load(MODEL)


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch, model: rf.Model) -> list[Any]:
    """Answer every prompt at once, with its own token ids; returns (prompts, config, other arguments) of every call.

    What is tested with it needs no answer of the model, and this saves its compiling.
    """
    calls = []

    def decode(job: Any, *, skip: frozenset[int], usage: Any, trace: bool) -> Iterator[dict[int, rf.Generation]]:
        calls.append((job.prompts, job.config, {"batch_size": job.batch_size, "trace": trace, "noise": job.noise}))
        for number in set(range(job.answers)) - skip:
            yield {number: answer(job.prompts[number // job.config.num_samples])}

    monkeypatch.setattr(command, "load", lambda source, dtype: calls.append((source, dtype)) or model)
    monkeypatch.setattr(command, "decode", decode)
    return calls


def answer(ids: list[int]) -> rf.Generation:
    return rf.Generation("ü \u2028 語", ids, [-0.5] * len(ids), "stop", rf.Stats(*[1] * 9, seconds=0.5))


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.fixture(scope="session")
def golden_prompts(golden_dir: Path) -> list[dict[str, Any]]:
    prompts = json.loads((golden_dir / "goldenA" / "prompts.json").read_text())["prompts"]
    return [prompts[row] for row in GOLDEN_ROWS]


# ---- The answers ----


def test_the_three_kinds_of_prompts_give_the_official_tokens(
    call: Call, tmp_path: Path, golden_dir: Path, golden_prompts: list[dict[str, Any]]
) -> None:
    ids, chat, text, bare = golden_prompts
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(
        jsonl(
            {"id": "ids", "prompt_ids": ids["prompt_ids"]},
            {"messages": [{"role": "user", "content": chat["query"]}], "id": 7},
            {"prompt": f"<|im_start|> user {text['query']} <|im_end|> <|im_start|> assistant "},
        )
        + b"\r\n \n"
        + jsonl({"prompt_ids": bare["prompt_ids"]}).rstrip()
    )
    output = tmp_path / "out.jsonl"
    result = call("--model", MODEL, "--prompts", prompts, "--output", output, *flags(OFFICIAL))
    assert (result.code, result.output) == (0, "")

    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [line["id"] for line in lines] == ["ids", 7, 2, 5], "without id: the line's number from 0"
    with np.load(golden_dir / "goldenA" / "generate.npz") as golden:
        tokens, calls = (golden[f"s01_{key}"][GOLDEN_ROWS] for key in ("tokens", "calls"))
    for line, expected, (plans, checks, drafts, verifications) in zip(lines, tokens, calls.tolist(), strict=True):
        assert list(line) == ["id", "text", "token_ids", "finish_reason", "stats"]
        assert list(line["stats"]) == STATS
        assert line["token_ids"] == [token for token in expected.tolist() if token >= 0]
        assert line["stats"]["plan_forwards"] == plans
        assert line["stats"]["draft_forwards"] == drafts
        assert line["stats"]["verify_forwards"] == checks + verifications
    assert [line["finish_reason"] for line in lines] == ["stop", "stop", "length", "stop"]
    assert lines[0]["text"] == ids["response"]
    check_summary(result.errors, lines)


def check_summary(errors: str, lines: list[dict[str, Any]]) -> None:
    """The summary's figures follow from the output: totals over totals, to the digits shown."""
    total = {name: sum(line["stats"][name] for line in lines) for name in lines[0]["stats"]}
    [ended, cut] = map(int, re.search(r"answers: (\d+) ended, (\d+) cut", errors).groups())
    assert ended == sum(line["finish_reason"] == "stop" for line in lines)
    assert cut == len(lines) - ended
    speed, tokens, seconds = re.search(r"([\d.]+) tokens/s: (\d+) tokens in ([\d.]+) s", errors).groups()
    assert int(tokens) == total["tokens"] == sum(len(line["token_ids"]) for line in lines)
    assert abs(int(tokens) / float(speed) - float(seconds)) < 0.006
    [rate, forwards] = re.search(r"([\d.]+) tokens per forward: \d+ tokens in (\d+) forwards", errors).groups()
    assert int(forwards) == total["forwards"]
    assert float(rate) == pytest.approx(total["tokens"] / total["forwards"], abs=0.005)
    [positions, padded] = re.search(r"([\d.]+) positions and ([\d.]+) padded positions per token", errors).groups()
    assert float(positions) == pytest.approx(total["positions"] / total["tokens"], abs=0.005)
    assert float(padded) == pytest.approx(total["padded_positions"] / total["tokens"], abs=0.005)


def test_exact_answers_from_stdin_with_trace(call: Call, golden_prompts: list[dict[str, Any]]) -> None:
    stdin = jsonl(*[{"prompt_ids": prompt["prompt_ids"]} for prompt in golden_prompts])
    lines = call("--model", MODEL, *flags(EXACT), "--trace", stdin=stdin).lines
    expected = exact.load("A", (8, 8))
    for line, row in zip(lines, GOLDEN_ROWS, strict=True):
        assert list(line)[5:] == ["trace", "commit_order"]
        assert line["token_ids"] == [token for token in expected["token_ids"][row].tolist() if token >= 0]
        assert line["finish_reason"] == expected["finish_reason"][row]
        committed = [tuple(pair) for event in line["trace"] for pair in event["committed"]]
        offsets, tokens = (expected[f"commit_{key}"][row] for key in ("offsets", "tokens"))
        assert committed == [pair for pair in zip(offsets.tolist(), tokens.tolist(), strict=True) if pair[0] >= 0]
        kept = [offset for offset, _ in committed if offset < len(line["token_ids"])]
        assert line["commit_order"] == kept
        assert len(line["trace"]) == line["stats"]["forwards"]


def test_without_arguments_the_bundled_model_decodes_the_bundled_prompts() -> None:
    """As a user starts it, from another directory, with something on stdin that is not meant for it."""
    result = subprocess.run(
        [sys.executable, ROOT / "decode.py"], cwd="/", input=b"not json", capture_output=True, timeout=300
    )
    assert result.returncode == 0, result.stderr.decode()
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    prompts = [json.loads(line) for line in (command.ASSETS / "prompts.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [prompt["id"] for prompt in prompts]
    queries = [prompt["messages"][0]["content"] for prompt in prompts]
    assert sum(worksheet.is_right(query, line["text"]) for query, line in zip(queries, lines, strict=True)) >= 11
    check_summary(result.stderr.decode(), lines)
    assert b"it/s" not in result.stderr and b"\r" not in result.stderr, "no progress bar where nobody looks at it"


# ---- Where input comes from, where output goes ----


def test_only_prompts_are_given(call: Call, tmp_path: Path, no_decoding: list[Any]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(jsonl({"prompt_ids": [5]}))
    result = call("--prompts", prompts)
    assert no_decoding[0] == (command.ASSETS / "model", "auto")
    assert result.lines[0]["token_ids"] == [5]
    assert "bundled model, 1 prompts" in result.errors


def test_piped_input_is_read_when_no_file_is_named(call: Call, no_decoding: list[Any]) -> None:
    assert call("--model", MODEL, stdin=jsonl({"prompt_ids": [6]})).lines[0]["token_ids"] == [6]
    assert call("--prompts", "-", stdin=jsonl({"prompt_ids": [7]})).lines[0]["token_ids"] == [7]


def test_on_a_terminal_the_bundled_prompts_are_read(call: Call, no_decoding: list[Any]) -> None:
    lines = call("--model", MODEL, stdin=None).lines
    assert len(lines) == len((command.ASSETS / "prompts.jsonl").read_bytes().splitlines())


def test_output_is_utf8_and_one_line_an_answer(
    call: Call, no_decoding: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    result = call("--prompts", "-", stdin=jsonl({"prompt_ids": [5], "id": "é"}, {"prompt_ids": [6]}))
    assert len(result.output.splitlines()) == 2
    assert result.output.startswith('{"id": "é", "text": "ü \\u2028 語", "token_ids": [5]')
    assert result.lines[0]["text"] == "ü \u2028 語"


def test_blank_lines_byte_order_mark_and_line_ends(call: Call, no_decoding: list[Any]) -> None:
    stdin = b'\xef\xbb\xbf\n{"prompt_ids": [5]}\r\n\n  \n{"prompt": "7 \xe2\x80\xa8 8", "id": 0}'
    lines = call("--prompts", "-", stdin=stdin).lines
    assert [line["id"] for line in lines] == [1, 0]


def test_output_replaces_a_file_behind_a_link_and_keeps_its_mode(
    call: Call, tmp_path: Path, no_decoding: list[Any]
) -> None:
    file, link = tmp_path / "file.jsonl", tmp_path / "link.jsonl"
    file.write_text("old")
    file.chmod(0o600)
    link.symlink_to(file)
    assert call("--output", link).code == 0
    assert link.is_symlink()
    assert len(file.read_text().splitlines()) == 12
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_output_to_what_is_no_file(call: Call, no_decoding: list[Any]) -> None:
    assert call("--output", os.devnull).code == 0
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize("failure", [RuntimeError("boom"), KeyboardInterrupt()])
def test_what_ends_decoding_leaves_the_old_output(
    call: Call, tmp_path: Path, no_decoding: list[Any], monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def decode(*args: Any, **kwargs: Any) -> None:
        raise failure

    monkeypatch.setattr(command, "decode", decode)
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    if isinstance(failure, KeyboardInterrupt):
        assert call("--output", output).code == 130
    else:
        with pytest.raises(RuntimeError, match="boom"):
            call("--output", output)
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


def test_a_write_that_fails_leaves_the_old_output(
    call: Call, tmp_path: Path, no_decoding: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(*paths: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    result = call("--output", output)
    assert result.code == 2
    assert result.errors.splitlines()[-1] == f"error: --output {output} could not be written: No space left on device"
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_writing_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    def lines() -> Iterator[bytes]:
        yield b"half\n"
        os.kill(os.getpid(), number)
        yield b"other half\n"

    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as end:
            write_output(str(tmp_path / "out.jsonl"), lines())
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert end.value.code == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_sigterm_while_decoding_leaves_nothing(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(jsonl({"prompt_ids": [5]}))
    args = ["--prompts", prompts, "--output", tmp_path / "out.jsonl", "--slot-size", "32", "--block-size", "512"]
    with subprocess.Popen([sys.executable, ROOT / "decode.py", *args], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"1 prompts" in process.stderr.readline()  # decoding begins
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == [prompts]


def test_a_reader_that_stops_reading_is_no_error() -> None:
    """decode.py --help | head -1"""
    process = subprocess.Popen(
        [sys.executable, ROOT / "decode.py", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 1


# ---- Options ----


def test_help_names_every_option_and_setting(
    call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        call("--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    kinds = (command.Options, rf.DecodeConfig, DistributedConfig)
    names = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    names = [name for name in names if name not in ("decoding", "processes")]
    assert [name for name in names if f"--{name.replace('_', '-')}" not in text] == []
    assert "REFUSION_JAX_CACHE" in text and "XDG_CACHE_HOME" in text
    assert max(map(len, text.splitlines())) <= 112


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--slot-siz", "8"], "there is no option --slot-siz; perhaps you meant --slot-size"),
        (["--slots=8"], "there is no option --slots"),
        (["--model", "x", "y"], "there is no option y"),
        (["--trace", "yes"], "there is no option yes"),
        (["--" + 200 * "long"], f"there is no option --{200 * 'long'}"),
        (["--model"], "--model needs a value"),
        (["--model", "--trace"], "--model needs a value"),
        (["--preset"], "--preset needs a value"),
        (["--slot-size", "eight"], "--slot-size must be an integer, not 'eight'"),
        (["--slot-size", "8.0"], "--slot-size must be an integer, not '8.0'"),
        (["--serial-num-blocks", "x"], "--serial-num-blocks must be an integer, not 'x'"),
        (["--slot-threshold", "high"], "--slot-threshold must be a number, not 'high'"),
        (["--method", "diffusion"], "--method must be one of 'refusion', 'ar', 'mdm', not 'diffusion'"),
        (["--dtype", "float16"], "--dtype must be one of 'auto', 'float32', 'bfloat16', not 'float16'"),
        (["--compat", "v1"], "--compat must be one of "),
        (["--batch-size", "0"], "batch_size=0 must be at least 1"),
        (["--max-new-tokens", "-1"], "max_new_tokens=-1 must be at least 1"),
        (["--slot-threshold", "nan"], "slot_threshold=nan is not a number"),
        (["--slot-size", "5"], "slot_size=5 does not divide block_size=32; try block_size 30 or 35"),
        (["--serial-num-blocks", "2"], "serial_num_blocks=2 belongs to compat='official'"),
        (["--compat", "official", "--method", "ar"], "compat='official' is a way of method='refusion'"),
        (["--preset", "gsm9k"], "there is no preset 'gsm9k': give one of latency, balanced, quality, mmlu_pro"),
        (["--preset", "/nowhere/mine.py"], "--preset /nowhere/mine.py gives no settings: FileNotFoundError"),
    ],
)
def test_options_that_cannot_be(call: Call, args: list[str], expected: str) -> None:
    assert expected in call(*args).sentence


@pytest.mark.parametrize(
    ("slot_size", "blocks", "new", "rule"),
    [
        # The settings in which the official code raises: golden generate_errors.json
        (8, 3, 64, "blocks of 21, which slot_size=8 does not divide"),
        (16, 2, 72, "blocks of 40, which slot_size=16 does not divide"),
        (8, 128, 64, "serial_num_blocks=128 leaves no token for a block"),
        (8, 1, 0, "max_new_tokens=0 must be at least 1"),
    ],
)
def test_where_the_official_code_raises(call: Call, slot_size: int, blocks: int, new: int, rule: str) -> None:
    args = f"--compat official --slot-size {slot_size} --serial-num-blocks {blocks} --max-new-tokens {new}".split()
    assert rule in call(*args).sentence


def test_where_the_official_code_loses_positions_a_warning_says_so(call: Call, no_decoding: list[Any]) -> None:
    result = call("--compat=official", "--slot-size=8", "--serial-num-blocks=9", "--max-new-tokens=80")
    assert result.code == 0
    [warning] = [line for line in result.errors.splitlines() if line.startswith("warning: ")]
    assert "the last 8 positions are never written" in warning


def test_warnings_are_one_line_each_and_said_once(call: Call, no_decoding: list[Any]) -> None:
    result = call("--slot-size=3", "--block-size=9", "--token-threshold=0.2")
    untrained, unread = sorted(line for line in result.errors.splitlines() if "warning" in line)[::-1]
    assert untrained.startswith("warning: slot_size=3 is none of the sizes this model was trained with (4, 8, 16, 32)")
    assert unread == "warning: --token-threshold: without effect beside the other options"


@pytest.mark.parametrize(
    ("args", "ignored"),
    [
        ("--verify threshold --token-threshold 0.2", ""),
        ("--compat official --token-threshold 0.2", ""),
        ("--compat official --serial-num-blocks 4 --block-size 16", "--block-size"),
        ("--method ar --slot-threshold 0.5", "--slot-threshold"),
        ("--method ar --ar-first token --slot-size 4", "--slot-size"),
        ("--ar-first token", "--ar-first"),
        ("--preset math --slot-threshold 0.5", ""),
        ("--method ar --planner mean", "--planner"),
        ("--method mdm --tokens-per-step 2 --slot-threshold 0.5", "--slot-threshold"),
        ("--top-p 0.9", "--top-p"),
        ("--temperature 1 --top-p 0.9 --seed 1", ""),
        ("--seed 1", "--seed"),
        ("--planner random --seed 1", ""),
    ],
)
def test_options_without_effect_are_named(args: str, ignored: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        command.parse_options(args.split())
    assert [str(warning.message).partition(":")[0] for warning in caught] == ([ignored] if ignored else [])


def test_presets_are_the_paper_s() -> None:
    """ReFusion, table 5: serial_num_blocks there is 512 / block_size here."""
    expected = {  # slot_size, serial_num_blocks, slot_threshold, token_threshold
        "mmlu_pro": (16, 4, 0.9, 0.4),
        "arc_c": (8, 64, 0.8, 0.1),
        "gsm8k": (32, 4, 0.9, 0.4),
        "math": (32, 8, 0.8, 0.6),
        "gpqa": (8, 32, 0.8, 0.2),
        "humaneval": (32, 4, 0.9, 0.4),
        "mbpp": (32, 4, 0.9, 0.3),
    }
    paper = {name: preset for name, preset in PRESETS.items() if preset.verify == "threshold"}
    assert set(PRESETS) - set(paper) == {"latency", "balanced", "quality"}
    assert {
        name: (preset.slot_size, 512 // preset.block_size, preset.slot_threshold, preset.token_threshold)
        for name, preset in paper.items()
    } == expected
    assert {preset.max_new_tokens for preset in paper.values()} == {512}


def test_the_preset_of_quality_writes_the_tokens_of_left_to_right(call: Call) -> None:
    """With one slot in a block there is one order to write in."""
    args = ["--max-new-tokens", "40", "--batch-size", "4"]
    lines = call("--preset", "quality", *args).lines
    assert [line["token_ids"] for line in lines] == [
        line["token_ids"] for line in call("--method", "ar", "--slot-size", "16", *args).lines
    ]


def test_options_win_over_the_preset(call: Call, no_decoding: list[Any]) -> None:
    assert call("--max-new-tokens", "64", "--preset=mmlu_pro", "--slot-size", "128").code == 0
    [_, (_, config, _)] = no_decoding
    assert config == dataclasses.replace(PRESETS["mmlu_pro"], max_new_tokens=64, slot_size=128)


def test_a_preset_of_one_s_own(call: Call, tmp_path: Path, no_decoding: list[Any]) -> None:
    assert call("--preset", ROOT / "configs" / "bundled.py", "--max-new-tokens", "8").code == 0
    [_, (_, config, _)] = no_decoding
    assert (config.block_size, config.max_new_tokens) == (32, 8)

    mine = tmp_path / "mine.py"
    mine.write_text("def get_config():\n    return 3\n")
    assert "get_config() must return a DecodeConfig, not 3" in call("--preset", mine).sentence
    mine.write_text("from refusion_jax import DecodeConfig\n\nget_config = lambda: DecodeConfig(slot_size=0)\n")
    assert "gives no settings: ValueError: slot_size=0 must be at least 1" in call("--preset", mine).sentence
    mine.write_text("")
    assert "gives no settings: KeyError: 'get_config'" in call("--preset", mine).sentence


def test_settings_reach_the_library(call: Call, no_decoding: list[Any]) -> None:
    call("--method", "ar", "--batch-size", "3", "--trace", "--dtype", "bfloat16", "--slot-size", "4")
    [(_, dtype), (_, config, others)] = no_decoding
    assert dtype == "bfloat16"
    assert config == rf.DecodeConfig(method="ar", slot_size=4)
    assert (others["batch_size"], others["trace"]) == (3, True)


# ---- Samples, seeds, log-probabilities ----


def test_samples_and_log_probabilities_are_written(call: Call, no_decoding: list[Any]) -> None:
    prompts = jsonl({"prompt_ids": [5, 6], "id": "a", "seed": 9}, {"prompt_ids": [7], "id": "b"})
    lines = call("--num-samples", "2", "--temperature", "1", "--logprobs", "--prompts", "-", stdin=prompts).lines
    assert [(line["id"], line["sample"], line["logprobs"]) for line in lines] == [
        ("a", 0, [-0.5, -0.5]),
        ("a", 1, [-0.5, -0.5]),
        ("b", 0, [-0.5]),
        ("b", 1, [-0.5]),
    ]
    assert no_decoding[-1][2]["noise"] == [9, 1]
    [plain, _] = call("--prompts", "-", stdin=prompts).lines
    assert list(plain) == ["id", "text", "token_ids", "finish_reason", "stats"]


# ---- Going on ----


@pytest.fixture
def interrupted(
    call: Call, tmp_path: Path, no_decoding: list[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str | Path], list[frozenset[int]]]:
    """The arguments of a run that was interrupted behind its third answer of six; what later ones skip."""
    skipped: list[frozenset[int]] = []

    def decode(job: Any, *, skip: frozenset[int], **others: Any) -> Iterator[dict[int, rf.Generation]]:
        skipped.append(skip)
        for number in (4, 0, 2, 1, 3, 5):
            if len(skipped) == 1 and number == 1:
                raise KeyboardInterrupt
            if number not in skip:
                yield {number: answer(job.prompts[number])}

    monkeypatch.setattr(command, "decode", decode)
    prompts = tmp_path / "in.jsonl"
    prompts.write_bytes(jsonl(*({"prompt_ids": [5 + number], "id": f"n{number}"} for number in range(6))))
    args: list[str | Path] = ["--prompts", prompts, "--output", tmp_path / "out.jsonl", "--resume"]
    assert call(*args).code == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl.partial"]
    return args, skipped


def test_an_interrupted_run_goes_on_where_it_stopped(
    call: Call, tmp_path: Path, interrupted: tuple[list[str | Path], list[frozenset[int]]]
) -> None:
    args, skipped = interrupted
    with (tmp_path / "out.jsonl.partial").open("ab") as partial:
        partial.write(b'{"id": "n5", "sam')  # what a kill leaves of a line
    assert call(*args).code == 0
    assert skipped[1] == {0, 2, 4}
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["id"], line["token_ids"]) for line in lines] == [(f"n{number}", [5 + number]) for number in range(6)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_answers_are_found_by_their_ids(
    call: Call, tmp_path: Path, interrupted: tuple[list[str | Path], list[frozenset[int]]]
) -> None:
    """Lines may be added and moved; without noise their places do not matter, but with it they do."""
    args, skipped = interrupted
    order = [5, 4, 3, 2, 1, 0]
    (tmp_path / "in.jsonl").write_bytes(jsonl(*({"prompt_ids": [5 + n], "id": f"n{n}"} for n in order)))
    assert call(*args).code == 0
    assert skipped[1] == {1, 3, 5}
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["token_ids"] for line in lines] == [[5 + number] for number in order]


def test_answers_of_another_run_are_refused(
    call: Call, tmp_path: Path, interrupted: tuple[list[str | Path], list[frozenset[int]]]
) -> None:
    args, _ = interrupted
    assert "slot_size (8 there, 4 now)" in call(*args, "--slot-size", "4").sentence
    assert "warning" not in call("--prompts", args[1], "--output", tmp_path / "other.jsonl").errors
    assert "holds answers of an interrupted run; --resume uses them" in call(*args[:-1]).errors
    (tmp_path / "in.jsonl").write_bytes(jsonl({"prompt_ids": [99], "id": "n0"}))
    assert "to id 'n0', but to another prompt or seed" in call(*args).sentence
    (tmp_path / "in.jsonl").write_bytes(jsonl({"prompt_ids": [5], "id": "n0"}, {"prompt_ids": [6], "id": "n0"}))
    assert "line 2 has that of" in call(*args).sentence
    (tmp_path / "out.jsonl.partial").write_bytes(b"junk\n")
    (tmp_path / "in.jsonl").write_bytes(jsonl({"prompt_ids": [5], "id": "n0"}))
    assert "is no file of finished answers" in call(*args).sentence
    assert "give --output FILE" in call("--resume").sentence
    assert "keeps no traces" in call(*args, "--trace").sentence


@pytest.mark.slow
def test_a_killed_run_loses_no_answer(tmp_path: Path) -> None:
    """kill -9 in the middle of decoding, again and again: the output is that of a run that nobody disturbed."""
    prompts = tmp_path / "in.jsonl"
    prompts.write_bytes((command.ASSETS / "prompts.jsonl").read_bytes())
    arguments = ["--prompts", prompts, "--max-new-tokens", "96", "--batch-size", "1", "--method", "ar"]
    arguments += ["--temperature", "0.7"]

    def start(output: str, *more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, ROOT / "decode.py", *arguments, "--output", tmp_path / output, *more])

    assert start("whole.jsonl").wait() == 0
    partial = tmp_path / "out.jsonl.partial"
    for _ in range(3):
        before = partial.read_bytes().count(b"\n") if partial.exists() else 0
        process = start("out.jsonl", "--resume")
        while process.poll() is None and (not partial.exists() or partial.read_bytes().count(b"\n") < before + 2):
            time.sleep(0.01)
        process.kill()
        process.wait()
    assert start("out.jsonl", "--resume").wait() == 0

    def answers(output: str) -> list[Any]:
        lines = [json.loads(line) for line in (tmp_path / output).read_text().splitlines()]
        return [(line["id"], line["token_ids"]) for line in lines]

    assert answers("out.jsonl") == answers("whole.jsonl")
    assert not partial.exists()


# ---- Bad input ----

LONE_SURROGATE = b'{"prompt": "\\ud800"}'


@pytest.mark.parametrize(
    ("content", "line", "expected"),
    [
        (b"", None, "holds no prompt"),
        (b"\n \r\n\t\n", None, "holds no prompt"),
        (b'{"prompt": "7"}\n{"prompt": "7"\n', 2, "not JSON, expecting ',' delimiter at character 15"),
        (b"\nprompt\n", 2, "not JSON, expecting value at character 1"),
        (b'{\n"prompt": "7"\n}\n', 1, "every line is one whole object"),
        (b'{"prompt": "7"} {"prompt": "8"}', 1, "not JSON, extra data at character 17"),
        (b'{"prompt": "7", "id": NaN}', 1, "NaN is not JSON"),
        (b'{"prompt": ' + 100_000 * b"[", 1, "too deeply nested"),
        (b'{"prompt": "7", "id": ' + 5000 * b"9" + b"}", 1, "4300"),
        (b'{"prompt": "7"}\n{"prompt": "caf\xe9"}', 2, "byte 16 (0xe9) is not UTF-8"),
        ('{"prompt": "7"}'.encode("utf-16"), 1, "byte 1 (0xff) is not UTF-8"),
        (b'["7"]', 1, '["7"] is no object'),
        (b'"7"', 1, '"7" is no object'),
        (b"null", 1, "null is no object"),
        (b'{"promt": "7"}', 1, 'unknown field "promt"; a line has one of prompt, messages, prompt_ids'),
        (b'{"prompt": "7", "seeds": 1}', 1, 'unknown field "seeds"'),
        (b'{"prompt": "7", "prompt": "8"}', 1, 'the field "prompt" stands there twice'),
        (b"{}", 1, "exactly one of prompt, messages, prompt_ids, and this one has none of them"),
        (b'{"id": 3}', 1, "this one has none of them"),
        (b'{"prompt": "7", "prompt_ids": [5]}', 1, "this one has prompt and prompt_ids"),
        (b'{"prompt": 7}', 1, "prompt must be a string, not 7"),
        (b'{"prompt": null}', 1, "prompt must be a string, not null"),
        (b'{"prompt_ids": "7"}', 1, 'prompt_ids must be a list of integers, not "7"'),
        (b'{"prompt_ids": [5, 6.0]}', 1, "prompt_ids must be a list of integers, not [5, 6.0]"),
        (b'{"prompt_ids": [true]}', 1, "prompt_ids must be a list of integers, not [true]"),
        (b'{"prompt_ids": [{"role": "user", "content": "7"}]}', 1, "prompt_ids must be a list of integers"),
        (b'{"messages": "7"}', 1, "messages must be a list of objects"),
        (b'{"messages": [5, 6]}', 1, "messages must be a list of objects, not [5, 6]"),
        (b'{"prompt": "7", "id": 1.5}', 1, "id 1.5 is neither a string nor an integer"),
        (b'{"prompt": "7", "seed": -1}', 1, "seed=-1 must be an integer in 0..4294967295"),
        (b'{"prompt": "7", "seed": 1.5}', 1, "seed=1.5 must be an integer"),
        (b'{"prompt": "7", "id": true}', 1, "id true is neither a string nor an integer"),
        (b'{"prompt": "7", "id": null}', 1, "id null is neither a string nor an integer"),
        (b'{"prompt": "7", "id": "\\ud800"}', 1, "lone surrogate"),
        # What is known with the model only:
        (b'{"prompt": "7"}\n\n{"prompt": ""}', 3, "the prompt is empty: a prompt needs at least one token"),
        (b'{"prompt_ids": []}', 1, "the prompt is empty"),
        (b'{"messages": []}', 1, "the prompt is empty"),
        (b'{"messages": [{"role": "user"}]}', 1, "the prompt: message 1 of the conversation has no 'content'"),
        (b'{"messages": [{"role": "user", "content": 7}]}', 1, "content=7, which is not a string"),
        (LONE_SURROGATE, 1, "the prompt: the text has a lone surrogate at character 0"),
        (b'{"prompt_ids": [5, 256]}', 1, "the prompt has token id 256 at place 1; ids of this model are 0..255"),
        (b'{"prompt_ids": [-1]}', 1, "the prompt has token id -1 at place 0"),
        (b'{"prompt_ids": [5, 4]}', 1, "the prompt has the mask token (id 4) at place 1"),
        (b'{"prompt": "7 <|mask|> 8"}', 1, "the prompt has the mask token (id 4) at place 1"),
        (
            jsonl({"prompt_ids": 900 * [5]}),
            1,
            "the prompt has 900 tokens, and 256 new ones make 1156 positions; the model has 1024",
        ),
    ],
)
def test_input_that_cannot_be_decoded(
    call: Call, tmp_path: Path, no_decoding: list[Any], content: bytes, line: int | None, expected: str
) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_bytes(content)
    sentence = call("--prompts", prompts, "--output", tmp_path / "out.jsonl").sentence
    assert sentence.startswith(f"{prompts} " if line is None else f"{prompts}, line {line}: ")
    assert expected in sentence
    assert [entry for entry in no_decoding if len(entry) == 3] == [], "nothing is decoded"
    assert list(tmp_path.iterdir()) == [prompts]


def test_the_longest_prompt_that_fits(call: Call, no_decoding: list[Any]) -> None:
    assert call("--prompts", "-", stdin=jsonl({"prompt_ids": 768 * [5]})).code == 0
    assert "make 1025 positions" in call("--prompts", "-", stdin=jsonl({"prompt_ids": 769 * [5]})).sentence


def test_standard_input_is_named(call: Call) -> None:
    assert call("--prompts", "-", stdin=b"{}\n").sentence.startswith("standard input, line 1: ")


def test_standard_input_that_is_closed(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.sys, "stdin", None)
    assert "standard input is closed" in Result(*run_captured(["--prompts", "-"], monkeypatch)).sentence


def run_captured(args: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    errors = io.StringIO()
    monkeypatch.setattr(command.sys, "stderr", errors)
    return command.main(args), "", errors.getvalue()


def test_files_that_cannot_be(call: Call, tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_bytes(jsonl({"prompt": "7"}))
    missing = tmp_path / "missing"

    assert call("--prompts", missing).sentence == f"--prompts {missing} cannot be read: No such file or directory"
    assert call("--prompts", tmp_path).sentence == f"--prompts {tmp_path} cannot be read: Is a directory"
    sentence = call("--prompts", prompts, "--output", missing / "out.jsonl").sentence
    assert sentence == f"the directory of --output {missing / 'out.jsonl'} does not exist; make it first"
    assert "is a directory; name a file" in call("--prompts", prompts, "--output", tmp_path).sentence
    assert "is the file that the prompts are read from" in call("--prompts", prompts, "--output", prompts).sentence
    assert "File name too long" in call("--prompts", prompts, "--output", tmp_path / (300 * "x")).sentence

    link = tmp_path / "link.jsonl"
    link.symlink_to(prompts)
    assert "is the file that the prompts are read from" in call("--prompts", prompts, "--output", link).sentence
    assert prompts.read_bytes() == jsonl({"prompt": "7"})


def test_an_output_directory_that_cannot_be_written(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    sentence = call("--output", tmp_path / "out.jsonl").sentence
    assert sentence == f"--output {tmp_path / 'out.jsonl'} cannot be written: Permission denied"


def copy_of_model(directory: Path, **changes: Any) -> Path:
    """A checkpoint like A with other settings in config.json; None takes one away."""
    directory.mkdir()
    for file in Path(MODEL).iterdir():
        (directory / file.name).symlink_to(file)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").unlink()
    config = {name: value for name, value in (config | changes).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_models_that_cannot_be_read(call: Call, tmp_path: Path) -> None:
    assert f"there is no directory {tmp_path / 'none'}" in call("--model", tmp_path / "none").sentence
    assert f"{__file__} is a file" in call("--model", __file__).sentence
    assert f"{tmp_path} holds no config.json" in call("--model", tmp_path).sentence

    sliding = copy_of_model(tmp_path / "sliding", sliding_window=64, use_sliding_window=True)
    assert "sliding_window" in call("--model", sliding).sentence
    truncated = copy_of_model(tmp_path / "truncated")
    weights = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").unlink()
    (truncated / "model.safetensors").write_bytes(weights[:-100])
    sentence = call("--model", truncated).sentence
    assert f"cannot load {truncated}: model.safetensors is truncated" in sentence
    assert "should end at byte" in sentence


def test_a_model_directory_that_may_not_be_read(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", "dir/config.json")

    monkeypatch.setattr(command, "load", refuse)
    assert call("--model", "dir").sentence == "cannot read dir/config.json: Permission denied"


def test_a_model_without_a_mask_token(call: Call, tmp_path: Path) -> None:
    directory = copy_of_model(tmp_path / "causal", mask_token_id=None)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        (directory / name).unlink()  # the mask token of a tokenizer would be taken
    sentence = call("--model", directory, "--prompts", "-", stdin=jsonl({"prompt_ids": [5]})).sentence
    assert "this model has no mask token (config.json has no mask_token_id)" in sentence
    sentence = call("--model", directory, "--method", "ar", "--ar-first", "token").sentence
    assert "line 1: the prompt: this model has no tokenizer" in sentence


def test_no_memory(call: Call, no_decoding: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*args: Any, **kwargs: Any) -> None:
        raise command.jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    monkeypatch.setattr(command, "decode", decode)
    result = call()
    assert result.code == 2
    assert result.errors.splitlines()[-1] == "error: out of memory; lower --batch-size=8 or --max-new-tokens"


# ---- Speed, progress, compiled programs ----


def test_speed_does_not_count_compiling(call: Call, no_decoding: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """0.4 s of tracing with 0.1 s of it nested, 0.1 s of running: 12 tokens in 0.1 s."""

    def decode(job: Any, usage: Any, **kwargs: Any) -> Iterator[dict[int, rf.Generation]]:
        start = time.time()
        time.sleep(0.5)
        for begin, end in ((0.1, 0.2), (0.0, 0.3), (0.3, 0.4)):
            command.jax.monitoring.record_event_time_span("/jax/core/compile/x", start + begin, start + end)
        command.jax.monitoring.record_event_time_span("/jax/other", start, start + 0.5)
        usage.tokens = 12
        yield {number: answer([5]) for number in range(job.answers)}

    monkeypatch.setattr(command, "decode", decode)
    result = call()
    seconds, compiling = re.search(r"12 tokens in ([\d.]+) s, without ([\d.]+) s of compiling", result.errors).groups()
    assert float(compiling) == 0.40
    assert 0.09 < float(seconds) < 0.4


def test_summary_by_hand() -> None:
    first = rf.Stats(10, 12, 4, 1, 2, 1, 30, 48, 80, 0.5)
    second = rf.Stats(2, 2, 1, 1, 0, 0, 6, 16, 80, 0.1)
    outputs = [
        {"finish_reason": reason, "stats": dataclasses.asdict(stats)}
        for reason, stats in (("stop", first), ("length", second))
    ]
    usage = Usage()
    usage.tokens, usage.places, usage.forwards, usage.computed, usage.positions = 10, 8, 4, 60, 30
    assert command.summary(outputs, usage, seconds=10.0, compile_seconds=8.0) == (
        "2 answers: 1 ended, 1 cut by the budget\n"
        "5.0 tokens/s: 10 tokens in 2.00 s, without 8.00 s of compiling\n"
        "2.40 tokens per forward: 12 tokens in 5 forwards\n"
        "3.00 positions and 5.33 padded positions per token\n"
        "50% of the rows were at work; 50% of the computed positions carried something"
    )


def test_time_covered_by_spans() -> None:
    assert command.covered([]) == 0
    assert command.covered([(5, 6), (0, 3), (1, 2), (2, 4)]) == 5


@pytest.fixture
def cache_settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command sets of jax.config, which stays as it is."""
    settings: dict[str, Any] = {}
    monkeypatch.setattr(command.jax.config, "update", settings.__setitem__)
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "REFUSION_JAX_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return settings


def test_compiled_programs_are_kept_in_the_user_s_cache(
    cache_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command.keep_compiled_programs()
    assert cache_settings == {
        "jax_compilation_cache_dir": str(tmp_path / "refusion_jax" / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.5,
    }
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    command.keep_compiled_programs()
    assert cache_settings["jax_compilation_cache_dir"] == str(tmp_path / ".cache" / "refusion_jax" / "jax")


@pytest.mark.parametrize("setting", [("REFUSION_JAX_CACHE", "off"), ("JAX_COMPILATION_CACHE_DIR", "elsewhere")])
def test_compiled_programs_are_kept_as_the_user_says(
    cache_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, setting: tuple[str, str]
) -> None:
    monkeypatch.setenv(*setting)
    command.keep_compiled_programs()
    assert cache_settings == {}


def test_compiled_programs_that_cannot_be_kept(
    cache_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, no_decoding: list[Any]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = call()
    assert result.code == 0
    assert result.errors.startswith("warning: compiled programs are not kept: ")
    assert cache_settings == {}
    monkeypatch.setenv("REFUSION_JAX_CACHE", "yes")
    assert "REFUSION_JAX_CACHE=yes must be off or unset" in call().sentence
