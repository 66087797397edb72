"""What is measured on held-out examples while a model trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refusion_jax.corrupt import Corrupted
from refusion_jax.data.batches import Batch, noise, noisy
from refusion_jax.data.dataset import Dataset
from refusion_jax.data.pipeline import Layout
from refusion_jax.decoding.generate import generate
from refusion_jax.decoding.prompts import encode
from refusion_jax.losses import Totals, totals
from refusion_jax.model import Model
from refusion_jax.model.transformer import Params
from refusion_jax.sharding import local_row_shards, row_shards
from refusion_jax.training.config import TrainConfig
from refusion_jax.training.step import all_parameters, piece_losses, put_batch

SEED = 0
"""Of held-out noise: the same in every evaluation and every run, so that losses can be compared."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Measures a model on held-out examples: losses by slot size, and whole answers right."""

    model: Model  # whose parameters do not matter
    config: TrainConfig
    dataset: Dataset
    _losses: Callable[[Params, Params | None, Batch], Any]

    @classmethod
    def make(cls, model: Model, config: TrainConfig, dataset: Dataset) -> Evaluation:
        """Prepare. Raises ValueError if a held-out prompt cannot be decoded as the settings ask for."""

        def losses(params: Params, adapters: Params | None, batch: Batch) -> Any:
            piece = jax.tree.map(lambda x: x[0], batch)
            sums = piece_losses(model.config, config, params, adapters, piece, Totals(jnp.float32(1), jnp.float32(1)))
            return sums, totals(piece.ar_weights, piece.segments)

        evaluation = cls(model, config, dataset, jax.jit(losses))
        for number, prompt in enumerate(evaluation.prompts()):
            encode(model, prompt, config.evaluation.decode, f"held-out prompt {number}")
        return evaluation

    def prompts(self) -> list[np.ndarray]:
        """The prompts to be decoded."""
        number = min(self.config.evaluation.answers, len(self.dataset))
        return [self.dataset[i].tokens[: self.dataset[i].prompt_length] for i in range(number)]

    def __call__(self, trained: Params, frozen: Params | None, stop: Callable[[], object]) -> dict[str, float] | None:
        """Names and values of all that is measured; None if ``stop`` said so in between.

        ``trained`` and ``frozen`` are as in a step: with LoRA the first are adapters.
        """
        measures = self.losses(trained, frozen, stop)
        if measures is None or self.config.evaluation.answers == 0:
            return measures
        answers = self.answers(all_parameters(trained, frozen, self.config), stop)
        return None if answers is None else measures | answers

    def losses(self, trained: Params, frozen: Params | None, stop: Callable[[], object]) -> dict[str, float] | None:
        """The terms of the loss by slot size, and their mean."""
        params, adapters = (trained, None) if frozen is None else (frozen, trained)
        measures: dict[str, float] = {}
        losses = []
        for slot_size in self._slot_sizes():
            sums = np.zeros(4)
            for batch in self._batches(slot_size):
                if stop():
                    return None
                terms, total = jax.device_get(self._losses(params, adapters, put_batch(batch)))
                sums += (*terms, *total)
            ar, masked = sums[0] / max(sums[2], 1), sums[1] / max(sums[3], 1)
            suffix = "" if slot_size is None else f"/slot_{slot_size}"
            measures[f"held_out/ar{suffix}"] = ar
            if slot_size is not None:
                measures[f"held_out/masked{suffix}"] = masked
            weights = self.config.forward
            losses.append(weights.ar_weight * ar + weights.masked_weight * masked)
        if losses:
            measures["held_out/loss"] = float(np.mean(losses))
        return measures

    def _slot_sizes(self) -> tuple[int | None, ...]:
        if self.config.evaluation.examples == 0:
            return ()
        return self.config.forward.slot_sizes if self.config.forward.objective == "refusion" else (None,)

    def _batches(self, slot_size: int | None) -> Iterator[Batch]:
        forward, train = self.config.forward, self.config.train
        if slot_size is not None:
            forward = dataclasses.replace(forward, slot_sizes=(slot_size,), curriculum=0)
        data = self.config.data
        layout = Layout(data.max_length, data.pack, 1, row_shards(), local_row_shards())
        number = min(self.config.evaluation.examples, len(self.dataset))
        size = max(train.batch_size // train.accumulate, 1)
        for first in range(0, number, size):
            members = range(first, min(first + size, number))

            def corrupted(member: int, members: range = members) -> Corrupted:
                index = members[member]
                return noisy(self.dataset[index], forward, self.model.config.mask_token_id, noise(SEED, 0, index), 1)

            yield layout([int(self.dataset.lengths[index]) for index in members], corrupted)

    def answers(self, params: Params, stop: Callable[[], object]) -> dict[str, float] | None:
        """The share of held-out prompts that are answered token for token, and the tokens of a forward pass."""
        prompts = self.prompts()
        params = jax.tree.map(lambda x: x.astype(self.model.config.dtype), params)
        model = dataclasses.replace(self.model, params=params)
        right, tokens, forwards = 0, 0, 0
        size = self.config.evaluation.batch_size
        for first in range(0, len(prompts), size):
            if stop():
                return None
            answers = generate(
                model, prompts[first : first + size], self.config.evaluation.decode, batch_size=min(size, len(prompts))
            )
            for index, answer in enumerate(answers, first):
                example = self.dataset[index]
                right += answer.token_ids == example.tokens[example.prompt_length :].tolist()
                tokens += answer.stats.tokens
                forwards += answer.stats.forwards
        return {
            "held_out/right": right / len(prompts),
            "held_out/tokens_per_forward": tokens / forwards,
        }
