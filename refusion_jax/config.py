"""Every setting of the library, as frozen dataclasses that check themselves."""

from __future__ import annotations

import dataclasses
from typing import Literal

OFFICIAL_SLOT_SIZES = (4, 8, 16, 32)
"""Slot sizes that the official checkpoints were trained with (ReFusion, section 4.3)."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Qwen3 decoder and the token ids that ReFusion adds to it.

    Raises:
      ValueError: a size is not positive, the heads do not divide, or a token id lies outside the vocabulary.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    mask_token_id: int | None  # None: an ordinary causal model, which only method="ar" can decode
    slot_sizes: tuple[int, ...] = OFFICIAL_SLOT_SIZES
    num_tokens: int | None = None  # ids >= num_tokens have rows but no text and are never generated; None: vocab_size
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and activations

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions pair two halves of a head")
        if self.num_tokens is not None and not 1 <= self.num_tokens <= self.vocab_size:
            raise ValueError(f"num_tokens={self.num_tokens} must lie in 1..vocab_size={self.vocab_size}")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id={self.mask_token_id} lies outside the vocabulary of {self.vocab_size}")
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"eos token id {token} lies outside the vocabulary of {self.vocab_size}")
