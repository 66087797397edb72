"""Settings by name: ``PRESETS["balanced"]``, or ``decode.py --preset balanced``.

Three are ours, for exact decoding: they differ in the size of a serial block, hence how much is written at once. The
others are the paper's, task by task (ReFusion, table 5 of its second version, and the same in the official ``eval.sh``,
where a block is given as 512 / serial_num_blocks). All decode greedily, without examples in the prompt.
"""

from __future__ import annotations

from refusion_jax.config import DecodeConfig, ModelConfig


def _paper(slot_threshold: float, token_threshold: float, slot_size: int, block_size: int) -> DecodeConfig:
    return DecodeConfig(
        verify="threshold",
        max_new_tokens=512,
        slot_threshold=slot_threshold,
        token_threshold=token_threshold,
        slot_size=slot_size,
        block_size=block_size,
    )


PRESETS = {
    "latency": DecodeConfig(slot_size=32, block_size=64),  # fewest forward passes
    "balanced": DecodeConfig(slot_size=16, block_size=32),  # fewer computed positions
    "quality": DecodeConfig(slot_size=16, block_size=16),  # one slot at a time: the tokens of left to right
    # name         tau_slot, tau_token, k, b
    "mmlu_pro": _paper(0.9, 0.4, 16, 128),
    "arc_c": _paper(0.8, 0.1, 8, 8),
    "gsm8k": _paper(0.9, 0.4, 32, 128),
    "math": _paper(0.8, 0.6, 32, 64),
    "gpqa": _paper(0.8, 0.2, 8, 16),
    "humaneval": _paper(0.9, 0.4, 32, 128),
    "mbpp": _paper(0.9, 0.3, 32, 128),
}


def _qwen3(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=151_936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        max_position_embeddings=40_960,
        eos_token_ids=(151_645,),  # <|im_end|>
        mask_token_id=None,
        num_tokens=151_669,
    )


SHAPES = {
    "qwen3_0_6b": _qwen3(1_024, 3_072, 28, 16, tied=True),
    "qwen3_1_7b": _qwen3(2_048, 6_144, 28, 16, tied=True),
    "qwen3_4b": _qwen3(2_560, 9_728, 36, 32, tied=True),
    "qwen3_8b": _qwen3(4_096, 12_288, 36, 32, tied=False),
}
"""Shapes of published models (config.json of Qwen/Qwen3-0.6B, -1.7B, -4B and -8B)."""
