"""Low-rank adapters (arXiv 2106.09685): a matrix W of a layer becomes W + alpha / rank * down @ up."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from refusion_jax.config import ModelConfig
from refusion_jax.model.transformer import PARAMETER_AXES, Params, abstract_params, flatten, unflatten
from refusion_jax.training.config import LoraConfig

INPUTS = {"query": 1, "key": 1, "value": 1, "output": 2, "gate": 1, "up": 1, "down": 1}
"""How many dimensions of a matrix, behind that of the layers, are its inputs."""


def init(config: ModelConfig, lora: LoraConfig, key: jax.Array) -> Params:
    """Adapters that change nothing yet, in float32: {"layers": {name: {"down": [L, *in, r], "up": [L, r, *out]}}}."""
    shapes = flatten(abstract_params(config))
    adapters = {}
    for name, own in zip(lora.targets, jax.random.split(key, len(lora.targets)), strict=True):
        layers, *rest = shapes[f"layers/{name}"].shape
        inputs, outputs = rest[: INPUTS[name]], rest[INPUTS[name] :]
        fan_in = jnp.prod(jnp.array(inputs))
        adapters[f"layers/{name}/down"] = jax.random.normal(own, (layers, *inputs, lora.rank)) * fan_in**-0.5
        adapters[f"layers/{name}/up"] = jnp.zeros((layers, lora.rank, *outputs))
    return unflatten(adapters)


def specs(adapters: Params) -> Params:
    """The PartitionSpec of every half: as the matrix lies, the rank whole."""
    partitions = {}
    for name in flatten(adapters):
        matrix, half = name.rsplit("/", 1)
        layers, *axes = PARAMETER_AXES[matrix]
        number = INPUTS[matrix.removeprefix("layers/")]
        partitions[name] = (
            PartitionSpec(layers, *axes[:number], None)
            if half == "down"
            else PartitionSpec(layers, None, *axes[number:])
        )
    return unflatten(partitions)


def scaled(adapters: Params, lora: LoraConfig) -> Params:
    """What ``transformer.apply`` takes: pairs (down, up), scaled."""
    scale = lora.alpha / lora.rank
    return {
        "layers": {name: (pair["down"], pair["up"] * scale) for name, pair in adapters["layers"].items()},
    }


@functools.partial(jax.jit, static_argnums=2)
def merge(params: Params, adapters: Params, lora: LoraConfig) -> Params:
    """The parameters with the adapters added to them, in the dtype of the parameters."""
    leaves = flatten(params)
    for name, (down, up) in scaled(adapters, lora)["layers"].items():
        leaf = leaves[f"layers/{name}"]
        product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))(down, up)
        leaves[f"layers/{name}"] = (leaf.astype(jnp.float32) + product).astype(leaf.dtype)
    return unflatten(leaves)
