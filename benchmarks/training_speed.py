"""How fast a training step is: ours beside PyTorch's, at the shape of the golden model A, in one run.

    python -m benchmarks.training_speed [--output FILE.json]

Both do the same work on 24 rows of 157 tokens, in float32 on the CPU: forward, hybrid loss, backward, clipping, AdamW.
PyTorch runs transformers' Qwen3 and is left out where it is not installed. Repeats alternate, and the best of each
counts: what else runs on the machine only ever slows them down.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tyro

from refusion_jax.config import ModelConfig
from refusion_jax.corrupt import corrupt
from refusion_jax.data.batches import Batch, lay_out
from refusion_jax.model.transformer import Remat, init
from refusion_jax.training import optimizer
from refusion_jax.training.config import DataConfig, LoopConfig, OptimizerConfig, StartConfig, TrainConfig
from refusion_jax.training.step import TrainState, make_step, put_batch

ROWS, TOKENS, PROMPT = 24, 157, 82
SHAPE = ModelConfig(
    vocab_size=256,
    hidden_size=96,
    intermediate_size=224,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    eos_token_ids=(2,),
    mask_token_id=4,
)
OFFICIAL = (35_400, 41_100)
"""Padded tokens/s of the official step on another, quiet machine (tests/golden/goldenA/timing.json)."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Time a training step."""

    repeats: int = 5
    """Alternations between the two."""
    steps: int = 10
    """Steps of each before they alternate; the best step counts."""
    output: str | None = None
    """JSON file of the figures."""


def batch(pieces: int = 1) -> Batch:
    """One batch [pieces, R, T] of random tokens, corrupted."""
    rng = np.random.default_rng(0)
    examples = [
        corrupt(rng.integers(5, 256, TOKENS).astype(np.int32), PROMPT, 8, rng, mask_token_id=4) for _ in range(ROWS)
    ]
    rows = lay_out(examples.__getitem__, [[row] for row in range(ROWS)], ROWS, TOKENS)
    return Batch(*(array.reshape(pieces, -1, TOKENS) for array in rows))


def ours(remat: Remat, pieces: int) -> Callable[[], float]:
    """One step at a time, and its seconds."""
    config = TrainConfig(
        run="",
        model=StartConfig(shape=SHAPE, tokenizer=""),
        data=DataConfig(),
        train=LoopConfig(steps=1000, remat=remat),
        optimizer=OptimizerConfig(learning_rate=1e-4),
    )
    adamw = optimizer.make(config.optimizer, 1000)
    params = init(SHAPE, jax.random.key(0))
    state = TrainState(jax.numpy.int32(0), params, adamw.init(params))
    step = make_step(SHAPE, config, adamw)
    data = put_batch(batch(pieces))

    def run() -> float:
        nonlocal state
        start = time.perf_counter()
        state, measures = step(state, None, data)
        jax.block_until_ready((state, measures))
        return time.perf_counter() - start

    return run


def torchs() -> Callable[[], float] | None:
    """The same with PyTorch; None where it is not installed."""
    try:
        import torch
        import transformers
    except ImportError:
        return None
    c = SHAPE
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            rms_norm_eps=c.rms_norm_eps,
            tie_word_embeddings=c.tie_word_embeddings,
            max_position_embeddings=c.max_position_embeddings,
            attn_implementation="sdpa",
        )
    ).float()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = Batch(*(torch.from_numpy(array[0]) for array in batch()))
    ar_weights = data.ar_weights / data.ar_weights.sum()
    masked_weights = data.masked_weights / ROWS
    tokens, positions, targets = data.inputs.long(), data.positions.long(), data.targets.long()
    seen = torch.ones_like(tokens)

    def run() -> float:
        start = time.perf_counter()
        logits = model(input_ids=tokens, attention_mask=seen, position_ids=positions).logits
        entropies = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        loss = (entropies * (ar_weights + masked_weights).flatten()).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        return time.perf_counter() - start

    return run


def main() -> None:
    options = tyro.cli(Options)
    remats: tuple[Remat, ...] = ("none", "dots", "full")
    runs = {f"ours, remat={remat}": ours(remat, 1) for remat in remats}
    runs["ours, remat=full, 4 pieces"] = ours("full", 4)
    if (torch_run := torchs()) is not None:
        runs["torch"] = torch_run
    best: dict[str, float] = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()  # compiles
    for _ in range(options.repeats):
        for name, run in runs.items():
            best[name] = min(best[name], *(run() for _ in range(options.steps)))
    rates = {name: ROWS * TOKENS / seconds for name, seconds in best.items()}
    for name, rate in rates.items():
        beside = "" if "torch" not in rates or name == "torch" else f"   {rate / rates['torch']:.2f} x torch"
        print(f"{name:<26} {best[name] * 1e3:7.1f} ms   {rate:9,.0f} tokens/s{beside}")
    if "torch" not in rates:
        print("torch is not installed: no ratio", file=sys.stderr)
    print(f"the official step on another machine: {OFFICIAL[0]:,} to {OFFICIAL[1]:,} tokens/s")
    if options.output is not None:
        report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "tokens_per_s": rates}
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
