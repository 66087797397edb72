"""Drives a decoding method for one prompt in plain Python: the twin of the compiled loop.

The engine batches rows, moves live entries to the front, takes widths and scatters into a cache. Here one row takes
one step after another; what an entry sees is looked up entry by entry, as the docstrings of `window.py` say, and keys
and values lie in a dictionary by position. So any numpy model can be decoded with a method's own `init`, `window` and
`update`, a scripted one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from refusion_jax.decoding import engine
from refusion_jax.decoding.row import DRAFT, PLAN, VERIFY
from refusion_jax.decoding.sampling import Sampling, Scores, request_key
from refusion_jax.decoding.window import SHARED
from refusion_jax.sharding import put_rows, row_shards
from tests.twins.context import Model, banned, log_probabilities
from tests.twins.noise import Sampled, sampled

_init = jax.jit(lambda method, *prompt: method.init(*prompt))
_window = jax.jit(lambda method, row: method.window(row))
_update = jax.jit(lambda method, row, window, scores: method.update(row, window, scores))


@dataclass
class Driven:
    """What became of one prompt."""

    token_ids: list[int]  # what was written before the row's end, in position order
    committed: list[tuple[int, int]]  # (offset, token) in commit order; offset = position minus prompt length
    plan_forwards: int
    verify_forwards: int
    draft_forwards: int
    plans: list[tuple[list[int], list[int]]]  # first offsets of the open slots, and of the chosen ones
    live: list[int] = field(default_factory=list)  # window entries of every forward
    logprobs: list[float] = field(default_factory=list)  # of token_ids
    cache: dict[int, tuple[NDArray, NDArray]] = field(default_factory=dict)  # keys and values [L, K, H] by position

    @property
    def forwards(self) -> int:
        return len(self.live)


def decode(
    method: engine.Method,
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    capacity: int | None = None,
    request: tuple[int, int, int] = (0, 0, 0),
) -> Driven:
    """`prompt` and `max_new_tokens` positions are `capacity` at most, by default what the engine takes for them."""
    P = len(prompt)
    S = engine.capacity(P + max_new_tokens) if capacity is None else capacity
    assert P + max_new_tokens <= S
    tokens = np.zeros(S, np.int32)
    tokens[:P] = prompt
    noise = request_key(*request)
    choose = None if method.sampling is None else choice_of(method.sampling, request)
    row = jax.device_get(_init(method, tokens, np.int32(P), np.int32(max_new_tokens), noise))

    cache: dict[int, tuple[NDArray, NDArray]] = {}
    _, keys, values = model.forward(np.array(prompt), np.arange(P), np.tri(P, dtype=bool))
    cache.update({p: (keys[:, p], values[:, p]) for p in range(P)})

    live_entries: list[int] = []
    plans: list[tuple[list[int], list[int]]] = []
    while not row.done:
        assert len(live_entries) < engine.most_steps(max_new_tokens), "decoding does not end"
        window = jax.device_get(_window(method, row))
        entries = np.flatnonzero(window.live)
        live_entries.append(len(entries))
        scores, keys, values = _forward(method, model, window, entries, cache, row, choose)
        new, stored, report = jax.device_get(_update(method, row, window, scores))
        kept = np.flatnonzero(stored)
        assert window.live[kept].all(), "keys and values of an entry that was not computed are stored"
        assert len(set(window.positions[kept])) == len(kept), "two entries are stored at one position"
        for entry in kept:
            place = np.flatnonzero(entries == entry)[0]
            cache[int(window.positions[entry])] = keys[:, place], values[:, place]
        if report.planned.any():
            plans.append(_plan(report, P, method.slot_size))
        assert new.forwards.sum() == row.forwards.sum() + 1
        assert not (row.committed & ~new.committed).any(), "a committed token is taken back"
        assert (new.tokens == row.tokens)[row.committed].all(), "a committed token is changed"
        row = new

    written = np.flatnonzero(row.committed)[P:]
    written = written[np.argsort(row.order[written])]
    committed = [(int(position) - P, int(row.tokens[position])) for position in written]
    answer = np.array([offset for offset, _ in sorted(committed) if offset + P < row.end], int)
    return Driven(
        token_ids=row.tokens[P + answer].tolist(),
        logprobs=row.logprob[P + answer].tolist(),
        committed=committed,
        plan_forwards=int(row.forwards[PLAN]),
        verify_forwards=int(row.forwards[VERIFY]),
        draft_forwards=int(row.forwards[DRAFT]),
        plans=plans,
        live=live_entries,
        cache=cache,
    )


def _forward(
    method: engine.Method,
    model: Model,
    window: Any,
    entries: NDArray,
    cache: dict,
    row: Any,
    choose: Sampled | None,
) -> tuple[Scores, NDArray, NDArray]:
    """Scores of all entries [T], and keys and values [L, live, K, H] of the live ones."""
    cached = sorted(cache)
    shared = [p for p in range(len(window.scope)) if window.scope[p] == SHARED]
    assert set(shared) <= set(cached), "a position is shown whose keys and values were never stored"
    assert row.committed[shared].all(), "a position is shown to all that is not committed"
    sees = np.array(
        [[_sees_cache(window, i, p) for p in cached] + [_sees(window, i, j) for j in entries] for i in entries]
    )
    context = None
    if cached:
        context = np.stack([cache[p][0] for p in cached], 1), np.stack([cache[p][1] for p in cached], 1)
    logits, keys, values = model.forward(window.tokens[entries], window.positions[entries], sees, context)
    return _scores(method, model, window, entries, logits, choose), keys, values


def _sees_cache(window: Any, entry: int, position: int) -> bool:
    """SHARED cache positions are seen by everybody, those of a branch by the entries of that branch."""
    scope, branch = window.scope[position], window.branch[entry]
    return bool(scope == SHARED or (branch >= 0 and scope == branch))


def _sees(window: Any, entry: int, other: int) -> bool:
    """The first `sees` entries of the trunk, and of the own branch those up to the own position."""
    if window.branch[other] == SHARED:
        return bool(window.place[other] < window.sees[entry])
    same = window.branch[entry] == window.branch[other]
    return bool(same and window.positions[other] <= window.positions[entry])


def _scores(
    method: engine.Method, model: Model, window: Any, entries: NDArray, logits: NDArray, choose: Sampled | None
) -> Scores:
    """What `sampling.score` reads off the logits, in the very arithmetic of the sequential twins."""
    T, raw = len(window.live), logits
    logits = banned(model, logits.astype(np.float32)) if method.restricted else logits.astype(np.float32)
    logits = logits - logits.max(-1, keepdims=True)
    exponents = np.exp(logits)
    total = exponents.sum(-1, keepdims=True)
    certainty = np.zeros(T, np.float32)
    certainty[entries] = (logits - np.log(total)).max(-1)
    logprob, ranked = certainty.copy(), logits
    if method.planner == "entropy":
        surprise = exponents * np.where(np.isfinite(logits), logits, 0)
        certainty[entries] = (surprise / total).sum(-1) - np.log(total[:, 0])
    if choose is not None:
        ranked = np.zeros(logits.shape)
        for place, entry in enumerate(entries):
            decides = int(window.positions[entry]) + int(window.tokens[entry] != model.mask_id)
            own = log_probabilities(model, raw[place])
            ranked[place], drawn_from = choose.scores(own, decides)
            logprob[entry] = (own if method.sampling.untempered else drawn_from)[ranked[place].argmax()]
    tokens = np.zeros((T, method.candidates), np.int32)
    tokens[entries] = np.argsort(-ranked, axis=-1, kind="stable")[:, : method.candidates]
    asked = None
    if window.asked is not None:
        asked = np.zeros(T, np.float32)
        asked[entries] = (exponents / total)[np.arange(len(entries)), window.asked[entries]]
    return Scores(tokens, logprob, certainty, asked)


def choice_of(sampling: Sampling, request: tuple[int, int, int]) -> Sampled:
    """How the twins choose tokens by a method's own settings."""
    top_k = 0 if sampling.top_k is None else int(sampling.top_k)
    top_p = 1.0 if sampling.top_p is None else float(sampling.top_p)
    return sampled(*request, float(sampling.temperature), top_k, top_p)


def _plan(report: Any, P: int, slot_size: int) -> tuple[list[int], list[int]]:
    """First offsets of the slots that were open and of those that were chosen."""
    firsts = range(0, len(report.planned), slot_size)
    base = int(report.base) - P
    return (
        [base + first for first in firsts if report.planned[first]],
        [base + first for first in firsts if report.chosen[first]],
    )


def begin(
    model: Any,
    method: engine.Method,
    tokens: Any,
    lengths: Any,
    budgets: Any,
    *,
    width: int | None = None,
    seed: int = 0,
) -> engine.State:
    """A batch whose prompts [B, S] are all cached, before the first step. A row is the request of its number."""
    rows, capacity = tokens.shape
    noise = np.stack([np.full(rows, seed), np.arange(rows), np.zeros(rows)], 1).astype(np.uint32)
    per_shard = np.tile(np.arange(rows // row_shards(), dtype=np.int32), row_shards())
    arrivals = engine.Arrivals(*put_rows((tokens, lengths, budgets, noise, per_shard)))
    state = engine.idle(method, config=model.config, rows=rows, capacity=capacity)
    width = engine.prefill_width(int(np.max(lengths))) if width is None else width
    return engine.admit(model.params, method, state, arrivals, None, config=model.config, width=width)
