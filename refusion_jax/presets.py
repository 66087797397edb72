"""The settings of the paper, task by task: ``PRESETS["gsm8k"]``, or ``decode.py --preset gsm8k``.

ReFusion, table 5 of its second version, and the same in the official ``eval.sh``, where a block is given as
512 / serial_num_blocks. All decode greedily, without examples in the prompt.
"""

from __future__ import annotations

from refusion_jax.config import DecodeConfig


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
    # name         tau_slot, tau_token, k, b
    "mmlu_pro": _paper(0.9, 0.4, 16, 128),
    "arc_c": _paper(0.8, 0.1, 8, 8),
    "gsm8k": _paper(0.9, 0.4, 32, 128),
    "math": _paper(0.8, 0.6, 32, 64),
    "gpqa": _paper(0.8, 0.2, 8, 16),
    "humaneval": _paper(0.9, 0.4, 32, 128),
    "mbpp": _paper(0.9, 0.3, 32, 128),
}
