"""The learning rate is what the settings say, and each parameter is trained by the algorithm it should be."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from refusion_jax.model.transformer import flatten, init, parameter_specs
from refusion_jax.sharding import make_mesh, place
from refusion_jax.training import optimizer
from refusion_jax.training.config import DataConfig, LoopConfig, LoraConfig, OptimizerConfig, StartConfig, TrainConfig
from tests.runs import SHAPE

MATRICES = {"query", "key", "value", "output", "gate", "up", "down"}


def rates(**settings: Any) -> list[float]:
    schedule = optimizer.schedule(OptimizerConfig(learning_rate=8.0, **settings), 20)
    return [float(schedule(step)) for step in range(20)]


def test_the_learning_rate_rises_and_then_falls_along_a_cosine() -> None:
    found = rates(warmup=0.2, final=0.25)
    assert found[:4] == pytest.approx([1.6, 3.2, 4.8, 6.4])  # fifths of the peak: the first step is not wasted
    assert found[4] == pytest.approx(8)
    middle = 2 + (8 - 2) * 0.5 * (1 + math.cos(math.pi * 8 / 16))
    assert found[12] == pytest.approx(middle)
    assert found[19] == pytest.approx(2 + 6 * 0.5 * (1 + math.cos(math.pi * 15 / 16)))


def test_the_learning_rate_falls_in_a_line_or_not_at_all() -> None:
    assert rates(schedule="linear")[10] == pytest.approx(4)
    assert rates(schedule="constant") == [8.0] * 20


@pytest.fixture(scope="module")
def params() -> Any:
    return init(SHAPE, jax.random.key(0))


def updates(params: Any, steps: int = 1, **settings: Any) -> Any:
    """The sum of updates of a few steps with random gradients."""
    made = optimizer.make(OptimizerConfig(learning_rate=1.0, schedule="constant", clip=1e9, **settings), 10)
    state, total = jax.jit(made.init)(params), jax.tree.map(jnp.zeros_like, params)
    for step in range(steps):
        keys = jax.random.split(jax.random.key(step + 1), len(jax.tree.leaves(params)))
        leaves = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, jax.tree.leaves(params), strict=True)]
        gradient = jax.tree.map(
            lambda x, like: place(x, like),
            jax.tree.unflatten(jax.tree.structure(params), leaves),
            parameter_specs(params),
        )
        change, state = jax.jit(made.update)(gradient, state, params)
        total = jax.tree.map(jnp.add, total, change)
    return jax.device_get(flatten(total))


def test_norms_are_never_decayed(params: Any) -> None:
    plain, decayed = updates(params), updates(params, weight_decay=0.5)
    for name, leaf in flatten(params).items():
        expected = plain[name] if name.endswith("norm") else plain[name] - 0.5 * np.asarray(leaf)
        np.testing.assert_allclose(decayed[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_muon_trains_the_matrices_of_layers_and_adamw_the_rest(params: Any) -> None:
    """Muon's update of a matrix is close to orthogonal: most of its singular values are about equal."""
    muon = updates(params, algorithm="muon", matrix_rate=3.0)
    for name, change in muon.items():
        last = name.split("/")[-1]
        if last not in MATRICES:
            # AdamW's first step with Nesterov momentum: (b1 (1 - b1) / (1 - b1^2) + 1) sign(gradient).
            np.testing.assert_allclose(np.abs(change), 0.9 * 0.1 / 0.19 + 1, rtol=1e-3, err_msg=name)
            continue
        inputs = 2 if last == "output" else 1
        for layer in change:
            matrix = layer.reshape(math.prod(layer.shape[:inputs]), -1)
            assert np.sqrt(np.mean(matrix**2)) == pytest.approx(3 * optimizer.UPDATE, rel=0.3), name
            singular = np.linalg.svd(matrix, compute_uv=False)
            assert singular.max() < 1.6 * np.median(singular), name


def test_muon_on_a_mesh_is_that_of_one_device(params: Any) -> None:
    alone = updates(params, steps=2, algorithm="muon")
    with jax.set_mesh(make_mesh(2, 2, 2)):
        on_mesh = updates(place(jax.device_get(params), parameter_specs(params)), steps=2, algorithm="muon")
    for name, change in alone.items():
        np.testing.assert_allclose(on_mesh[name], change, atol=2e-3, err_msg=name)


def test_a_large_gradient_is_clipped(params: Any) -> None:
    made = optimizer.make(OptimizerConfig(clip=2.0), 10)
    clipped, _ = optax.clip_by_global_norm(2.0).update(jax.tree.map(lambda x: x + 5, params), optax.EmptyState())
    small = jax.tree.map(jnp.zeros_like, params)
    a, _ = made.update(jax.tree.map(lambda x: x + 5, params), made.init(small), small)
    b, _ = made.update(clipped, made.init(small), small)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_adapters_are_not_for_muon() -> None:
    with pytest.raises(ValueError, match=r"adapters \(lora\.rank\) take 'adamw'"):
        TrainConfig(
            run="",
            model=StartConfig(checkpoint="DIR"),
            data=DataConfig(),
            train=LoopConfig(steps=1),
            optimizer=OptimizerConfig(algorithm="muon"),
            lora=LoraConfig(rank=4),
        )
