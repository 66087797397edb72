"""From tokenised examples to the batches of a training run: any step's batch, at any time, in any process."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

import absl.flags
import grain
import numpy as np

from refusion_jax.corrupt import Corrupted
from refusion_jax.data.batches import Batch, example_at, lay_out, noise, noisy, pack
from refusion_jax.data.dataset import Dataset
from refusion_jax.training.config import ForwardConfig

AHEAD = 4
"""Batches that are prepared ahead of the step that takes them."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How examples lie in the arrays of a batch, [pieces, R, T]. It never changes what is learnt from them.

    The number of rows is rounded up to what the devices divide, and coarsely, so that few programs are compiled.
    """

    row_length: int
    pack: bool = True  # several examples in a row; otherwise rows are as long as the longest, in steps of 64
    pieces: int = 1  # that a step is computed in, one after another
    row_shards: int = 1  # that the rows of a piece are split over
    local: Sequence[int] | None = None  # those of this process, which alone are made; None: all

    def __call__(self, lengths: Sequence[int], examples: Callable[[int], Corrupted]) -> Batch:
        """Lay out as many examples as there are lengths, or what of them is this process's."""
        rows = pack(lengths, self.row_length) if self.pack else [[member] for member in range(len(lengths))]
        width = self.row_length if self.pack else min(round_up(max(lengths), 64), self.row_length)
        unit = self.pieces * self.row_shards
        count = round_up(len(rows), unit * coarse(len(rows) // unit))
        rows += [[]] * (count - len(rows))
        places = np.arange(count).reshape(self.pieces, self.row_shards, -1)
        if self.local is not None:
            places = places[:, list(self.local)]
        batch = lay_out(examples, [rows[place] for place in places.flat], places.size, width)
        return Batch(*(array.reshape(self.pieces, -1, width) for array in batch))


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of all steps, by number: the examples of a step and their noise follow from seed and step alone."""

    dataset: Dataset
    forward: ForwardConfig
    mask_token_id: int | None
    layout: Layout
    steps: int
    batch_size: int  # examples of a step
    seed: int

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Batch:
        first = step * self.batch_size
        places = [example_at(place, len(self.dataset), self.seed) for place in range(first, first + self.batch_size)]

        def corrupted(member: int) -> Corrupted:
            epoch, index = places[member]
            rng = noise(self.seed, epoch, index)
            return noisy(self.dataset[index], self.forward, self.mask_token_id, rng, step / self.steps)

        return self.layout([int(self.dataset.lengths[index]) for _, index in places], corrupted)

    def read(self, first: int, workers: int = 0) -> Iterator[Batch]:
        """The batches of steps ``first``, ``first`` + 1, ..., prepared ahead by threads or ``workers`` processes."""
        steps = grain.MapDataset.range(first, self.steps).map(self.__getitem__)
        options = grain.ReadOptions(num_threads=0 if workers else 1, prefetch_buffer_size=0 if workers else AHEAD)
        ahead = steps.to_iter_dataset(options)
        if workers:
            if not absl.flags.FLAGS.is_parsed():  # grain's workers are handed the flags of a program that has none
                absl.flags.FLAGS.mark_as_parsed()
            ahead = ahead.mp_prefetch(
                grain.MultiprocessingOptions(workers, per_worker_buffer_size=AHEAD), _follow_parent
            )
        return iter(ahead)


def _follow_parent(worker: int, workers: int) -> None:
    """In a worker: signals are for the process that trains, and the worker ends with it, even if it is killed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def end() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def round_up(number: int, unit: int) -> int:
    """``number``, or the next multiple of ``unit``."""
    return -(-number // unit) * unit


def coarse(number: int) -> int:
    """The unit by which about ``number`` rows are rounded: a power of two, and at most an eighth of them."""
    return 1 << max(number.bit_length() - 4, 0)
