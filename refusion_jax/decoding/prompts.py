"""Prompts: what a user may give, as checked token ids."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from refusion_jax.config import DecodeConfig
from refusion_jax.model import Model
from refusion_jax.model.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray | jax.Array | Sequence[Mapping[str, Any]]
"""Plain text, token ids, or chat messages ({"role": ..., "content": ...})."""


def encode(model: Model, prompt: Prompt, config: DecodeConfig, name: str, prefix: tuple[int, ...] = ()) -> list[int]:
    """Token ids of one prompt, checked, behind those of a ``prefix``. Errors (ValueError) call it by ``name``."""
    if isinstance(prompt, np.ndarray | jax.Array):
        prompt = np.asarray(prompt).tolist()
    if isinstance(prompt, Mapping):
        raise ValueError(f"{name} is a single message; a chat is a list of messages: put it in a list of its own")
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise ValueError(f"{name} is {reprlib.repr(prompt)}; give text, a list of token ids or a list of chat messages")
    ids: Sequence[int]
    try:
        if isinstance(prompt, str):
            ids = tokenizer_of(model).encode(prompt)
        elif prompt and isinstance(prompt[0], Mapping):
            ids = tokenizer_of(model).encode_chat(cast(Sequence[Mapping[str, Any]], prompt))
        else:
            ids = cast(Sequence[int], prompt)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    c = model.config
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise ValueError(
                f"{name} has {reprlib.repr(token)} at place {place}, which is no token id: ids are integers"
            )
        if not 0 <= token < c.vocab_size:
            raise ValueError(
                f"{name} has token id {token} at place {place}; ids of this model are 0..{c.vocab_size - 1}"
            )
        if token == c.mask_token_id:
            raise ValueError(
                f"{name} has the mask token (id {token}) at place {place}: masks stand for text to be "
                "written and cannot be part of a prompt; remove it"
            )
    if not ids:
        raise ValueError(f"{name} is empty: a prompt needs at least one token")
    ids = [*prefix, *(int(token) for token in ids)]
    new = config.max_new_tokens if config.method == "ar" else config.blocks()[1]
    if len(ids) + new > c.max_position_embeddings:
        raise ValueError(
            f"{name} has {len(ids)} tokens, and {new} new ones make {len(ids) + new} positions; the model "
            f"has {c.max_position_embeddings}: shorten the prompt or lower max_new_tokens"
        )
    return ids


def tokenizer_of(model: Model) -> Tokenizer:
    """The model's tokenizer, or why text cannot be read (ValueError)."""
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer, so prompts must be token ids")
    return model.tokenizer
