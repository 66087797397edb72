"""A batch of rows on the host's side: free places are filled from a queue between two calls of the compiled loop.

The loop returns when enough rows have ended; their places go to the next prompts of the queue while the others stay as
they are. A row never waits for the longest answer.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from refusion_jax.cache import KVCache
from refusion_jax.decoding import engine
from refusion_jax.decoding.row import Row
from refusion_jax.decoding.trace import record
from refusion_jax.model import Model
from refusion_jax.sharding import fetch, put_rows, row_shards

STEPS_PER_CALL = 64  # forward passes between two looks at the clock


class Request(NamedTuple):
    """One answer that is wanted."""

    number: int  # of the answer
    prompt: Sequence[int]  # samples of one prompt hold the same object, and share what is cached of it
    noise: tuple[int, int, int]  # seed, request, sample


class Ended(NamedTuple):
    """One answer as the loop left it, or as it stands."""

    request: Request
    row: Row  # numpy arrays of one row
    seconds: float  # from when the row took its place to its own end
    events: list[dict[str, Any]] | None  # what every step did, if that was traced
    drafted: np.ndarray  # [S] bool: positions that hold a draft


class Usage:
    """What a job computed, and what of it was of use."""

    steps = 0  # forward passes of the whole batch
    places = 0  # rows times steps
    forwards = 0  # of these, the ones in which the row took part
    computed = 0  # window positions, those of free and ended rows included
    positions = 0  # of these, the ones that carried something
    prefilled = 0  # prompt tokens that were computed
    tokens = 0  # of the answers

    @property
    def occupancy(self) -> float:
        """The share of rows at work."""
        return self.forwards / max(self.places, 1)

    @property
    def live(self) -> float:
        """The share of computed positions that carried something."""
        return self.positions / max(self.computed, 1)


class Batch:
    """Rows that are decoded together; see the module's docstring.

    Args:
      budget: new tokens of an answer at most.
      capacity: positions of a row, prompt and answer.
      rows: places; a multiple of the mesh's row shards.
      prefix: keys and values of tokens that all prompts begin with.
      slot_size: for traces; None: nothing is traced.
      refill: False leaves places free until all rows have ended.
    """

    def __init__(
        self,
        model: Model,
        method: engine.Method,
        *,
        budget: int,
        capacity: int,
        rows: int,
        usage: Usage,
        prefix: KVCache | None = None,
        slot_size: int | None = None,
        refill: bool = True,
    ) -> None:
        self.model, self.method, self.usage = model, method, usage
        self.budget, self.capacity, self.rows, self.slot_size = budget, capacity, rows, slot_size
        self.prefix, self.refill = prefix, refill
        self.state = engine.idle(method, config=model.config, rows=rows, capacity=capacity)
        self.requests: list[Request | None] = [None] * rows  # of the rows that are being written
        self.cached: list[Sequence[int] | None] = [None] * rows  # the prompt that every row holds in the cache
        self.started = np.zeros(rows)
        self.ended_at = np.zeros(rows)
        self.events: list[list[dict[str, Any]]] = [[] for _ in range(rows)]
        self.step = self.computed = 0
        self.arrivals = engine.arrivals(rows // row_shards())  # R, prompts of a shard that are admitted together

    def active(self) -> list[int]:
        """The rows that are being written."""
        return [row for row, request in enumerate(self.requests) if request is not None]

    # ---- From the queue ----

    def fill(self, queue: deque[Request]) -> None:
        """Give free places to the requests of the queue, in order."""
        if self.active() and not self.refill:
            return
        per_shard = self.rows // row_shards()
        free: list[deque[int]] = [deque() for _ in range(row_shards())]
        for row, request in enumerate(self.requests):
            if request is None:
                free[row // per_shard].append(row)
        while queue and any(free):
            new: list[tuple[int, Request]] = []
            again: list[tuple[int, Request]] = []
            for shard, places in enumerate(free):
                held = [prompt for row, prompt in enumerate(self.cached) if row // per_shard == shard]
                own: list[Request] = []
                while queue and places and len(own) < self.arrivals:
                    request = queue[0]
                    is_held = any(request.prompt is prompt for prompt in held)
                    if not is_held and any(request.prompt is other.prompt for other in own):
                        break  # its prompt comes with this one
                    own.append(queue.popleft())
                    (again if is_held else new).append((places.popleft(), request))
            self.copy(again)
            self.compute(new)

    def copy(self, rows: list[tuple[int, Request]]) -> None:
        """Admit requests whose prompts are cached in a row of the shard that they go to."""
        if not rows:
            return
        per_shard = self.rows // row_shards()
        sources = []
        for row, request in rows:
            first = row // per_shard * per_shard
            shard = self.cached[first : first + per_shard]
            sources.append(next(place for place, prompt in enumerate(shard) if prompt is request.prompt))
        arrivals, where = self.arrange(rows)
        sources_of = np.zeros(len(arrivals.places), np.int32)
        sources_of[where] = sources
        self.state = engine.admit_again(self.method, self.state, put_rows(arrivals), put_rows(sources_of))
        self.seat(rows)

    def compute(self, rows: list[tuple[int, Request]]) -> None:
        """Admit requests whose prompts are not cached."""
        if not rows:
            return
        arrivals, _ = self.arrange(rows)
        behind = 0 if self.prefix is None else self.prefix.capacity
        width = engine.prefill_width(max(len(request.prompt) for _, request in rows) - behind)
        self.state = engine.admit(
            self.model.params,
            self.method,
            self.state,
            put_rows(arrivals),
            self.prefix,
            config=self.model.config,
            width=width,
        )
        self.usage.prefilled += sum(len(request.prompt) - behind for _, request in rows)
        self.seat(rows)

    def arrange(self, rows: list[tuple[int, Request]]) -> tuple[engine.Arrivals, list[int]]:
        """The arrivals, those of each shard behind each other, and where each of ``rows`` stands among them."""
        per_shard, R = self.rows // row_shards(), self.arrivals
        total = R * row_shards()
        tokens = np.zeros((total, self.capacity), np.int32)
        lengths, budgets = np.ones(total, np.int32), np.zeros(total, np.int32)
        noise = np.zeros((total, 3), np.uint32)
        places = np.tile(per_shard + np.arange(R, dtype=np.int32), row_shards())  # nowhere
        taken = [0] * row_shards()
        where = []
        for row, request in rows:
            shard = row // per_shard
            place = shard * R + taken[shard]
            taken[shard] += 1
            tokens[place, : len(request.prompt)] = request.prompt
            lengths[place], budgets[place] = len(request.prompt), self.budget
            noise[place] = request.noise
            places[place] = row % per_shard
            where.append(place)
        return engine.Arrivals(tokens, lengths, budgets, noise, places), where  # type: ignore[arg-type]

    def seat(self, rows: list[tuple[int, Request]]) -> None:
        """Note who has which place, from now on."""
        now = time.perf_counter()
        for row, request in rows:
            self.requests[row], self.cached[row] = request, request.prompt
            self.started[row], self.events[row] = now, []

    # ---- Steps ----

    def advance(self, waiting: int, steps: int = STEPS_PER_CALL) -> None:
        """Run until so many rows have ended as can be filled again, or all, but not more than ``steps`` passes.

        Args:
          waiting: requests in the queue.

        Raises:
          ValueError: the model gives logits that are no numbers.
          RuntimeError: an answer takes more forward passes than any needs.
        """
        active = self.active()
        enough = len(active) if not (waiting and self.refill) else min(self.arrivals, len(active))
        before, step = time.perf_counter(), self.step
        if self.slot_size is None:
            limit, enough_done = jnp.int32(step + steps), jnp.int32(self.rows - len(active) + enough)
            self.state = engine.run(
                self.model.params, self.method, self.state, limit, enough_done, config=self.model.config
            )
        else:
            self.trace(active, self.slot_size)
        state = self.state
        finished_at, forwards, now_at, computed, finite = fetch(
            (state.rows.finished_at, state.rows.forwards, state.step, state.computed, state.finite)
        )
        if not finite:
            raise ValueError("the model gives logits that are no numbers (NaN): its weights are damaged, or overflow")
        self.done = finished_at >= 0
        taken = forwards.sum(axis=1)
        if any(taken[row] >= engine.most_steps(self.budget) for row in active if not self.done[row]):
            raise RuntimeError(f"decoding did not end within {taken.max()} forward passes; please report this as a bug")
        now = time.perf_counter()
        self.step = int(now_at)
        self.usage.steps += self.step - step
        self.usage.places += (self.step - step) * self.rows
        self.usage.computed += (int(computed) - self.computed) * row_shards()
        self.computed = int(computed)
        # Inside one call, steps are taken to be equally long.
        part = (finished_at - step) / max(self.step - step, 1)
        self.ended_at = np.where(self.done & (finished_at > step), before + (now - before) * part, now)

    def trace(self, active: list[int], slot_size: int) -> None:
        """One step, and what it did to every row."""
        old = fetch(self.state.rows)
        self.state, report = engine.run_once(self.model.params, self.method, self.state, config=self.model.config)
        new, report = fetch((self.state.rows, report))
        for row in active:
            before, after, done = (of_one(tree, row) for tree in (old, new, report))
            if before.start < before.end:
                self.events[row].append(record(before, after, done, slot_size))

    # ---- Answers ----

    def ended(self) -> Iterator[Ended]:
        """The answers that have ended; their places are free."""
        yield from self.take([row for row in self.active() if self.done[row]])

    def take(self, rows: list[int]) -> Iterator[Ended]:
        """The answers of ``rows``, whose places are free then."""
        for row, ended in zip(rows, self.look(rows), strict=True):
            self.requests[row] = None
            yield ended

    def look(self, rows: list[int]) -> list[Ended]:
        """The answers of ``rows`` as they stand."""
        if not rows:
            return []
        rows_of = self.state.rows
        text = Row(**{field.name: getattr(rows_of, field.name) for field in dataclasses.fields(Row)})
        text, chosen = fetch((text, getattr(rows_of, "chosen", text.committed)))
        out = []
        for row in rows:
            request, one = self.requests[row], of_one(text, row)
            assert request is not None
            seconds = float(self.ended_at[row] - self.started[row])
            events = None if self.slot_size is None else self.events[row]
            out.append(Ended(request, one, seconds, events, chosen[row] & ~one.committed))
        return out

    def stop(self, rows: list[int]) -> None:
        """End rows where they stand."""
        if rows:
            stopped = np.isin(np.arange(self.rows), rows)
            self.state = engine.stop(self.state, put_rows(stopped))


def of_one(tree: Any, row: int) -> Any:
    """One row of a batch."""
    return jax.tree.map(lambda x: x[row], tree)
