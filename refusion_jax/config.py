"""Every setting of the library, as frozen dataclasses that check themselves."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, Literal

OFFICIAL_SLOT_SIZES = (4, 8, 16, 32)
"""Slot sizes that the official checkpoints were trained with (ReFusion, section 4.3)."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Qwen3 decoder and the token ids that ReFusion adds to it.

    Raises:
      ValueError: a size is not positive, the heads do not divide, or a token id lies outside the vocabulary.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    mask_token_id: int | None  # None: an ordinary causal model, which only method="ar" can decode
    slot_sizes: tuple[int, ...] = OFFICIAL_SLOT_SIZES
    num_tokens: int | None = None  # ids >= num_tokens have rows but no text and are never generated; None: vocab_size
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and activations

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions pair two halves of a head")
        if self.num_tokens is not None and not 1 <= self.num_tokens <= self.vocab_size:
            raise ValueError(f"num_tokens={self.num_tokens} must lie in 1..vocab_size={self.vocab_size}")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id={self.mask_token_id} lies outside the vocabulary of {self.vocab_size}")
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"eos token id {token} lies outside the vocabulary of {self.vocab_size}")
            if token == self.mask_token_id:
                raise ValueError(f"token id {token} is both the mask and an end of text; a mask is never written")


def check_seed(seed: Any, name: str) -> None:
    """Raise ValueError unless ``seed`` is one, calling it by ``name``."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= int(seed) < 2**32:
        raise ValueError(f"{name}={seed!r} must be an integer in 0..{2**32 - 1}")


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How prompts are decoded. The output depends on the prompt and these settings, never on the batch.

    Raises:
      ValueError: a setting is out of its range, or two of them contradict each other.
    """

    method: Literal["refusion", "ar", "mdm"] = "refusion"
    """refusion plans and infills slots in parallel; ar writes left to right, and mdm token by token by masked diffusion
    that reads the whole answer again in every step: the baselines."""
    max_new_tokens: int = 256
    """Budget of new tokens a prompt; the last slot and block are short when they do not divide it."""
    slot_size: int = 8
    """Tokens of a slot, the paper's k: slots are written in parallel, each of them from left to right."""
    block_size: int = 32
    """Tokens of a serial block, the paper's b: blocks are written one after another."""
    slot_threshold: float = 0.9
    """Slots whose certainty exceeds it (strictly) are written at once, the paper's tau_slot; any real number."""
    token_threshold: float = 0.4
    """Drafted tokens whose probability exceeds it pass, the paper's tau_token; verify="threshold" only."""
    verify: Literal["exact", "threshold"] = "exact"
    """exact gives the tokens of the sequential process; threshold is the paper's algorithm."""
    planner: Literal["confidence", "mean", "entropy", "random", "left_to_right"] = "confidence"
    """How certain a slot is: the probability of its first token, the mean of all its masks, the entropy at the first,
    a random number, or less than every slot before it (one slot at a time)."""
    temperature: float = 0.0
    """Tokens are drawn from the distribution at this temperature; 0 takes the most likely one."""
    top_k: int = 0
    """Draw among the tokens that are no less likely than the k-th; 0: among all."""
    top_p: float = 1.0
    """Draw among the most likely tokens that together have this probability."""
    seed: int = 0
    """Of the noise, together with the prompt's place in the input (or its own seed) and the token's position."""
    kv_reuse: Literal["reuse", "recompute", "none"] = "reuse"
    """Keys and values of slots that were infilled in parallel: reuse keeps them as they are, recompute computes them
    again behind each other, none caches nothing of the answer; verify="threshold" only."""
    tokens_per_step: int = 0
    """method="mdm": how many of the most certain tokens every step writes; 0: those above slot_threshold."""
    num_samples: int = 1
    """Answers to every prompt, drawn one independently of the other; the prompt is computed once."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer: it is cut before the first of them."""
    untempered_logprobs: bool = False
    """Log-probabilities of the answer are the model's own, not those after temperature, top_k and top_p."""
    compat: Literal["official"] | None = None
    """official gives the tokens of the official code, bug for bug (compared in float32)."""
    serial_num_blocks: int | None = None
    """Number of serial blocks, in place of block_size; compat="official" only."""
    ar_first: Literal["mask", "token"] = "mask"
    """method="ar": read the first token of a slot from its mask (ReFusion) or from the token before (causal models)."""

    def __post_init__(self) -> None:
        choices: dict[str, tuple[str | None, ...]] = {
            "method": ("refusion", "ar", "mdm"),
            "verify": ("exact", "threshold"),
            "planner": ("confidence", "mean", "entropy", "random", "left_to_right"),
            "kv_reuse": ("reuse", "recompute", "none"),
            "compat": (None, "official"),
            "ar_first": ("mask", "token"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, allowed))}")
        at_least_1 = ("max_new_tokens", "slot_size", "block_size", "serial_num_blocks", "num_samples")
        for name in (*at_least_1, "top_k", "tokens_per_step"):
            value = getattr(self, name)
            if value is None and name == "serial_num_blocks":
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise ValueError(f"{name}={value!r} must be an integer")
            if value < (name in at_least_1):
                raise ValueError(f"{name}={value} must be at least {int(name in at_least_1)}")
        for name in ("slot_threshold", "token_threshold", "temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or value != value:
                raise ValueError(f"{name}={value!r} is not a number")
        check_seed(self.seed, "seed")
        if not (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6):
            raise ValueError(f"temperature={self.temperature} must be 0 (the most likely token) or in 1e-6..1e6")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(f"num_samples={self.num_samples} answers would be the same: set a temperature above 0")
        if not isinstance(self.stop, tuple) or not all(isinstance(string, str) and string for string in self.stop):
            raise ValueError(f"stop={self.stop!r} must be a tuple of strings, none of them empty")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.compat is None and self.serial_num_blocks is not None:
            raise ValueError(f"serial_num_blocks={self.serial_num_blocks} belongs to compat='official'; set block_size")
        if self.compat == "official" and self.method != "refusion":
            raise ValueError(f"compat='official' is a way of method='refusion', not of method={self.method!r}")
        if self.kv_reuse != "reuse" and (self.method, self.verify, self.compat) != ("refusion", "threshold", None):
            raise ValueError(f"kv_reuse={self.kv_reuse!r} is a way of verify='threshold' alone")
        if self.tokens_per_step and self.method != "mdm":
            raise ValueError(f"tokens_per_step={self.tokens_per_step} is a setting of method='mdm' alone")
        if self.compat == "official" and (self.temperature or self.planner != "confidence" or self.stop):
            raise ValueError(
                "compat='official' is greedy, plans by confidence and knows no stop strings: leave temperature, "
                "planner and stop out"
            )
        if self.method == "refusion":
            self.blocks()

    def blocks(self) -> tuple[int, int]:
        """The size of a serial block, and the number of tokens that may be written in all of them.

        With compat="official" as there: the budget is rounded up to whole slots and cut into equal blocks, of which
        what does not divide is lost.
        """
        k, new = 1 if self.method == "mdm" else self.slot_size, self.max_new_tokens
        rounded = -(-new // k) * k
        if self.compat == "official":
            number = self.serial_num_blocks
            if number is None:
                number = max(rounded // self.block_size, 1)
            block = rounded // number
            if block == 0:
                raise ValueError(
                    f"serial_num_blocks={number} leaves no token for a block: there are {rounded} tokens "
                    f"(max_new_tokens={new}, rounded up to whole slots)"
                )
            if block % k:
                raise ValueError(
                    f"the official code cannot decode this: {rounded} tokens in serial_num_blocks={number} blocks make "
                    f"blocks of {block}, which slot_size={k} does not divide"
                )
            return block, block * number
        if self.block_size % k:
            below, above = self.block_size // k * k, -(-self.block_size // k) * k
            hint = f"{below} or {above}" if below else str(above)
            raise ValueError(f"slot_size={k} does not divide block_size={self.block_size}; try block_size {hint}")
        return min(self.block_size, rounded), new
