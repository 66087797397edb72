"""Checkpoints are read right or refused by name, and come back byte for byte."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from refusion_jax.config import ModelConfig
from refusion_jax.model import Model
from refusion_jax.model.hf import TENSORS, export_hf, load
from refusion_jax.model.hf_config import FIXED, READ
from refusion_jax.model.tokenizer import Tokenizer
from refusion_jax.model.transformer import (
    PARAMETER_AXES,
    Transformer,
    abstract_params,
    causal,
    flatten,
    unflatten,
)
from refusion_jax.sharding import make_mesh

GOLDEN = Path(__file__).parent / "golden"
V, D, F, L, N, K, H = 24, 16, 20, 2, 4, 2, 6  # 6 is not 16 / 4

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 3,
    "eos_token_id": 2,
    "head_dim": H,
    "hidden_act": "silu",
    "hidden_size": D,
    "initializer_range": 0.02,
    "intermediate_size": F,
    "mask_token_id": 4,
    "max_position_embeddings": 64,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": N,
    "num_hidden_layers": L,
    "num_key_value_heads": K,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "vocab_size": V,
}

SHAPES = {  # as transformers names and shapes them
    "model.embed_tokens.weight": (V, D),
    "model.norm.weight": (D,),
    "lm_head.weight": (V, D),
} | {
    f"model.layers.{layer}.{name}.weight": shape
    for layer in range(L)
    for name, shape in {
        "input_layernorm": (D,),
        "self_attn.q_proj": (N * H, D),
        "self_attn.k_proj": (K * H, D),
        "self_attn.v_proj": (K * H, D),
        "self_attn.q_norm": (H,),
        "self_attn.k_norm": (H,),
        "self_attn.o_proj": (D, N * H),
        "post_attention_layernorm": (D,),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }.items()
}

Tensors = dict[str, np.ndarray]


def make_tensors(*, tied: bool = False, dtype: Any = np.float32) -> Tensors:
    rng = np.random.default_rng(0)
    shapes = {name: shape for name, shape in SHAPES.items() if not tied or name != "lm_head.weight"}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def write(
    directory: Path,
    tensors: Tensors | None = None,
    *,
    shards: int = 1,
    drop: tuple[str, ...] = (),
    **config: Any,
) -> Path:
    """A checkpoint made without the code under test."""
    directory.mkdir()
    raw = {key: value for key, value in CONFIG.items() if key not in drop} | config
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    tensors = make_tensors(tied=raw.get("tie_word_embeddings", False)) if tensors is None else tensors
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    where = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return directory


def read_bytes(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> dtype, shape and bytes of every tensor in a directory."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                found[name] = (file.get_slice(name).get_dtype(), tensor.shape, tensor.tobytes())
    return found


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def logits(model: Model, tokens: list[int]) -> np.ndarray:
    ids, positions = jnp.array([tokens]), jnp.arange(len(tokens))[None]
    run = jax.jit(
        lambda params: Transformer(model.config).apply({"params": params}, ids, positions, causal(len(tokens)))
    )
    return np.asarray(run(model.params).logits[0])


def from_scratch(config: ModelConfig, tokenizer: Tokenizer | None = None) -> Model:
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape).astype(leaf.dtype)), abstract_params(config)
    )
    return Model(params, config, tokenizer)


def change(model: Model, name: str, leaf: jax.Array) -> Model:
    return model.replace(params=unflatten(flatten(model.params) | {name: leaf}))


# ---- What is read ----


@pytest.mark.parametrize("model", ["A", "A0"])
def test_golden_models_give_the_official_logits(model: str) -> None:
    loaded = load(GOLDEN / f"model{model}")
    golden = np.load(GOLDEN / f"golden{model}" / "logits.npz")
    np.testing.assert_allclose(logits(loaded, golden["plain0_ids"].tolist()), golden["plain0_logits"], atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_becomes_the_parameter_that_its_name_says(tmp_path: Path, tied: bool) -> None:
    tensors = make_tensors(tied=tied)
    model = load(write(tmp_path / "in", tensors, tie_word_embeddings=tied))
    params = {name: np.asarray(leaf) for name, leaf in flatten(model.params).items()}

    def layers(name: str) -> np.ndarray:
        return np.stack([tensors[f"model.layers.{layer}.{name}.weight"] for layer in range(L)])

    def equal(name: str, expected: np.ndarray) -> None:
        np.testing.assert_array_equal(params.pop(name), expected)

    equal("embedding", tensors["model.embed_tokens.weight"])
    equal("final_norm", tensors["model.norm.weight"])
    if not tied:
        equal("head", tensors["lm_head.weight"].T)
    equal("layers/attention_norm", layers("input_layernorm"))
    equal("layers/mlp_norm", layers("post_attention_layernorm"))
    equal("layers/query_norm", layers("self_attn.q_norm"))
    equal("layers/key_norm", layers("self_attn.k_norm"))
    for ours, theirs, heads in (("query", "q_proj", N), ("key", "k_proj", K), ("value", "v_proj", K)):
        equal(f"layers/{ours}", layers(f"self_attn.{theirs}").reshape(L, heads, H, D).transpose(0, 3, 1, 2))
    equal("layers/output", layers("self_attn.o_proj").reshape(L, D, N, H).transpose(0, 2, 3, 1))
    for name in ("gate", "up", "down"):
        equal(f"layers/{name}", layers(f"mlp.{name}_proj").transpose(0, 2, 1))
    assert not params


def test_the_table_covers_every_parameter() -> None:
    assert {line.parameter for line in TENSORS} == PARAMETER_AXES.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_tree_is_the_one_the_transformer_makes(tmp_path: Path, dtype: Any) -> None:
    model = load(write(tmp_path / "in"), dtype=dtype)
    assert model.config.dtype == dtype
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model.params))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), model.params)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), abstract_params(model.config))


def test_dtype_auto_is_float32_on_cpu_and_nonsense_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "in", make_tensors(dtype=jnp.bfloat16), torch_dtype="bfloat16")
    if jax.default_backend() == "cpu":
        assert load(tmp_path / "in").config.dtype == "float32"
    with pytest.raises(ValueError, match="dtype='float16' must be"):
        load(tmp_path / "in", dtype="float16")  # type: ignore[arg-type]


def test_loading_compiles_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write(tmp_path / "in")
    with jax.log_compiles():
        load(directory)
    assert not [record for record in caplog.records if "ompiling" in record.getMessage()]


def test_parameters_are_laid_out_on_the_current_mesh(tmp_path: Path) -> None:
    directory = write(tmp_path / "in")
    with jax.set_mesh(make_mesh(2, 2, 2)):
        model = load(directory)
        export_hf(model, tmp_path / "out")
    for name, leaf in flatten(model.params).items():
        assert leaf.sharding.spec == jax.sharding.PartitionSpec(*PARAMETER_AXES[name])
    assert files(tmp_path / "out") == files(directory)


def test_a_mesh_that_does_not_divide_the_heads_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with jax.set_mesh(make_mesh(1, 1, 4)), pytest.raises(ValueError, match=r"tensor=4 .* 2 of .*layers/key"):
        load(write(tmp_path / "in"))


# ---- config.json ----


def test_both_spellings_of_the_rope_base_are_read(tmp_path: Path) -> None:
    old = load(write(tmp_path / "old", rope_theta=5000))
    new = load(
        write(
            tmp_path / "new",
            rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
            drop=("rope_theta",),
        )
    )
    both = load(write(tmp_path / "both", rope_parameters={"rope_theta": 5000.0}, rope_theta=5000.0))
    assert old.config.rope_theta == new.config.rope_theta == both.config.rope_theta == 5000.0


@pytest.mark.parametrize(
    ("config", "drop", "message"),
    [
        ({}, ("rope_theta",), "rope_theta is missing, and so is rope_parameters.rope_theta"),
        ({"rope_parameters": {"rope_type": "default"}}, ("rope_theta",), "rope_theta is missing"),
        (
            {"rope_parameters": {"rope_theta": 1e6}},
            (),
            r"rope_theta=10000.0 and rope_parameters.rope_theta=1000000.0",
        ),
        ({"rope_theta": -1}, (), "rope_theta=-1 must be a positive number"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            (),
            "rope_scaling=.*yarn.* is not supported",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, (), "rope_scaling=.*linear.* is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3"}}, (), "rope_parameters=.*llama3"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, (), "partial_rotary_factor"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            (),
            "rope_parameters=.*full_attention",
        ),
        ({"partial_rotary_factor": 0.5}, (), "partial_rotary_factor=0.5 is not supported"),
        ({"attention_bias": True}, (), "attention_bias=True is not supported, only False is"),
        ({"attention_dropout": 0.1}, (), "attention_dropout=0.1 is not supported"),
        ({"use_sliding_window": True, "sliding_window": 32}, (), "use_sliding_window=True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, (), "layer_types=.*sliding_attention"),
        ({"hidden_act": "gelu"}, (), "hidden_act='gelu' is not supported, only 'silu' is"),
        ({"model_type": "llama"}, (), "model_type='llama' is not supported, only 'qwen3' is"),
        ({}, ("model_type",), "model_type is missing"),
        ({"quantization_config": {"bits": 4}}, (), "quantization_config=.*bits"),
        ({}, ("vocab_size",), "vocab_size is missing"),
        ({"vocab_size": "24"}, (), "vocab_size='24' must be an integer"),
        ({"rms_norm_eps": 0}, (), "rms_norm_eps=0 must be a positive number"),
        ({"tie_word_embeddings": 1}, (), "tie_word_embeddings=1 must be true or false"),
        ({"num_attention_heads": 3}, (), "num_kv_heads=2 does not divide num_heads=3"),
        ({"eos_token_id": "</s>"}, (), "eos_token_id='</s>' must be a token id or a list"),
        ({"eos_token_id": [2, 99]}, (), "eos token id 99 lies outside the vocabulary of 24"),
        ({"mask_token_id": 24}, (), "mask_token_id=24 lies outside the vocabulary of 24"),
        ({"slot_sizes": [4, 0]}, (), r"slot_sizes=\[4, 0\] must be a list of positive integers"),
    ],
)
def test_what_the_model_does_not_compute_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], drop: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load(write(tmp_path / "in", drop=drop, **config))
    assert str(error.value).startswith(f"cannot load {tmp_path / 'in'}: ")
    assert "\n" not in str(error.value)


def test_harmless_fields_are_accepted_without_a_word(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    plain = load(write(tmp_path / "plain"))
    harmless = load(write(
        tmp_path / "in", sliding_window=4096, use_sliding_window=False, layer_types=["full_attention"] * L,
        rope_scaling={"rope_type": "default"}, auto_map={"AutoModel": "modeling.Model"}, dtype="bfloat16",
    ))  # fmt: skip
    assert harmless.config == plain.config
    assert not recwarn.list


def test_an_unknown_field_is_warned_about(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="logit_scale"):
        load(write(tmp_path / "in", logit_scale=0.5))


def test_head_dim_defaults_to_128_as_in_transformers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"q_proj.weight has shape \[24, 16\], but config.json asks for \[512, 16\]"):
        load(write(tmp_path / "in", drop=("head_dim",)))


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, [2, 0], (2, 0)),
        (5, 2, (5, 2)),
        (None, 2, (2,)),
        (None, None, ()),
    ],
)
def test_text_ends_at_every_token_that_a_file_names(
    tmp_path: Path, config_ids: Any, generation_ids: Any, expected: tuple[int, ...]
) -> None:
    directory = write(tmp_path / "in", eos_token_id=config_ids)
    if generation_ids is not None:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_ids}))
    assert load(directory).config.eos_token_ids == expected


def test_refusion_fields(tmp_path: Path) -> None:
    given = load(write(tmp_path / "given", slot_sizes=[2, 8])).config
    assert (given.mask_token_id, given.slot_sizes) == (4, (2, 8))
    absent = load(write(tmp_path / "absent", drop=("mask_token_id",))).config
    assert (absent.mask_token_id, absent.slot_sizes) == (None, (4, 8, 16, 32))


def test_rows_beyond_the_tokenizer_are_kept_and_counted_out() -> None:
    model = load(GOLDEN / "modelA")
    assert model.params["embedding"].shape == (256, 96)
    assert model.config.vocab_size == 256
    assert model.config.num_tokens == 224


def test_a_tokenizer_that_knows_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "in")
    shutil.copy(GOLDEN / "modelA" / "tokenizer.json", directory)
    with pytest.raises(ValueError, match="vocab_size=24, but the tokenizer knows 224 tokens"):
        load(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n "vocab_size": 24,\n}', "config.json is not valid JSON: .* in line 3|line 2"),
        (b'{"a": "\xff"}', "config.json is not UTF-8 text; byte 7"),
        (b"[]", "config.json must hold a JSON object, not a list"),
    ],
)
def test_a_broken_config_file_is_named_with_the_place(tmp_path: Path, content: bytes, message: str) -> None:
    directory = write(tmp_path / "in")
    (directory / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(directory)


# ---- No field is dead ----

SIZES = {
    "vocab_size": 32, "hidden_size": 24, "intermediate_size": 28, "num_layers": 3, "num_heads": 6,
    "num_kv_heads": 1, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip
VALUES = {"rope_theta": 100.0, "rms_norm_eps": 0.1, "dtype": "bfloat16"}
FOR_DECODING = {
    "max_position_embeddings": 32, "eos_token_ids": (3,), "mask_token_id": 5, "slot_sizes": (2,),
    "num_tokens": 20,
}  # fmt: skip


def test_every_field_of_the_config_is_accounted_for_below() -> None:
    assert {field.name for field in dataclasses.fields(ModelConfig)} == {*SIZES, *VALUES, *FOR_DECODING}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_changes_the_parameters_and_old_checkpoints_are_refused(tmp_path: Path, name: str) -> None:
    model = load(write(tmp_path / "in"))
    changed = dataclasses.replace(model.config, **{name: SIZES[name]})
    shapes = jax.tree.map(lambda leaf: leaf.shape, model.params)
    assert jax.tree.map(lambda leaf: leaf.shape, abstract_params(changed)) != shapes
    key = next(key for key, field in READ.items() if field == name)
    with pytest.raises(ValueError, match=r"tensor .* (has shape|is missing|differs)"):
        load(write(tmp_path / "other", make_tensors(), **{key: SIZES[name]}))


@pytest.mark.parametrize("name", VALUES)
def test_a_value_changes_the_logits(tmp_path: Path, name: str) -> None:
    model = load(write(tmp_path / "in"))
    changed = dataclasses.replace(model, config=dataclasses.replace(model.config, **{name: VALUES[name]}))
    assert np.abs(logits(model, [5, 9, 11]) - logits(changed, [5, 9, 11])).max() > 1e-3


@pytest.mark.parametrize("key", READ)
def test_every_field_read_from_config_json_arrives(tmp_path: Path, key: str) -> None:
    """Checked by what an export writes: a field that did not arrive would come back unchanged."""
    name = READ[key]
    value = (SIZES | VALUES | FOR_DECODING)[name]
    config = ModelConfig(V, D, F, L, N, K, H, 1e4, 1e-6, False, 64, (2,), 4)
    config = dataclasses.replace(config, **{name: value})
    export_hf(from_scratch(config), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())[key]
    assert written == (3 if name == "eos_token_ids" else list(value) if isinstance(value, tuple) else value)
    assert load(tmp_path / "out").config == config


# ---- Faulty weights ----


def without(*names: str) -> Tensors:
    return {name: tensor for name, tensor in make_tensors().items() if name not in names}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without("model.layers.1.mlp.up_proj.weight"),
         r"model.layers.1.mlp.up_proj.weight is missing; config.json asks for it, with shape \[20, 16\]"),
        (without("model.norm.weight", "lm_head.weight"), r"model.norm.weight \(and 1 more\) is missing"),
        (make_tensors() | {"model.layers.2.mlp.up_proj.weight": np.zeros((F, D), np.float32)},
         "model.layers.2.mlp.up_proj.weight has no place"),
        (make_tensors() | {"model.layers.0.self_attn.q_proj.bias": np.zeros(N * H, np.float32)},
         "model.layers.0.self_attn.q_proj.bias has no place"),
        (make_tensors() | {"model.norm.weight": np.zeros(D + 1, np.float32)},
         r"model.norm.weight has shape \[17\], but config.json asks for \[16\]"),
        (make_tensors() | {"model.layers.0.mlp.down_proj.weight": np.zeros((F, D), np.float32)},
         r"down_proj.weight has shape \[20, 16\], but config.json asks for \[16, 20\]"),
        (make_tensors() | {"model.norm.weight": np.zeros(D, np.int8)},
         "model.norm.weight is stored as I8; only F32, BF16, F16 are supported"),
    ],
)  # fmt: skip
def test_a_faulty_tensor_is_named_with_what_was_expected(tmp_path: Path, tensors: Tensors, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / "in", tensors))


def test_a_stored_head_of_a_tied_model_must_equal_the_embedding(tmp_path: Path) -> None:
    tensors = make_tensors(tied=True)
    stored = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    model = load(write(tmp_path / "equal", stored, tie_word_embeddings=True))
    export_hf(model, tmp_path / "out")
    assert read_bytes(tmp_path / "out") == read_bytes(tmp_path / "equal")
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight.*tie_word_embeddings"):
        load(write(tmp_path / "other", make_tensors(), tie_word_embeddings=True))


def test_a_truncated_file_names_the_first_lost_tensor_and_the_sizes(tmp_path: Path) -> None:
    directory = write(tmp_path / "in")
    path = directory / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    message = (
        rf"model.safetensors is truncated.* tensor (\S+) should end at byte {len(content)}, the file at byte "
        rf"{len(content) - 5}"
    )
    with pytest.raises(ValueError, match=message):
        load(directory)


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 10) + b'{"a": oops', b"\xff" * 100])
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    directory = write(tmp_path / "in")
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors is truncated or corrupt: .*; copy or download it again"):
        load(directory)


def test_faults_of_a_sharded_index(tmp_path: Path) -> None:
    def broken(name: str) -> tuple[Path, dict[str, Any], Path]:
        directory = write(tmp_path / name, shards=3)
        path = directory / "model.safetensors.index.json"
        return directory, json.loads(path.read_text()), path

    directory, _, _ = broken("shard gone")
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names the shard model-00002-of-00003.safetensors, which is missing"):
        load(directory)

    directory, index, path = broken("tensor elsewhere")
    index["weight_map"]["model.norm.weight"] = "model-00002-of-00003.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model.norm.weight is (not )?in the shard"):
        load(directory)

    directory, index, path = broken("outside")
    index["weight_map"]["model.norm.weight"] = "../model.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="which is outside the checkpoint"):
        load(directory)

    directory, _, path = broken("no map")
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"index.json has no weight_map"):
        load(directory)

    directory, _, _ = broken("both")
    save_file(make_tensors(), directory / "model.safetensors")
    with pytest.raises(ValueError, match="remove the one that is out of date"):
        load(directory)


def test_pickles_and_empty_directories_are_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "in")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickles and could run code"):
        load(directory)
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"there is neither model.safetensors nor"):
        load(directory)
    (directory / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no config.json"):
        load(directory)


# ---- Where checkpoints come from ----


def test_a_source_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no directory .*gone, and it is no hub id"):
        load(tmp_path / "gone")
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="is a file; give the directory"):
        load(tmp_path / "file")


def test_a_hub_id_is_fetched_and_offline_it_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "owner/gone":
            raise OSError("Cannot reach the hub.\nA page of advice.")
        return str(GOLDEN / "modelA")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert load("owner/name-8B").config.vocab_size == 256
    assert asked[0][0] == "owner/name-8B"
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in asked[0][1])
    with pytest.raises(FileNotFoundError, match=r"owner/gone, .*: Cannot reach the hub.$"):
        load("owner/gone")


# ---- What is written ----


@pytest.mark.parametrize("model", ["A", "A0"])
def test_a_golden_checkpoint_comes_back_byte_for_byte_as_a_whole(tmp_path: Path, model: str) -> None:
    export_hf(load(GOLDEN / f"model{model}"), tmp_path / "out")
    assert files(tmp_path / "out") == files(GOLDEN / f"model{model}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_a_bfloat16_checkpoint_comes_back_byte_for_byte(tmp_path: Path, dtype: Any, shards: int, tied: bool) -> None:
    tensors = make_tensors(tied=tied, dtype=jnp.bfloat16)
    directory = write(tmp_path / "in", tensors, shards=shards, tie_word_embeddings=tied, torch_dtype="bfloat16")
    export_hf(load(directory, dtype=dtype), tmp_path / "out")
    assert read_bytes(tmp_path / "out") == read_bytes(directory)
    assert (tmp_path / "out" / "config.json").read_bytes() == (directory / "config.json").read_bytes()
    if shards == 1:
        assert files(tmp_path / "out") == files(directory)


def test_mixed_dtypes_come_back_byte_for_byte(tmp_path: Path) -> None:
    tensors = {
        name: tensor.astype(np.float32 if "norm" in name else np.float16 if "mlp" in name else jnp.bfloat16)
        for name, tensor in make_tensors().items()
    }
    directory = write(tmp_path / "in", tensors, torch_dtype="bfloat16")
    export_hf(load(directory, dtype="float32"), tmp_path / "out")
    assert files(tmp_path / "out") == files(directory)


@pytest.mark.parametrize("keys", [("torch_dtype",), ("dtype",), ("dtype", "torch_dtype"), ()])
def test_a_checkpoint_narrower_in_memory_is_written_so_and_says_so(tmp_path: Path, keys: tuple[str, ...]) -> None:
    directory = write(tmp_path / "in", drop=("torch_dtype",), **dict.fromkeys(keys, "float32"))
    export_hf(load(directory, dtype="bfloat16"), tmp_path / "out")
    expected = {name: tensor.astype(jnp.bfloat16) for name, tensor in make_tensors().items()}
    assert read_bytes(tmp_path / "out") == {
        name: ("BF16", tensor.shape, tensor.tobytes()) for name, tensor in expected.items()
    }
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    for key in keys or ("torch_dtype",):
        assert written.pop(key) == "bfloat16"
    assert written == {key: value for key, value in CONFIG.items() if key != "torch_dtype"}


def test_trained_weights_are_not_rounded_to_the_dtype_they_came_in(tmp_path: Path) -> None:
    tensors = make_tensors(dtype=jnp.bfloat16)
    model = load(write(tmp_path / "in", tensors, torch_dtype="bfloat16"), dtype="float32")
    trained = change(model, "final_norm", model.params["final_norm"] + 1e-5)
    export_hf(trained, tmp_path / "out")
    again = load(tmp_path / "out")
    np.testing.assert_array_equal(again.params["final_norm"], trained.params["final_norm"])
    assert {dtype for dtype, _, _ in read_bytes(tmp_path / "out").values()} == {"F32"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"


def test_weights_beyond_the_shard_size_are_spread_over_files(tmp_path: Path) -> None:
    directory = write(tmp_path / "in")
    export_hf(load(directory), tmp_path / "out", shard_bytes=4000)
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            assert sum(file.get_tensor(name).nbytes for name in file.keys()) <= 4000  # noqa: SIM118
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == SHAPES.keys()
    assert index["metadata"]["total_size"] == sum(4 * np.prod(shape) for shape in SHAPES.values())
    assert read_bytes(tmp_path / "out") == read_bytes(directory)
    assert jax.tree.all(jax.tree.map(np.array_equal, load(tmp_path / "out").params, load(directory).params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_made_from_scratch_is_written_and_read(tmp_path: Path, dtype: Any, tied: bool) -> None:
    config = ModelConfig(256, D, F, L, N, K, H, 1e4, 1e-5, tied, 64, (2, 3), 4, (2, 4), num_tokens=224, dtype=dtype)
    model = from_scratch(config, load(GOLDEN / "modelA").tokenizer)
    export_hf(model, tmp_path / "out")
    again = load(tmp_path / "out", dtype=dtype)
    assert again.config == config
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, model.params))
    assert again.tokenizer.files == model.tokenizer.files
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype


def test_a_changed_config_is_written_into_the_original_files(tmp_path: Path) -> None:
    directory = write(tmp_path / "in", drop=("mask_token_id", "rope_theta"), rope_parameters={"rope_theta": 1e4})
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "top_p": 0.9}))
    model = load(directory)
    config = dataclasses.replace(model.config, mask_token_id=7, slot_sizes=(2, 4), eos_token_ids=(5,), rope_theta=2e4)
    export_hf(dataclasses.replace(model, config=config), tmp_path / "out")
    assert load(tmp_path / "out").config == config
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["Qwen3ForCausalLM"]
    assert written["rope_parameters"] == {"rope_theta": 2e4}
    assert "rope_theta" not in written
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": 5,
        "top_p": 0.9,
    }


def test_what_would_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    model = load(write(tmp_path / "in"))  # it has no tokenizer to tell how many tokens have a text
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, num_tokens=20))
    with pytest.raises(ValueError, match=r"config.num_tokens=20 cannot be written"):
        export_hf(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_target_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    model = load(write(tmp_path / "in"))
    before = files(tmp_path / "in")
    with pytest.raises(FileExistsError, match="exists and is not an empty directory"):
        export_hf(model, tmp_path / "in")
    assert files(tmp_path / "in") == before
    (tmp_path / "empty").mkdir()
    export_hf(model, tmp_path / "empty")
    export_hf(model, tmp_path / "deep" / "er")
    assert files(tmp_path / "empty") == files(tmp_path / "deep" / "er") == before


def test_a_failed_export_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    model = load(write(tmp_path / "in"))
    monkeypatch.setattr("refusion_jax.model.hf.save_file", full)
    with pytest.raises(OSError, match="no space left"):
        export_hf(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_others_may_read_the_weights_if_they_may_read_the_config(tmp_path: Path) -> None:
    export_hf(load(write(tmp_path / "in")), tmp_path / "out")
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


def test_parameters_that_do_not_fit_the_config_are_not_written(tmp_path: Path) -> None:
    model = load(write(tmp_path / "in"))
    for config, message in [
        (
            {"hidden_size": 32},
            r"parameter embedding is float32\[24, 16\], but the config asks for float32\[24, 32\]",
        ),
        (
            {"dtype": "bfloat16"},
            r"parameter embedding is float32\[24, 16\], but the config asks for bfloat16",
        ),
        ({"tie_word_embeddings": True}, "the params have head"),
    ]:
        wrong = dataclasses.replace(model, config=dataclasses.replace(model.config, **config))
        with pytest.raises(ValueError, match=message):
            export_hf(wrong, tmp_path / "out")


# ---- New weights for a model ----


def test_new_params_must_be_like_the_old_ones(tmp_path: Path) -> None:
    model = load(write(tmp_path / "in"))
    leaves = flatten(model.params)
    doubled = model.replace(params=jax.tree.map(lambda leaf: 2 * leaf, model.params))
    np.testing.assert_array_equal(doubled.params["final_norm"], 2 * model.params["final_norm"])
    assert (doubled.config, doubled.tokenizer, doubled.origin) == (
        model.config,
        model.tokenizer,
        model.origin,
    )
    with pytest.raises(ValueError, match="the new params lack final_norm"):
        model.replace(params=unflatten({name: leaf for name, leaf in leaves.items() if name != "final_norm"}))
    with pytest.raises(ValueError, match="the new params have layers/bias, which"):
        model.replace(params=unflatten(leaves | {"layers/bias": leaves["final_norm"]}))
    with pytest.raises(ValueError, match=r"final_norm .* is float32\[17\], but this model's is float32\[16\]"):
        change(model, "final_norm", jnp.zeros(17))
    with pytest.raises(ValueError, match=r"final_norm .* is bfloat16\[16\], but this model's is float32\[16\]"):
        change(model, "final_norm", jnp.zeros(16, jnp.bfloat16))


def test_every_refusal_names_a_field_that_is_otherwise_read() -> None:
    assert not FIXED.keys() & READ.keys()
