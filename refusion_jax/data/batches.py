"""Which examples a step takes, what noise they get, and how they lie in rows. Pure functions of (seed, step).

A batch depends on nothing else: not on the number of hosts, nor on packing, nor on where training was interrupted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from refusion_jax.corrupt import Corrupted, corrupt, left_to_right
from refusion_jax.data.dataset import Example
from refusion_jax.training.config import ForwardConfig

ORDER, NOISE = 0, 1
"""What a generator draws: part of its seed, so that the two are independent."""


Array = Any  # numpy's in the pipeline, jax.Array in a step


class Batch(NamedTuple):
    """Examples laid out in rows, all [..., R, T]: R rows of T tokens."""

    inputs: Array  # int32
    positions: Array  # int32, true positions, in each example from 0
    targets: Array  # int32
    segments: Array  # int32: 1, 2, ... for the examples of a row, 0 behind the last
    ar_weights: Array  # float32
    masked_weights: Array  # float32


def example_at(place: int, examples: int, seed: int) -> tuple[int, int]:
    """(epoch, example) of a place in the endless sequence of shuffled epochs."""
    epoch, offset = divmod(place, examples)
    return epoch, int(_order(examples, seed, epoch)[offset])


@functools.lru_cache(maxsize=2)
def _order(examples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([ORDER, seed, epoch]).permutation(examples)


def slot_sizes_at(config: ForwardConfig, progress: float) -> tuple[int, ...]:
    """The slot sizes of which one is drawn when a share of ``progress`` of the training is over."""
    if progress >= config.curriculum:
        return config.slot_sizes
    number = int(len(config.slot_sizes) * progress / config.curriculum) + 1
    return config.slot_sizes[:number]


def noisy(
    example: Example,
    config: ForwardConfig,
    mask_token_id: int | None,
    rng: np.random.Generator,
    progress: float,
) -> Corrupted:
    """The example as the network is fed it: a slot size is drawn, and then the noise."""
    if config.objective == "ar":
        return left_to_right(example.tokens, example.prompt_length)
    assert mask_token_id is not None
    slot_size = int(rng.choice(slot_sizes_at(config, progress)))
    return corrupt(
        example.tokens,
        example.prompt_length,
        slot_size,
        rng,
        mask_token_id=mask_token_id,
        permute=config.permute,
    )


def noise(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The generator of an example's noise in an epoch."""
    return np.random.default_rng([NOISE, seed, epoch, index])


# ---- Rows ----


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Rows of at most ``row_length`` tokens, each a list of examples: first fit, the longest first."""
    rows: list[list[int]] = []
    space: list[int] = []
    for example in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[example]
        if length > row_length:
            raise ValueError(f"an example of {length} tokens does not fit into a row of {row_length}")
        row = next((row for row, free in enumerate(space) if length <= free), len(rows))
        if row == len(rows):
            rows.append([])
            space.append(row_length)
        rows[row].append(example)
        space[row] -= length
    return rows


def lay_out(
    examples: Callable[[int], Corrupted], rows: Sequence[Sequence[int]], row_count: int, row_length: int
) -> Batch:
    """The examples in their rows, with empty rows behind them up to ``row_count``. Arrays are [R, T].

    Unused places hold token 0, see only themselves and each other, and have no weight.
    """
    shape = (row_count, row_length)
    batch = Batch(*(np.zeros(shape, np.int32) for _ in range(4)), *(np.zeros(shape, np.float32) for _ in range(2)))
    for row, members in enumerate(rows):
        start = 0
        for segment, member in enumerate(members, 1):
            example = examples(member)
            place = slice(start, start + len(example.inputs))
            for name in ("inputs", "positions", "targets", "ar_weights", "masked_weights"):
                getattr(batch, name)[row, place] = getattr(example, name)
            batch.segments[row, place] = segment
            start = place.stop
    return batch
