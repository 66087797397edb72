"""Decoding speed on golden model A, beside the official PyTorch code on the same prompts and sizes.

    python -m benchmarks.decoding_speed [--repeats 5] [--output results.json]

All 64 golden prompts, 96 new tokens at most. The official figures were recorded on another day, on a machine that may
have been faster or slower: where torch is installed, the same bare loop (transformers' Qwen3 with its cache, one token
a forward) that was timed beside them is timed here between the passes, and the ratios are corrected by the best that
it gives now over what it gave then. Tokens are counted to the first EOS. Speeds are the median of several passes, after
a first one that compiles.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import refusion_jax as rf

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
NEW = 96
ALONE = [(8, 24), (4, 16), (8, 8), (4, 24), (4, 96), (8, 48), (8, 96), (16, 96), (32, 96)]
BATCHES = {1: ALONE, 8: [(8, 24), (4, 16)], 32: [(8, 24), (4, 16)]}
HELD = [(8, 24), (4, 16)]  # the settings that are held to a floor, at batch 1


def right(answer: list[int], wanted: list[int], same: list[int]) -> bool:
    """Whether an answer is right; the two ids in ``same`` are interchangeable."""
    plain = [[same[0] if token == same[1] else token for token in ids] for ids in (answer, wanted)]
    return plain[0] == plain[1]


def bare_loop() -> float | None:
    """Tokens/s of transformers' Qwen3 with its cache, one token a forward; None without torch.

    64 tokens for each of the prompts 10 to 21, as the figure recorded in timing.json.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "modelA", dtype=torch.float32).eval()
    prompts = [prompt["prompt_ids"] for prompt in golden()["prompts"][10:22]]

    @torch.no_grad()
    def run() -> float:
        started = time.perf_counter()
        for prompt in prompts:
            out = model(torch.tensor([prompt]), use_cache=True)
            for _ in range(64):
                token = out.logits[:, -1:].argmax(-1)
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
        return 64 * len(prompts) / (time.perf_counter() - started)

    run()
    return statistics.median(run() for _ in range(3))


def golden() -> dict[str, Any]:
    """Prompts and right answers."""
    return json.loads((GOLDEN / "goldenA" / "prompts.json").read_text())


def measure(model: rf.Model, slot: int, block: int, batch: int, repeats: int) -> dict[str, Any]:
    """One setting: a first pass over a batch that compiles, then timed passes over all prompts."""
    data = golden()
    prompts = [prompt["prompt_ids"] for prompt in data["prompts"]]
    config = rf.DecodeConfig(max_new_tokens=NEW, slot_size=slot, block_size=block)
    started = time.perf_counter()
    rf.generate(model, prompts[:batch], config, batch_size=batch)
    first = time.perf_counter() - started
    rf.generate(model, prompts, config, batch_size=batch)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        answers = rf.generate(model, prompts, config, batch_size=batch)
        seconds.append(time.perf_counter() - started)
    tokens = sum(answer.stats.tokens for answer in answers)
    rates = sorted(tokens / s for s in seconds)
    same = data["sep_equivalent_ids"]
    return {
        "batch": batch,
        "slot_size": slot,
        "block_size": block,
        "tokens_per_s": statistics.median(rates),
        "spread": [rates[0], rates[-1]],
        "right": sum(right(a.token_ids, p["response_ids"], same) for a, p in zip(answers, data["prompts"], strict=True))
        / len(prompts),
        "tokens_per_forward": tokens / sum(answer.stats.forwards for answer in answers),
        "positions_per_token": sum(answer.stats.positions for answer in answers) / tokens,
        "padded_positions_per_token": sum(answer.stats.padded_positions for answer in answers) / tokens,
        "first_batch_seconds": first,
    }


def start_up() -> list[float]:
    """Seconds of two runs of the command line on one prompt: with an empty compilation cache, then with a warm one."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.jsonl")
        prompts.write_text(json.dumps({"prompt_ids": golden()["prompts"][0]["prompt_ids"]}) + "\n")
        command = [sys.executable, str(ROOT / "decode.py"), "--model", str(GOLDEN / "modelA")]
        command += ["--prompts", str(prompts), "--block-size", "24", "--max-new-tokens", str(NEW)]
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(Path(folder, "cache"))}
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, env=environment)
            seconds.append(time.perf_counter() - started)
        return seconds


def main() -> None:
    """Measure, print a table and the verdict; write everything as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)

    timing = json.loads((GOLDEN / "goldenA" / "timing.json").read_text())
    official = {(row["slot_size"], row["block"]): row for row in timing["generate"]}
    model = rf.load(GOLDEN / "modelA")
    loops, results = [bare_loop()], []
    for batch, settings in BATCHES.items():
        for slot, block in settings:
            results.append(measure(model, slot, block, batch, arguments.repeats))
            if batch == 1 and (slot, block) in HELD:
                loops.append(bare_loop())
    measured = [loop for loop in loops if loop is not None]
    machine = max(measured) / timing["bare_ar_loop_tokens_per_s"] if measured else 1.0

    table = Table("batch", "slot, block", "tokens/s", "(spread)", "x official", "right", "tokens/forward",
                  "positions/token", "padded", "first batch s")  # fmt: skip
    for row in results:
        there = official.get((row["slot_size"], row["block_size"]))
        row["times_official"] = row["tokens_per_s"] / (there["tokens_per_s"] * machine) if there else None
        ratio = f"{row['times_official']:.2f}" if there else "-"
        table.add_row(
            str(row["batch"]), f"{row['slot_size']}, {row['block_size']}", f"{row['tokens_per_s']:.0f}",
            "{:.0f} to {:.0f}".format(*row["spread"]), ratio, f"{row['right']:.2f}", f"{row['tokens_per_forward']:.2f}",
            f"{row['positions_per_token']:.1f}", f"{row['padded_positions_per_token']:.1f}",
            f"{row['first_batch_seconds']:.1f}",
        )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    if measured:
        console.print(
            f"bare loop here: {', '.join(f'{loop:.0f}' for loop in measured)} tokens/s; when the official code "
            f"was timed: {timing['bare_ar_loop_tokens_per_s']}; this machine: {machine:.2f} of that one"
        )
    else:
        console.print("torch is not installed: ratios are not corrected for the speed of this machine")
    cold, warm = start_up()
    console.print(
        f"command line, one prompt: {cold:.1f} s with an empty compilation cache, {warm:.1f} s with a warm one"
    )
    for slot, block in HELD:
        row = next(r for r in results if (r["batch"], r["slot_size"], r["block_size"]) == (1, slot, block))
        verdict = "holds" if row["times_official"] >= 4 else "FAILS"
        console.print(
            f"slot {slot}, block {block}: {row['times_official']:.2f} times the official code; at least 4: {verdict}"
        )
    if arguments.output:
        report = {
            "command": "python -m benchmarks.decoding_speed", "date": time.strftime("%Y-%m-%d"), "jax": jax.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores", "bare_loop_tokens_per_s": measured,
            "machine_factor": machine, "start_up_seconds": {"cold": cold, "warm": warm}, "results": results,
        }  # fmt: skip
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
