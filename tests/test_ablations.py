"""The benchmark that compares variants of training gives figures for each, and does no work twice."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import ablations
from refusion_jax.cli.options import UserError, parse, read_settings
from refusion_jax.training.config import TrainConfig


def small(cache: Path) -> TrainConfig:
    """The settings of the bundled model, with a model and data that compile and train in seconds."""
    config = read_settings(str(ablations.CONFIG), TrainConfig, "--config")
    assert config.model.shape is not None
    shape = dataclasses.replace(
        config.model.shape, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
    )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, shape=shape),
        data=dataclasses.replace(config.data, path="worksheet:0:64", validation_path="worksheet:0:8", cache=str(cache)),
        train=dataclasses.replace(config.train, steps=6, batch_size=8),
        evaluation=dataclasses.replace(
            config.evaluation, decode=dataclasses.replace(config.evaluation.decode, max_new_tokens=16)
        ),
    )


def test_variants_differ_in_the_forward_process_alone(tmp_path: Path) -> None:
    config = read_settings(str(ablations.CONFIG), TrainConfig, "--config")
    for name, variant in ablations.VARIANTS.items():
        settings = ablations.settings_of(name, config, tmp_path)
        assert settings.data == config.data and settings.optimizer == config.optimizer
        assert settings.train.batch_size == config.train.batch_size and settings.train.seed == config.train.seed
        if variant.fifths == (0, 5):
            assert settings.train.steps == config.train.steps and settings.model == config.model


def test_from_causal_to_refusion_in_a_fifth_of_the_steps_takes_as_many_in_all(tmp_path: Path) -> None:
    config = read_settings(str(ablations.CONFIG), TrainConfig, "--config")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=4000))
    causal, turned = (
        ablations.settings_of(name, config, tmp_path).train.steps for name in ("causal", "causal-then-refusion")
    )
    assert (causal, turned) == (3200, 800)


def test_a_variant_brings_along_what_it_starts_from() -> None:
    assert ablations.selected("causal-then-refusion,refusion") == ["refusion", "causal", "causal-then-refusion"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--only", "refusion,mamba"], "--only has 'mamba'; the variants are refusion, autoregressive"),
        (["--steps", "1"], "--steps must be at least 2, not 1"),
        (["--worksheets", "0"], "--worksheets must be at least 1, not 0"),
    ],
)
def test_wrong_options_are_refused(args: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(ablations.Options, args, ablations.Options())


@pytest.mark.slow
def test_figures_of_variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also: a second command neither trains nor decodes, and one with other worksheets decodes again."""
    config, output = small(tmp_path / "cache"), tmp_path / "runs"
    names = ablations.selected("slot-size-1,causal-then-refusion")
    results = ablations.ablate(config, names, output, worksheets=3, seed=0)

    text = io.StringIO()
    Console(file=text, width=140).print(ablations.table_of(results))
    for name, result in results.items():
        figures = result["figures"]
        left_to_right = figures["decoded"]["left to right"]
        assert left_to_right["tokens_per_forward"] == 1
        assert ("exact" in figures["decoded"]) == (name != "causal")
        assert 0 < left_to_right["tokens"] <= 3 * 16
        assert figures["training_seconds"] > 0
        assert name in text.getvalue()
        assert json.loads((output / name / "figures.json").read_text()) == result
    assert set(results["slot-size-1"]["figures"]["held_out"]) == {"masked/slot_1", "loss"}
    assert set(results["causal"]["figures"]["held_out"]) == {"ar", "loss"}
    assert results["causal-then-refusion"]["settings"]["run"]["start"]["checkpoint"] == "../causal/model"

    def refuse(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(ablations, "decode", refuse)
    assert ablations.ablate(config, ["slot-size-1"], output, worksheets=3, seed=0) == {
        "slot-size-1": results["slot-size-1"]
    }
    with pytest.raises(AssertionError, match="decoded again"):
        ablations.ablate(config, ["slot-size-1"], output, worksheets=3, seed=1)
