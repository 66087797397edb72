"""The model that training starts from: an ordinary causal model becomes one that knows a mask token."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import refusion_jax as rf
from refusion_jax.data import worksheet
from refusion_jax.model import Model
from refusion_jax.model.hf import export_hf
from refusion_jax.model.transformer import flatten
from refusion_jax.training import loop
from refusion_jax.training.config import StartConfig, TrainConfig
from refusion_jax.training.start import start
from tests import runs
from tests.twins import golden

MODEL_A = golden.DIRECTORY / "modelA"
TOKENS = 224  # of its tokenizer


def causal(directory: Path, vocab_size: int = 256, tied: bool = True) -> Path:
    """Model A as it would be without a mask token, with another vocabulary or a head of its own."""
    source = directory / "source"
    shutil.copytree(MODEL_A, source)
    for file in source.glob("*.json"):
        file.write_text(file.read_text().replace("<|mask|>", "<|gone|>"))
    config = json.loads((source / "config.json").read_text())
    del config["mask_token_id"]
    (source / "config.json").write_text(json.dumps(config))
    if (vocab_size, tied) == (256, True):
        return source
    model = rf.load(source)
    rng = np.random.default_rng(0)
    rows = np.asarray(model.params["embedding"])
    rows = np.concatenate([rows, rng.normal(0, 0.1, (256, rows.shape[1]))])[:vocab_size].astype(np.float32)
    params = {**model.params, "embedding": jnp.asarray(rows)}
    if not tied:
        head = rng.normal(0, 0.1, rows.shape[::-1]).astype(np.float32) + rows.T
        params["head"] = jnp.asarray(head)
    shape = dataclasses.replace(model.config, vocab_size=vocab_size, tie_word_embeddings=tied)
    export_hf(Model(params, shape, model.tokenizer), directory / "model")
    return directory / "model"


def settings(directory: Path, checkpoint: Path, **changes: dict[str, Any]) -> TrainConfig:
    """Three steps on the golden prompts."""
    lines = [
        json.dumps({"query": prompt["query"], "response": prompt["response"]})
        for prompt in json.loads((golden.DIRECTORY / "goldenA" / "prompts.json").read_text())["prompts"]
    ]
    (directory / "examples.jsonl").write_text("\n".join(lines))
    config = runs.settings(directory, data={"path": str(directory / "examples.jsonl")})
    config = dataclasses.replace(config, model=StartConfig(checkpoint=str(checkpoint)))
    config = runs.changed(config, train={"steps": 3, "batch_size": 8}, optimizer={"learning_rate": 1e-3})
    return runs.changed(config, **changes)


# ---- The mask token ----


@pytest.mark.parametrize("mesh", [None, (2, 2, 2), (1, 8, 1)], ids=str)
@pytest.mark.parametrize(
    ("vocab_size", "tied", "size"),
    [
        (256, True, 256),  # there is room in the padding
        (TOKENS, True, 256),  # it is full
        (TOKENS, False, 256),
        (TOKENS + 2, False, TOKENS + 2),
    ],
)
def test_a_mask_token_is_added(
    tmp_path: Path, vocab_size: int, tied: bool, size: int, mesh: tuple[int, int, int] | None
) -> None:
    """Its rows are the mean of those of all tokens; all others are as they were."""
    checkpoint = causal(tmp_path, vocab_size, tied)
    before = {name: np.asarray(leaf) for name, leaf in flatten(rf.load(checkpoint).params).items()}
    if mesh is None:
        model = start(settings(tmp_path, checkpoint))
    else:
        with jax.set_mesh(rf.make_mesh(*mesh)):
            model = start(settings(tmp_path, checkpoint))
            assert all(len(leaf.devices()) == 8 for leaf in jax.tree.leaves(model.params))
    assert model.tokenizer is not None
    assert model.tokenizer.token_id("<|mask|>") == TOKENS
    assert model.tokenizer.encode("1 <|mask|> 2")[1] == TOKENS, "it is one token wherever it stands"
    assert (model.config.mask_token_id, model.config.num_tokens) == (TOKENS, TOKENS + 1)
    assert (model.config.vocab_size, model.config.slot_sizes) == (size, (4, 8, 16, 32))
    after = {name: np.asarray(leaf) for name, leaf in flatten(model.params).items()}
    assert before.keys() == after.keys()
    for name, leaf in before.items():
        if name not in ("embedding", "head"):
            assert after[name].tobytes() == leaf.tobytes()
            continue
        old, new = (leaf, after[name]) if name == "embedding" else (leaf.T, after[name].T)
        assert new.shape == (size, 96)
        np.testing.assert_allclose(new[TOKENS], old[:TOKENS].mean(axis=0, dtype=np.float64), rtol=1e-4, atol=1e-6)
        assert np.array_equal(new[:TOKENS], old[:TOKENS])
        assert np.array_equal(new[TOKENS + 1 : vocab_size], old[TOKENS + 1 :])
        assert not np.any(new[max(vocab_size, TOKENS + 1) :])


def test_a_full_vocabulary_grows_by_whole_rows_of_128(tmp_path: Path) -> None:
    source = causal(tmp_path)
    extra = [f"<|extra_{number}|>" for number in range(256 - TOKENS)]
    model = rf.load(source)
    assert model.tokenizer is not None
    tokenizer = model.tokenizer.with_special_tokens(extra)
    shape = dataclasses.replace(model.config, num_tokens=256)
    export_hf(Model(model.params, shape, tokenizer), tmp_path / "model")
    started = start(settings(tmp_path, tmp_path / "model"))
    assert (started.config.mask_token_id, started.config.vocab_size) == (256, 384)
    assert started.params["embedding"].shape == (384, 96)


def test_the_mask_token_that_is_there_is_used(tmp_path: Path) -> None:
    """That of config.json; or else the one that the tokenizer knows, as the official code has it."""
    before = rf.load(MODEL_A)
    model = start(settings(tmp_path, MODEL_A, model={"mask_token": "<|other|>"}))
    assert model.config == before.config
    assert runs.digest(model.params) == runs.digest(before.params)
    source = causal(tmp_path)
    model = start(settings(tmp_path, source, model={"mask_token": "<|gone|>"}))
    assert (model.config.mask_token_id, model.config.vocab_size) == (4, 256)
    assert runs.digest(model.params) == runs.digest(before.params)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"tokenizer": "worksheet"},
            r"token 0 is '<\|pad\|>' in the tokenizer worksheet, but '<\|endoftext\|>' in .*model.tokenizer None",
        ),
        ({"checkpoint": "no/such/place"}, "there is no directory no/such/place"),
        ({"tokenizer": "no/such/place"}, "there is no directory no/such/place"),
    ],
)
def test_what_cannot_be_started_from(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        start(settings(tmp_path, MODEL_A, model=changes))


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    model = rf.load(MODEL_A)
    shape = dataclasses.replace(model.config, num_tokens=None)
    export_hf(Model(model.params, shape), tmp_path / "bare")
    with pytest.raises(ValueError, match=r"bare has no tokenizer; give the directory of one as model.tokenizer"):
        start(settings(tmp_path, tmp_path / "bare"))
    started = start(settings(tmp_path, tmp_path / "bare", model={"tokenizer": str(MODEL_A)}))
    assert started.config == model.config


def test_a_tokenizer_that_knows_more_tokens_than_the_vocabulary(tmp_path: Path) -> None:
    shape = dataclasses.replace(runs.SHAPE, vocab_size=128)
    with pytest.raises(ValueError, match=rf"worksheet knows {len(worksheet.VOCABULARY)} tokens, .* has only 128"):
        start(runs.settings(tmp_path, model={"shape": shape}))


# ---- Runs that start so ----


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> runs.Watch:
    watch = runs.Watch()
    watch.stand_in(monkeypatch)
    return watch


@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_the_trained_model_knows_its_mask_and_slot_sizes(tmp_path: Path, watch: runs.Watch, rank: int) -> None:
    """The export, the run's directory and the model in memory decode alike, with adapters as well."""
    config = settings(
        tmp_path,
        causal(tmp_path, TOKENS, tied=False),
        forward={"slot_sizes": (4, 8)},
        lora={"rank": rank, "targets": ("query", "down")},
    )
    trained = loop.train(config)
    raw = json.loads(Path(config.run, "model", "config.json").read_text())
    assert (raw["mask_token_id"], raw["slot_sizes"], raw["vocab_size"]) == (TOKENS, [4, 8], 256)
    exported, run = rf.load(Path(config.run, "model")), rf.load(config.run)
    assert trained.config == exported.config == run.config
    assert runs.digest(trained.params) == runs.digest(exported.params) == runs.digest(run.params)
    assert exported.tokenizer is not None and run.tokenizer is not None and trained.tokenizer is not None
    assert exported.tokenizer.fingerprint == run.tokenizer.fingerprint == trained.tokenizer.fingerprint
    prompts = [prompt.prompt_ids for prompt in golden.load("A").prompts[:2]]
    decode = rf.DecodeConfig(max_new_tokens=8, slot_size=4, block_size=8)
    answers = [[out.token_ids for out in rf.generate(model, prompts, decode)] for model in (trained, exported)]
    assert answers[0] == answers[1]


def test_from_causal_to_refusion(tmp_path: Path, watch: runs.Watch) -> None:
    """Trained from left to right first, without a mask; the second run begins where the first one ended."""
    causal = runs.settings(tmp_path, forward={"objective": "ar"}, train={"steps": 2})
    first = loop.train(dataclasses.replace(causal, run=str(tmp_path / "first")))
    assert first.config.mask_token_id is None
    assert rf.load(tmp_path / "first").config.mask_token_id is None
    second = dataclasses.replace(
        runs.settings(tmp_path, train={"steps": 2}), model=StartConfig(checkpoint=str(tmp_path / "first"))
    )
    started = start(second)
    assert started.config.mask_token_id == worksheet.VOCABULARY.index("<|mask|>")
    assert runs.digest(started.params) == runs.digest(first.params)
    assert loop.train(second).config == started.config


@pytest.mark.slow
def test_bfloat16(tmp_path: Path, watch: runs.Watch) -> None:
    """It is computed in bfloat16; what is trained is float32, and loses no small updates."""
    full, half = (
        dataclasses.replace(settings(tmp_path, MODEL_A, train={"dtype": dtype}), run=str(tmp_path / dtype))
        for dtype in ("float32", "bfloat16")
    )
    loop.train(full)
    trained = loop.train(half)
    for line, expected in zip(runs.metrics(half), runs.metrics(full), strict=True):
        for name in ("train/loss", "train/gradient_norm"):
            assert line[name] == pytest.approx(expected[name], rel=0.03)
            assert line[name] != expected[name]
    assert {leaf.dtype for leaf in jax.tree.leaves(trained.params)} == {jnp.dtype(jnp.bfloat16)}
    tensors = load_file(Path(half.run, "model", "model.safetensors"))
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"bfloat16"}
    master = rf.load(half.run, dtype="float32")
    assert runs.digest(jax.tree.map(lambda x: x.astype(jnp.bfloat16), master.params)) == runs.digest(trained.params)
    start_of = flatten(rf.load(MODEL_A).params)
    for name, leaf in flatten(master.params).items():
        assert leaf.dtype == jnp.float32
        assert np.any(np.asarray(leaf) != np.asarray(leaf.astype(jnp.bfloat16).astype(jnp.float32))), name
        assert np.max(np.abs(leaf - start_of[name])) < 0.01
