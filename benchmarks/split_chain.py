"""How well split_chain finds the parts of a chain that do not need each other, where they are known.

    python -m benchmarks.split_chain [--seeds 0,1,2] [--steps 1500]

A causal model, of the shape and with the optimizer of configs/tiny.py, is trained on chains of sums
(refusion_jax.nap.sums) and then rates chains of the test split. Precision and recall are of pairs of steps that stand
in one path. ``shares`` is how split_chain finds what depends on what, by the chain rule; ``pairs`` is the plain way,
each pair of segments as if nothing stood between them. About four minutes for each seed on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence

from refusion_jax.cli.options import read_settings
from refusion_jax.nap import sums
from refusion_jax.nap.curators import Parts, dependences, pairs_together, parts
from refusion_jax.nap.seqdep import Scorer, Tokens, cut, left_to_right
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


def gains_of_pairs(prompt: Tokens, segments: Sequence[Tokens], scorer: Scorer) -> list[list[float]]:
    """What each segment gains from each one before it, alone, in nats."""
    rated = iter(
        scorer([([*prompt, *before], one) for n, one in enumerate(segments) for before in ((), *segments[:n])])
    )
    gains = []
    for number in range(len(segments)):
        alone = next(rated)
        gains.append([next(rated) - alone for _ in range(number)])
    return gains


def parts_of_pairs(gains: Sequence[Sequence[float]], threshold: float) -> Parts:
    """The groups of segments that are joined by a gain of at least ``threshold``, the last segment left out."""
    group = list(range(len(gains) - 1))
    for number, of_segment in enumerate(gains[:-1]):
        for before, gain in enumerate(of_segment):
            if gain >= threshold:
                group = [group[before] if one == group[number] else one for one in group]
    return Parts([[n for n, one in enumerate(group) if one == g] for g in dict.fromkeys(group)], [len(gains) - 1])


RULES = {"shares": (dependences, parts), "pairs": (gains_of_pairs, parts_of_pairs)}


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
        chains = []
        for index in range(options.chains):
            drawn = sums.example("test", seed, index)
            segments = cut(sums.fields(drawn, "chain")["response"], sums.STEP)
            prompt = tokenizer.encode_chat([{"role": "user", "content": drawn.query}])
            chains.append((prompt, [tokenizer.encode(segment) for segment in segments], true_parts(drawn)))
        for name, (rate, divide) in RULES.items():
            rated = [(rate(prompt, segments, scorer), truth) for prompt, segments, truth in chains]
            for threshold in THRESHOLDS:
                right = found = true = whole = 0
                for gains, truth in rated:
                    split = divide(gains, threshold)
                    ours, theirs = pairs_together(split.paths), pairs_together(truth.paths)
                    right, found, true = right + len(ours & theirs), found + len(ours), true + len(theirs)
                    whole += split == truth
                print(
                    f"seed {seed}, {name}, threshold {threshold}: precision {right / max(1, found):.3f}, "
                    f"recall {right / true:.3f}, {whole} of {len(rated)} chains split as they were made",
                    flush=True,
                )


if __name__ == "__main__":
    main()
