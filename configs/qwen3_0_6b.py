"""A recipe that fits one accelerator: Qwen3-0.6B, all parameters, rows of 2,048 tokens.

    python train.py --config configs/qwen3_0_6b.py --data.path FILE.jsonl --data.validation-path HELD_OUT.jsonl

Parameters, gradient and optimizer state take 9.6 GB (16 bytes for each of 0.6 billion), and a piece of the batch is
computed at a time. With --lora.rank 16 only adapters are trained, and far less memory is needed.
"""

from __future__ import annotations

from refusion_jax.config import DecodeConfig
from refusion_jax.presets import SHAPES
from refusion_jax.training.config import (
    DataConfig,
    EvaluationConfig,
    LoopConfig,
    OptimizerConfig,
    StartConfig,
    TrainConfig,
)


def get_config() -> TrainConfig:
    return TrainConfig(
        run="runs/qwen3_0_6b",
        model=StartConfig(checkpoint="Qwen/Qwen3-0.6B", shape=SHAPES["qwen3_0_6b"]),
        data=DataConfig(max_length=2048),
        train=LoopConfig(epochs=2, batch_size=64, accumulate=8, dtype="bfloat16", remat="full", save_every=200),
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup=0.03),
        evaluation=EvaluationConfig(every=200, answers=32, decode=DecodeConfig(max_new_tokens=256)),
    )
