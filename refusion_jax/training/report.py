"""What a run tells while it runs: a progress bar, metrics, and a stop when the loss is no number any more."""

from __future__ import annotations

import math
import sys
import time
import types
from collections.abc import Callable, Mapping

import jax
import numpy as np
import tqdm

from refusion_jax.config import ModelConfig
from refusion_jax.data.batches import Batch
from refusion_jax.distributed import is_first, of_first
from refusion_jax.training.config import TrainConfig
from refusion_jax.training.metrics import Metrics, measured, throughput
from refusion_jax.training.optimizer import schedule
from refusion_jax.training.step import Measures


class Report:
    """A context manager around the steps of a run."""

    evaluated: bool
    """Whether the step that training goes on from was evaluated."""

    def __init__(self, config: TrainConfig, model: ModelConfig, first: int, steps: int) -> None:
        self._config, self._model = config, model
        self._learning_rate = schedule(config.optimizer, steps)
        self._metrics = Metrics(config.run, step=first or None) if is_first() else None
        names = measured(config.run, first) if is_first() else set()
        self.evaluated = bool(of_first(np.asarray(any(name.startswith("held_out/") for name in names))))
        if first and is_first():
            print(f"going on from step {first} of {steps}", file=sys.stderr)
        hidden = None if is_first() else True
        self._bar = tqdm.tqdm(initial=first, total=steps, unit="step", disable=hidden, dynamic_ncols=True)
        self._waiting: list[Measures] = []  # not looked at yet: that would wait for the device
        self._places = 0
        self._since = time.perf_counter()

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: types.TracebackType | None) -> None:
        self._bar.close()
        if self._metrics is not None:
            self._metrics.__exit__()

    def step(self, number: int, batch: Batch, measures: Measures) -> None:
        """Take note of a step; every ``log_every`` steps the means since the last time are written."""
        self._waiting.append(measures)
        self._places += batch.segments.size
        self._bar.update()
        if number % self._config.train.log_every == 0:
            self._write(number)

    def check(self, number: int, measures: Measures) -> None:
        """Raise FloatingPointError if the loss of the step is no number: what comes then is not worth keeping."""
        loss, norm = float(measures.loss), float(measures.gradient_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"at step {number} the loss is {loss} and the norm of its gradient {norm}, and so it will be again: "
                "give another --run directory, with a lower optimizer.learning_rate or optimizer.clip"
            )

    def evaluation(self, number: int, evaluate: Callable[[], Mapping[str, float] | None]) -> float | None:
        """Write what an evaluation measures, and return the held-out loss; None where there is none.

        It takes none of the time by which the speed of training is measured.
        """
        start = time.perf_counter()
        measures = evaluate()
        self._since += time.perf_counter() - start
        if measures is None:
            return None
        if self._metrics is not None:
            self._metrics.write(number, measures)
            words = ", ".join(f"{name.removeprefix('held_out/')} {value:.4g}" for name, value in measures.items())
            self._bar.write(f"step {number}, held out: {words}", file=sys.stderr)
        return measures.get("held_out/loss")

    def _write(self, number: int) -> None:
        waited = jax.device_get(self._waiting)
        self.check(number, waited[-1])
        seconds = max(time.perf_counter() - self._since, 1e-9)
        tokens = sum(int(measures.tokens) for measures in waited)
        means = {name: float(np.mean([getattr(m, name) for m in waited])) for name in Measures._fields[:-1]}
        speed = throughput(self._model, tokens, seconds, tokens / (len(waited) * self._config.train.batch_size))
        values = means | {"learning_rate": float(self._learning_rate(number - 1))} | speed
        values["efficiency"] = tokens / self._places
        if self._metrics is not None:
            self._metrics.write(number, {f"train/{name}": value for name, value in values.items()})
        self._bar.set_postfix_str(f"loss {means['loss']:.3f}, {speed['tokens_per_second']:,.0f} tokens/s")
        self._restart()

    def _restart(self) -> None:
        self._waiting.clear()
        self._places = 0
        self._since = time.perf_counter()
