"""transformers computes the same logits from the checkpoints we read and write."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import ModelConfig
from refusion_jax.model import Model
from refusion_jax.model.hf import export_hf, load
from refusion_jax.model.transformer import Transformer, causal, init
from refusion_jax.training import loop
from tests import runs

torch = pytest.importorskip("torch", reason="torch, with which transformers computes, is not installed")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

ROWS, LENGTH = 2, 33
SMALL = {
    "grouped": {},
    "one key/value head": {"num_key_value_heads": 1},
    "no grouping": {"num_key_value_heads": 6, "num_attention_heads": 6, "hidden_size": 40, "head_dim": 10},
    "rope base 1e6, large epsilon": {"rope_theta": 1e6, "rms_norm_eps": 1e-2},
}


def make_torch(directory: Path, **changed: Any) -> Any:
    """A random Qwen3 of transformers, saved; its norms are random too, lest one stand in for another."""
    config = {
        "vocab_size": 61, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 1e4, "eos_token_id": 2,
    } | changed  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    model.save_pretrained(directory)
    return model


def tokens(vocabulary: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocabulary, (ROWS, LENGTH))


def torch_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens(model.config.vocab_size))).logits.numpy()


def our_logits(model: Model) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
    sees = jnp.broadcast_to(causal(LENGTH), (ROWS, LENGTH, LENGTH))
    ids = jnp.asarray(tokens(model.config.vocab_size))
    run = jax.jit(lambda params: Transformer(model.config).apply({"params": params}, ids, positions, sees))
    return np.asarray(run(model.params).logits)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("changed", SMALL.values(), ids=SMALL)
def test_a_checkpoint_of_transformers_gives_its_logits(tmp_path: Path, changed: dict[str, Any], tied: bool) -> None:
    expected = torch_logits(make_torch(tmp_path / "in", tie_word_embeddings=tied, **changed))
    assert np.ptp(expected) > 1  # logits near zero would agree whatever we compute
    np.testing.assert_allclose(our_logits(load(tmp_path / "in")), expected, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_an_export_of_its_own_checkpoint(tmp_path: Path, tied: bool) -> None:
    expected = torch_logits(make_torch(tmp_path / "in", tie_word_embeddings=tied))
    model = load(tmp_path / "in")
    config = dataclasses.replace(model.config, mask_token_id=4, slot_sizes=(4, 8))
    export_hf(dataclasses.replace(model, config=config), tmp_path / "out", shard_bytes=40_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    np.testing.assert_array_equal(torch_logits(again), expected)
    assert again.config.mask_token_id == 4


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_a_model_made_from_scratch(tmp_path: Path, tied: bool) -> None:
    config = ModelConfig(61, 48, 72, 3, 4, 2, 16, 5e3, 1e-5, tied, 64, (2,), 4)
    model = Model(init(config, jax.random.key(0)), config)
    export_hf(model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.config.mask_token_id == 4
    np.testing.assert_allclose(torch_logits(theirs), our_logits(model), atol=1e-4)


def test_a_bfloat16_checkpoint_of_transformers_comes_back_byte_for_byte(tmp_path: Path) -> None:
    transformers.set_seed(0)
    model = make_torch(tmp_path / "in")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bf16", max_shard_size="30KB")
    export_hf(load(tmp_path / "bf16", dtype="float32"), tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    for (name, ours), (_, theirs) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "bf16" / "config.json").read_bytes()


def test_transformers_reads_what_training_leaves(tmp_path: Path) -> None:
    """Must-show h: the model of a finished run, its tokenizer included."""
    trained = loop.train(runs.settings(tmp_path, train={"steps": 2}, evaluation={"every": 0}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    np.testing.assert_allclose(torch_logits(theirs), our_logits(trained), atol=1e-4)
    np.testing.assert_array_equal(our_logits(load(tmp_path / "run" / "model")), our_logits(trained))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer.convert_tokens_to_ids("<|mask|>") == theirs.config.mask_token_id == trained.config.mask_token_id
