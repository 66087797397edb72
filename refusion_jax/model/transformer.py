"""The Qwen3 decoder: one causal transformer for planning, infilling, verifying, left-to-right and training.

A forward pass takes a *window* of tokens with their true positions, a mask that says what each window token sees
of the window, and a read-only cache with a mask that says what each window token sees of it. It returns logits and
the window's own keys and values and never writes the cache: what is accepted is committed afterwards
(``refusion_jax.cache.commit``). All decoding modes differ in the masks alone.

B rows, T window tokens, S cache capacity, L layers, D width, N query heads, K key/value heads, G = N/K,
H head size, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from refusion_jax import cache as kv
from refusion_jax.cache import KVCache
from refusion_jax.config import ModelConfig
from refusion_jax.model.packing import Packing, pack, unpack
from refusion_jax.sharding import ROWS, TENSOR, einsum, has_mesh, per_shard, reshard, row_shards, spec

Params = Any  # nested dictionaries of arrays, laid out as PARAMETER_AXES
Remat = Literal["none", "dots", "full"]

PARAMETER_AXES: dict[str, tuple[str | None, ...]] = {
    "embedding": (TENSOR, "fsdp"),  # [V, D]
    "layers/attention_norm": (None, None),  # [L, D]
    "layers/query": (None, "fsdp", TENSOR, None),  # [L, D, N, H]
    "layers/key": (None, "fsdp", TENSOR, None),  # [L, D, K, H]
    "layers/value": (None, "fsdp", TENSOR, None),  # [L, D, K, H]
    "layers/query_norm": (None, None),  # [L, H]
    "layers/key_norm": (None, None),  # [L, H]
    "layers/output": (None, TENSOR, None, "fsdp"),  # [L, N, H, D]
    "layers/mlp_norm": (None, None),  # [L, D]
    "layers/gate": (None, "fsdp", TENSOR),  # [L, D, F]
    "layers/up": (None, "fsdp", TENSOR),  # [L, D, F]
    "layers/down": (None, TENSOR, "fsdp"),  # [L, F, D]
    "final_norm": (None,),  # [D]
    "head": ("fsdp", TENSOR),  # [D, V]; absent when the head is the embedding
}
"""Parameter -> mesh axis of each dimension: the one table behind init, import, restore and optimizer state."""

INITIAL = nn.initializers.normal(0.02)
"""Random matrices, as Qwen3's are (initializer_range of its config.json)."""

MASKED = -1e30  # finite, so that an entry which sees nothing stays finite

SAVED = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What the backward pass keeps of a layer: the results of its matrices (attention is computed again), or its input."""


class Output(NamedTuple):
    """What a forward pass returns."""

    logits: jax.Array  # [B, T, V] float32; with head=False the final hidden states [B, T, D]
    keys: jax.Array  # [L, B, K, T, H], after norm and rotation
    values: jax.Array  # [L, B, K, T, H]


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32; scaled in the dtype of ``x``."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    return x32.astype(x.dtype) * scale.astype(x.dtype)


def rotary_table(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [B, T, 1, H/2] float32 of the rotation at ``positions`` [B, T]."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary positions in the half-rotation form: the first half of a head is paired with the second."""
    cos, sin = table
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def look_up(embedding: jax.Array, tokens: jax.Array) -> jax.Array:
    """The rows of ``embedding`` [V, D] at ``tokens`` [B, T]: [B, T, D].

    On a mesh no part of the table is moved: each device looks up, in the part that it has, the tokens of all rows of
    its fsdp group, and the devices of the group swap what they found. XLA would send whole batches to every device.
    """
    if not has_mesh():
        return embedding[tokens]

    def of_shard(table: jax.Array, tokens: jax.Array) -> jax.Array:
        tokens = jax.lax.all_gather(tokens, "fsdp", axis=0, tiled=True)
        place = tokens - jax.lax.axis_index(TENSOR) * len(table)
        found = table.at[jnp.where(place < 0, len(table), place)].get(mode="fill", fill_value=0)
        found = jax.lax.psum(found, TENSOR)
        return jax.lax.all_to_all(found, "fsdp", split_axis=0, concat_axis=2, tiled=True)

    axes = PARAMETER_AXES["embedding"]
    return per_shard(of_shard, (axes, (ROWS,)), (ROWS,))(reshard(embedding, *axes), tokens)


def attend(
    query: jax.Array,  # [B, T, N, H]
    keys: jax.Array,  # [B, K, T, H]
    values: jax.Array,  # [B, K, T, H]
    sees: jax.Array,  # [B, T, T] bool
    cache: tuple[jax.Array, jax.Array] | None,  # keys and values [B, K, S, H]
    sees_cache: jax.Array | None,  # [B, T, S] bool
) -> jax.Array:  # [B, T, N, H]
    """Attention over the cache and the window, as one softmax over two score matrices.

    The cache is never concatenated with the window: that would copy it.
    """
    B, T, N, H = query.shape
    K = keys.shape[1]
    G = N // K
    axes = (ROWS, TENSOR, None, None)

    def grouped(x: jax.Array) -> jax.Array:  # [B, T, N, H] -> [B, K, G*T, H]; a key head serves G query heads
        x = x.reshape(B, T, K, G, H, out_sharding=spec(ROWS, None, TENSOR, None, None))
        return x.transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H, out_sharding=spec(*axes))

    def scores(q: jax.Array, k: jax.Array, mask: jax.Array) -> jax.Array:  # [B, K, G*T, S or T] float32
        s = einsum("bkqh,bksh->bkqs", q, k, axes, preferred_element_type=jnp.float32) * H**-0.5
        # The mask takes the shape of the scores, not they its: on a TPU a reshape ends what is fused with a product.
        shape = B, G, T, mask.shape[-1]
        mask = jnp.broadcast_to(mask[:, None], shape, out_sharding=spec(ROWS, None, None, None))
        return jnp.where(mask.reshape(B, 1, G * T, -1, out_sharding=spec(ROWS, None, None, None)), s, MASKED)

    q = grouped(query)
    parts = [(scores(q, keys, sees), values)]
    if cache is not None and sees_cache is not None:
        parts.append((scores(q, cache[0], sees_cache), cache[1]))

    largest = functools.reduce(jnp.maximum, [jnp.max(s, axis=-1, keepdims=True) for s, _ in parts])
    largest = jax.lax.stop_gradient(largest)  # it cancels; its gradient would need the scores again
    weights = [jnp.exp(s - largest) for s, _ in parts]
    total = functools.reduce(jnp.add, [jnp.sum(w, axis=-1, keepdims=True) for w in weights])
    summands = [
        einsum("bkqs,bksh->bkqh", w.astype(v.dtype), v, axes, preferred_element_type=jnp.float32)
        for w, (_, v) in zip(weights, parts, strict=True)
    ]
    mixed = (functools.reduce(jnp.add, summands) / total).astype(query.dtype)
    mixed = mixed.reshape(B, K, G, T, H, out_sharding=spec(ROWS, TENSOR, None, None, None)).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(B, T, N, H, out_sharding=spec(ROWS, None, TENSOR, None))


def attend_with_cache(
    query: jax.Array,  # [B, T, N, H]
    keys: jax.Array,  # [B, K, T, H]
    values: jax.Array,  # [B, K, T, H]
    sees: jax.Array,  # [B, T, T] bool
    cache: KVCache,
    layer: jax.Array,  # int32: its number
    sees_cache: jax.Array,  # [B, T, S] bool
    reach: jax.Array,  # int32: behind it, nobody sees anything of the cache
) -> jax.Array:  # [B, T, N, H]
    """Attention over the window and a layer of the cache, which is read no further than it must be."""

    def as_far_as(length: int) -> jax.Array:
        # Of the whole cache, in here: what a branch is given is made before it, all of it.
        of_layer = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (cache.keys, cache.values))
        old_keys, old_values = (x[:, :, :length] for x in of_layer)
        return attend(query, keys, values, sees, (old_keys, old_values), sees_cache[:, :, :length])

    lengths = kv.lengths(cache.capacity)
    which = jnp.sum(reach > np.array(lengths[:-1], np.int32))
    return jax.lax.switch(which, [functools.partial(as_far_as, length) for length in lengths])


class Layer(nn.Module):
    """One decoder layer: attention with normed, rotated queries and keys, then a gated feed-forward."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        hidden: jax.Array,  # [B, T, D]
        number: jax.Array,  # int32: of the layer
        sees: jax.Array,  # [B, T, T] bool
        cached: tuple[KVCache, jax.Array, jax.Array] | None,  # the cache, sees_cache, reach
        table: tuple[jax.Array, jax.Array],
        packing: Packing | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        c = self.config
        D, N, K, H, F = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size

        def norm(name: str, x: jax.Array) -> jax.Array:
            scale = self.param(name, nn.initializers.ones, x.shape[-1:], jnp.dtype(c.dtype))
            return rms_norm(x, scale, c.rms_norm_eps)

        x = norm("attention_norm", hidden)
        query = rotate(norm("query_norm", self.project("query", x, N, H)), table)
        keys = rotate(norm("key_norm", self.project("key", x, K, H)), table)
        values = self.project("value", x, K, H)
        if packing is not None:
            query, keys, values = (unpack(packing, x, TENSOR, None) for x in (query, keys, values))
        keys, values = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)
        if cached is None:
            mixed = attend(query, keys, values, sees, None, None)
        else:
            cache, sees_cache, reach = cached
            mixed = attend_with_cache(query, keys, values, sees, cache, number, sees_cache, reach)
        if packing is not None:
            mixed = pack(packing, mixed, TENSOR, None)
        hidden = hidden + self.project("output", mixed, D)

        x = norm("mlp_norm", hidden)
        x = nn.silu(self.project("gate", x, F)) * self.project("up", x, F)
        return hidden + self.project("down", x, D), (keys, values)

    def project(self, name: str, x: jax.Array, *outputs: int) -> jax.Array:
        """[B, T, *inputs] times the matrix ``name`` -> [B, T, *outputs].

        Adds the low-rank adapter of the matrix where there is one: a pair [*inputs, r], [r, *outputs].
        """
        B, T, *inputs = x.shape
        dtype = jnp.dtype(self.config.dtype)
        fan_in = math.prod(inputs)
        axes = PARAMETER_AXES[f"layers/{name}"][1:]
        weights = self.param(name, INITIAL, (*inputs, *outputs), dtype, spec(*axes)).astype(dtype)
        adapter: Any = self.get_variable("adapters", name)
        if adapter is not None:
            down, up = (half.astype(dtype) for half in adapter)
            weights = weights + jnp.tensordot(down, up, 1, out_sharding=spec(*axes))
        # A matrix, not more dimensions: XLA on CPU copies those of a weight's gradient one number at a time.
        of_inputs, of_outputs = axes[0], axes[len(inputs)]
        weights = weights.reshape(fan_in, -1, out_sharding=spec(of_inputs, of_outputs))
        across, along = (None if axis == "fsdp" else axis for axis in (of_inputs, of_outputs))
        x = x.reshape(B * T, fan_in, out_sharding=spec(ROWS, across))
        y = einsum("ti,io->to", x, weights, (ROWS, along))
        return y.reshape(B, T, *outputs, out_sharding=spec(ROWS, None, along, *(None,) * (len(outputs) - 1)))


class Transformer(nn.Module):
    """The whole decoder; ``apply`` below runs it."""

    config: ModelConfig
    remat: Remat = "none"

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,  # [B, T] int32
        positions: jax.Array,  # [B, T] int32, true positions
        sees: jax.Array,  # [B, T, T] bool: query, key
        cache: KVCache | None = None,
        sees_cache: jax.Array | None = None,  # [B, T, S] bool: query, cache entry
        *,
        head: bool = True,
        packing: Packing | None = None,
    ) -> Output:
        """One forward pass.

        Args:
          tokens: ids of the window, [B, T] int32.
          positions: their true positions, [B, T] int32, in any order.
          sees: what each window token sees of the window (itself included), [B, T, T] bool.
          cache: keys and values of earlier tokens; read, never written.
          sees_cache: what each window token sees of the cache, [B, T, S] bool; required with a cache.
          head: False returns the final hidden states in place of logits.
          packing: tokens and positions are packed, [G, M], and so is the output but for keys and values.
        """
        c = self.config
        dtype = jnp.dtype(c.dtype)
        embedding = self.param("embedding", INITIAL, (c.vocab_size, c.hidden_size), dtype, spec(TENSOR, "fsdp"))
        hidden = look_up(embedding, tokens).astype(dtype)
        table = rotary_table(positions, c.head_dim, c.rope_theta)
        layer = Layer
        if self.remat != "none":
            layer = nn.remat(Layer, policy=SAVED[self.remat], prevent_cse=False)
        layers = nn.scan(
            layer,
            variable_axes={"params": 0, "adapters": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast),
            length=c.num_layers,
        )(c, name="layers")
        cached = None
        if cache is not None and sees_cache is not None:
            seen = jnp.any(sees_cache, axis=(0, 1))
            cached = cache, sees_cache, jnp.max(jnp.where(seen, 1 + jnp.arange(cache.capacity), 0))
        hidden, (keys, values) = layers(hidden, jnp.arange(c.num_layers), sees, cached, table, packing)
        scale = self.param("final_norm", nn.initializers.ones, (c.hidden_size,), dtype)
        hidden = rms_norm(hidden, scale, c.rms_norm_eps)
        if c.tie_word_embeddings:
            equation, weights = "btd,vd->btv", embedding
        else:
            equation = "btd,dv->btv"
            weights = self.param("head", INITIAL, (c.hidden_size, c.vocab_size), dtype, spec("fsdp", TENSOR))
        if not head:
            return Output(hidden, keys, values)
        logits = einsum(
            equation, hidden, weights.astype(dtype), (ROWS, None, TENSOR), preferred_element_type=jnp.float32
        )
        return Output(logits, keys, values)


def causal(length: int) -> jax.Array:
    """The ordinary causal window mask [1, T, T] bool."""
    return jnp.tril(jnp.ones((length, length), bool))[None]


def apply(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array,  # [B, T] int32
    positions: jax.Array,  # [B, T] int32
    sees: jax.Array,  # [B, T, T] bool
    cache: KVCache | None = None,
    sees_cache: jax.Array | None = None,  # [B, T, S] bool
    *,
    head: bool = True,
    adapters: Params | None = None,
    remat: Remat = "none",
    packing: Packing | None = None,
) -> Output:
    """One forward pass, see ``Transformer.__call__``: the one function behind prefill, decoding and training.

    ``adapters`` are added to the matrices of the layers: {"layers": {"query": ([L, D, r], [L, r, N, H]), ...}}.
    ``remat`` says what the backward pass computes again: nothing, all but matrix products, or whole layers.
    """
    variables = {"params": params} if adapters is None else {"params": params, "adapters": adapters}
    out = Transformer(config, remat).apply(
        variables, tokens, positions, sees, cache, sees_cache, head=head, packing=packing
    )
    assert isinstance(out, Output)
    return out


def init(config: ModelConfig, key: jax.Array) -> Params:
    """Random parameters, the same on every mesh, and each made where it lies."""
    one = jnp.zeros((row_shards(), 1), jnp.int32, out_sharding=spec(ROWS, None))
    return Transformer(config).init(key, one, one, causal(1))["params"]


def abstract_params(config: ModelConfig) -> Params:
    """Shapes and dtypes of the parameters, without memory, whatever their size."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def flatten(params: Params) -> dict[str, Any]:
    """Nested parameters -> {"layers/query": leaf, ...}, named as in PARAMETER_AXES."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    return {"/".join(key.key for key in path): leaf for path, leaf in paths}


def unflatten(leaves: dict[str, Any]) -> Params:
    """The inverse of ``flatten``."""
    params: Params = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return params


def parameter_specs(params: Params) -> Params:
    """The PartitionSpec of every parameter, as a tree like ``params``."""
    return unflatten({name: PartitionSpec(*PARAMETER_AXES[name]) for name in flatten(params)})
