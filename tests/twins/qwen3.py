"""The Qwen3 decoder in numpy, read from a Hugging Face directory.

Shape letters: T window tokens, C context entries, L layers, D width, N query heads, K key/value heads,
H head size, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray
from safetensors.numpy import load_file

Memory = tuple[NDArray, NDArray]  # keys (normed and rotated) and values of C entries, each [L, C, K, H]


class Qwen3:
    """One sequence at a time, no batch, no padding, no attention mask but the one that is passed."""

    def __init__(self, directory: str | Path, dtype: DTypeLike = np.float32):
        directory = Path(directory)
        config = json.loads((directory / "config.json").read_text())
        tensors = load_file(directory / "model.safetensors")
        weights = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        self.layers = [
            {
                name.split(".", 3)[3].removesuffix(".weight"): tensor
                for name, tensor in weights.items()
                if name.startswith(f"model.layers.{layer}.")
            }
            for layer in range(config["num_hidden_layers"])
        ]
        self.embedding = weights["model.embed_tokens.weight"]  # [V, D]
        self.head = self.embedding if config["tie_word_embeddings"] else weights["lm_head.weight"]  # [V, D]
        self.final_norm = weights["model.norm.weight"]  # [D]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_size: int = config["head_dim"]
        self.epsilon: float = config["rms_norm_eps"]
        theta = config["rope_theta"] if "rope_theta" in config else config["rope_parameters"]["rope_theta"]
        self.cos, self.sin = _rotation(theta, self.head_size, config["max_position_embeddings"], dtype)

        self.mask_id: int = config["mask_token_id"]
        self.eos_id: int = config["eos_token_id"]
        self.vocabulary: int = config["vocab_size"]
        self.tokenizer_length = _tokenizer_length(directory / "tokenizer.json")

    def forward(
        self,
        tokens: NDArray,  # [T] int
        positions: NDArray,  # [T] int, true positions: they enter RoPE only
        sees: NDArray,  # [T, C + T] bool: the context entries and window tokens that each sees, itself too
        context: Memory | None = None,
    ) -> tuple[NDArray, NDArray, NDArray]:
        """Logits [T, V] of a window of tokens and the window's own keys and values, each [L, T, K, H]."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]  # [T, 1, H]
        x = self.embedding[tokens]  # [T, D]
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            h = self._norm(x, layer["input_layernorm"])
            q = self._heads(h @ layer["self_attn.q_proj"].T)  # [T, N, H]
            k = self._heads(h @ layer["self_attn.k_proj"].T)  # [T, K, H]
            v = self._heads(h @ layer["self_attn.v_proj"].T)  # [T, K, H]
            q = _rotate(self._norm(q, layer["self_attn.q_norm"]), cos, sin)
            k = _rotate(self._norm(k, layer["self_attn.k_norm"]), cos, sin)
            keys.append(k)
            values.append(v)
            if context is not None:
                k = np.concatenate([context[0][index], k])  # [C + T, K, H]
                v = np.concatenate([context[1][index], v])
            x = x + self._attend(q, k, v, sees) @ layer["self_attn.o_proj"].T
            h = self._norm(x, layer["post_attention_layernorm"])
            h = _silu(h @ layer["mlp.gate_proj"].T) * (h @ layer["mlp.up_proj"].T)
            x = x + h @ layer["mlp.down_proj"].T
        return self._norm(x, self.final_norm) @ self.head.T, np.stack(keys), np.stack(values)

    def _heads(self, x: NDArray) -> NDArray:
        return x.reshape(len(x), x.shape[1] // self.head_size, self.head_size)

    def _norm(self, x: NDArray, weight: NDArray) -> NDArray:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + x.dtype.type(self.epsilon)) * weight

    def _attend(self, q: NDArray, k: NDArray, v: NDArray, sees: NDArray) -> NDArray:
        """Grouped attention: query head n reads key/value head n // (N // K). [T, N * H]"""
        window, heads, size = q.shape
        q = q.reshape(window, self.kv_heads, heads // self.kv_heads, size)
        q = q.transpose(1, 2, 0, 3)  # [K, N // K, T, H]
        k = k.transpose(1, 2, 0)[:, None]  # [K, 1, H, C + T]
        v = v.transpose(1, 0, 2)[:, None]  # [K, 1, C + T, H]
        scores = np.where(sees, q @ k * q.dtype.type(size**-0.5), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return (weights @ v).transpose(2, 0, 1, 3).reshape(window, heads * size)


def _rotation(theta: float, size: int, length: int, dtype: DTypeLike) -> tuple[NDArray, NDArray]:
    """Cosines and sines [length, size] of half-rotation RoPE, computed in float32 whatever the dtype."""
    frequencies = 1 / np.float32(theta) ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))
    angles = np.arange(length, dtype=np.float32)[:, None] * np.concatenate([frequencies, frequencies])
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def _rotate(x: NDArray, cos: NDArray, sin: NDArray) -> NDArray:
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], axis=-1) * sin


def _silu(x: NDArray) -> NDArray:
    return x / (1 + np.exp(-x))


def _tokenizer_length(path: Path) -> int:
    """How many ids the tokenizer knows; vocabulary rows from here on are padding."""
    tokenizer = json.loads(path.read_text())
    return len(set(tokenizer["model"]["vocab"]) | {token["content"] for token in tokenizer["added_tokens"]})
