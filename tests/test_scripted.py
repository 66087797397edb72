"""Every method against its sequential twin, on models that are made up for the purpose.

The properties run on adversaries: models whose every prediction depends, through a hash, on the token, its position
and the whole history of all that it sees. One entry that sees too much, or keys and values that were computed in
another context than the twin's, and the text is another one. Scenarios with counts worked out by hand follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from refusion_jax.decoding import engine
from refusion_jax.decoding.autoregressive import Autoregressive
from refusion_jax.decoding.exact import Exact
from refusion_jax.decoding.threshold import Threshold
from tests import drive
from tests.twins import autoregressive, exact, official
from tests.twins.qwen3 import Memory
from tests.twins.scripted import Script, ScriptedModel

CAPACITY = 48
EOS, MASK = 0, 1


# --- adversaries --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HashModel:
    """Predictions are hashes of a token, its position and, recursively, of everything that it sees.

    Its keys are those hashes. With probability `agreeing` an entry predicts a token that depends on the position
    alone, so that some drafts are right.
    """

    seed: int
    vocabulary: int
    tokenizer_length: int
    agreeing: float
    eos_rate: float
    ties: bool  # logits take two values: the best token, and certainties, are often equal to others
    mask_id: int = MASK
    eos_id: int = EOS

    def forward(
        self, tokens: NDArray, positions: NDArray, sees: NDArray, context: Memory | None = None
    ) -> tuple[NDArray, NDArray, NDArray]:
        behind = np.zeros(0, np.uint64) if context is None else context[0][0, :, 0, 0]
        own = sees[:, len(behind) :]
        assert not np.triu(own, 1).any() and own.diagonal().all()
        hashes = np.concatenate([behind, np.zeros(len(tokens), np.uint64)])
        for i, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            entry = len(behind) + i
            history = hashes[:entry][sees[i, :entry]].sum(dtype=np.uint64)
            hashes[entry] = mix(history, int(token), int(position), self.seed)
        own_hashes = hashes[len(behind) :]
        keys = own_hashes[None, :, None, None]
        return self.logits(own_hashes, positions + (tokens != self.mask_id)), keys, keys

    def logits(self, history: NDArray, position: NDArray) -> NDArray:
        """Of the tokens at the positions [T] after such histories [T]: [T, V] float32."""
        ids = np.arange(self.vocabulary)
        agrees = unit(mix(history, 1)) < self.agreeing
        source = np.where(agrees, mix(position, self.seed), history)
        favourite = np.where(unit(mix(source, 2)) < self.eos_rate, EOS, mix(source, 3) % np.uint64(self.vocabulary))
        is_favourite = ids == favourite[:, None]
        if self.ties:
            high = is_favourite | (unit(mix(source[:, None], 4, ids)) < 0.2)
            return np.where(high, 0, -80).astype(np.float32)
        strength = 8 * unit(mix(history, 5))
        return (2 * unit(mix(history[:, None], 6, ids)) + strength[:, None] * is_favourite).astype(np.float32)


def mix(*values: Any) -> Any:
    """A 64-bit hash of integers, elementwise over arrays."""
    h = np.uint64(0)
    with np.errstate(over="ignore"):
        for value in values:
            h = (h ^ np.asarray(value).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            h = (h ^ (h >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            h = h ^ (h >> np.uint64(32))
    return h


def unit(h: Any) -> Any:
    """A hash as a number in [0, 1)."""
    return (h >> np.uint64(11)) * 2.0**-53


@st.composite
def models(draw: st.DrawFn) -> HashModel:
    vocabulary = draw(st.integers(6, 12))
    return HashModel(
        seed=draw(st.integers(0, 10**6)),
        vocabulary=vocabulary,
        tokenizer_length=vocabulary - draw(st.integers(0, 2)),
        agreeing=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        eos_rate=draw(st.sampled_from([0.0, 0.02, 0.1, 0.3])),
        ties=draw(st.booleans()),
    )


# Lengths of the prompt and of the budget; some fill the cache to its last position.
lengths = st.one_of(
    st.tuples(st.integers(1, 12), st.integers(1, 36)),
    st.integers(1, 36).map(lambda new: (CAPACITY - new, new)),
)
token_thresholds = st.sampled_from([-1.0, 0.0, 0.1, 0.25, 1 / 3, 0.4, 0.5, 0.7, 0.9, 1.0, 1.5])
# No possible certainty of `ties` is among them but 1, which no threshold of 1 lets through.
thresholds = st.sampled_from([-1.0, 0.05, 0.3, 0.45, 0.6, 0.9, 1.0, 1.5])


def prompt_of(length: int) -> list[int]:
    return [2 + i % 4 for i in range(length)]


few = hypothesis.settings(max_examples=60)


def more(*sizes: Any) -> list[Any]:
    """Sizes that are tried by slow tests only: each compiles a method of its own."""
    return [pytest.param(*np.atleast_1d(size).tolist(), marks=pytest.mark.slow) for size in sizes]


# --- properties ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slot_size", "block_size"),
    [(4, 8), (3, 9), *more((1, 1), (1, 5), (2, 2), (2, 8), (4, 4), (5, 10), (6, 18), (8, 8), (4, 32), (16, 32))],
)
@few
@hypothesis.given(models(), lengths, thresholds)
def test_exact_decoding_writes_the_tokens_of_the_sequential_process_in_its_order(
    slot_size: int, block_size: int, model: HashModel, length: tuple[int, int], threshold: float
) -> None:
    prompt, new = prompt_of(length[0]), length[1]
    method = Exact(jnp.float32(threshold), slot_size, block_size, MASK, (EOS,))
    driven = drive.decode(method, model, prompt, new, CAPACITY)
    twin = exact.decode(
        model, prompt, slot_size=slot_size, block_size=block_size, max_new_tokens=new, slot_threshold=threshold
    )
    assert driven.token_ids == twin.token_ids
    assert driven.committed == twin.committed
    assert driven.plans == [(plan.open, plan.chosen) for plan in twin.plans]
    assert driven.forwards == driven.plan_forwards + driven.verify_forwards
    assert driven.forwards <= len(driven.committed) + driven.plan_forwards


@pytest.mark.parametrize(
    ("slot_size", "block_size"),
    [(2, 8), (8, 8), *more((1, 1), (1, 5), (2, 2), (3, 9), (4, 4), (4, 12), (5, 10), (8, 32), (16, 32))],
)
@few
@hypothesis.example(HashModel(0, 6, 6, agreeing=0.0, eos_rate=0.0, ties=False), (43, 5), -1.0, 0.1)
@hypothesis.given(models(), lengths, thresholds, token_thresholds)
def test_threshold_decoding_writes_the_tokens_of_the_mended_algorithm_with_as_many_calls(
    slot_size: int, block_size: int, model: HashModel, length: tuple[int, int], threshold: float, token_threshold: float
) -> None:
    prompt, new = prompt_of(length[0]), length[1]
    method = Threshold(jnp.float32(threshold), jnp.float32(token_threshold), slot_size, block_size, MASK, (EOS,))
    driven = drive.decode(method, model, prompt, new, CAPACITY)
    twin = official.decode_threshold(
        model,
        prompt,
        max_new_tokens=new,
        slot_size=slot_size,
        block_size=block_size,
        slot_threshold=threshold,
        token_threshold=token_threshold,
    )
    check_threshold(driven, twin)
    assert driven.token_ids == twin.token_ids


@pytest.mark.parametrize(("slot_size", "slots"), [(2, 4), (3, 3), *more((1, 6), (4, 1), (4, 3), (5, 2), (8, 2))])
@few
@hypothesis.given(models(), lengths, thresholds, token_thresholds)
def test_official_decoding_writes_the_tokens_of_the_official_code_with_as_many_calls(
    slot_size: int, slots: int, model: HashModel, length: tuple[int, int], threshold: float, token_threshold: float
) -> None:
    block_size = slot_size * slots
    blocks = max((CAPACITY - length[0]) // block_size, 1)
    prompt = prompt_of(min(length[0], CAPACITY - blocks * block_size))
    method = Threshold(
        jnp.float32(threshold), jnp.float32(token_threshold), slot_size, block_size, MASK, (EOS,), official=True
    )
    driven = drive.decode(method, model, prompt, blocks * block_size, CAPACITY)
    twin = official.decode_official(
        model,
        prompt,
        gen_length=blocks * block_size,
        slot_size=slot_size,
        serial_num_blocks=blocks,
        slot_threshold=threshold,
        token_threshold=token_threshold,
    )
    check_threshold(driven, twin)


def check_threshold(driven: drive.Driven, twin: official.Decoded) -> None:
    assert driven.committed == twin.committed
    assert driven.plan_forwards == twin.calls["plan"]
    assert driven.verify_forwards == twin.calls["global_verification"] + twin.calls["verify"]
    assert driven.draft_forwards == twin.calls["draft"]


@pytest.mark.parametrize("slot_size", [3, *more(1, 2, 8)])
@pytest.mark.parametrize("first", ["mask", "token"])
@few
@hypothesis.given(models(), lengths)
def test_left_to_right_decoding_writes_the_tokens_of_one_at_a_time(
    slot_size: int, first: Any, model: HashModel, length: tuple[int, int]
) -> None:
    prompt, new = prompt_of(length[0]), length[1]
    method = Autoregressive(slot_size, MASK if first == "mask" else None, (EOS,))
    driven = drive.decode(method, model, prompt, new, CAPACITY)
    twin = autoregressive.decode(model, prompt, max_new_tokens=new, first=first, slot_size=slot_size)
    assert driven.token_ids == twin.token_ids
    assert driven.committed == list(enumerate(twin.token_ids))
    assert driven.forwards == driven.verify_forwards == len(twin.token_ids)


# --- scenarios ----------------------------------------------------------------------------------------------

PROMPT = [9]
A, B, C, D, E, F, G, H = range(2, 10)
VOCABULARY = 32
CERTAIN = 1 - 1e-6


def writes(answer: list[int], certainty: Callable[[int], float], slot_size: int, wrong_drafts: bool) -> Script:
    """A model that writes `answer` whatever it sees, then A.

    At the mask at an offset it is `certainty(offset)` sure, and with `wrong_drafts` of something else wherever the
    mask is not the first of its slot; after a token it is always sure.
    """

    def script(token: int, position: int, visible: object) -> NDArray:
        masked = token == MASK
        offset = position - len(PROMPT) + (not masked)
        right = answer[offset] if offset < len(answer) else A
        wrong = masked and wrong_drafts and offset % slot_size > 0
        best, probability = (H if wrong else right), certainty(offset) if masked else CERTAIN
        probabilities = np.full(VOCABULARY, (1 - probability) / (VOCABULARY - 2))
        probabilities[[MASK, right]] = 1e-9
        probabilities[best] = probability
        return np.log(probabilities)

    return script


def methods(
    slot_size: int, block_size: int, slot_threshold: float = 0.9, token_threshold: float = 0.5
) -> dict[str, engine.Method]:
    alpha, beta = jnp.float32(slot_threshold), jnp.float32(token_threshold)
    return {
        "exact": Exact(alpha, slot_size, block_size, MASK, (EOS,)),
        "threshold": Threshold(alpha, beta, slot_size, block_size, MASK, (EOS,)),
        "official": Threshold(alpha, beta, slot_size, block_size, MASK, (EOS,), official=True),
        "ar, mask": Autoregressive(slot_size, MASK, (EOS,)),
        "ar, token": Autoregressive(slot_size, None, (EOS,)),
    }


def run(
    method: engine.Method,
    answer: list[int],
    max_new_tokens: int,
    certainty: Callable[[int], float] = lambda offset: CERTAIN,
    wrong_drafts: bool = False,
) -> drive.Driven:
    script = writes(answer, certainty, method.slot_size, wrong_drafts)
    model = ScriptedModel(script, vocabulary=VOCABULARY, mask_id=MASK, eos_id=EOS)
    return drive.decode(method, model, PROMPT, max_new_tokens, CAPACITY)


@pytest.mark.parametrize("name", ["exact", "threshold", "ar, mask", "ar, token"])
@pytest.mark.parametrize(
    ("certain_slots", "answer"),
    [
        ({0, 1, 2, 3}, [A, B, C, EOS, E, F, G, H]),  # mid-slot, and slots behind it are chosen with it
        ({0, 2}, [A, B, C, D, EOS, F, G, H]),  # the slot before it is still open: no hole is left
        ({1, 2}, [A, EOS, C, D, E, EOS, G, H]),  # in two slots, the later one written first
        ({3}, [EOS, B, EOS, D, EOS, F, G, EOS]),  # in every slot, the last one written first
    ],
)
def test_text_ends_at_the_earliest_eos_without_holes(name: str, certain_slots: set[int], answer: list[int]) -> None:
    """Trap D6."""
    out = run(methods(2, 8)[name], answer, 16, lambda offset: CERTAIN if offset // 2 in certain_slots else 0.5)
    assert out.token_ids == answer[: answer.index(EOS) + 1]


@pytest.mark.parametrize(("name", "forwards"), [("exact", 2), ("threshold", 2), ("ar, mask", 3), ("ar, token", 3)])
def test_no_forward_follows_an_eos(name: str, forwards: int) -> None:
    """Trap D7: a budget of many times the answer costs nothing."""
    out = run(methods(2, 8)[name], [A, B, EOS], 40)
    assert out.token_ids == [A, B, EOS]
    assert out.forwards == forwards


def test_exact_decoding_computes_nothing_behind_a_drafted_eos() -> None:
    """Neither the drafts behind it nor a plan: the text most likely ends there."""
    answer = [A, B, C, D, E, EOS]
    out = run(methods(4, 8)["exact"], answer, 24)
    assert out.token_ids == answer
    assert out.live == [8, 6 + 1]  # a plan; the drafts and the second slot's probe


@pytest.mark.parametrize("name", ["exact", "threshold", "official", "ar, mask", "ar, token"])
@pytest.mark.parametrize("answer", [[EOS], [A, EOS]])
def test_the_first_token_of_a_short_answer_is_kept(name: str, answer: list[int]) -> None:
    """Trap D9."""
    assert run(methods(2, 8)[name], answer, 8).token_ids == answer


@pytest.mark.parametrize("name", ["exact", "threshold", "ar, mask", "ar, token"])
@pytest.mark.parametrize("threshold", [1.0, 1e9])
def test_a_model_that_wants_to_write_masks_and_is_never_sure_enough_ends_without_any(
    name: str, threshold: float
) -> None:
    """Trap D11. Ids from 8 on are padding of the vocabulary."""
    model = ScriptedModel(
        lambda token, position, visible: [0, 9, 2, 5, 5, 0, 0, 0, 9, 9],
        vocabulary=10,
        mask_id=MASK,
        eos_id=EOS,
        tokenizer_length=8,
    )
    method = methods(2, 8, threshold, threshold)[name]
    assert drive.decode(method, model, PROMPT, 13, CAPACITY).token_ids == [B] * 13


@pytest.mark.parametrize("name", ["threshold", "official"])
@pytest.mark.parametrize(("token_threshold", "passes"), [(0.5, False), (0.49, True)])
def test_a_probability_equal_to_the_threshold_does_not_pass(name: str, token_threshold: float, passes: bool) -> None:
    """Two tokens are equally probable everywhere; the lower id is drafted."""
    model = ScriptedModel(
        lambda token, position, visible: [-80, -80, 0, 0, -80, -80], vocabulary=6, mask_id=MASK, eos_id=EOS
    )
    out = drive.decode(methods(4, 8, 0.9, token_threshold)[name], model, [3], 4, CAPACITY)
    assert out.token_ids == [A] * 4
    assert (out.plan_forwards, out.verify_forwards, out.draft_forwards) == ((1, 1, 0) if passes else (1, 4, 3))


@pytest.mark.parametrize(
    ("name", "forwards", "positions"),
    [
        # Plan a block (8); verify its drafts and the second slot's probe while planning the next (8 + 1 + 8), twice;
        # verify the last (8 + 1).
        ("exact", 1 + 3, 8 + 17 + 17 + 9),
        # Plan and verify three blocks.
        ("threshold", 3 * 2, 3 * (8 + 8)),
        ("official", 3 * 2, 3 * (8 + 8)),
        # The token before, and six masks. The first token has a mask only.
        ("ar, mask", 24, 23 + 6),
        ("ar, token", 24, 24),
    ],
)
def test_what_a_certain_model_costs_that_is_always_right(name: str, forwards: int, positions: int) -> None:
    """Trap D15: slots of 4, blocks of 8, 24 tokens."""
    answer = [A + offset % 7 for offset in range(24)]
    out = run(methods(4, 8)[name], answer, 24)
    assert out.token_ids == answer
    assert (out.forwards, sum(out.live)) == (forwards, positions)


@pytest.mark.parametrize(
    ("name", "forwards", "positions"),
    [
        # A slot: plan; verify two drafts, of which the first holds; the pending token, a draft and four alternatives,
        # twice. The second slot's plan has the pending token too, but no masks of the first.
        ("exact", 4 + 4, (8 + 2 + 6 + 6) + (1 + 4 + 2 + 6 + 6)),
        # A slot: plan, verify, then draft and check 4, 3 and 2 tokens.
        ("threshold", 8 + 8, (8 + 4 + 2 * 9) + (4 + 4 + 2 * 9)),
        ("official", 8 + 8, (8 + 4 + 2 * 9) + (4 + 4 + 2 * 9)),
        ("ar, mask", 8, 7 + 2),
        ("ar, token", 8, 8),
    ],
)
def test_what_a_model_costs_that_is_never_certain_and_whose_drafts_are_never_right(
    name: str, forwards: int, positions: int
) -> None:
    """Trap D15: two slots of 4 in one block, one chosen at a time. Drafts are 0.05 sure, too little to look further.

    The thresholds' drafts are right all the same: what that algorithm drafts last it writes, right or wrong.
    """
    answer = [A + offset % 6 for offset in range(8)]
    method = methods(4, 8, slot_threshold=1.5, token_threshold=1.5)[name]
    out = run(method, answer, 8, lambda offset: 0.05 if offset % 4 else 0.5, wrong_drafts=name == "exact")
    assert out.token_ids == answer
    assert (out.forwards, sum(out.live)) == (forwards, positions)
