"""Low-rank adapters: they alone are trained, and what is trained is what is exported."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import refusion_jax as rf
from refusion_jax.data.batches import Batch
from refusion_jax.model.transformer import Params, apply, causal, flatten, unflatten
from refusion_jax.training import loop, lora
from refusion_jax.training.config import LoraConfig, StartConfig, TrainConfig
from refusion_jax.training.step import gradients
from tests import runs
from tests.twins import golden

MODEL = golden.DIRECTORY / "modelA"
LORA = LoraConfig(rank=3, alpha=6.0)
SCALE = 2.0
MATRICES = {  # name: [in, out] with the dimensions of each, as flat matrices
    "query": (96, 128),
    "key": (96, 64),
    "value": (96, 64),
    "output": (128, 96),
    "gate": (96, 224),
    "up": (96, 224),
    "down": (224, 96),
}


@pytest.fixture(scope="module")
def base() -> rf.Model:
    return rf.load(MODEL)


@pytest.fixture(scope="module")
def adapters(base: rf.Model) -> Params:
    """Of which no half is zero."""
    zero = lora.init(base.config, LORA, jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.1, x.shape), jnp.float32), zero)


def batch(base: rf.Model) -> Batch:
    """One piece of two rows, the second with two examples."""
    rng = np.random.default_rng(1)
    shape = (1, 2, 12)
    segments = np.array([[[1] * 9 + [0] * 3, [1] * 5 + [2] * 7]], np.int32)
    positions = np.array([[[*range(9), 0, 0, 0], [*range(5), *range(7)]]], np.int32)
    tokens = rng.integers(0, base.config.vocab_size, (2, *shape)).astype(np.int32)
    weights = rng.integers(0, 2, (2, *shape)).astype(np.float32) * (segments > 0)
    return Batch(tokens[0], positions, tokens[1], segments, weights[0], weights[1])


def logits(base: rf.Model, params: Params, adapters: Params | None) -> jax.Array:
    tokens = jnp.asarray(golden.load("A").prompts[0].prompt_ids)[None]
    positions = jnp.arange(tokens.shape[1])[None]
    sees = causal(tokens.shape[1])
    forward = jax.jit(lambda params, adapters: apply(base.config, params, tokens, positions, sees, adapters=adapters))
    return forward(params, adapters).logits


def test_new_adapters_change_nothing(base: rf.Model) -> None:
    new = lora.init(base.config, LORA, jax.random.key(1))
    expected = np.asarray(logits(base, base.params, None))
    np.testing.assert_array_equal(logits(base, base.params, lora.scaled(new, LORA)), expected)
    for name, leaf in flatten(new).items():
        assert leaf.dtype == jnp.float32
        assert np.any(leaf) != name.endswith("/up"), "the other half must not be zero, or nothing is ever learnt"


def test_merged_parameters(base: rf.Model, adapters: Params) -> None:
    """W + alpha / rank * down @ up, and the forward pass with adapters is that with merged parameters."""
    merged = flatten(lora.merge(base.params, adapters, LORA))
    for name, leaf in flatten(base.params).items():
        matrix = name.removeprefix("layers/")
        expected = np.asarray(leaf, np.float64)
        if matrix in MATRICES:
            inputs, outputs = MATRICES[matrix]
            pair = adapters["layers"][matrix]
            down, up = (np.asarray(pair[half], np.float64) for half in ("down", "up"))
            product = down.reshape(2, inputs, 3) @ up.reshape(2, 3, outputs)
            expected = expected + SCALE * product.reshape(leaf.shape)
        np.testing.assert_allclose(merged[name], expected, atol=1e-6, err_msg=name)
    unmerged = np.asarray(logits(base, base.params, lora.scaled(adapters, LORA)))
    np.testing.assert_allclose(logits(base, unflatten(merged), None), unmerged, rtol=1e-5, atol=1e-4)
    assert np.max(np.abs(unmerged - logits(base, base.params, None))) > 1


def test_gradients(base: rf.Model, adapters: Params) -> None:
    """By the chain rule from the gradient of the merged matrices: scale * G up', scale * down' G."""
    config = TrainConfig("", StartConfig(checkpoint=""), *_unused(), lora=LORA)
    data = batch(base)
    ours, measures = jax.jit(lambda a, p: gradients(base.config, config, a, p, data))(adapters, base.params)
    full = dataclasses.replace(config, lora=LoraConfig())
    merged = lora.merge(base.params, adapters, LORA)
    theirs, expected = jax.jit(lambda p: gradients(base.config, full, p, None, data))(merged)
    assert float(measures.loss) == pytest.approx(float(expected.loss), rel=1e-5)
    for name, (inputs, outputs) in MATRICES.items():
        G = np.asarray(theirs["layers"][name], np.float64).reshape(2, inputs, outputs)
        pair = adapters["layers"][name]
        down = np.asarray(pair["down"], np.float64).reshape(2, inputs, 3)
        up = np.asarray(pair["up"], np.float64).reshape(2, 3, outputs)
        found = {half: np.asarray(ours["layers"][name][half]).reshape(2, -1) for half in ("down", "up")}
        for half, gradient in (
            ("down", SCALE * G @ up.transpose(0, 2, 1)),
            ("up", SCALE * down.transpose(0, 2, 1) @ G),
        ):
            gradient = gradient.reshape(2, -1)
            np.testing.assert_allclose(found[half], gradient, rtol=1e-3, atol=1e-4 * np.max(np.abs(gradient)))


def _unused() -> tuple[Any, Any]:
    config = runs.settings(Path())
    return config.data, config.train


# ---- Runs ----

# A large epsilon: AdamW turns a gradient of nothing but rounding into a whole step.
OPTIMIZER = {"learning_rate": 1e-3, "epsilon": 1e-4}


@pytest.fixture(scope="module")
def configure(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainConfig]:
    """Three steps that adapt model A to some of the golden prompts."""
    directory = tmp_path_factory.mktemp("lora")
    lines = [
        json.dumps({"query": prompt["query"], "response": prompt["response"]})
        for prompt in json.loads((golden.DIRECTORY / "goldenA" / "prompts.json").read_text())["prompts"]
    ]
    (directory / "examples.jsonl").write_text("\n".join(lines))

    def settings(run: Path, **changes: dict[str, Any]) -> TrainConfig:
        config = dataclasses.replace(
            runs.settings(directory, data={"path": str(directory / "examples.jsonl")}),
            run=str(run / "run"),
            model=StartConfig(checkpoint=str(MODEL)),
            lora=LORA,
        )
        config = runs.changed(config, train={"steps": 3, "batch_size": 8}, optimizer=OPTIMIZER)
        return runs.changed(config, **changes)

    return settings


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> runs.Watch:
    watch = runs.Watch()
    watch.stand_in(monkeypatch)
    return watch


@pytest.fixture(scope="module")
def run(configure: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run that is over."""
    config = configure(tmp_path_factory.mktemp("run"), lora={"targets": ("query", "down")})
    with pytest.MonkeyPatch.context() as patch:
        runs.Watch().stand_in(patch)
        loop.train(config)
    return config


def test_only_adapters_change_and_are_saved(run: TrainConfig) -> None:
    before, after = (load_file(path / "model.safetensors") for path in (MODEL, Path(run.run, "model")))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        change = after[name] - tensor
        adapted = "q_proj" in name or "down_proj" in name
        assert np.any(change) == adapted, name
        if adapted:
            assert np.linalg.matrix_rank(change, tol=1e-5) == LORA.rank
    (checkpoint,) = Path(run.run, "checkpoints").iterdir()
    metadata = next(checkpoint.rglob("_METADATA")).read_text()
    assert "query" in metadata and "down" in metadata
    assert "embedding" not in metadata and "gate" not in metadata


def test_a_run_is_a_model_wherever_it_is_read(
    run: TrainConfig, configure: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its adapters need their checkpoint, which was named from another directory."""
    exported = rf.load(Path(run.run, "model"))
    assert runs.digest(rf.load(run.run).params) == runs.digest(exported.params)
    monkeypatch.chdir(MODEL.parent)
    config = configure(tmp_path, model={"checkpoint": MODEL.name}, lora={"targets": ("query", "down")})
    runs.Watch().stand_in(monkeypatch)
    loop.train(config)
    monkeypatch.chdir("/")
    assert runs.digest(rf.load(config.run).params) == runs.digest(exported.params)


@pytest.mark.slow
def test_stopped_and_on_a_mesh(configure: Callable[..., TrainConfig], tmp_path: Path, watch: runs.Watch) -> None:
    """Two steps on eight devices and the third on one give what three on one do."""
    one, other = configure(tmp_path / "one"), configure(tmp_path / "other")
    loop.train(one)
    steps = list(watch.steps)
    watch.steps.clear()

    def before(number: int) -> None:
        if number == 2:
            signal.raise_signal(signal.SIGTERM)

    watch.before = before
    with jax.set_mesh(rf.make_mesh(2, 2, 2)):
        with pytest.raises(loop.Interrupted, match="at step 2"):
            loop.train(other)
        on_mesh = rf.load(other.run)
        assert all(len(leaf.devices()) == 8 for leaf in jax.tree.leaves(on_mesh.params))
    loop.train(other)
    assert [batch for *_, batch in watch.steps][2:] == [batch for *_, batch in steps][2:]
    for line, expected in zip(runs.metrics(other), runs.metrics(one), strict=True):
        assert line["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)
    ours, theirs = (load_file(Path(config.run, "model", "model.safetensors")) for config in (other, one))
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor, theirs[name], atol=1e-5, err_msg=name)


def test_resumed_bitwise(configure: Callable[..., TrainConfig], tmp_path: Path, run: TrainConfig) -> None:
    config = configure(tmp_path, lora={"targets": ("query", "down")})
    watch = runs.Watch(lambda number: signal.raise_signal(signal.SIGTERM))
    with pytest.MonkeyPatch.context() as patch:
        watch.stand_in(patch)
        for _ in range(3):
            with pytest.raises(loop.Interrupted):
                loop.train(config)
        loop.train(config)
    assert runs.exported(config) == runs.exported(run)
    assert runs.metrics(config) == runs.metrics(run)


def test_other_adapters_are_another_run(run: TrainConfig) -> None:
    with pytest.raises(ValueError, match=r"lora.rank: there 3, now 4"):
        loop.train(runs.changed(run, lora={"rank": 4}))
    with pytest.raises(ValueError, match=r"lora.rank: there 3, now nothing"):
        loop.train(runs.changed(run, lora={"rank": 0}))


def test_random_weights_cannot_be_adapted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lora.rank=3 adapts a checkpoint, and model.checkpoint is missing"):
        loop.train(runs.settings(tmp_path, lora={"rank": 3}))
