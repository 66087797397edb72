"""From logits to tokens: which ids may be generated, which one is chosen, and how probable it was.

A token is chosen as argmax(log p' + g), where p' is the distribution after temperature, top-k and top-p, and g is
Gumbel noise: an exact draw from p'. Greedily there is no noise. The noise of a token is a function of the seed, the
request, the token's position and its id, and of nothing else: a draft, a probe and the place that verifies a token
share it, so that a draft is right if and only if it equals its target, sampled or not, and a batch, its order, padding
or a mesh change no answer.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from refusion_jax.config import DecodeConfig, ModelConfig

NO_TOKEN = 0xFFFFFFFF  # stands for an id where noise belongs to a position itself


class Sampling(flax.struct.PyTreeNode):
    """How tokens are drawn. Where there is none, the most likely one is taken."""

    temperature: jax.Array  # float32, positive
    top_k: jax.Array | None  # int32; None: all
    top_p: jax.Array | None  # float32; None: 1
    untempered: bool = flax.struct.field(pytree_node=False, default=False)  # log-probabilities are the model's own


def sampling_of(config: DecodeConfig) -> Sampling | None:
    """What ``config`` asks for."""
    if config.temperature == 0:
        return None
    return Sampling(
        temperature=jnp.asarray(config.temperature, jnp.float32),
        top_k=jnp.asarray(min(config.top_k, 2**31 - 1), jnp.int32) if config.top_k else None,
        top_p=jnp.asarray(config.top_p, jnp.float32) if config.top_p < 1 else None,
        untempered=config.untempered_logprobs,
    )


class Scores(flax.struct.PyTreeNode):
    """What decoding reads off the logits of window entries."""

    tokens: jax.Array  # [..., C] int32: the chosen token and those that came next; equals by lowest id
    logprob: jax.Array  # [...] float32: of the chosen token, under the distribution that it was chosen from
    certainty: jax.Array  # [...] float32, logarithms: how certain the model is, before temperature
    asked: jax.Array | None  # [...] float32: probability of the asked token, before temperature


def allowed_tokens(config: ModelConfig) -> jax.Array:
    """[V] bool: ids that may be generated. The mask and rows beyond the tokenizer may not."""
    ids = jnp.arange(config.vocab_size)
    allowed = ids < (config.num_tokens or config.vocab_size)
    return allowed if config.mask_token_id is None else allowed & (ids != config.mask_token_id)


def score(
    logits: jax.Array,  # [..., V] float32
    allowed: jax.Array | None,  # [V] bool; None: every id
    asked: jax.Array | None,  # [...] int32
    sampling: Sampling | None = None,
    keys: jax.Array | None = None,  # [..., 2] uint32: noise keys of the positions that are decided; read if sampling
    *,
    candidates: int,
    entropy: bool = False,
    axis: str | None = None,
) -> Scores:
    """The best ``candidates`` tokens and their probabilities, over the allowed ids alone.

    The certainty is the log-probability of the most likely token or, with ``entropy``, minus the entropy in nats.
    With ``axis``, each device of that mesh axis holds a part of the vocabulary and of ``allowed``, in order.
    """

    def total(values: jax.Array) -> jax.Array:
        here = jnp.sum(values, axis=-1)
        return jax.lax.psum(here, axis) if axis else here

    def normaliser(shifted: jax.Array) -> jax.Array:
        # The others are summed without the best, so that probabilities near 1 keep their order in float32.
        others = total(jnp.where(shifted == 0, 0.0, jnp.exp(shifted)))
        return jnp.log1p(others + (total((shifted == 0).astype(jnp.float32)) - 1.0))

    def of(values: jax.Array, tokens: jax.Array) -> jax.Array:
        """A value of every id [..., V], of the ``tokens`` [...]."""
        place = tokens - first_id
        here = (place >= 0) & (place < size)
        value = jnp.take_along_axis(values, jnp.clip(place, 0, size - 1)[..., None], axis=-1)[..., 0]
        return jax.lax.psum(jnp.where(here, value, 0.0), axis) if axis else value

    size = logits.shape[-1]
    first_id = jax.lax.axis_index(axis) * size if axis else 0
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    best = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - (jax.lax.pmax(best, axis) if axis else best)

    ranked = logits
    if sampling is not None:
        assert keys is not None
        tempered = kept(shifted / sampling.temperature, sampling, total)
        ranked = tempered + gumbel(keys, first_id + jnp.arange(size))
    # Behind the barrier no slice of the result can merge into it: XLA on CPU would then sort the whole vocabulary.
    tokens = jax.lax.optimization_barrier(best_places(ranked, candidates))
    if axis:
        tokens = best_of_shards(tokens + first_id, jnp.take_along_axis(ranked, tokens, axis=-1), axis)

    normal = normaliser(shifted)
    certainty = -normal
    if entropy:
        surprise = jnp.where(jnp.isneginf(shifted), 0.0, jnp.exp(shifted) * shifted)
        certainty = total(surprise) * jnp.exp(-normal) - normal
    logprob = -normal
    if sampling is not None and sampling.untempered:
        logprob = of(shifted, tokens[..., 0]) - normal
    elif sampling is not None:
        logprob = of(tempered, tokens[..., 0]) - normaliser(tempered)
    probability = None if asked is None else jnp.exp(of(shifted, asked) - normal)
    return Scores(tokens.astype(jnp.int32), logprob, certainty, probability)


def best_places(ranked: jax.Array, count: int) -> jax.Array:
    """Where the ``count`` largest of [..., V] are, the largest first; of equals the first."""
    # XLA on TPU has a fast top-k for matrices, and sorts everything else whole.
    matrix = ranked.reshape(-1, ranked.shape[-1])
    return jax.lax.top_k(matrix, count)[1].reshape(*ranked.shape[:-1], count)


def best_of_shards(tokens: jax.Array, ranked: jax.Array, axis: str) -> jax.Array:
    """The best candidates [..., C] of all shards from the best of each, and what they are ranked by."""
    candidates = tokens.shape[-1]
    tokens = jax.lax.all_gather(tokens, axis, axis=tokens.ndim - 1, tiled=True)
    ranked = jax.lax.all_gather(ranked, axis, axis=ranked.ndim - 1, tiled=True)
    place = best_places(ranked, candidates)  # equals: the first, which has the lowest id
    return jnp.take_along_axis(tokens, place, axis=-1)


def kept(tempered: jax.Array, sampling: Sampling, total: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Tempered logits [..., V], the largest of them 0, with -inf for what top-k and then top-p leave out.

    Top-k keeps the ids that are no less likely than the k-th; top-p, of what is left, those that are no less likely
    than the last one needed to reach the probability p. Equally likely ids stay or go together, so that no order of
    the vocabulary matters. ``total`` sums [..., V] over the vocabulary.
    """
    if sampling.top_k is not None:
        k = sampling.top_k
        tempered = at_least(tempered, lambda chosen: total(chosen.astype(jnp.int32)) >= k)
    if sampling.top_p is not None:
        mass = jnp.exp(tempered)
        wanted = sampling.top_p * total(mass)
        tempered = at_least(tempered, lambda chosen: total(jnp.where(chosen, mass, 0.0)) >= wanted)
    return tempered


def at_least(values: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """``values`` [..., V] of at most 0, with -inf for those below the largest bound that leaves enough of them.

    The bound is found by bisection over all floats, 31 sums over the vocabulary and no sort; ``enough`` maps which are
    left [..., V] to bool [...]. If all of them are not enough, all are left.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    rank = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
    low = jnp.full(values.shape[:-1], -0x7F800001, jnp.int32)  # the rank of -inf
    high = jnp.ones_like(low)  # above 0, where none is left

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        leaves_enough = enough(rank >= middle[..., None])
        return jnp.where(leaves_enough, middle, low), jnp.where(leaves_enough, high, middle)

    low, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
    return jnp.where(rank >= low[..., None], values, -jnp.inf)


# ---- Noise ----


def request_key(seed: int | jax.Array, request: int | jax.Array, sample: int | jax.Array) -> jax.Array:
    """The key [2] uint32 of all noise of one sample of one request."""
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, request), sample))


def fold_in(key: jax.Array, number: jax.Array) -> jax.Array:
    """The key [2] uint32 of one ``number`` under ``key`` [2] uint32."""
    return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), number))


def uniform(bits: jax.Array) -> jax.Array:
    """32 random bits, uint32, as a float32 in (0, 1), precise near 0."""
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)


def gumbel(keys: jax.Array, ids: jax.Array) -> jax.Array:
    """Gumbel noise [..., V] float32 of the ``ids`` [V], for each key [..., 2] uint32.

    The uniform number is smallest where the noise is largest, so that float32 resolves the draws of rare tokens.
    """

    def of_key(key: jax.Array) -> jax.Array:
        bits = jax.vmap(fold_in, (None, 0))(key, ids)[:, 0]
        return -jnp.log(-jnp.log1p(-uniform(bits)))

    return jnp.vectorize(of_key, signature="(k)->(v)")(keys)
