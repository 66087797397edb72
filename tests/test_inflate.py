"""A small model in the shape of a large one: what it decides is what the small one decides."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

import refusion_jax as rf
from refusion_jax import demo
from refusion_jax.config import ModelConfig
from refusion_jax.evaluation import inflate as module
from refusion_jax.evaluation.inflate import inflate, inflated_config, inflated_params, main, parameters
from refusion_jax.model import transformer
from refusion_jax.model.transformer import abstract_params, causal, flatten, parameter_specs
from refusion_jax.presets import SHAPES
from tests.twins import golden, qwen3

DIRECTORIES = {"bundled": demo.ASSETS / "model", "A": golden.DIRECTORY / "modelA"}
TOLERANCE = {"atol": 1e-4, "rtol": 0}
T = 64

# Both models: width 96, 4 query heads on 2 key/value heads of size 32, 256 ids, the head tied.
EACH: dict[str, dict[str, Any]] = {
    "width": {"hidden_size": 160},
    "feed-forward": {"intermediate_size": 300},
    "layers": {"num_layers": 5},
    "key/value heads": {"num_kv_heads": 3, "num_heads": 6},
    "query heads": {"num_heads": 6},
    "head size": {"head_dim": 48},
    "vocabulary": {"vocab_size": 300},
    "head": {"tie_word_embeddings": False},
}
EVERY = {name: value for change in EACH.values() for name, value in change.items()} | {"num_heads": 9}
FOURFOLD = EVERY | {"hidden_size": 4 * 96, "head_dim": 4 * 32}
"""Square roots of the ratios are powers of two, so that no scaled weight is rounded."""
UNEQUAL = EVERY | {"hidden_size": 4 * 96, "head_dim": 32}
"""The same, and such that no epsilon alone serves both the width and the heads."""

HUNDRED_MILLION = {
    "vocab_size": 32_768,
    "hidden_size": 512,
    "intermediate_size": 2_048,
    "num_layers": 18,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 64,
}

apply = jax.jit(transformer.apply, static_argnums=0)


@pytest.fixture(scope="module", params=DIRECTORIES)
def directory(request: pytest.FixtureRequest) -> Path:
    return DIRECTORIES[request.param]


@pytest.fixture(scope="module")
def small(directory: Path) -> rf.Model:
    return rf.load(directory)


@pytest.fixture(scope="module")
def bundled() -> rf.Model:
    return rf.load(DIRECTORIES["bundled"])


def changed(model: rf.Model, changes: dict[str, Any]) -> ModelConfig:
    """A shape of the model's sizes but for ``changes``. What is no size is unlike the model's, and must not count."""
    return dataclasses.replace(
        model.config, rope_theta=5e6, rms_norm_eps=1e-5, eos_token_ids=(7,), mask_token_id=None, slot_sizes=(2,),
        num_tokens=None, **changes,
    )  # fmt: skip


def windows(rows: int) -> tuple[NDArray, NDArray]:
    """Random tokens [B, T], masks and padding of the vocabulary among them, and positions in any order [B, T]."""
    rng = np.random.default_rng(0)
    positions = np.stack([rng.permutation(2 * T)[:T] for _ in range(rows)])
    return rng.integers(0, 256, (rows, T)), positions


def logits(model: rf.Model) -> NDArray:
    tokens, positions = windows(3)
    return np.asarray(apply(model.config, model.params, tokens, positions, causal(T)).logits)


def exact_rotation(theta: float, size: int, length: int, dtype: Any) -> tuple[NDArray, NDArray]:
    """The twin's cosines and sines, with angles in float64."""
    frequencies = float(theta) ** (-np.arange(0, size, 2) / size)
    angles = np.arange(length)[:, None] * np.concatenate([frequencies, frequencies])
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


# --- logits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directory", "dimension"),
    [
        *(("A", dimension) for dimension in EACH),
        *(pytest.param("bundled", dimension, marks=pytest.mark.slow) for dimension in EACH),
        *((name, "every") for name in DIRECTORIES),
    ],
    indirect=["directory"],
)
def test_logits_are_those_of_the_small_model(small: rf.Model, dimension: str) -> None:
    """Speed would be measured on a model that writes something else."""
    large = inflate(small, changed(small, EVERY if dimension == "every" else EACH[dimension]))
    found, size = logits(large), small.config.vocab_size
    np.testing.assert_allclose(found[..., :size], logits(small), **TOLERANCE)
    assert not np.any(found[..., size:])


@pytest.mark.parametrize("changes", [FOURFOLD, UNEQUAL], ids=["fourfold", "unequal"])
def test_in_float64_the_logits_are_the_same_to_the_last_digits(
    directory: Path, small: rf.Model, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong epsilon changes them by 1e-3, which rounding in float32 could be blamed for."""
    monkeypatch.setattr(qwen3, "_rotation", exact_rotation)
    rf.export_hf(inflate(small, changed(small, changes)), tmp_path / "large")
    (tokens,), (positions,) = windows(1)
    sees = np.tril(np.ones((T, T), bool))
    twins = [qwen3.Qwen3(path, np.float64) for path in (directory, tmp_path / "large")]
    expected, found = (twin.forward(tokens, positions, sees)[0] for twin in twins)
    np.testing.assert_allclose(found[:, : expected.shape[1]], expected, atol=1e-10, rtol=0)


def test_the_same_shape_gives_the_same_parameters(small: rf.Model) -> None:
    large = inflate(small, changed(small, {}))
    assert large.config == small.config
    for name, leaf in flatten(small.params).items():
        np.testing.assert_array_equal(flatten(large.params)[name], leaf)


def test_on_a_mesh_the_parameters_are_the_same_and_lie_as_those_of_a_loaded_model(bundled: rf.Model) -> None:
    shape = changed(bundled, EVERY | {"num_kv_heads": 4, "num_heads": 12})
    expected = flatten(inflate(bundled, shape).params)
    with jax.set_mesh(rf.make_mesh(2, 2, 2)):
        params = inflate(rf.load(DIRECTORIES["bundled"]), shape).params
        for name, leaf in flatten(params).items():
            assert leaf.sharding.spec == flatten(parameter_specs(params))[name]
            np.testing.assert_array_equal(leaf, expected[name])
        with pytest.raises(ValueError, match=r"tensor=2 does not divide the dimension 9 of parameter layers/query"):
            inflate(bundled, changed(bundled, EVERY))


# --- decisions ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(bundled: rf.Model) -> rf.Model:
    """The bundled model in another shape."""
    return inflate(bundled, changed(bundled, EVERY))


def check_decisions(small: rf.Model, large: rf.Model, config: rf.DecodeConfig, count: int) -> None:
    prompts = [line["messages"] for line in demo.read_lines(demo.ASSETS / "prompts.jsonl")][:count]
    expected, found = (rf.generate(model, prompts, config, batch_size=count) for model in (small, large))
    for messages, one, other in zip(prompts, expected, found, strict=True):
        assert other.token_ids == one.token_ids
        assert demo.is_right(messages[-1]["content"], other)
        assert dataclasses.replace(other.stats, seconds=0) == dataclasses.replace(one.stats, seconds=0)


def test_answers_and_what_they_cost_are_those_of_the_small_model(bundled: rf.Model, large: rf.Model) -> None:
    """The forwards, drafts and positions of the small model are what a speed is measured with.

    In small blocks, which compile in a third of the time.
    """
    check_decisions(bundled, large, dataclasses.replace(demo.EXACT, slot_size=4, block_size=4), 6)


@pytest.mark.slow
@pytest.mark.parametrize("method", demo.MODES)
def test_answers_of_every_method_are_those_of_the_small_model(bundled: rf.Model, large: rf.Model, method: str) -> None:
    check_decisions(bundled, large, demo.MODES[method], 12)


@pytest.mark.slow
def test_answers_of_a_hundred_million_parameters_are_those_of_the_small_model(bundled: rf.Model) -> None:
    check_decisions(bundled, inflate(bundled, changed(bundled, HUNDRED_MILLION)), demo.EXACT, 12)


def test_a_written_model_is_read_again_as_it_was(large: rf.Model, tmp_path: Path) -> None:
    rf.export_hf(large, tmp_path / "large")
    read = rf.load(tmp_path / "large")
    assert read.config == large.config
    for name, leaf in flatten(large.params).items():
        np.testing.assert_array_equal(flatten(read.params)[name], leaf)


# --- config -------------------------------------------------------------------------------------------------


def test_token_ids_and_slot_sizes_are_the_small_models_and_the_longer_text_counts(bundled: rf.Model) -> None:
    config = inflated_config(bundled.config, SHAPES["qwen3_8b"])
    assert (config.eos_token_ids, config.mask_token_id, config.num_tokens) == ((1,), 3, 223)
    assert config.slot_sizes == (4, 8, 16, 32)
    assert config.max_position_embeddings == 40_960
    assert config.dtype == "float32"
    short = dataclasses.replace(SHAPES["qwen3_8b"], max_position_embeddings=64)
    assert inflated_config(bundled.config, short).max_position_embeddings == 512


def test_added_ids_are_never_generated_where_the_small_model_may_generate_all_of_its_own(bundled: rf.Model) -> None:
    unrestricted = dataclasses.replace(bundled.config, num_tokens=None)
    assert inflated_config(unrestricted, SHAPES["qwen3_8b"]).num_tokens == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 255}, "vocab_size would shrink from 256 to 255"),
        ({"hidden_size": 94}, "hidden_size would shrink from 96 to 94"),
        ({"intermediate_size": 1}, "intermediate_size would shrink from 256 to 1"),
        ({"num_layers": 2}, "num_layers would shrink from 3 to 2"),
        ({"num_heads": 8, "num_kv_heads": 1}, "num_kv_heads would shrink from 2 to 1"),
        ({"num_heads": 8, "num_kv_heads": 8}, "num_heads / num_kv_heads would shrink from 2 to 1"),
        ({"head_dim": 30}, "head_dim would shrink from 32 to 30, .* take a shape with at least 32"),
        # 10000^(H/32) is 3.2e38 for H = 308 and 5.6e38 for 310; float32 ends at 3.4e38.
        ({"head_dim": 310}, r"rope_theta=10000 must become 10000\^\(310/32\), .* a head_dim of at most 308"),
    ],
)
def test_what_cannot_be_padded_is_refused(bundled: rf.Model, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inflate(bundled, dataclasses.replace(bundled.config, mask_token_id=None, num_tokens=None, **changes))


def test_the_largest_base_that_float32_holds_is_taken(bundled: rf.Model) -> None:
    config = inflated_config(bundled.config, dataclasses.replace(bundled.config, head_dim=308))
    assert np.isfinite(np.float32(config.rope_theta))


def test_a_head_of_its_own_cannot_be_tied(bundled: rf.Model) -> None:
    untied = inflate(bundled, dataclasses.replace(bundled.config, tie_word_embeddings=False))
    with pytest.raises(ValueError, match="take a shape with tie_word_embeddings=False"):
        inflate(untied, bundled.config)


def test_an_unknown_dtype_is_refused(bundled: rf.Model) -> None:
    with pytest.raises(ValueError, match="dtype='float16' must be 'float32', 'bfloat16' or None"):
        inflate(bundled, bundled.config, dtype="float16")  # type: ignore[arg-type]


# --- size ---------------------------------------------------------------------------------------------------


def test_the_parameters_are_those_of_an_8b_model(bundled: rf.Model) -> None:
    shape = dataclasses.replace(SHAPES["qwen3_8b"], dtype="bfloat16")
    config = inflated_config(bundled.config, shape, dtype="bfloat16")
    made = jax.eval_shape(lambda params: inflated_params(params, bundled.config, config), bundled.params)
    assert made == abstract_params(shape)


def test_parameters_are_counted() -> None:
    """The first two are what the files of Qwen/Qwen3-8B and Qwen/Qwen3-0.6B hold, the latter without its tied head."""
    assert parameters(SHAPES["qwen3_8b"]) == 8_190_735_360
    assert parameters(SHAPES["qwen3_0_6b"]) == 751_632_384 - 151_936 * 1_024
    matrices = 512 * 16 * 64 + 2 * 512 * 8 * 64 + 16 * 64 * 512 + 3 * 512 * 2_048
    norms = 2 * 512 + 2 * 64
    shape = dataclasses.replace(SHAPES["qwen3_0_6b"], num_tokens=None, eos_token_ids=(), **HUNDRED_MILLION)
    assert parameters(shape) == 32_768 * 512 + 18 * (matrices + norms) + 512 == 101_733_120


# --- command line -------------------------------------------------------------------------------------------


def test_the_command_writes_a_checkpoint_and_does_not_write_over_one(
    bundled: rf.Model,
    large: rf.Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(module.SHAPES, "other", changed(bundled, EVERY))
    args = ["--shape", "other", "--output", str(tmp_path / "large")]
    assert main(args) == 0
    assert f"large: other, {sum(leaf.size for leaf in flatten(large.params).values()):,} " in capsys.readouterr().out
    written = rf.load(tmp_path / "large", dtype="float32")
    assert written.config == large.config
    assert written.tokenizer is not None and bundled.tokenizer is not None
    assert written.tokenizer.encode("1. add 3 1") == bundled.tokenizer.encode("1. add 3 1")
    assert written.origin is not None and set(written.origin.dtypes.values()) == {"BF16"}
    for name, leaf in flatten(large.params).items():
        np.testing.assert_array_equal(flatten(written.params)[name], leaf.astype("bfloat16").astype("float32"))
    assert main(args) == 2
    assert "exists and is not an empty directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--shape is missing: give one of qwen3_0_6b, qwen3_1_7b, qwen3_4b, qwen3_8b"),
        (["--shape", "qwen3_8b"], "--output is missing: give the directory to be made"),
        (["--shape", "big"], "--shape must be one of qwen3_0_6b, qwen3_1_7b, qwen3_4b, qwen3_8b, not big"),
        (["--shape", "qwen3_8b", "--output", "x", "--model", "missing"], "there is no directory missing"),
        (["--dtype", "int8"], "--dtype must be one of 'float32', 'bfloat16', not 'int8'"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
