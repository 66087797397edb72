"""From logits to tokens: which ids may be generated, which one is chosen, and how probable it was."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from refusion_jax.config import ModelConfig


class Scores(flax.struct.PyTreeNode):
    """What decoding reads off the logits of window entries."""

    tokens: jax.Array  # [..., C] int32: the most likely tokens, best first, equal logits by lowest id
    logprob: jax.Array  # [...] float32: log-probability of the first of them
    asked: jax.Array | None  # [...] float32: probability of the asked token


def allowed_tokens(config: ModelConfig) -> jax.Array:
    """[V] bool: ids that may be generated. The mask and rows beyond the tokenizer may not."""
    ids = jnp.arange(config.vocab_size)
    allowed = ids < (config.num_tokens or config.vocab_size)
    return allowed if config.mask_token_id is None else allowed & (ids != config.mask_token_id)


def score(
    logits: jax.Array,  # [..., V] float32
    allowed: jax.Array | None,  # [V] bool; None: every id
    asked: jax.Array | None,  # [...] int32
    *,
    candidates: int,
    axis: str | None = None,
) -> Scores:
    """The best ``candidates`` tokens and their probabilities, over the allowed ids alone.

    With ``axis``, each device of that mesh axis holds a part of the vocabulary and of ``allowed``, in order.
    """
    size = logits.shape[-1]
    first_id = jax.lax.axis_index(axis) * size if axis else 0
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    # Behind the barrier no slice of the result can merge into it: XLA on CPU would then sort the whole vocabulary.
    tokens = jax.lax.optimization_barrier(jax.lax.top_k(logits, candidates)[1])
    best = jnp.max(logits, axis=-1, keepdims=True)
    tokens += first_id
    if axis:
        tokens, best = best_of_shards(tokens, jnp.take_along_axis(logits, tokens - first_id, axis=-1), axis)
    # The others are summed without the best, so that probabilities near 1 keep their order in float32.
    is_best = first_id + jnp.arange(size) == tokens[..., :1]
    others = jnp.sum(jnp.where(is_best, 0.0, jnp.exp(logits - best)), axis=-1)
    probability = None
    if asked is not None:
        place = asked[..., None] - first_id
        here = (place >= 0) & (place < size)
        wanted = jnp.take_along_axis(logits, jnp.clip(place, 0, size - 1), axis=-1)
        probability = jnp.where(here, jnp.exp(wanted - best), 0.0)[..., 0]
    if axis:
        others, probability = jax.lax.psum((others, probability), axis)
    if probability is not None:
        probability /= 1.0 + others
    return Scores(tokens.astype(jnp.int32), -jnp.log1p(others), probability)


def best_of_shards(tokens: jax.Array, logits: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """The best candidates [..., C] of all shards from the best of each, and the largest logit [..., 1]."""
    candidates = tokens.shape[-1]
    tokens = jax.lax.all_gather(tokens, axis, axis=tokens.ndim - 1, tiled=True)
    logits = jax.lax.all_gather(logits, axis, axis=logits.ndim - 1, tiled=True)
    largest, place = jax.lax.top_k(logits, candidates)  # equal logits: the first, which has the lowest id
    return jnp.take_along_axis(tokens, place, axis=-1), largest[..., :1]
