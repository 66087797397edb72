"""The recipe of the ReFusion paper (appendix B.1, and the official train.sh): Qwen3-8B, 3.7 million examples.

    python train.py --config configs/refusion_8b.py --data.path 'gs://BUCKET/*.json' --mesh.fsdp 64 --mesh.tensor 4

A step takes 512 examples of at most 4,096 tokens, packed in rows: with the paper's data (330 tokens an example) about
41 rows. It needs an accelerator with a mesh; see --help for the settings. The paper used 128 GPUs for about 83 hours.
"""

from __future__ import annotations

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
        run="runs/refusion_8b",
        model=StartConfig(checkpoint="Qwen/Qwen3-8B", shape=SHAPES["qwen3_8b"]),
        data=DataConfig(max_length=4096, workers=8),
        train=LoopConfig(epochs=4, batch_size=512, dtype="bfloat16", remat="full", save_every=500),
        optimizer=OptimizerConfig(learning_rate=2e-5),
        evaluation=EvaluationConfig(every=1000),
    )
