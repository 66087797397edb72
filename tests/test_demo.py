"""The demo: what it prints is what happened, and the bundled files are fit to be decoded."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.text import Text

from benchmarks import batches, worksheets
from refusion_jax import Generation, Stats, demo
from refusion_jax.data import worksheet
from refusion_jax.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
WORDS = {1: "sun", 2: "moon", 3: "cat", 4: "dog", 5: "fish", 9: "<end>"}

# Slots of two tokens. Slot 1 is written first, then slots 0 and 2 in one pass, in which a draft is wrong.
TRACE = [
    {
        "kind": "plan",
        "open": [0, 1],
        "certainties": [0.25, 0.98],
        "chosen": [1],
        "drafts": [],
        "accepted": [],
        "committed": [],
    },
    {"kind": "verify", "drafts": [(2, 4)], "accepted": [2], "committed": [(2, 4), (3, 5)]},
    {
        "kind": "verify",
        "open": [0, 2],
        "certainties": [0.6, 1.0],
        "chosen": [0, 2],
        "drafts": [],
        "accepted": [],
        "committed": [],
    },
    {
        "kind": "verify",
        "drafts": [(0, 1), (1, 2), (4, 9), (5, 9)],
        "accepted": [0, 1],
        "committed": [(0, 1), (1, 2), (4, 3)],
    },
    {
        "kind": "verify",
        "drafts": [(5, 9)],
        "accepted": [5],
        "committed": [(5, 9)],
        "open": [3],
        "certainties": [0.5],
        "chosen": [3],
    },
    {"kind": "verify", "drafts": [(6, 9)], "accepted": [6], "committed": [(6, 9)]},
]


def test_a_trace_reads_as_what_was_written_when() -> None:
    lines = list(demo.trace_lines(TRACE, 2, WORDS.get, eos=[9]))
    assert [line.plain for line in lines] == [
        "  1  plan    open    0 (0.25), 1 (0.98) -> write 1",
        "  2  verify  slot 1  dog >fish",
        "  3  verify  open    0 (0.60), 2 (1.00) -> write 0, 2",
        "  4  verify  slot 0  sun moon",
        "             slot 2  <end>>cat _",
        "  5  verify  slot 2  cat <end>",
        "             open    3 (0.50) -> write 3",
        "  6  verify  slot 3  <end>",
    ]


def style_of(line: Text, word: str) -> str:
    start = line.plain.index(word)
    return next(str(span.style) for span in line.spans if span.start <= start < span.end and span.style)


def test_right_drafts_wrong_drafts_and_older_tokens_have_their_own_colours() -> None:
    lines = list(demo.trace_lines(TRACE, 2, WORDS.get, eos=[9]))
    assert style_of(lines[3], "moon") == "bold green"
    assert style_of(lines[4], "<end>>") == "red"
    assert style_of(lines[4], "cat") == "bold yellow"
    assert not any(span.style and lines[5].plain[span.start : span.end] == "cat" for span in lines[5].spans)


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_is_respected_on_a_terminal(no_color: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NO_COLOR": no_color, "FORCE_COLOR": "1", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    console = demo.terminal()
    console.file = io.StringIO()
    console.print(Text("moon", "bold green"))
    assert ("\x1b" in console.file.getvalue()) == (not no_color)


def stats(tokens: int, forwards: int, positions: int, padded_positions: int) -> Stats:
    return Stats(tokens, tokens, forwards, 1, forwards - 1, 0, positions, padded_positions, 80, 0.5)


def test_rates_of_the_table_are_totals_over_totals() -> None:
    # 40 tokens in 20 forwards; the mean of the two ratios, 6 and 0.67, would be 3.33.
    answers = [stats(30, 5, 60, 100), stats(10, 15, 30, 80)]
    assert demo.table_row("exact", 1, answers, 0.02) == ("exact", "1 of 2", "2.00", "2.25", "4.50", "2,000")


def answer(text: str, finish_reason: str = "stop", commit_order: tuple[int, ...] = ()) -> Generation:
    return Generation(text, [], [], finish_reason, stats(5, 3, 9, 9), commit_order=list(commit_order))


def test_an_answer_is_wrong_when_it_did_not_end() -> None:
    query, right = "1. add 4 1 2. last", "1. add 4 + 1 = 5 2. last 5 done"
    assert demo.is_right(query, answer(right))
    assert not demo.is_right(query, answer(right.replace("= 5", "= 6")))
    assert not demo.is_right(query, answer(right, "length"))


def test_the_order_of_slots_is_that_of_their_first_tokens() -> None:
    text = demo.summary(answer("", commit_order=(0, 4, 5, 1, 2, 3)), slot_size=2)
    assert text == "5 tokens, 3 forward passes, slots begun in the order 0 2 1"


def test_the_bundled_prompts_are_the_first_test_worksheets_and_leave_room_for_the_answers() -> None:
    """None is left out because the model fails on it."""
    prompts = demo.read_lines(demo.ASSETS / "prompts.jsonl")
    sheets = [worksheet.example("test", 0, index) for index in range(12)]
    assert [line["messages"] for line in prompts] == [[{"role": "user", "content": each["query"]}] for each in sheets]
    assert len({line["id"] for line in prompts}) == 12
    assert max(len(each["response"].split()) for each in sheets) < demo.EXACT.max_new_tokens


def test_the_bundled_tokenizer_is_that_of_the_task() -> None:
    model = demo.ASSETS / "model"
    for name, content in worksheet.tokenizer_files().items():
        assert (model / name).read_bytes() == content


def test_the_bundled_model_is_what_its_metrics_are_about() -> None:
    """Someone may check it: which weights, how they were made, how often they are right."""
    metrics = json.loads((demo.ASSETS / "metrics.json").read_text())
    weights = (demo.ASSETS / "model" / "model.safetensors").read_bytes()
    assert metrics["sha256"] == hashlib.sha256(weights).hexdigest()
    assert len(weights) < 5e6


@pytest.mark.slow
def test_the_bundled_model_is_as_often_right_on_other_worksheets(tmp_path: Path) -> None:
    """Of a seed that neither its metrics nor the bundled prompts are from."""
    file = tmp_path / "figures.json"
    assert worksheets.main(["--worksheets", "200", "--seed", "3", "--output", str(file)]) == 0
    decoded = json.loads(file.read_text())["decoded"]
    for preset in PRESETS:
        assert decoded[f"exact, {preset}"]["right"] >= 0.97
    assert decoded["left to right"]["right"] >= 0.97
    assert decoded["exact, balanced"]["tokens_per_forward"] > 5
    assert decoded["left to right"]["tokens_per_forward"] == 1


def test_a_benchmark_whose_output_cannot_be_written_says_so_before_it_decodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert worksheets.main(["--output", str(tmp_path / "missing" / "figures.json")]) == 2
    assert "does not exist; make it first" in capsys.readouterr().err


def test_the_benchmark_of_batches_holds_all_of_them_to_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert batches.main(["--worksheets", "5", "--repeats", "1", "--batch-sizes", "1,4", "--preset", "quality"]) == 0
    assert "all ways give the same tokens" in capsys.readouterr().out
    assert batches.main(["--preset", "gsm9k"]) == 2
    assert "--preset gsm9k: give one of latency" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_runs_as_a_process_and_finds_every_answer_right_in_every_mode() -> None:
    command = [sys.executable, "-m", "refusion_jax.demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout  # plain, because it is not a terminal
    rows = re.findall(r"^\W*(ar|threshold|exact)\W+(\d+) of (\d+)\W+([\d.]+) ", done.stdout, re.MULTILINE)
    assert [name for name, *_ in rows] == ["ar", "threshold", "exact"]
    assert all(right == count == "12" for _, right, count, _ in rows)
    ar, threshold, exact = (float(rate) for *_, rate in rows)
    assert ar == 1 < threshold < exact
