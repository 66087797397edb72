"""How well split_chain finds the parts of a chain that do not need each other, where they are known.

    python -m benchmarks.split_chain [--seeds 0,1,2] [--steps 1500]

A causal model, of the shape and with the optimizer of configs/tiny.py, is trained on chains of sums
(refusion_jax.nap.sums) and then rates chains of the test split. Precision and recall are of pairs of steps that stand
in one path. About four minutes for each seed on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile

from refusion_jax.cli.options import read_settings
from refusion_jax.nap import sums
from refusion_jax.nap.curators import Parts, dependences, pairs_together, parts
from refusion_jax.nap.seqdep import cut, left_to_right
from refusion_jax.training import loop
from refusion_jax.training.config import DataConfig, EvaluationConfig, ForwardConfig, TrainConfig

EXAMPLES = 30_000
THRESHOLDS = (0.5, 0.7, 1.0, 1.3, 1.5)


def true_parts(drawn: sums.Sum) -> Parts:
    """By the generator."""
    paths: list[list[int]] = []
    first = 0
    for solution in drawn.paths:
        paths.append(list(range(first, first + len(solution))))
        first += len(solution)
    return Parts(paths, [first])


def main() -> None:
    """Print precision and recall for each seed and threshold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0", help="of the data, separated by commas")
    parser.add_argument("--steps", type=int, default=1500, help="of training")
    parser.add_argument("--chains", type=int, default=200, help="held out, of the test split")
    options = parser.parse_args()
    config = read_settings("configs/tiny.py", TrainConfig, "--config")
    for seed in map(int, options.seeds.split(",")):
        with tempfile.TemporaryDirectory() as directory:
            data = f"{directory}/chains.jsonl"
            sums.run(["--form", "chain", "--seed", str(seed), "--count", str(EXAMPLES), "--output", data])
            model = loop.train(
                dataclasses.replace(
                    config,
                    run=f"{directory}/run",
                    data=DataConfig(path=data, max_length=192),
                    train=dataclasses.replace(config.train, steps=options.steps, save_every=options.steps, seed=seed),
                    forward=ForwardConfig(objective="ar"),
                    evaluation=EvaluationConfig(every=0),
                )
            )
        assert model.tokenizer is not None
        tokenizer, scorer = model.tokenizer, left_to_right(model, 64)
        rated = []
        for index in range(options.chains):
            drawn = sums.example("test", seed, index)
            segments = cut(sums.fields(drawn, "chain")["response"], sums.STEP)
            prompt = tokenizer.encode_chat([{"role": "user", "content": drawn.query}])
            rated.append((dependences(prompt, [tokenizer.encode(segment) for segment in segments], scorer), drawn))
        for threshold in THRESHOLDS:
            right = found = true = whole = 0
            for gains, drawn in rated:
                split, truth = parts(gains, threshold), true_parts(drawn)
                ours, theirs = pairs_together(split.paths), pairs_together(truth.paths)
                right, found, true = right + len(ours & theirs), found + len(ours), true + len(theirs)
                whole += split == truth
            print(
                f"seed {seed}, threshold {threshold}: precision {right / max(1, found):.3f}, "
                f"recall {right / true:.3f}, {whole} of {len(rated)} chains split as they were made",
                flush=True,
            )


if __name__ == "__main__":
    main()
