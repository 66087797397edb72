"""What happened to a row, iteration by iteration."""

from __future__ import annotations

from typing import Any

import numpy as np

from refusion_jax.decoding.row import Report, Row

KINDS = ("plan", "verify", "draft")


def record(before: Row, after: Row, report: Report, slot_size: int) -> dict[str, Any]:
    """One forward pass of one row, as plain numbers. Arguments hold numpy arrays of one row.

    Returns:
      kind: "plan", "verify" (it may also have planned) or "draft".
      open, certainties, chosen: if it planned: the open slots, their certainties, the slots chosen (slot numbers count
        from the begin of the answer).
      drafts: (offset, token) of the drafts that were verified; offsets count from the begin of the answer.
      accepted: offsets of those that were right.
      committed: (offset, token) in the order in which they were committed.
    """
    P = int(before.prompt_length)
    counts = after.forwards - before.forwards
    event: dict[str, Any] = {"kind": KINDS[int(np.argmax(counts))]}
    if report.planned.any():
        base = int(report.base) - P
        starts = range(0, report.planned.shape[0], slot_size)
        slots = [(s, (base + s) // slot_size) for s in starts if report.planned[s]]
        event["open"] = [number for _, number in slots]
        event["certainties"] = [float(np.exp(report.certainty[s // slot_size])) for s, _ in slots]
        event["chosen"] = [number for s, number in slots if report.chosen[s]]
    block = int(before.start) + np.arange(report.drafts.shape[0])
    event["drafts"] = [(int(p) - P, int(before.tokens[p])) for p in block[report.drafts]]
    event["accepted"] = [int(p) - P for p in block[report.drafts & report.accepted]]
    new = np.flatnonzero(after.committed & ~before.committed)
    new = new[np.argsort(after.order[new])]
    event["committed"] = [(int(p) - P, int(after.tokens[p])) for p in new]
    return event
