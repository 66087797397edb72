"""Training runs: that they can be stopped at any moment and go on, and what they leave behind."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from refusion_jax.training import loop
from refusion_jax.training.checkpoint import Checkpoints
from refusion_jax.training.config import TrainConfig
from refusion_jax.training.evaluate import Evaluation
from tests import runs

STEPS = 20


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where examples are tokenised, once for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def configure(cache: Path) -> Callable[..., TrainConfig]:
    """``runs.settings`` with examples from the cache."""

    def settings(directory: Path, **changes: dict[str, Any]) -> TrainConfig:
        changes["data"] = {"cache": str(cache), **changes.get("data", {})}
        return runs.settings(directory, **changes)

    return settings


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> runs.Watch:
    watch = runs.Watch()
    monkeypatch.setattr(loop, "make_step", watch)
    return watch


class Run:
    """What is known of a run that nothing interrupted."""

    def __init__(self, config: TrainConfig) -> None:
        watch = runs.Watch()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "make_step", watch)
            loop.train(config)
        self.steps, self.metrics, self.exported = watch.steps, runs.metrics(config), runs.exported(config)


@pytest.fixture(scope="module")
def uninterrupted(configure: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """20 steps, evaluated every 5."""
    run = Run(configure(tmp_path_factory.mktemp("uninterrupted"), data=HELD_OUT))
    assert [number for number, *_ in run.steps] == list(range(1, STEPS + 1))
    return run


HELD_OUT = {"validation_path": "worksheet:0:4"}


def stop_before(watch: runs.Watch, number: signal.Signals, *steps: int) -> None:
    """Have the process get a signal in these steps."""

    def before(step: int) -> None:
        if step in steps:
            signal.raise_signal(number)

    watch.before = before


def check(config: TrainConfig, watch: runs.Watch, expected: Run) -> None:
    """A run that was interrupted is the uninterrupted one to the last bit."""
    assert watch.steps == expected.steps
    assert runs.metrics(config) == expected.metrics
    assert runs.exported(config) == expected.exported


def test_stopped_in_every_step(
    configure: Callable[..., TrainConfig], tmp_path: Path, watch: runs.Watch, uninterrupted: Run
) -> None:
    """Trap T5, T8: a step each time, with all the evaluations."""
    config = configure(tmp_path, data=HELD_OUT)
    stop_before(watch, signal.SIGTERM, *range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        with pytest.raises(loop.Interrupted, match=f"stopped by SIGTERM at step {step}; the same command goes on"):
            loop.train(config)
        assert not Path(config.run, "model").exists()
    loop.train(config)
    check(config, watch, uninterrupted)
