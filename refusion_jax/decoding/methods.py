"""Which method a configuration asks for, and whether a model can be decoded by it."""

from __future__ import annotations

import warnings

import jax.numpy as jnp

from refusion_jax.config import DecodeConfig, ModelConfig
from refusion_jax.decoding import engine
from refusion_jax.decoding.autoregressive import Autoregressive
from refusion_jax.decoding.exact import Exact
from refusion_jax.decoding.masked_diffusion import MaskedDiffusion
from refusion_jax.decoding.sampling import sampling_of
from refusion_jax.decoding.threshold import Threshold


def method_of(model: ModelConfig, config: DecodeConfig) -> engine.Method:
    """The method that ``config`` asks for, or why ``model`` cannot be decoded by it (ValueError).

    Warns (UserWarning) of a slot size that the model was not trained with, and of positions that the official code
    loses.
    """
    mask = model.mask_token_id
    if mask is None and not (config.method == "ar" and config.ar_first == "token"):
        raise ValueError(
            "this model has no mask token (config.json has no mask_token_id), so slots cannot be planned: take a "
            "checkpoint trained for ReFusion, add mask_token_id to its config.json if it has one under another name, "
            "or decode it as an ordinary causal model with method='ar', ar_first='token'"
        )
    if not model.eos_token_ids:
        raise ValueError("this model has no end-of-text token: add eos_token_id to its config.json")
    sampling = sampling_of(config)
    if config.method == "ar" and config.ar_first == "token":
        return Autoregressive(1, None, model.eos_token_ids, sampling)
    assert mask is not None
    slot_threshold = jnp.asarray(config.slot_threshold, jnp.float32)
    if config.method == "mdm":
        block, _ = config.blocks()
        number = jnp.asarray(config.tokens_per_step, jnp.int32)
        budget, eos = config.max_new_tokens, model.eos_token_ids
        return MaskedDiffusion(slot_threshold, number, budget, block, mask, eos, sampling, config.planner)
    if config.slot_size not in model.slot_sizes:
        warnings.warn(
            f"slot_size={config.slot_size} is none of the sizes this model was trained with "
            f"({', '.join(map(str, model.slot_sizes))}); its answers may be worse",
            stacklevel=4,
        )
    if config.method == "ar":
        return Autoregressive(config.slot_size, mask, model.eos_token_ids, sampling)
    block, _ = config.blocks()
    if config.compat is None and config.verify == "exact":
        return Exact(slot_threshold, config.slot_size, block, mask, model.eos_token_ids, sampling, config.planner)
    official = config.compat == "official"
    token_threshold = jnp.asarray(config.token_threshold, jnp.float32)
    lost = -(-config.max_new_tokens // config.slot_size) * config.slot_size - config.blocks()[1]
    if official and lost:
        warnings.warn(
            f"like the official code, the last {lost} positions are never written: the blocks are equal, and "
            f"{block} tokens in each leave them over",
            stacklevel=4,
        )
    return Threshold(
        slot_threshold,
        token_threshold,
        config.slot_size,
        block,
        mask,
        eos_of(model, config),
        sampling,
        config.planner,
        official,
        config.kv_reuse,
        config.max_new_tokens if config.kv_reuse == "none" else 0,
    )


def eos_of(model: ModelConfig, config: DecodeConfig) -> tuple[int, ...]:
    """The ids that end a text; the official code knows one alone."""
    return model.eos_token_ids[:1] if config.compat == "official" else model.eos_token_ids
