"""What was measured, as JSON, as tables and as a figure."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from refusion_jax.evaluation.compare import compared, headlines, overtaken, predicted
from refusion_jax.evaluation.measure import Entry, Parts, Prompts, family
from refusion_jax.evaluation.roofline import Calibration, Peaks, bytes_moved

# ---- JSON ----


def result(entry: Entry, prompts: Prompts, all_peaks: Sequence[Peaks], copied: float) -> dict[str, Any]:
    """The figures of an entry."""
    usage, stats = entry.usage, [answer.stats for answer in entry.answers]
    speeds = [usage.tokens / one.seconds for one in entry.passes]
    assert entry.parts is not None
    forward_seconds = entry.seconds * entry.parts.forwards / usage.steps
    moved = bytes_moved(entry.job.model.config, entry.forward)
    return {
        "method": entry.method,
        "batch": entry.job.batch_size,
        "settings": dataclasses.asdict(entry.job.config),
        "right": entry.right(prompts),
        "answers": len(stats),
        "tokens": usage.tokens,
        "tokens_per_s": entry.speed,
        "tokens_per_s_spread": [min(speeds), max(speeds)],
        "tokens_per_s_behind_prompts": entry.speed_behind_prompts,
        "tokens_per_forward": usage.tokens / usage.forwards,
        "positions_per_token": usage.positions / usage.tokens,
        "padded_positions_per_token": sum(s.padded_positions for s in stats) / usage.tokens,
        "forwards": {kind: sum(getattr(s, f"{kind}_forwards") for s in stats) for kind in ("plan", "verify", "draft")},
        "batch_forwards": int(usage.steps),
        "rows_at_work": usage.occupancy,
        "positions_per_batch_forward": usage.computed / usage.steps,
        "compile_seconds": entry.compiling,
        "peak_memory_so_far": None if entry.memory is None else dict(zip(("bytes", "of"), entry.memory, strict=True)),
        "time": entry.parts._asdict(),
        "forward_seconds": forward_seconds,
        "forward_bytes": moved,
        "forward_bytes_per_s": moved / forward_seconds,
        "share_of_copy": moved / forward_seconds / copied,
        "predicted_tokens_per_s": {peaks.name: predicted(entry, peaks) for peaks in all_peaks},
    }


def report(
    about: Mapping[str, Any],
    prompts: Prompts,
    entries: Sequence[Entry],
    calibration: Calibration,
    all_peaks: Sequence[Peaks],
    compare: str | None,
) -> dict[str, Any]:
    """Everything, for benchmark.json. ``about`` says what ran, and ``compare`` names the answers of another run."""
    by_batch: dict[int, list[Entry]] = {}
    for entry in entries:
        by_batch.setdefault(entry.job.batch_size, []).append(entry)
    return {
        **about,
        "copy_bytes_per_s": calibration.copied(),
        "results": [result(entry, prompts, all_peaks, calibration.copied()) for entry in entries],
        "ratios": [line._asdict() for group in by_batch.values() for line in headlines(group, prompts)],
        "peaks": [dataclasses.asdict(peaks) for peaks in all_peaks],
        "left_to_right_overtakes": [line._asdict() for line in overtaken(entries, all_peaks)],
        "compared": compared(entries, prompts, compare) if compare is not None else None,
    }


# ---- Tables ----


def table(title: str, *headings: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    out = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        out.add_column(heading, justify="right" if number else "left")
    return out


def show(figures: Mapping[str, Any], console: Console) -> None:
    """Print a report."""
    results = figures["results"]
    model, device = figures["model"], figures["device"]
    console.print(
        f"{model['parameters']:,} parameters in {model['dtype']}, {figures['prompts']['count']} prompts "
        f"({figures['prompts']['source']}), {device['kind']} ({device['machine']})\n"
    )
    speed = table(
        f"Speed, the median of {figures['repeats']}", "batch, method", "right", "tokens/s", "(spread)",
        "w/o prompts", "tokens/forward", "positions/token", "padded", "plan+verify+draft", "compiling", "peak memory",
    )  # fmt: skip
    for row in results:
        memory = row["peak_memory_so_far"]
        speed.add_row(
            f"{row['batch']:>3} {row['method']}",
            "-" if row["right"] is None else f"{row['right']} of {row['answers']}",
            f"{row['tokens_per_s']:,.1f}",
            "{:,.1f} to {:,.1f}".format(*row["tokens_per_s_spread"]),
            f"{row['tokens_per_s_behind_prompts']:,.1f}",
            f"{row['tokens_per_forward']:.2f}",
            f"{row['positions_per_token']:.2f}",
            f"{row['padded_positions_per_token']:.2f}",
            "+".join(str(count) for count in row["forwards"].values()),
            f"{row['compile_seconds']:.1f} s",
            "-" if memory is None else f"{memory['bytes'] / 1e9:.2f} GB",
        )
    console.print(speed)
    note = "compiling: what no method before it had compiled"
    if (memory := results[0]["peak_memory_so_far"]) is not None:
        note += f"; peak memory: of the {memory['of']}, from its begin until this method had decoded for the first time"
    console.print(f"{note}\n")
    show_ratios(figures, console)
    show_roofline(figures, console)
    for row in figures["compared"] or ():
        console.print(
            f"against the other run, {row['method']}, batch {row['batch']}: {row['equal']} answers are equal, "
            f"{row['near-tie']} differ at a near-tie, {row['order']} in the order of writing, {row['other']} otherwise"
        )


def show_ratios(figures: Mapping[str, Any], console: Console) -> None:
    """How many times as fast exact decoding is."""
    if not figures["ratios"]:
        return
    ratios = table(
        "Ratios", "batch, of what", "settings", "right", "tokens/s: of totals", "w/o prompts", "of means",
        "mean of ratios", "geometric mean", "tokens/forward",
    )  # fmt: skip
    for row in figures["ratios"]:
        ratios.add_row(
            f"{row['batch']:>3} {row['title']}",
            f"{row['one']} / {row['other']}",
            " / ".join("-" if right is None else str(right) for right in row["right"]),
            f"{row['ratio_of_totals']:.2f}",
            f"{row['ratio_of_totals_behind_prompts']:.2f}",
            f"{row['ratio_of_means']:.2f}",
            f"{row['mean_of_ratios']:.2f}",
            f"{row['geometric_mean_of_ratios']:.2f}",
            f"{row['tokens_per_forward']:.2f}",
        )
    console.print(ratios)
    console.print(
        "settings: of each, the fastest that is right as often as both methods can be. of totals: all tokens over all "
        "seconds; w/o prompts: without the seconds in which prompts are computed; the next three: of the tokens/s of "
        "every answer\n"
    )


def show_roofline(figures: Mapping[str, Any], console: Console) -> None:
    """What was predicted, beside what was measured."""
    names = [peaks["name"] for peaks in figures["peaks"]]
    roofline = table(
        "Roofline", "batch, method", "positions/pass", "ms/pass", "GB/pass", "GB/s", "of a copy", "tokens/s",
        *(heading for name in names for heading in (f"predicted: {name}", "predicted / measured")),
    )  # fmt: skip
    for row in figures["results"]:
        predictions = [row["predicted_tokens_per_s"][name] for name in names]
        roofline.add_row(
            f"{row['batch']:>3} {row['method']}",
            f"{row['positions_per_batch_forward']:.1f}",
            f"{1e3 * row['forward_seconds']:.2f}",
            f"{row['forward_bytes'] / 1e9:.2f}",
            f"{row['forward_bytes_per_s'] / 1e9:.1f}",
            f"{row['share_of_copy']:.0%}",
            f"{row['tokens_per_s']:,.1f}",
            *(cell for p in predictions for cell in (f"{p:,.1f}", f"{p / row['tokens_per_s']:.2f}")),
        )
    console.print(roofline)
    for peaks in figures["peaks"]:
        rates = ", ".join(f"{rate / 1e12:.3g} at {positions:g}" for positions, rate in peaks["layers"])
        console.print(
            f"{peaks['name']}: in layers {rates} positions, in 10^12 operations/s; {peaks['bandwidth'] / 1e9:.1f} "
            f"GB/s; {1e3 * peaks['overhead']:.2f} ms for every pass"
        )
    if figures["left_to_right_overtakes"]:
        when = table("\nLeft to right is as fast from batch", "method", "measured", *names)
        for row in figures["left_to_right_overtakes"]:
            batches = [row["measured"], *(row["predicted"][name] for name in names)]
            when.add_row(row["method"], *("never" if batch is None else str(batch) for batch in batches))
        console.print(when)
        console.print(
            "measured: among the batch sizes of this run; predicted: up to 1,024, as far as memory suffices\n"
        )


# ---- Figure ----

COLOURS = {"ar": "#000000", "exact": "#0072b2", "threshold": "#e69f00", "mdm": "#cc79a7"}


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Three panels: right answers against tokens per forward, tokens/s against batch size, where the time goes."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker  # type: ignore[import-not-found,unused-ignore]

    results = figures["results"]
    first = [row for row in results if row["batch"] == results[0]["batch"]]
    marks = dict(zip((row["method"] for row in first), itertools.cycle("osD^v<>PX*"), strict=False))
    picture, (answers, speed, parts) = pyplot.subplots(1, 3, figsize=(18, 6), layout="constrained")
    for row in first:
        method = row["method"]
        style = {"color": COLOURS[family(method)], "marker": marks[method]}
        share = math.nan if row["right"] is None else 100 * row["right"] / row["answers"]
        answers.plot(row["tokens_per_forward"], share, linestyle="none", label=method, **style)
        rows = [other for other in results if other["method"] == method]
        low, high = ([abs(r["tokens_per_s"] - r["tokens_per_s_spread"][end]) for r in rows] for end in (0, 1))
        batches, medians = [r["batch"] for r in rows], [r["tokens_per_s"] for r in rows]
        speed.errorbar(batches, medians, yerr=[low, high], capsize=3, label=method, **style)
    answers.set(xlabel="tokens per forward", ylabel="right answers, %", title="Right answers")
    answers.legend()
    speed.set(xlabel="batch size", ylabel="tokens/s", title="Speed", xscale="log", yscale="log")
    batches = sorted({row["batch"] for row in results})
    speed.set_xticks(batches, [str(batch) for batch in batches])
    speed.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    speed.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    speed.minorticks_off()
    names = [f"{row['method']}, batch {row['batch']}" for row in results]
    left = [0.0] * len(results)
    for part, colour in zip(Parts._fields, ("#56b4e9", "#009e73", "#bbbbbb"), strict=True):
        shares = [100 * row["time"][part] for row in results]
        parts.barh(names, shares, left=left, color=colour, label=part)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    parts.invert_yaxis()
    parts.tick_params(axis="y", labelsize=7)
    parts.set(xlabel="% of the time", title="Where the time goes")
    parts.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(Parts._fields))
    picture.savefig(path, dpi=120)
    pyplot.close(picture)
