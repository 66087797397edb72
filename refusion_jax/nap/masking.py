"""Which tokens of a canvas are masked: structured masking, as NAP's code has it and its paper does not.

Of a canvas with a masking level t, uniform in [0, 1), later tokens of the summary are masked more than early ones, and
the summary is hidden until t is small: reason first, summarise last. Tags and the prompt are never masked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


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
