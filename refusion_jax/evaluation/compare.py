"""What was measured, compared: methods with each other, with what ``roofline.py`` predicts, with another run.

Rates are totals over totals. What is predicted follows from sizes, from the tokens and positions of a forward pass that
were counted, and from the peaks of a device.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from refusion_jax.cli.options import UserError
from refusion_jax.decoding import engine
from refusion_jax.decoding.generate import Generation
from refusion_jax.evaluation.measure import PLAIN, Entry, Prompts
from refusion_jax.evaluation.roofline import Forward, Peaks, largest_batch, overtaken_at, tokens_per_second

NEAR_TIE = 1e-4  # two probabilities that are closer may change places with the order of float sums, in float32

# ---- Headline ratios ----


class Ratio(NamedTuple):
    """How many times as fast one entry is as another, in every convention in use."""

    batch: int
    title: str
    one: str
    other: str
    right: tuple[int | None, int | None]
    tokens_per_forward: float  # total over total, one over other
    ratio_of_totals: float  # all tokens over all seconds, one over other
    ratio_of_totals_behind_prompts: float  # the same without the seconds in which prompts were computed
    ratio_of_means: float  # the mean of the answers' tokens/s, one over other
    mean_of_ratios: float  # over answers
    geometric_mean_of_ratios: float


def ratio(title: str, one: Entry, other: Entry, prompts: Prompts) -> Ratio:
    """How many times as fast ``one`` is as ``other``."""
    speeds, others = one.speeds(), other.speeds()
    ratios = [speed / against for speed, against in zip(speeds, others, strict=True)]
    per_forward = [entry.usage.tokens / entry.usage.forwards for entry in (one, other)]
    return Ratio(
        batch=one.job.batch_size,
        title=title,
        one=one.method,
        other=other.method,
        right=(one.right(prompts), other.right(prompts)),
        tokens_per_forward=per_forward[0] / per_forward[1],
        ratio_of_totals=one.speed / other.speed,
        ratio_of_totals_behind_prompts=one.speed_behind_prompts / other.speed_behind_prompts,
        ratio_of_means=statistics.mean(speeds) / statistics.mean(others),
        mean_of_ratios=statistics.mean(ratios),
        geometric_mean_of_ratios=math.exp(statistics.mean(map(math.log, ratios))),
    )


def fastest_at_equal_right(ones: Sequence[Entry], others: Sequence[Entry], prompts: Prompts) -> tuple[Entry, Entry]:
    """The fastest entry of each side among those that are right as often as both sides can be.

    That is as often as the most often right entry of the side whose most often right entry is right less often. Where
    right answers are not known, the fastest of each side.
    """
    level = min(max(entry.right(prompts) or 0 for entry in side) for side in (ones, others))

    def fastest(side: Sequence[Entry]) -> Entry:
        return max((entry for entry in side if (entry.right(prompts) or 0) >= level), key=lambda entry: entry.speed)

    return fastest(ones), fastest(others)


def headlines(entries: Sequence[Entry], prompts: Prompts) -> list[Ratio]:
    """Exact over every other method, each at its best, of one batch size."""
    sides: dict[str, list[Entry]] = {}
    for entry in entries:
        sides.setdefault(entry.family, []).append(entry)
    exact = sides.pop("exact", None)
    if exact is None:
        return []
    out = []
    for name, others in sides.items():
        plain = [other for other in others if other.method == PLAIN]
        if plain != others:
            out.append(ratio(f"exact / {name}", *fastest_at_equal_right(exact, others, prompts), prompts))
        if plain:
            title = f"exact / plain {name}, one token a step"
            out.append(ratio(title, *fastest_at_equal_right(exact, plain, prompts), prompts))
    return out


# ---- Predictions ----


def prompt_seconds(entry: Entry, peaks: Peaks) -> float:
    """Seconds that prompts take, for every forward pass behind them."""
    job, usage = entry.job, entry.usage
    width = engine.prefill_width(max(map(len, job.prompts)))
    together = engine.arrivals(entry.rows)
    seconds = 0.0
    for prompt in job.prompts:
        for chunk in range(-(-len(prompt) // width)):
            forward = Forward(width * together, together, width, entry.decoding.cached * bool(chunk), head=False)
            seconds += peaks.seconds(job.model.config, forward) / together
    return seconds / usage.steps


def predicted(entry: Entry, peaks: Peaks) -> float:
    """Tokens/s of an entry."""
    config = entry.job.model.config
    return tokens_per_second(config, peaks, entry.decoding, entry.rows, prompt_seconds(entry, peaks))


def predicted_at(entries: Sequence[Entry], peaks: Peaks) -> Callable[[int], float]:
    """Tokens/s of a method at any batch size, from what it did at the largest measured one that is not larger."""

    def speed(rows: int) -> float:
        entry = max((e for e in entries if e.rows <= rows), key=lambda e: e.rows, default=entries[0])
        return tokens_per_second(entry.job.model.config, peaks, entry.decoding, rows)

    return speed


class Overtaken(NamedTuple):
    """The batch size at which left-to-right decoding is as fast as a method."""

    method: str
    measured: int | None  # the smallest measured one; None: at none
    predicted: dict[str, int | None]  # by the peaks' name; None: at none that fits into the memory, up to 1,024


def overtaken(entries: Sequence[Entry], all_peaks: Sequence[Peaks]) -> list[Overtaken]:
    """When left-to-right decoding overtakes each other method. Prompts take the same time with both."""
    by_method: dict[str, list[Entry]] = {}
    for entry in entries:
        by_method.setdefault(entry.method, []).append(entry)
    out = []
    left_to_right = by_method.pop("ar", [])
    for method, ones in by_method.items() if left_to_right else ():
        pairs = zip(ones, left_to_right, strict=True)
        measured = next((one.job.batch_size for one, other in pairs if other.speed >= one.speed), None)
        predictions = {}
        for peaks in all_peaks:
            limit = largest_batch(ones[0].job.model.config, peaks, ones[0].decoding.capacity)
            speeds = predicted_at(ones, peaks), predicted_at(left_to_right, peaks)
            predictions[peaks.name] = overtaken_at(*speeds, limit)
        out.append(Overtaken(method, measured, predictions))
    return out


# ---- Another run ----


def recorded(answer: Generation) -> dict[str, Any]:
    """What ``difference`` needs of an answer."""
    return {
        "token_ids": answer.token_ids,
        "commit_order": answer.commit_order,
        "logprobs": [round(value, 6) for value in answer.logprobs],
    }


Difference = Literal["equal", "near-tie", "order", "other"]


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> Difference:
    """How two answers to a prompt differ first, in the order in which they were written.

    near-tie: another token was taken, and both are so near one half, or under it, and so near each other that they may
    have changed places by rounding. order: a token of another place was written, as when other slots were chosen.
    """
    if one["token_ids"] == other["token_ids"]:
        return "equal"
    for place, against in zip(one["commit_order"], other["commit_order"], strict=False):
        if place != against:
            return "order"
        if one["token_ids"][place] != other["token_ids"][place]:
            probabilities = [math.exp(answer["logprobs"][place]) for answer in (one, other)]
            tie = max(probabilities) < 0.5 + NEAR_TIE and abs(probabilities[0] - probabilities[1]) < NEAR_TIE
            return "near-tie" if tie else "other"
    return "order"


def compared(entries: Sequence[Entry], prompts: Prompts, file: str) -> list[dict[str, Any]]:
    """How many answers equal those of another run, by method and batch size. Raises UserError."""
    try:
        there = json.loads(Path(file).read_text(encoding="utf-8"))
        of_others, answers = there["prompts"], there["answers"]
    except OSError as error:
        raise UserError(f"--compare {file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--compare {file} is no answers.json that this command wrote") from None
    if of_others != digest(prompts):
        raise UserError(f"--compare {file} holds answers to other prompts")
    out = []
    for entry in entries:
        key = key_of(entry)
        if key in answers:
            pairs = zip(map(recorded, entry.answers), answers[key], strict=True)
            found = [difference(one, other) for one, other in pairs]
            counts = {kind: found.count(kind) for kind in ("equal", "near-tie", "order", "other")}
            out.append({"method": entry.method, "batch": entry.job.batch_size, **counts})
    return out


def key_of(entry: Entry) -> str:
    """How answers.json calls an entry."""
    return f"{entry.method}, batch {entry.job.batch_size}"


def digest(prompts: Prompts) -> str:
    """Of all prompts."""
    return hashlib.sha256(json.dumps(prompts.prompts).encode()).hexdigest()
