"""Which tokens of a canvas are masked, and what they weigh, as NAP's code has it and its paper does not say.

*Structured masking*: with a masking level t, uniform in [0, 1), later tokens of the summary are masked more than early
ones, and the summary is hidden until t is small: reason first, summarise last. Tags and the prompt are never masked.

*CART* (Dream 7B, arXiv 2508.15487, section 3.3): a masked token weighs the more the more of its neighbours are clean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.signal
from numpy.typing import NDArray


class Masked(NamedTuple):
    """The noise of a canvas: of the tokens of all its regions, one behind the other."""

    masked: NDArray[np.bool_]  # [tokens]
    weights: NDArray[np.float64]  # [tokens]: 1 / rate where a token is masked, else 0


@dataclasses.dataclass(frozen=True)
class StructuredMasking:
    """How rates of masking lie in a canvas; the defaults are those of NAP's code.

    Raises:
      ValueError: a setting is out of its range.
    """

    largest: float = 0.9
    """Rate at t = 1 of a token that no slope touches, r_max there."""
    summary_from: float = 0.8
    """The summary is masked whole while 1 - t is below it, alpha there."""
    path_slope: float = 0.0
    """How much higher the rate of a path's last token is than that of its first, as a share; kappa_think there."""
    summary_slope: float = 1.0
    """The same in the summary; kappa_summary there."""
    shuffle_paths: bool = False
    """Whether paths change places at random; shuffle_think there."""

    def __post_init__(self) -> None:
        for name in ("largest", "summary_from"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be from 0 to 1")
        for name in ("path_slope", "summary_slope"):
            if not getattr(self, name) >= -1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least -1")

    def rates(self, t: float, lengths: Sequence[int]) -> list[NDArray[np.float64]]:
        """The probability that each token is masked: of every path, and of the summary, which is the last region.

        Args:
          t: the masking level, from 0 (nothing) to 1.
          lengths: tokens of every region.
        """
        rate = min(1.0, t * self.largest)

        def sloped(length: int, slope: float) -> NDArray[np.float64]:
            return np.clip(rate * (1 + slope * np.linspace(0, 1, length)), 0, 1)

        *paths, summary = lengths
        hidden = 1 - t < self.summary_from
        last = np.ones(summary) if hidden else sloped(summary, self.summary_slope)
        return [*(sloped(length, self.path_slope) for length in paths), last]

    def draw(self, lengths: Sequence[int], rng: np.random.Generator) -> Masked:
        """The noise of a canvas whose regions have ``lengths`` tokens, paths first."""
        rates = np.concatenate(self.rates(rng.random(), lengths))
        masked = rng.random(len(rates)) < rates
        return Masked(masked, masked / np.where(masked, rates, 1))


def cart_weights(masked: NDArray[np.bool_], p: float = 0.1) -> NDArray[np.float64]:
    """What masked tokens weigh by CART, [T] by true position; 0 where a token is clean, as the prompt's are.

    Half the sum over all clean positions of p (1 - p)^(distance - 1). The loss of an example is the mean over its
    masked tokens of weight times cross entropy.

    Raises:
      ValueError: ``p`` is not above 0 and at most 1.
    """
    if not 0 < p <= 1:
        raise ValueError(f"p={p} must be above 0 and at most 1")
    clean = (~masked).astype(np.float64)

    def from_left(clean: NDArray[np.float64]) -> NDArray[np.float64]:  # y[n] = clean[n - 1] + (1 - p) y[n - 1]
        return np.asarray(scipy.signal.lfilter([0, 1], [1, p - 1], clean))

    return np.where(masked, p / 2 * (from_left(clean) + from_left(clean[::-1])[::-1]), 0)
