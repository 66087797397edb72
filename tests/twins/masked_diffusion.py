"""Masked diffusion token by token, one prompt at a time: what `method="mdm"` must equal.

In every step the written tokens of the answer, in position order, stand behind the prompt, each seeing all before it,
and behind them the masks of the current block, one behind the other. The most certain ones are written: so many a
step, or all above a threshold and one at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.twins.context import Choose, Context, Model, banned, greedy, log_probabilities, partition, response


def doubt_of(model: Model, logits: NDArray) -> float:
    """Minus the log-probability of the most likely token, in float64: many certainties are 1 in float32."""
    allowed = np.sort(banned(model, logits.astype(np.float64)))[::-1]
    return float(max(np.log1p(np.exp(allowed[1:] - allowed[0]).sum()), 1e-300))


@dataclass(frozen=True)
class Decoded:
    token_ids: list[int]  # up to and including the earliest EOS by position
    committed: list[tuple[int, int]]  # (offset, token) in commit order
    forwards: int
    positions: int  # fed in all of them, without the prompt
    margin: float  # of the closest decision


def decode(
    model: Model,
    prompt: Sequence[int],
    *,
    block_size: int,
    max_new_tokens: int,
    tokens_per_step: int = 0,
    threshold: float = 0.9,
    choose: Choose = greedy,
) -> Decoded:
    context = Context(model)
    context.commit(prompt, range(len(prompt)))
    text: dict[int, int] = {}
    committed: list[tuple[int, int]] = []
    margins: list[float] = []
    forwards = positions = 0
    end = max_new_tokens
    for block in partition(0, max_new_tokens, block_size):
        while masks := [offset for offset in block if offset < end and offset not in text]:
            written = sorted(text)
            offsets = written + masks
            tokens = [text[offset] for offset in written] + [model.mask_id] * len(masks)
            logits = context.forward(tokens, [len(prompt) + offset for offset in offsets])[0][len(written) :]
            forwards += 1
            positions += len(tokens)
            distributions = log_probabilities(model, logits)
            doubts = np.log([doubt_of(model, row) for row in logits])
            certainties = np.exp(-np.exp(doubts))
            ranked = np.argsort(doubts, kind="stable")
            if tokens_per_step:
                taken = ranked[:tokens_per_step]
                rest = ranked[tokens_per_step:]
                margins += [float(doubts[rest].min() - doubts[taken].max())] if len(rest) else []
            else:
                taken = np.flatnonzero(certainties > np.float32(threshold))
                margins += np.abs(np.delete(certainties, ranked[0]) - threshold).tolist()
                if len(taken) == 0:
                    taken = ranked[:1]
                    margins += [float(other - doubts[ranked[0]]) for other in doubts[ranked[1:2]]]
            for index in sorted(taken):
                token, margin = choose(distributions[index], len(prompt) + masks[index])
                margins.append(margin)
                text[masks[index]] = token
                committed.append((masks[index], token))
                if token == model.eos_id:
                    end = min(end, masks[index] + 1)
        if end < max_new_tokens:
            break
    return Decoded(response(committed, model.eos_id), committed, forwards, positions, min(margins))
