"""Train the bundled model: worksheets (refusion_jax/data/worksheet.py), on two CPU cores.

python train.py --config configs/tiny.py
"""

from __future__ import annotations

from refusion_jax.config import DecodeConfig, ModelConfig
from refusion_jax.training.config import (
    DataConfig,
    EvaluationConfig,
    LoopConfig,
    OptimizerConfig,
    StartConfig,
    TrainConfig,
)

SHAPE = ModelConfig(
    vocab_size=256,
    hidden_size=96,
    intermediate_size=256,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    eos_token_ids=(),
    mask_token_id=None,
)


def get_config() -> TrainConfig:
    return TrainConfig(
        run="runs/tiny",
        model=StartConfig(shape=SHAPE, tokenizer="worksheet"),
        data=DataConfig(path="worksheet:0:100000", validation_path="worksheet:0:500", max_length=192),
        train=LoopConfig(steps=8_000, batch_size=16, accumulate=2, remat="full", log_every=100, save_every=1000),
        optimizer=OptimizerConfig(
            algorithm="muon",
            learning_rate=4e-3,
            matrix_rate=5.0,
            warmup=0.03,
            final=0.02,
            b2=0.98,
            weight_decay=0.01,
        ),
        evaluation=EvaluationConfig(
            every=4000,
            examples=128,
            answers=100,
            decode=DecodeConfig(max_new_tokens=96, slot_size=16, block_size=32),
            batch_size=20,
        ),
    )
