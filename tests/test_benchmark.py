"""The benchmark of decoding: predictions by hand, ratios as the paper's come out, a report that says what happened."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from refusion_jax import Stats, demo
from refusion_jax.chips import CHIPS
from refusion_jax.cli.options import UserError, parse
from refusion_jax.config import ModelConfig
from refusion_jax.decoding.generate import prepare
from refusion_jax.evaluation import benchmark, compare, measure, roofline
from refusion_jax.evaluation.benchmark import Options, main
from refusion_jax.evaluation.compare import difference
from refusion_jax.evaluation.inflate import parameters
from refusion_jax.evaluation.measure import Entry, Parts, Pass, Prompts, largest_of
from refusion_jax.evaluation.roofline import (
    Calibration,
    Decoding,
    Forward,
    Peaks,
    bytes_moved,
    largest_batch,
    layer_parameters,
    matrix_parameters,
    operations,
    overtaken_at,
    published,
    rate,
    resident_bytes,
    tokens_per_second,
)
from refusion_jax.model.hf import load
from refusion_jax.presets import SHAPES

ROOT = Path(__file__).resolve().parent.parent

SMALL = ModelConfig(
    vocab_size=16,
    hidden_size=4,
    intermediate_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=64,
    eos_token_ids=(1,),
    mask_token_id=3,
)
LARGE = dataclasses.replace(SHAPES["qwen3_8b"], dtype="bfloat16")
FORWARD = Forward(positions=3, rows=1, window=3, cached=5)


# --- roofline -----------------------------------------------------------------------------------------------


def test_parameters_by_hand() -> None:
    # Of a layer: queries and output 4 x 4 each, keys and values 4 x 2 each, three matrices of 4 x 8.
    assert layer_parameters(SMALL) == 2 * (16 + 16 + 8 + 8 + 96)
    assert matrix_parameters(SMALL) == 288 + 4 * 16


def test_operations_by_hand() -> None:
    # Two products of attention, each 2 operations for 2 layers, 2 heads of size 2, 3 positions that meet 5 + 3.
    assert operations(SMALL, FORWARD) == (2 * 3 * 288 + 2 * 2 * 2 * 2 * 2 * 3 * 8, 2 * 3 * 64)
    assert operations(SMALL, FORWARD._replace(head=False)).head == 0


def test_bytes_by_hand() -> None:
    weights, cache = 4 * 352, 4 * (2 * 2 * 1 * 2 * 5)
    # Results of a layer: 4 + 2 + 2 of queries, keys and values, 4 of attention, 4, 8 + 8 and 4. Written, then read.
    results = 2 * 3 * (4 * 2 * 36 + 4 * 16)
    assert bytes_moved(SMALL, FORWARD) == weights + cache + results
    assert bytes_moved(SMALL, FORWARD._replace(head=False)) == weights - 4 * 64 + cache + results - 2 * 3 * 4 * 16
    half = dataclasses.replace(SMALL, dtype="bfloat16")
    assert bytes_moved(half, FORWARD) == (weights + cache) / 2 + 2 * 3 * (2 * 2 * 36 + 4 * 16)


def test_a_pass_takes_the_longer_of_computing_and_moving_and_a_fixed_time() -> None:
    slow = Peaks("", layers=((1, 1000),), head=((1, 100),), bandwidth=1e9, overhead=0.5)
    assert slow.seconds(SMALL, FORWARD) == pytest.approx(2.496 + 3.84 + 0.5)
    narrow = Peaks("", layers=((1, 1e9),), head=((1, 1e9),), bandwidth=368.0)
    assert narrow.seconds(SMALL, FORWARD) == pytest.approx(10.0)


def test_between_measured_sizes_time_is_interpolated() -> None:
    rates = ((1, 10), (4, 20))  # 0.1 s for 1 position, 0.2 s for 4
    assert [rate(rates, m) for m in (0.5, 1, 2.5, 4, 8)] == pytest.approx([10, 10, 2.5 / 0.15, 20, 20])


def test_the_largest_of_some_draws() -> None:
    """The longest row of a batch says how far the cache is read."""
    assert largest_of(1, [3, 1, 2]) == pytest.approx(2)
    assert largest_of(2, [1, 3]) == pytest.approx(3 * 3 / 4 + 1 / 4)


def test_parameters_of_qwen3_8b() -> None:
    # Its model card: 8.2 billion parameters, 6.95 billion of them not embeddings.
    assert layer_parameters(LARGE) == pytest.approx(6.95e9, rel=1e-3)
    assert resident_bytes(LARGE, 0, 0) == pytest.approx(2 * 8.19e9, rel=1e-3)
    # 36 layers of keys and values of 8 heads of 128, two bytes each: 147,456 bytes a position.
    assert resident_bytes(LARGE, 3, 100) - resident_bytes(LARGE, 0, 100) == 300 * 147_456


def test_left_to_right_on_an_h200_reads_the_weights() -> None:
    peaks = published("NVIDIA H200", "bfloat16")
    decoding = Decoding(tokens=1, positions=1, window=1, cached=0, capacity=0)
    # 7.57 billion matrix parameters of two bytes at 4.8 TB/s
    assert tokens_per_second(LARGE, peaks, decoding, 1) == pytest.approx(4.8e12 / (2 * 7.57e9), rel=2e-3)
    assert tokens_per_second(LARGE, peaks, decoding, 1, prompt=1.0) == pytest.approx(1.0, rel=4e-3)


def test_when_left_to_right_overtakes_on_an_h200() -> None:
    """8 tokens from 32 positions: it does where 32 B positions take 8 times as long as reading the weights.

    2 P 32 B / 989.5e12 = 8 (2 P / 4.8e12), B = 51.5; attention and the results of products move it a little.
    """
    peaks = published("NVIDIA H200", "bfloat16")
    parallel = Decoding(tokens=8, positions=32, window=32, cached=0, capacity=0)
    one = Decoding(tokens=1, positions=1, window=1, cached=0, capacity=0)
    batch = overtaken_at(
        lambda rows: tokens_per_second(LARGE, peaks, parallel, rows),
        lambda rows: tokens_per_second(LARGE, peaks, one, rows),
        1024,
    )
    assert batch == pytest.approx(51.5, abs=3)


def test_the_first_batch_counts_and_none_is_none() -> None:
    assert overtaken_at(lambda rows: 10.0, lambda rows: 3.0 * rows, 8) == 4
    assert overtaken_at(lambda rows: 10.0, lambda rows: 3.0 * rows, 3) is None


def test_batches_that_do_not_fit_are_not_considered() -> None:
    peaks = Peaks("", ((1, 1),), ((1, 1),), bandwidth=1, memory=4 * 352 + 160 * 7 + 159)  # 160 bytes of cache a row
    assert largest_batch(SMALL, peaks, 5) == 7
    assert largest_batch(SMALL, dataclasses.replace(peaks, memory=None), 5, limit=9) == 9
    assert largest_batch(SMALL, dataclasses.replace(peaks, memory=100), 5) == 0


@pytest.mark.parametrize("kind", CHIPS)
def test_published_peaks_are_of_their_size(kind: str) -> None:
    """A factor of a thousand would go unnoticed in a prediction for a chip that nobody has."""
    chip = CHIPS[kind]
    assert 100e12 < chip.bfloat16 < 3000e12
    assert chip.float32 is None or 10e12 < chip.float32 < 100e12
    assert 200e9 < chip.bandwidth < 10e12
    assert 10e9 < chip.memory < 200e9
    assert chip.source


def test_unknown_peaks() -> None:
    with pytest.raises(ValueError, match=r"there is no chip 'H300': give one of TPU v4, "):
        published("H300", "bfloat16")
    with pytest.raises(ValueError, match="of TPU v4 no peak in float32 is published"):
        published("TPU v4", "float32")
    assert published("NVIDIA L4", "float32").layers == ((1, 30.3e12),)


def test_a_calibration_measures_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(roofline.POSITIONS, "cpu", [1, 8])
    model = load(demo.ASSETS / "model")
    calibration = Calibration(model.config, model.params)
    calibration.compile()
    for _ in range(2):
        calibration.measure()
    assert {len(times) for times in calibration.seconds.values()} == {2}
    peaks = calibration.peaks(overhead=0.25)
    assert [positions for positions, _ in peaks.layers] == [positions for positions, _ in peaks.head]
    assert all(1e6 < rate < 1e15 for _, rate in peaks.layers + peaks.head)
    assert peaks.bandwidth >= calibration.copied()
    assert peaks.seconds(model.config, FORWARD) > 0.25


def test_the_shape_for_a_cpu_has_a_hundred_million_parameters() -> None:
    assert 100e6 < parameters(benchmark.SHAPES["100m"]) < 110e6


# --- ratios -------------------------------------------------------------------------------------------------


def entry(method: str, speeds: list[float], right: int = 0, tokens: int = 100) -> Entry:
    """An entry whose answers came at ``speeds`` tokens/s one after another, the first ``right`` of them right."""
    stats = [
        Stats(tokens, tokens, 10, 2, 8, 0, positions=300, padded_positions=400, prefill_positions=9, seconds=tokens / s)
        for s in speeds
    ]
    answers: Any = [SimpleNamespace(stats=s, right=number < right) for number, s in enumerate(stats)]
    usage: Any = SimpleNamespace(tokens=tokens * len(speeds), forwards=10 * len(speeds))
    one = Pass(answers, usage, sum(s.seconds for s in stats), 0.0)
    job: Any = SimpleNamespace(batch_size=1)
    return Entry(method, job, 0.0, None, [one], Parts(prompts=0.2, forwards=0.7, rest=0.1))


def prompts_of(count: int) -> Prompts:
    return Prompts("", ["prompt"] * count, [lambda answer: answer.right] * count)  # type: ignore[attr-defined]


# Tokens/s of ReFusion and of Qwen3-8B on seven tasks (ReFusion, second version, table 1).
REFUSION = [52.74, 32.46, 81.24, 81.77, 64.11, 103.90, 92.09]
QWEN3 = [31.42, 42.78, 31.20, 30.11, 30.95, 30.43, 30.07]


def test_the_papers_speed_up_in_every_convention() -> None:
    """The paper's 2.33 is the mean of ratios; the same figures give 2.24 and 2.12 in other conventions."""
    found = compare.ratio("", entry("exact-8-8", REFUSION), entry("ar", QWEN3), prompts_of(7))
    assert found.mean_of_ratios == pytest.approx(2.33, abs=5e-3)
    assert found.ratio_of_means == pytest.approx(2.24, abs=5e-3)
    assert found.geometric_mean_of_ratios == pytest.approx(2.12, abs=5e-3)
    # As many tokens of each task: time adds up, and the slow tasks weigh most.
    assert found.ratio_of_totals == pytest.approx(sum(1 / s for s in QWEN3) / sum(1 / s for s in REFUSION))
    assert found.tokens_per_forward == 1


def test_the_fastest_settings_that_are_right_as_often_as_both_can_be() -> None:
    exact = [entry("exact-8-8", [9.0] * 4, right=2), entry("exact-16-16", [5.0] * 4, right=4)]
    threshold = [entry("threshold-8-8-0.4", [8.0] * 4, right=1), entry("threshold-8-8-0.9", [4.0] * 4, right=3)]
    for ones, others in ((exact, threshold), (threshold, exact)):  # threshold reaches 3, exact-8-8 does not
        pair = compare.fastest_at_equal_right(ones, others, prompts_of(4))
        assert {one.method for one in pair} == {"exact-16-16", "threshold-8-8-0.9"}
    unknown = Prompts("", ["prompt"] * 4, None)
    pair = compare.fastest_at_equal_right(exact, threshold, unknown)
    assert [one.method for one in pair] == ["exact-8-8", "threshold-8-8-0.4"]


def test_plain_masked_diffusion_is_compared_by_that_name() -> None:
    """The usual ratio, against one token a step, must not pass for the one against its best setting."""
    entries = [
        entry("exact-8-8", [9.0]), entry("ar", [3.0]), entry("mdm-1", [1.0]), entry("mdm-above-0.9", [6.0])
    ]  # fmt: skip
    found = {line.title: line.ratio_of_totals for line in compare.headlines(entries, Prompts("", ["prompt"], None))}
    assert found == pytest.approx({"exact / ar": 3, "exact / mdm": 1.5, "exact / plain mdm, one token a step": 9})
    [alone] = compare.headlines([entries[0], entries[2]], Prompts("", ["prompt"], None))
    assert alone.title == "exact / plain mdm, one token a step"


# --- another run --------------------------------------------------------------------------------------------


def recorded(tokens: list[int], order: list[int], probabilities: list[float]) -> dict[str, Any]:
    return {"token_ids": tokens, "commit_order": order, "logprobs": [math.log(p) for p in probabilities]}


ONE = recorded([5, 6, 7], [2, 0, 1], [0.9, 0.49998, 0.8])


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (recorded([5, 6, 7], [0, 1, 2], [0.1, 0.1, 0.1]), "equal"),  # the text counts
        (recorded([5, 8, 7], [2, 0, 1], [0.9, 0.49995, 0.8]), "near-tie"),
        (recorded([5, 8, 7], [2, 0, 1], [0.9, 0.48, 0.8]), "other"),  # not near each other
        (recorded([5, 8, 9], [2, 0, 1], [0.9, 0.49995, 0.8]), "other"),  # 9 was written first
        (recorded([4, 6, 7], [2, 0, 1], [0.9, 0.5, 0.8]), "other"),  # both are likely: they cannot tie
        (recorded([5, 8, 7], [0, 1, 2], [0.9, 0.5, 0.8]), "order"),
        (recorded([5, 6, 7, 1], [2, 0, 1, 3], [0.9, 0.5, 0.8, 0.9]), "order"),
    ],
)
def test_how_answers_differ(other: dict[str, Any], expected: str) -> None:
    """What rounding explains must not hide what it does not."""
    assert difference(ONE, other) == expected
    assert difference(other, ONE) == expected


# --- a run --------------------------------------------------------------------------------------------------


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(roofline.POSITIONS, "cpu", [1, 16])  # each takes a program
    figure = importlib.util.find_spec("matplotlib") is not None
    arguments = ["--methods", "ar,exact-4-4", "--prompts", "worksheets:0:2", "--batch-sizes", "1", "--repeats", "2"]
    arguments += ["--chip", "NVIDIA H200", "--output", str(tmp_path / "out")] + ["--no-figure"] * (not figure)
    assert main(arguments) == 0
    report = json.loads((tmp_path / "out" / "benchmark.json").read_text())
    assert report["complete"]
    assert report["model"]["parameters"] == parameters(load(demo.ASSETS / "model").config)
    assert [(row["batch"], row["method"]) for row in report["results"]] == [(1, "ar"), (1, "exact-4-4")]
    for row in report["results"]:
        low, high = row["tokens_per_s_spread"]
        assert low <= row["tokens_per_s"] <= high
        assert (row["right"], row["answers"]) == (2, 2)
        assert row["batch_forwards"] == sum(row["forwards"].values())  # one row: all forwards are its own
        assert row["tokens_per_forward"] == row["tokens"] / row["batch_forwards"]
        assert row["positions_per_token"] <= row["padded_positions_per_token"]
        assert sum(row["time"].values()) == pytest.approx(1)
        assert list(row["predicted_tokens_per_s"]) == [f"measured peaks of {jax.devices()[0].device_kind}",
                                                       "published peaks of NVIDIA H200"]  # fmt: skip
        assert all(speed > 0 for speed in row["predicted_tokens_per_s"].values())
    left_to_right, exact = report["results"]
    assert left_to_right["tokens_per_forward"] == 1
    assert exact["tokens_per_forward"] > 2
    [ratio] = report["ratios"]
    assert (ratio["one"], ratio["other"], ratio["right"]) == ("exact-4-4", "ar", [2, 2])
    assert ratio["ratio_of_totals"] == pytest.approx(exact["tokens_per_s"] / left_to_right["tokens_per_s"])
    [overtaken] = report["left_to_right_overtakes"]
    assert overtaken["measured"] in (None, 1)
    answers = json.loads((tmp_path / "out" / "answers.json").read_text())["answers"]
    assert list(answers) == ["ar, batch 1", "exact-4-4, batch 1"]
    assert [len(answer["token_ids"]) for answer in answers["ar, batch 1"]] == [
        len(answer["logprobs"]) for answer in answers["ar, batch 1"]
    ]
    assert (tmp_path / "out" / "benchmark.png").exists() == figure
    printed = capsys.readouterr().out
    for heading in ("Speed, the median of 2", "Ratios", "Roofline", "Left to right is as fast from batch"):
        assert heading in printed


@pytest.mark.slow
def test_a_run_of_every_method_and_the_answers_of_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--prompts", "worksheets:0:4", "--batch-sizes", "1,4", "--repeats", "1", "--no-figure"]
    methods = "ar,exact-8-8,threshold-8-8-0.4,mdm-1,mdm-4,mdm-above-0.9"
    assert main([*common, "--methods", methods, "--output", str(tmp_path / "one")]) == 0
    report = json.loads((tmp_path / "one" / "benchmark.json").read_text())
    rows = {(row["batch"], row["method"]): row for row in report["results"]}
    assert rows[1, "mdm-1"]["tokens_per_forward"] <= 1
    assert rows[1, "mdm-4"]["tokens_per_forward"] > 2
    assert [ratio["title"] for ratio in report["ratios"] if ratio["batch"] == 4] == [
        "exact / ar", "exact / threshold", "exact / mdm", "exact / plain mdm, one token a step"
    ]  # fmt: skip

    against = ["--methods", "ar", "--compare", str(tmp_path / "one" / "answers.json")]
    assert main([*common, *against, "--output", str(tmp_path / "two")]) == 0
    compared = json.loads((tmp_path / "two" / "benchmark.json").read_text())["compared"]
    assert [(row["batch"], row["equal"] + row["near-tie"]) for row in compared] == [(1, 4), (4, 4)]
    assert "against the other run, ar, batch 1: 4 answers are equal" in capsys.readouterr().out

    assert main([*common, *against, "--prompts", "worksheets:1:4"]) == 2
    assert "holds answers to other prompts" in capsys.readouterr().err


@pytest.mark.slow
def test_prompts_of_a_file_have_no_right_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once upon a time"}\n{"prompt_ids": [5, 6, 7]}\n')
    arguments = ["--methods", "ar,exact-4-4", "--prompts", str(tmp_path / "prompts.jsonl"), "--batch-sizes", "2"]
    arguments += ["--repeats", "1", "--max-new-tokens", "8", "--output", str(tmp_path)]
    assert main(arguments) == 0
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert {row["right"] for row in report["results"]} == {None}
    assert (tmp_path / "benchmark.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_parts_of_a_pass_are_all_of_it() -> None:
    model = load(demo.ASSETS / "model")
    prompts = benchmark.read("worksheets:0:3")
    job = prepare(model, prompts.prompts, demo.EXACT, batch_size=1)
    measure.decode_once(job)
    parts = measure.take_apart(job)
    assert sum(parts) == pytest.approx(1)
    assert min(parts) > 0
    assert parts._fields == Parts._fields


# --- what cannot be done ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "ar,exact-3-3"], "--methods: there is no 'exact-3-3': give some of ar, exact-4-4, "),
        (["--batch-sizes", "1,0"], "--batch-sizes must be positive integers separated by commas, not '1,0'"),
        (["--batch-sizes", "many"], "--batch-sizes must be positive integers separated by commas, not 'many'"),
        (["--repeats", "0"], "--repeats must be at least 1, not 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, not 0"),
        (["--prompts", "worksheets:0"], "--prompts must be worksheets:SEED:COUNT, such as worksheets:0:32"),
        (["--prompts", "worksheets:0:0"], "--prompts must be worksheets:SEED:COUNT, such as worksheets:0:32"),
        (["--prompts", "no/such/file.jsonl"], "--prompts no/such/file.jsonl cannot be read: No such file"),
        (
            ["--shape", "huge"],
            "one of qwen3_0_6b, qwen3_1_7b, qwen3_4b, qwen3_8b, 100m or a Python file, not huge",
        ),
        (["--shape", "none.py"], "--shape none.py gives no settings: FileNotFoundError"),
        (["--chip", "H300"], "--chip: there is no chip 'H300': give one of TPU v4, "),
        (["--model", "no/such/directory"], "no/such/directory"),
        (["--compare", "no/such/file.json"], "--compare no/such/file.json cannot be read: No such file"),
        (["--output", "/dev/null/out", "--no-figure"], "--output /dev/null/out cannot be made: Not a directory"),
        (["--batch-size", "1"], "there is no option --batch-size; perhaps you meant --batch-sizes"),
        (["--max-new-tokens", "500"], "prompt 0 has 64 tokens, and 500 new ones make 564 positions; the model has 512"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "Calibration", lambda *args: None)
    monkeypatch.setattr(benchmark, "overhead", lambda *args: 0.0)
    monkeypatch.setattr(measure, "decode_once", lambda *args: pytest.fail("it decodes before it has checked"))
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_file_that_is_no_answers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "answers.json").write_text("[]")
    with pytest.raises(UserError, match=r"answers\.json is no answers\.json that this command wrote"):
        compare.compared([], prompts_of(1), str(tmp_path / "answers.json"))


def test_without_matplotlib_a_figure_is_refused_before_anything_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"needs matplotlib, which is not installed: pip install 'refusion_jax\[eval\]'"
    ):
        benchmark.prepare_output(Options(output=str(tmp_path / "out")))
    assert benchmark.prepare_output(Options(output=str(tmp_path / "out"), figure=False)) == tmp_path / "out"


# --- on a GPU -----------------------------------------------------------------------------------------------


def test_the_commands_for_a_gpu_are_ones_that_the_benchmark_understands() -> None:
    """A typing error there would cost time on a machine that is paid by the minute."""
    done = subprocess.run(
        ["sh", "benchmarks/gpu.sh", "--dry-run", "/out"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    runs = {}
    for command in commands:
        assert command[1:3] == ["-m", "refusion_jax.evaluation.benchmark"]
        options = parse(Options, command[3:], Options())
        runs[options.output] = options
        benchmark.read(options.prompts)
        if options.shape is not None:
            benchmark.shape_of(options.shape)
    cpu, gpu, small, large = (runs[f"/out/{name}"] for name in ("parity-cpu", "parity-gpu", "0.6b", "8b"))
    assert (small.shape, large.shape) == ("qwen3_0_6b", "qwen3_8b")
    assert gpu == dataclasses.replace(cpu, output="/out/parity-gpu", compare="/out/parity-cpu/answers.json")
    # Answers are compared where prompts, methods and batch sizes are the same.
    assert (small.compare, small.prompts) == (gpu.compare, cpu.prompts)
    assert set(benchmark.names_of(cpu.methods)) <= set(benchmark.names_of(small.methods))
    assert set(benchmark.batch_sizes_of(cpu.batch_sizes)) <= set(benchmark.batch_sizes_of(small.batch_sizes))


@pytest.mark.slow
def test_without_a_gpu_the_script_says_so() -> None:
    import sys

    done = subprocess.run(
        ["sh", "benchmarks/gpu.sh"], cwd=ROOT, capture_output=True, text=True, env={"PYTHON": sys.executable,
                                                                                   "JAX_PLATFORMS": "cpu",
                                                                                   "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 2
    assert re.fullmatch(r"gpu\.sh: there is no GPU that jax can use .*\n", done.stderr)
