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
) -> Scores:
    """The best ``candidates`` tokens and their probabilities, over the allowed ids alone."""
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    if candidates == 1:
        tokens = jnp.argmax(logits, axis=-1)[..., None]
    else:
        # Behind the barrier no slice of the result can merge into it: XLA would then sort the whole vocabulary.
        tokens = jax.lax.optimization_barrier(jax.lax.top_k(logits, candidates)[1])
    # The others are summed without the best, so that probabilities near 1 keep their order in float32.
    best = jnp.max(logits, axis=-1, keepdims=True)
    is_best = jnp.arange(logits.shape[-1]) == tokens[..., :1]
    others = jnp.sum(jnp.where(is_best, 0.0, jnp.exp(logits - best)), axis=-1)
    probability = None
    if asked is not None:
        wanted = jnp.take_along_axis(logits, asked[..., None], axis=-1)
        probability = jnp.exp(wanted - best)[..., 0] / (1.0 + others)
    return Scores(tokens.astype(jnp.int32), -jnp.log1p(others), probability)
