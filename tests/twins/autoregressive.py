"""Left-to-right decoding, one token and one prompt at a time: what `method="ar"` must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.twins.context import Choose, Context, Model, greedy, log_probabilities


@dataclass(frozen=True)
class Decoded:
    token_ids: list[int]  # up to and including EOS
    margin: float  # of the closest decision
    finish_reason: str  # "stop" | "length"


def decode(
    model: Model,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    first: Literal["mask", "token"],
    slot_size: int = 8,
    choose: Choose = greedy,
) -> Decoded:
    """Every token is read from the token before it.

    With first="mask" the first token of every slot is read from a lone mask at its own position instead, as
    ReFusion models are trained; slot_size matters there only.
    """
    if first == "token" and len(prompt) == 0:
        raise ValueError('an empty prompt has no token to read the first one from; use first="mask"')
    context = Context(model)
    if len(prompt) > 0:
        logits = context.commit(prompt, range(len(prompt)))
    tokens: list[int] = []
    margins: list[float] = []
    for offset in range(max_new_tokens):
        position = len(prompt) + offset
        if first == "mask" and offset % slot_size == 0:
            logits = context.forward([model.mask_id], [position])[0]
        token, margin = choose(log_probabilities(model, logits[-1]), position)
        margins.append(margin)
        tokens.append(token)
        if token == model.eos_id:
            return Decoded(tokens, min(margins), "stop")
        logits = context.commit([token], [position])
    return Decoded(tokens, min(margins), "length")
