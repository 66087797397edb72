"""A text that many prompts begin with, such as examples or what was retrieved: computed once, kept, and put to use."""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from refusion_jax.cache import CACHE_AXES, KVCache
from refusion_jax.config import DecodeConfig, ModelConfig
from refusion_jax.decoding import engine
from refusion_jax.decoding.prompts import Prompt, encode
from refusion_jax.model import Model
from refusion_jax.model.transformer import Params
from refusion_jax.sharding import fetch, place, put_rows, reshard, row_shards

FORMAT = "refusion_jax prefix 1"


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The first tokens of prompts, with their keys and values.

    They hold for the weights that they were computed with, and for the positions where they stand.
    """

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]  # of the tokens: 0, 1, ...
    cache: KVCache  # [L, 1, K, P, H]
    weights: int  # digest of the parameters

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all."""
        draft = Path(path).parent / f".{Path(path).name}.{secrets.token_hex(4)}"
        arrays = {
            "token_ids": np.asarray(self.token_ids, np.int32),
            "positions": np.asarray(self.positions, np.int32),
            **dict(zip(("keys", "values"), fetch((self.cache.keys, self.cache.values)), strict=True)),
        }
        try:
            save_file(arrays, draft, metadata={"format": FORMAT, "weights": str(self.weights)})
            draft.chmod(draft.parent.stat().st_mode & 0o666)  # safetensors makes it private to us
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def check(self, model: Model) -> None:
        """Raise ValueError unless this was computed by ``model``, with these very weights."""
        if self.weights != digest(model):
            raise ValueError(
                "this prefix was computed by another model, or before its weights changed; compute it again with "
                "cache_prefix"
            )


def cache_prefix(model: Model, prefix: Prompt) -> Prefix:
    """Compute the keys and values of a text, token ids or chat messages that prompts will begin with.

    ``generate(model, prompts, prefix=...)`` then decodes ``prefix`` followed by each prompt. Text is tokenised by
    itself: end it where a token ends, such as behind a line.

    Raises:
      ValueError: as ``generate`` of a prompt.
    """
    ids = encode(model, prefix, DecodeConfig(max_new_tokens=1, slot_size=1, block_size=1), "the prefix")
    rows, P = row_shards(), len(ids)
    tokens = np.tile(np.asarray(ids, np.int32), (rows, 1))
    cache = _prefill(
        model.params,
        *put_rows((tokens, np.full(rows, P, np.int32))),
        config=model.config,
        width=engine.prefill_width(P),
    )
    return Prefix(tuple(ids), tuple(range(P)), cache, digest(model))


def load_prefix(model: Model, path: str | os.PathLike[str]) -> Prefix:
    """Read what ``Prefix.save`` wrote.

    Raises:
      ValueError: it is no such file, it was computed by another model, or its tokens do not stand at 0, 1, ...
    """
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} is no file that Prefix.save wrote")
            arrays = {name: file.get_tensor(name) for name in ("token_ids", "positions", "keys", "values")}
    except SafetensorError as error:
        raise ValueError(f"{path} is no file that Prefix.save wrote: {error}") from error
    positions = arrays["positions"].tolist()
    if positions != list(range(len(positions))):
        raise ValueError(f"{path} holds tokens at positions {positions[:4]}...; a prefix begins at 0, without a gap")
    axes = PartitionSpec(*_AXES)
    cache = KVCache(*(jnp.asarray(place(arrays[name], axes)) for name in ("keys", "values")))
    prefix = Prefix(tuple(arrays["token_ids"].tolist()), tuple(positions), cache, int(metadata["weights"]))
    prefix.check(model)
    return prefix


def digest(model: Model) -> int:
    """A number that differs if any bit of the parameters does."""
    return int(_digest(model.params))


_AXES = (CACHE_AXES[0], None, *CACHE_AXES[2:])  # one row, for all shards


@functools.partial(jax.jit, static_argnames=("config", "width"))
def _prefill(params: Params, tokens: jax.Array, lengths: jax.Array, *, config: ModelConfig, width: int) -> KVCache:
    capacity = tokens.shape[1]
    cache = engine.prefill(params, tokens, lengths, None, config=config, width=width, capacity=capacity)
    return jax.tree.map(lambda x: reshard(x, *_AXES)[:, :1], cache)


@jax.jit
def _digest(params: Params) -> jax.Array:
    total = jnp.uint32(0)
    for number, leaf in enumerate(jax.tree.leaves(params), 1):
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
        place = jax.lax.broadcasted_iota(jnp.uint32, (leaf.shape[-1],), 0) * 2 + 1
        total += jnp.sum(bits * place, dtype=jnp.uint32) * jnp.uint32(2 * number + 1)
    return total
