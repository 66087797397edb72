"""Drawing a token, in float64: the choice that sampled decoding must make, and how probable it was.

The distribution p' of a token is the model's at the temperature, cut by top-k and then by top-p; the token is
argmax(log p' + g) with Gumbel noise g. The random bits behind g are jax's, the first word of the threefry key
key(seed) -> request -> sample -> position -> token, every arrow one `fold_in`; what is made of them is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from tests.twins import exact
from tests.twins.context import Choice, greedy
from tests.twins.exact import Planner

NO_TOKEN = 2**32 - 1  # stands for a token in the noise of a position itself
TOP_P_TIE = 1e-5  # a top-p that is off by this may keep another set
TOP_K_TIE = 1e-4  # logarithms of probabilities closer than this may change places at the edge of top-k


# --- noise --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def key_of(seed: int, request: int, sample: int) -> jax.Array:
    """The key of all noise of one sample of one request."""
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, request), sample)


@partial(jax.jit, static_argnames="vocabulary")
def _bits(key: jax.Array, positions: jax.Array, vocabulary: int) -> jax.Array:
    def of(position: jax.Array, token: jax.Array) -> jax.Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, position), token))[0]

    return jax.vmap(jax.vmap(of, (None, 0)), (0, None))(positions, jnp.arange(vocabulary))


@lru_cache(maxsize=512)
def _page(seed: int, request: int, sample: int, page: int, vocabulary: int) -> NDArray:
    """Bits of 64 positions, [64, V] uint32."""
    return np.asarray(_bits(key_of(seed, request, sample), 64 * page + np.arange(64), vocabulary))


def uniform(bits: NDArray) -> NDArray:
    """32 random bits as a number in (0, 1), float32 as the library's: near 1 its steps are coarse."""
    return np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))


def gumbel(seed: int, request: int, sample: int, position: int, vocabulary: int) -> NDArray:
    """Gumbel noise [V] of every token at a position."""
    page, place = divmod(position, 64)
    bits = _page(seed, request, sample, page, -(-vocabulary // 16) * 16)[place, :vocabulary]
    return -np.log(-np.log1p(-uniform(bits).astype(np.float64)))


# --- the distribution ---------------------------------------------------------------------------------------


def tempered(
    log_probabilities: NDArray, temperature: float, top_k: int = 0, top_p: float = 1.0, *, shift: float = 0.0
) -> NDArray:
    """log p' [V] float64 of log p [V]: -inf for what is left out. Equally likely tokens stay or go together.

    `shift` moves the edge of top-k.
    """
    values = log_probabilities.astype(np.float64) / temperature
    values -= values.max()
    if top_k:
        ordered = np.sort(values)[::-1]
        values = np.where(values >= min(ordered[min(top_k, len(values)) - 1] + shift, 0), values, -np.inf)
    if top_p < 1:
        ordered = np.sort(values)[::-1]
        mass = np.cumsum(np.exp(ordered))
        last = np.searchsorted(mass, top_p * mass[-1])  # of those that are needed to reach the probability
        values = np.where(values >= ordered[last], values, -np.inf)
    return values - np.log(np.exp(values).sum())


# --- the choice ---------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """What is known of one choice."""

    token: int
    logprobs: list[float]  # log p' of the token; behind the first what it is if the edge of p' lies a little elsewhere
    own: float  # log p, the model's own


@dataclass
class Sampled:
    """Chooses tokens as `context.Choose` and remembers what it chose. At temperature 0 it takes the most likely."""

    seed: int
    request: int
    sample: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    drawn: dict[int, Drawn] = field(default_factory=dict)  # by position

    def __call__(self, log_probabilities: NDArray, position: int) -> Choice:
        choice, logprobs = self.choice(log_probabilities, position)
        self.drawn[position] = Drawn(choice.token, logprobs, float(log_probabilities[choice.token]))
        return choice

    def choice(self, log_probabilities: NDArray, position: int) -> tuple[Choice, list[float]]:
        """The token and its margin: the gap of the noisy scores, at most 1, and 0 if a nearby p' gives another one."""
        if self.temperature == 0:
            choice = greedy(log_probabilities, position)
            return choice, [float(log_probabilities[choice.token])]
        ranked, log_p = self.scores(log_probabilities, position)
        token = int(ranked.argmax())
        second, first = np.sort(ranked)[-2:]
        margin, logprobs = min(float(first - second), 1.0), [float(log_p[token])]
        for log_p in self.nearby(log_probabilities):
            logprobs.append(float(log_p[token]))
            if int((log_p + self.noise(position, len(log_p))).argmax()) != token:
                margin = 0.0
        return Choice(token, margin), logprobs

    def scores(self, log_probabilities: NDArray, position: int) -> tuple[NDArray, NDArray]:
        """log p' + g, by which tokens are ranked, and log p', each [V]."""
        log_p = tempered(log_probabilities, self.temperature, self.top_k, self.top_p)
        return log_p + self.noise(position, len(log_p)), log_p

    def noise(self, position: int, vocabulary: int) -> NDArray:
        return gumbel(self.seed, self.request, self.sample, position, vocabulary)

    def nearby(self, log_probabilities: NDArray) -> Iterator[NDArray]:
        """log p' if its edges lay a little elsewhere."""
        if self.top_p < 1:
            for top_p in (self.top_p - TOP_P_TIE, self.top_p + TOP_P_TIE):
                yield tempered(log_probabilities, self.temperature, self.top_k, min(max(top_p, 0), 1))
        if self.top_k:
            for shift in (-TOP_K_TIE, TOP_K_TIE):
                yield tempered(log_probabilities, self.temperature, self.top_k, self.top_p, shift=shift)


def sampled(seed: int, request: int, sample: int, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Sampled:
    """A `context.Choose` that draws the tokens of one sample of one request."""
    return Sampled(seed, request, sample, temperature, top_k, top_p)


# --- planners -----------------------------------------------------------------------------------------------


def random(seed: int, request: int, sample: int) -> Planner:
    """Slots are as certain as a number that is uniform between 0 and 1, drawn at their first position."""

    def certainty(log_probabilities: NDArray, slot: int, position: int) -> float:
        key = jax.random.fold_in(key_of(seed, request, sample), position)
        bits = jax.random.key_data(jax.random.fold_in(key, NO_TOKEN))[0]
        return float(uniform(np.asarray(bits)))

    return certainty


PLANNERS: dict[str, Callable[[int, int, int], Planner]] = {
    "confidence": lambda *request: exact.confidence,
    "mean": lambda *request: exact.mean,
    "entropy": lambda *request: exact.entropy,
    "random": random,
    "left_to_right": lambda *request: exact.left_to_right,
}
"""By the library's name; of a seed, a request and a sample."""
