"""The slow twins themselves, held to golden data and to hand-made examples.

If one of these fails, the reference that the compiled loops are tested against is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.twins import autoregressive, exact, golden, official
from tests.twins.context import Context
from tests.twins.qwen3 import Qwen3
from tests.twins.scripted import Script, ScriptedModel

NEAR_TIE = 1e-4  # decisions closer than this may turn with the order of float sums

load = cache(golden.load)
arrays = cache(golden.arrays)


# --- the model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden.MODELS)
@pytest.mark.parametrize("case", ["plain0", "plain1", "plain2", "perm0", "perm1", "perm2"])
def test_logits_equal_the_official_model(name: str, case: str) -> None:
    official = arrays(name, "logits")
    tokens = official[f"{case}_ids"]
    positions = official.get(f"{case}_pos", np.arange(len(tokens)))
    logits, keys, values = load(name).model.forward(tokens, positions, np.tri(len(tokens), dtype=bool))
    np.testing.assert_allclose(logits, official[f"{case}_logits"], atol=1e-4, rtol=0)
    if case == "perm0":
        for layer in range(2):
            np.testing.assert_allclose(keys[layer].swapaxes(0, 1), official[f"perm0_k{layer}"], atol=1e-5)
            np.testing.assert_allclose(values[layer].swapaxes(0, 1), official[f"perm0_v{layer}"], atol=1e-5)


@pytest.mark.parametrize("name", golden.MODELS)
def test_logits_behind_a_context_equal_those_of_the_whole(name: str) -> None:
    official = arrays(name, "logits")
    chunks = [np.array_split(official[f"perm0_{key}"], 3) for key in ("ids", "pos")]
    context = Context(load(name).model)
    logits = [context.commit(tokens, positions) for tokens, positions in zip(*chunks, strict=True)]
    np.testing.assert_allclose(np.concatenate(logits), official["perm0_cached_logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", golden.MODELS)
def test_slots_that_do_not_see_each_other_equal_official_batch_rows(name: str) -> None:
    official = arrays(name, "logits")
    prompt, tokens, positions = (official[f"rows_{key}"] for key in ("prompt", "ids", "pos"))
    slots, slot_size = tokens.shape
    own = np.kron(np.eye(slots), np.tri(slot_size)).astype(bool)
    model = load(name).model
    _, keys, values = model.forward(prompt, np.arange(len(prompt)), np.tri(len(prompt), dtype=bool))
    sees = np.hstack([np.ones((slots * slot_size, len(prompt)), bool), own])
    logits = model.forward(tokens.ravel(), positions.ravel(), sees, (keys, values))[0]
    np.testing.assert_allclose(logits.reshape(*tokens.shape, -1), official["rows_logits"], atol=1e-4, rtol=0)


# --- exact plan-and-infill, by hand -------------------------------------------------------------------------

Visible = frozenset[tuple[int, int]]  # (token, position)
EOS, MASK, PROMPT = 0, 1, [9]
A, B, C, D, E, F, G, H = range(2, 10)


def likely(token: int, probability: float = 0.99, vocabulary: int = 10) -> NDArray:
    """Logits that give one token this probability, and the rest to all others alike."""
    probabilities = np.full(vocabulary, (1 - probability) / (vocabulary - 1 - (token != MASK)))
    probabilities[[MASK, token]] = 1e-30, probability  # the mask is banned: nothing of the sum is its
    return np.log(probabilities)


def text(target: list[int], certainty: dict[int, float]) -> Callable[[int, int, Visible], NDArray]:
    """Writes `target` whatever it sees; certainty gives the probability of a token at a mask, by offset."""

    def script(token: int, position: int, visible: Visible) -> NDArray:
        if token == MASK:
            offset = position - len(PROMPT)
            return likely(target[offset], certainty.get(offset, 0.5))
        offset = position + 1 - len(PROMPT)
        return likely(target[offset] if offset < len(target) else A)

    return script


def decode(
    script: Script, max_new_tokens: int, slot_size: int = 2, block_size: int = 8, slot_threshold: float = 0.9
) -> exact.Decoded:
    return exact.decode(
        ScriptedModel(script, vocabulary=10, mask_id=MASK, eos_id=EOS),
        PROMPT,
        slot_size=slot_size,
        block_size=block_size,
        max_new_tokens=max_new_tokens,
        slot_threshold=slot_threshold,
    )


def test_confident_slots_are_written_first_and_the_text_stands_in_order() -> None:
    out = decode(text([A, B, C, D, E, F, G, H], {0: 0.5, 2: 0.95, 4: 0.7, 6: 0.91}), 8)
    assert out.token_ids == [A, B, C, D, E, F, G, H]
    assert [offset for offset, _ in out.committed] == [2, 3, 6, 7, 4, 5, 0, 1]
    assert [plan.open for plan in out.plans] == [[0, 2, 4, 6], [0, 4], [0]]
    assert [plan.chosen for plan in out.plans] == [[2, 6], [4], [0]]
    np.testing.assert_allclose(out.plans[0].certainties, [0.5, 0.95, 0.7, 0.91], rtol=1e-6)
    assert out.finish_reason == "length"


def test_a_certainty_equal_to_the_threshold_is_not_confident() -> None:
    half = np.log([0.5, 1e-30, 0.5, *[1e-30] * 7])
    out = decode(lambda token, position, visible: half, 4, slot_threshold=0.5)
    assert out.plans[0].certainties == [0.5, 0.5]
    assert out.plans[0].chosen == [0]  # the fallback: one slot, the earliest of equals
    assert out.margin == 0


def test_equal_logits_go_to_the_lowest_id_and_the_mask_and_padded_rows_are_never_written() -> None:
    def script(token: int, position: int, visible: Visible) -> list[float]:
        return [0, 9, 5, 5, 5, 0, 0, 0, 9, 9]  # mask and rows 8, 9 highest; then A, B, C

    model = ScriptedModel(script, vocabulary=10, mask_id=MASK, eos_id=EOS, tokenizer_length=8)
    out = exact.decode(model, PROMPT, slot_size=2, block_size=4, max_new_tokens=4)
    assert out.token_ids == [A] * 4
    np.testing.assert_allclose(out.plans[0].certainties, 1 / (3 + 4 * np.exp(-5)), rtol=1e-6)


def test_a_slots_first_token_sees_the_chosen_slots_before_it() -> None:
    def script(token: int, position: int, visible: Visible) -> NDArray:
        if token == MASK:
            return likely(B if (A, 2) in visible else C, 0.95)  # C in the plan, B once slot 0 stands
        return likely(A)

    assert decode(script, 4).token_ids == [C, A, B, A]


def test_a_mask_sees_earlier_masks_of_its_own_slot_only_and_a_token_no_mask() -> None:
    target = text([A, B, C, D, E, F, G, H], {0: 0.5, 2: 0.95, 4: 0.7, 6: 0.91})

    def script(token: int, position: int, visible: Visible) -> NDArray:
        masks = {seen for other, seen in visible if other == MASK}
        first = position - (position - len(PROMPT)) % 2
        assert masks == (set(range(first, position + 1)) if token == MASK else set())
        return target(token, position, visible)

    assert decode(script, 8).token_ids == [A, B, C, D, E, F, G, H]


def test_eos_drops_later_slots_and_earlier_ones_are_still_written() -> None:
    """EOS stands mid-slot; slot 6 was chosen with it and must not be written, slot 0 was not and must be."""
    out = decode(text([A, B, C, D, EOS, F, G, H], {0: 0.5, 2: 0.95, 4: 0.95, 6: 0.95}), 16)
    assert out.token_ids == [A, B, C, D, EOS]
    assert [offset for offset, _ in out.committed] == [2, 3, 4, 0, 1]
    assert out.finish_reason == "stop"


def test_the_earliest_eos_by_position_ends_the_text() -> None:
    """Slot 4 ends first, then slot 0 does, although slot 2 stands already."""
    out = decode(text([A, EOS, C, D, E, EOS, G, H], {0: 0.5, 2: 0.95, 4: 0.95, 6: 0.5}), 16)
    assert out.token_ids == [A, EOS]
    assert [offset for offset, _ in out.committed] == [2, 3, 4, 5, 0, 1]
    assert [plan.open for plan in out.plans] == [[0, 2, 4, 6], [0]]


def test_the_last_slot_and_block_are_short() -> None:
    out = decode(text([A, B, C, D, E, F, G], {}), 7, slot_size=2, block_size=4)
    assert out.token_ids == [A, B, C, D, E, F, G]
    assert [plan.open for plan in out.plans] == [[0, 2], [2], [4, 6], [6]]
    assert len(out.committed) == 7


def test_margin_is_the_closest_decision() -> None:
    out = decode(text([A, B, C, D], {0: 0.95, 2: 0.93}), 4)
    assert out.margin == pytest.approx(0.03, abs=1e-6)  # slot 2 to the threshold
    out = decode(text([A, B, C, D], {0: 0.7, 2: 0.68}), 4)
    assert out.margin == pytest.approx(0.02, abs=1e-6)  # which slot comes first
    out = decode(text([A, B], {0: 0.2}), 2)
    assert out.margin == pytest.approx(0.2 - 0.8 / 8, abs=1e-6)  # the first token against its runner-up


def test_a_slot_size_that_does_not_divide_the_block_is_refused() -> None:
    with pytest.raises(ValueError, match="slot_size=3 does not divide block_size=8"):
        decode(text([A] * 8, {}), 8, slot_size=3)


def test_an_empty_prompt_is_decoded() -> None:
    model = ScriptedModel(lambda token, position, visible: likely(A), vocabulary=10, mask_id=MASK, eos_id=EOS)
    assert exact.decode(model, [], slot_size=2, block_size=2, max_new_tokens=3).token_ids == [A, A, A]


# --- exact plan-and-infill, stored results ------------------------------------------------------------------


def equal_rows(stored: dict[str, NDArray], fresh: dict[str, NDArray]) -> NDArray:
    keys = ["token_ids", "commit_offsets", "commit_tokens", "finish_reason", "plans", "right"]
    return np.all([(stored[key] == fresh[key]).reshape(len(fresh[key]), -1).all(1) for key in keys], axis=0)


@pytest.mark.parametrize("name", golden.MODELS)
@pytest.mark.parametrize("setting", exact.SETTINGS)
def test_stored_results_are_what_the_twin_decodes(name: str, setting: tuple[int, int]) -> None:
    stored = {key: values[::16] for key, values in exact.load(name, setting).items()}
    equal = equal_rows(stored, exact.table(load(name), setting, every=16))
    assert (equal | (stored["margin"] < NEAR_TIE)).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_all_stored_results_are_what_the_twin_decodes(dtype: type) -> None:
    equal: list[bool] = []
    near_tie: list[bool] = []
    for name in golden.MODELS:
        data = replace(load(name), model=Qwen3(golden.DIRECTORY / f"model{name}", dtype))
        for setting in exact.SETTINGS:
            stored = exact.load(name, setting)
            equal.extend(equal_rows(stored, exact.table(data, setting)))
            near_tie.extend(stored["margin"] < NEAR_TIE)
    assert np.all(np.array(equal) | near_tie)
    assert np.mean(np.array(equal)[near_tie]) >= 0.95


# --- the official decoder -----------------------------------------------------------------------------------


def settings(name: str) -> dict[str, dict]:
    """The settings s01 to s28 that the official code was run with."""
    table = json.loads((golden.DIRECTORY / f"golden{name}" / "generate_table.json").read_text())
    return {setting["id"]: setting for setting in table}


ARGUMENTS = ("gen_length", "slot_size", "serial_num_blocks", "slot_threshold", "token_threshold")


def equals_official(name: str, setting: dict, prompt: int) -> bool:
    out = official.decode_official(
        load(name).model, load(name).prompts[prompt].prompt_ids, **{key: setting[key] for key in ARGUMENTS}
    )
    of_prompt = {
        key.removeprefix(f"{setting['id']}_"): values[prompt]
        for key, values in arrays(name, "generate").items()
        if key.startswith(f"{setting['id']}_")
    }
    length = of_prompt["len"]
    return (
        out.token_ids == of_prompt["tokens"][:length].tolist()
        and [offset for offset, _ in out.committed] == of_prompt["commit_pos"][:length].tolist()
        and [token for _, token in out.committed] == of_prompt["commit_tok"][:length].tolist()
        and list(out.calls.values()) == of_prompt["calls"].tolist()
        and out.query_tokens == of_prompt["query_tokens"]
        and len(out.tokens_per_forward) == of_prompt["iterations"]
        and sum(out.tokens_per_forward) == pytest.approx(of_prompt["sum_TPF"])
    )


@pytest.mark.parametrize("name", golden.MODELS)
def test_tokens_order_and_calls_equal_the_official_code(name: str) -> None:
    for identity, setting in settings(name).items():
        fragile = arrays(name, "generate")[f"{identity}_fragile"]
        for prompt in range(0, 64, 8):
            assert fragile[prompt] or equals_official(name, setting, prompt), (identity, prompt)


@pytest.mark.slow
def test_all_tokens_order_and_calls_equal_the_official_code() -> None:
    equal: list[bool] = []
    fragile: list[bool] = []
    same_as_float64: list[bool] = []
    for name in golden.MODELS:
        for identity, setting in settings(name).items():
            equal.extend(equals_official(name, setting, prompt) for prompt in range(64))
            fragile.extend(arrays(name, "generate")[f"{identity}_fragile"])
            same_as_float64.extend(arrays(name, "generate")[f"{identity}_same_as_float64"])
    assert np.all(np.array(equal) | fragile)
    assert np.mean(np.array(equal)[np.array(fragile) & same_as_float64]) >= 0.95


@pytest.mark.parametrize("index", range(4))
def test_settings_on_which_the_official_code_raises_are_refused(index: int) -> None:
    failure = json.loads((golden.DIRECTORY / "goldenA" / "generate_errors.json").read_text())[index]
    rule = ["does not divide", "does not divide", "blocks would be empty", "at least one token"][index]
    with pytest.raises(ValueError, match=rule):
        official.decode_official(load("A").model, [1], **{key: failure[key] for key in ARGUMENTS})


@pytest.mark.parametrize("name", golden.MODELS)
def test_the_mended_eos_gives_the_golden_figures(name: str) -> None:
    """Right answers and forwards over all prompts. `tokens` there counts all that is committed."""
    data = load(name)
    comparison = json.loads((golden.DIRECTORY / f"golden{name}" / "eos_fixed_comparison.json").read_text())
    for identity, figures in comparison.items():
        setting = settings(name)[identity]
        length = -(-setting["gen_length"] // setting["slot_size"]) * setting["slot_size"]
        outs = [
            official.decode_threshold(
                data.model,
                prompt.prompt_ids,
                max_new_tokens=length,
                slot_size=setting["slot_size"],
                block_size=length // setting["serial_num_blocks"],
                slot_threshold=setting["slot_threshold"],
                token_threshold=setting["token_threshold"],
            )
            for prompt in data.prompts
        ]
        right = [data.right(index, out.token_ids, length) for index, out in enumerate(outs)]
        forwards = [sum(out.calls.values()) for out in outs]
        committed = [len(out.committed) for out in outs]
        assert np.mean(right) == figures["exact_with_D1_fixed"]
        assert np.mean(forwards) == figures["mean_forwards_fixed"]
        assert sum(committed) / sum(forwards) == pytest.approx(figures["tokens_per_forward_fixed"])


def official_by_hand(script: Script, length: int, token_threshold: float) -> official.Decoded:
    return official.decode_official(
        ScriptedModel(script, vocabulary=10, mask_id=MASK, eos_id=EOS),
        PROMPT,
        gen_length=length,
        slot_size=2,
        serial_num_blocks=1,
        slot_threshold=0.9,
        token_threshold=token_threshold,
    )


def threshold_by_hand(
    script: Script, length: int, token_threshold: float, slot_size: int = 2, tokenizer_length: int = 10
) -> official.Decoded:
    return official.decode_threshold(
        ScriptedModel(script, vocabulary=10, mask_id=MASK, eos_id=EOS, tokenizer_length=tokenizer_length),
        PROMPT,
        max_new_tokens=length,
        slot_size=slot_size,
        block_size=-(-length // slot_size) * slot_size,
        slot_threshold=0.9,
        token_threshold=token_threshold,
    )


def test_the_official_code_loses_slots_before_an_eos_and_the_mended_one_writes_them() -> None:
    """Slots 0 and 6 are confident, the drafts' second tokens do not pass, slot 6 begins with EOS."""
    script = text([A, B, C, D, E, F, EOS, H], {0: 0.95, 2: 0.5, 4: 0.7, 6: 0.95})
    assert official_by_hand(script, 8, token_threshold=1.5).token_ids == [A, B, EOS]
    mended = threshold_by_hand(script, 8, token_threshold=1.5)
    assert mended.token_ids == [A, B, C, D, E, F, EOS]
    assert [offset for offset, _ in mended.committed] == [0, 1, 6, 4, 5, 2, 3]
    assert list(mended.calls.values()) == [3, 3, 3, 3]
    assert mended.finish_reason == "stop"


def test_threshold_text_ends_at_the_first_eos_by_position() -> None:
    """Slot 2 is written first and ends in EOS, slot 0 then does so too: official output keeps both."""
    script = text([A, EOS, C, EOS], {0: 0.5, 2: 0.95})
    assert official_by_hand(script, 4, token_threshold=0.5).token_ids == [A, EOS, C, EOS]
    assert threshold_by_hand(script, 4, token_threshold=0.5).token_ids == [A, EOS]


@pytest.mark.parametrize("token_threshold", [0.5, 1.5])
def test_threshold_writes_a_short_last_slot_beside_whole_ones(token_threshold: float) -> None:
    """With 1.5 no draft passes, so slots of 4, 4 and 1 tokens are infilled together in three rounds."""
    script = text([A, B, C, D, E, F, G, H, A], dict.fromkeys(range(9), 0.95))
    out = threshold_by_hand(script, 9, token_threshold, slot_size=4)
    assert out.token_ids == [A, B, C, D, E, F, G, H, A]
    assert list(out.calls.values()) == ([1, 1, 0, 0] if token_threshold < 1 else [1, 1, 3, 3])
    assert out.finish_reason == "length"


@pytest.mark.parametrize("token_threshold", [0.0, 1.5])
def test_threshold_never_writes_the_mask_or_padded_rows(token_threshold: float) -> None:
    def script(token: int, position: int, visible: Visible) -> list[float]:
        return [0, 9, 5, 4, 3, 0, 0, 0, 9, 9]

    assert threshold_by_hand(script, 4, token_threshold, tokenizer_length=8).token_ids == [A] * 4


# --- left to right ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden.MODELS)
def test_next_token_decoding_equals_official_greedy_generation(name: str) -> None:
    data = load(name)
    for index, expected in enumerate(arrays(name, "baselines")["ar_tokens"]):
        out = autoregressive.decode(data.model, data.prompts[index].prompt_ids, max_new_tokens=128, first="token")
        assert out.token_ids == expected[expected >= 0].tolist() or out.margin < NEAR_TIE
        assert out.finish_reason == "stop"


@pytest.mark.parametrize("name", golden.MODELS)
def test_first_tokens_through_masks_equal_exact_decoding_of_one_slot_at_a_time(name: str) -> None:
    data, stored = load(name), exact.load(name, (8, 8))
    for index, expected in enumerate(stored["token_ids"]):
        out = autoregressive.decode(
            data.model,
            data.prompts[index].prompt_ids,
            max_new_tokens=exact.MAX_NEW_TOKENS,
            first="mask",
            slot_size=8,
        )
        assert out.token_ids == expected[expected >= 0].tolist() or out.margin < NEAR_TIE
        assert out.finish_reason == stored["finish_reason"][index]


def test_next_token_decoding_of_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        autoregressive.decode(load("A").model, [], max_new_tokens=4, first="token")
