"""What parallel decoding looks like: the bundled model on the bundled prompts.

    python -m refusion_jax.demo        (``make demo`` installs, then runs this)

shows how one answer was written, forward pass by forward pass, then a few more answers, then what left-to-right,
threshold and exact decoding cost on all prompts. Half a minute on two CPU cores, most of it compiling; a few seconds
when the compiled programs have been kept from an earlier run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from refusion_jax.cli.decode import ASSETS
from refusion_jax.cli.process import keep_compiled_programs
from refusion_jax.config import DecodeConfig
from refusion_jax.data import worksheet
from refusion_jax.decoding.generate import Generation, Stats, generate
from refusion_jax.model.hf import load

EXACT = DecodeConfig(max_new_tokens=96, slot_size=16, block_size=32)
MODES = {
    "ar": dataclasses.replace(EXACT, method="ar"),
    "threshold": dataclasses.replace(EXACT, verify="threshold"),
    "exact": EXACT,
}
MORE_ANSWERS = 3
RUNS = 3

LEGEND = (
    "Each line is one slot behind one forward pass, or a plan: how certain every open slot is, and which are written "
    "next. _ is not written yet. New tokens are drafts that were right; 6>7 is a draft 6 that was wrong, for which the "
    "same pass gave 7; >7 came free behind them."
)
ON_CPU = (
    "On this CPU a forward pass costs a fixed time and more for every padded position; on an accelerator with few "
    "rows the fixed part, reading the weights, is nearly all, and tokens per forward decide."
)
ON_ACCELERATOR = (
    "On an accelerator with few rows a forward pass costs about the same however wide it is, so that tokens per "
    "forward decide; with many rows padded positions do."
)


def main() -> None:
    started = time.perf_counter()
    console = terminal()
    keep_compiled_programs()
    model = load(ASSETS / "model")
    assert model.tokenizer is not None
    prompts = [line["messages"] for line in read_lines(ASSETS / "prompts.jsonl")]
    queries = [messages[-1]["content"] for messages in prompts]

    def print_answer(number: int, answer: Generation) -> None:
        verdict = "right" if is_right(queries[number], answer) else "wrong"
        console.print(Text.assemble(("Prompt  ", "bold"), queries[number]))
        console.print(Text.assemble(("Answer  ", "bold"), answer.text, (f"  ({verdict})", "dim")))
        console.print()

    with ThreadPoolExecutor(max_workers=2) as pool:  # compiling keeps one core busy
        traced = pool.submit(generate, model, prompts[:1], EXACT, trace=True)
        first_runs = [pool.submit(generate, model, prompts, config, batch_size=1) for config in MODES.values()]

        console.rule("One answer, in the order in which it was written")
        [answer] = traced.result()
        assert answer.trace is not None
        print_answer(0, answer)
        console.print(f"{LEGEND}\n")
        for line in trace_lines(answer.trace, EXACT.slot_size, model.tokenizer.token_text, model.config.eos_token_ids):
            console.print(line, soft_wrap=True)
        console.print(f"\n{summary(answer, EXACT.slot_size)}\n")

        console.rule("A few more")
        all_answers = [run.result() for run in first_runs]
        for number in range(1, 1 + MORE_ANSWERS):
            print_answer(number, all_answers[-1][number])

    console.rule(f"All {len(prompts)} prompts, one after another")
    table = Table("")
    for heading in ("right answers", "tokens per forward", "positions per token", "padded per token", "tokens/s"):
        table.add_column(heading, justify="right")
    for (name, config), answers in zip(MODES.items(), all_answers, strict=True):
        seconds = fastest(partial(generate, model, prompts, config, batch_size=1))
        right = sum(map(is_right, queries, answers))
        table.add_row(*table_row(name, right, [answer.stats for answer in answers], seconds))
    console.print(table)
    console.print(f"tokens/s is without compiling: every mode had run once, then the fastest of {RUNS} runs counts.")
    console.print(ON_CPU if jax.default_backend() == "cpu" else ON_ACCELERATOR)
    console.print(f"The demo took {time.perf_counter() - started:.0f} s, compiling included.")


def terminal() -> Console:
    """Standard output: coloured on a terminal, plain elsewhere and where NO_COLOR is set."""
    return Console(color_system=None if os.environ.get("NO_COLOR") else "auto", markup=False, highlight=False)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def is_right(query: str, answer: Generation) -> bool:
    """Whether the answer to a worksheet ended by itself and is right in every token."""
    return answer.finish_reason == "stop" and worksheet.is_right(query, answer.text)


def fastest(run: Callable[[], object]) -> float:
    """The seconds of the fastest of several runs: other programs of the machine can only slow one down."""
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def trace_lines(
    trace: Sequence[Mapping[str, Any]], slot_size: int, word: Callable[[int], str | None], eos: Sequence[int]
) -> Iterator[Text]:
    """A trace (see decoding/trace.py) for the eye: what every forward pass wrote, slot by slot, and what it planned."""
    written: dict[int, int] = {}
    for number, event in enumerate(trace, 1):
        written.update(event["committed"])
        slots = sorted({offset // slot_size for offset, _ in event["committed"]})
        lines = [slot_line(slot, slot_size, event, written, word, eos) for slot in slots]
        if "chosen" in event:
            lines.append(plan_line(event))
        for place, line in enumerate(lines):
            head = f"{number:3}  {event['kind']:6}  " if place == 0 else " " * 13
            yield Text.assemble((head, "dim"), line)


def slot_line(
    slot: int,
    slot_size: int,
    event: Mapping[str, Any],
    written: Mapping[int, int],
    word: Callable[[int], str | None],
    eos: Sequence[int],
) -> Text:
    """One slot as a forward pass that wrote to it left it, up to EOS. ``written`` holds the token of every offset."""
    new, drafts, accepted = dict(event["committed"]), dict(event["drafts"]), set(event["accepted"])
    cells = []
    for offset in range(slot * slot_size, (slot + 1) * slot_size):
        if offset not in written:
            cells.append(Text("_", "dim"))
            continue
        token = written[offset]
        if offset not in new:
            cells.append(Text(f"{word(token)}"))
        elif offset in accepted:
            cells.append(Text(f"{word(token)}", "bold green"))
        else:
            wrong = word(drafts[offset]) if drafts.get(offset, token) != token else ""
            cells.append(Text.assemble((f"{wrong}>", "red"), (f"{word(token)}", "bold yellow")))
        if token in eos:
            break
    return Text.assemble((f"slot {slot}  ", "bold cyan"), Text(" ").join(cells))


def plan_line(event: Mapping[str, Any]) -> Text:
    """The open slots, how certain each is, and which are written next."""
    chosen = event["chosen"]
    slots = [
        Text(f"{slot} ({certainty:.2f})", "bold cyan" if slot in chosen else "dim")
        for slot, certainty in zip(event["open"], event["certainties"], strict=True)
    ]
    return Text.assemble("open    ", Text(", ").join(slots), f" -> write {', '.join(map(str, chosen))}")


def summary(answer: Generation, slot_size: int) -> str:
    """How many forward passes an answer took, and in which order its slots were begun."""
    order = " ".join(map(str, dict.fromkeys(offset // slot_size for offset in answer.commit_order)))
    return f"{answer.stats.tokens} tokens, {answer.stats.forwards} forward passes, slots begun in the order {order}"


def table_row(name: str, right: int, stats: Sequence[Stats], seconds: float) -> tuple[str, ...]:
    """A row of the table. Every rate is a total over a total."""
    tokens = sum(s.tokens for s in stats)
    forwards = sum(s.forwards for s in stats)
    positions = sum(s.positions for s in stats)
    padded = sum(s.padded_positions for s in stats)
    return (
        name,
        f"{right} of {len(stats)}",
        f"{tokens / forwards:.2f}",
        f"{positions / tokens:.2f}",
        f"{padded / tokens:.2f}",
        f"{tokens / seconds:,.0f}",
    )


if __name__ == "__main__":
    main()
