"""The queue: rows that are refilled, samples and prefixes that share what is computed, stop strings, streams."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import refusion_jax as rf
from refusion_jax.decoding.batch import Usage
from refusion_jax.decoding.generate import decode, prepare
from tests.twins import golden

pytestmark = pytest.mark.parametrize("model_name", ["A"], indirect=True)

CONFIG = rf.DecodeConfig(max_new_tokens=40, slot_size=4, block_size=8)
SAMPLED = dataclasses.replace(CONFIG, temperature=1.0)


def tokens(outs: list[rf.Generation]) -> list[list[int]]:
    return [out.token_ids for out in outs]


@pytest.fixture(scope="module")
def mixed(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts of many lengths, whose answers have many lengths, too."""
    return [prompt[:length] for prompt, length in zip(prompts, range(3, 80, 3), strict=False)]


@pytest.fixture(scope="module")
def alone(model: rf.Model, mixed: list[list[int]]) -> list[rf.Generation]:
    return rf.generate(model, mixed, CONFIG, batch_size=1)


# --- refilling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [4, 16, 64])
def test_answers_are_the_same_in_any_batch(
    model: rf.Model, mixed: list[list[int]], alone: list[rf.Generation], batch_size: int
) -> None:
    assert tokens(rf.generate(model, mixed, CONFIG, batch_size=batch_size)) == tokens(alone)


def test_rows_that_have_ended_are_filled_again(model: rf.Model, mixed: list[list[int]]) -> None:
    used = {}
    for refill in (True, False):
        usage = Usage()
        answers: dict[int, rf.Generation] = {}
        for ended in decode(prepare(model, mixed, CONFIG, batch_size=4), refill=refill, usage=usage):
            answers |= ended
        assert usage.tokens == sum(answer.stats.tokens for answer in answers.values())
        assert usage.forwards == sum(answer.stats.forwards for answer in answers.values())
        assert usage.prefilled == sum(map(len, mixed))
        assert usage.places == 4 * usage.steps
        assert usage.positions <= usage.computed
        used[refill] = usage
    assert used[True].occupancy > 0.85 > used[False].occupancy
    assert used[True].steps < used[False].steps


def test_progress_tells_of_every_answer_once(model: rf.Model, mixed: list[list[int]]) -> None:
    told: list[rf.Generation] = []
    outs = rf.generate(model, mixed, CONFIG, batch_size=4, on_progress=told.extend)
    assert sorted(tokens(told)) == sorted(tokens(outs))


def test_on_a_mesh_every_shard_fills_its_own_rows(
    model_dir: Path, mixed: list[list[int]], alone: list[rf.Generation]
) -> None:
    with jax.set_mesh(rf.make_mesh(2, 1, 2)):
        sharded = rf.load(model_dir)
        assert tokens(rf.generate(sharded, mixed, CONFIG, batch_size=8)) == tokens(alone)
        long = [*(5 * mixed[20]), *mixed[20]][:300]  # more than one window of the prefill
        [whole] = rf.generate(sharded, [long], CONFIG)
        assert tokens(rf.generate(sharded, [long[290:]], CONFIG, prefix=rf.cache_prefix(sharded, long[:290]))) == [
            whole.token_ids
        ]
        prefix = rf.cache_prefix(sharded, mixed[20][:30])
        outs = rf.generate(sharded, [mixed[20][30:], *[mixed[20][30:]] * 5], CONFIG, batch_size=4, prefix=prefix)
        assert tokens(outs) == [alone[20].token_ids] * 6


# --- what is shared -----------------------------------------------------------------------------------------


def test_samples_of_a_prompt_differ_and_compute_it_once(model: rf.Model, mixed: list[list[int]]) -> None:
    """Trap D5. A sample does not depend on how many there are, nor on the batch."""
    config = dataclasses.replace(SAMPLED, num_samples=6)
    usage = Usage()
    answers: dict[int, rf.Generation] = {}
    for ended in decode(prepare(model, mixed[10:14], config, batch_size=4), usage=usage):
        answers |= ended
    assert usage.prefilled == sum(map(len, mixed[10:14]))
    outs = [answers[number] for number in range(24)]
    assert all(len({tuple(out.token_ids) for out in outs[first : first + 6]}) > 1 for first in range(0, 24, 6))
    fewer = rf.generate(model, mixed[10:14], dataclasses.replace(config, num_samples=2), batch_size=3)
    assert tokens(fewer) == tokens([outs[6 * prompt + sample] for prompt in range(4) for sample in range(2)])


def test_equal_prompts_are_computed_once(model: rf.Model, mixed: list[list[int]], alone: list[rf.Generation]) -> None:
    usage = Usage()
    answers: dict[int, rf.Generation] = {}
    for ended in decode(prepare(model, [mixed[20]] * 12, CONFIG, batch_size=4), usage=usage):
        answers |= ended
    assert usage.prefilled == len(mixed[20])
    assert tokens(list(answers.values())) == [alone[20].token_ids] * 12


def test_noise_follows_from_the_place_among_the_prompts_or_from_a_prompts_own_seed(
    model: rf.Model, mixed: list[list[int]]
) -> None:
    first = rf.generate(model, mixed[10:18], SAMPLED)
    order = [3, 7, 0, 1, 2, 6, 5, 4]
    again = rf.generate(model, [mixed[10 + index] for index in order], SAMPLED, batch_size=3, seeds=order)
    assert tokens(again) == [first[index].token_ids for index in order]
    other = rf.generate(model, mixed[10:18], dataclasses.replace(SAMPLED, seed=1))
    assert tokens(other) != tokens(first)
    with pytest.raises(ValueError, match="there are 2 seeds for 3 prompts"):
        rf.generate(model, mixed[:3], SAMPLED, seeds=[1, 2])
    with pytest.raises(ValueError, match=r"seeds\[1\]=-1 must be an integer in 0"):
        rf.generate(model, mixed[:3], SAMPLED, seeds=[1, -1, None])
    with pytest.raises(ValueError, match="seeds=3 must be a list"):
        rf.generate(model, mixed[:3], SAMPLED, seeds=3)  # type: ignore[arg-type]
    numbers = rf.generate(model, mixed[10:12], SAMPLED, seeds=np.arange(2))  # type: ignore[arg-type]
    assert tokens(numbers) == tokens(first[:2])


def test_prompts_behind_a_prefix_are_answered_as_whole_ones(
    model: rf.Model, model_dir: Path, mixed: list[list[int]], alone: list[rf.Generation], tmp_path: Path
) -> None:
    """Also behind one that was saved, with the weights it was computed with only."""
    prefix = rf.cache_prefix(model, mixed[25][:40])
    behind = [mixed[25][40:], [6, 7]]
    expected = rf.generate(model, [mixed[25], [*mixed[25][:40], 6, 7]], CONFIG)
    usage = Usage()
    answers: dict[int, rf.Generation] = {}
    for ended in decode(prepare(model, behind, CONFIG, batch_size=2, prefix=prefix), usage=usage):
        answers |= ended
    assert tokens([answers[0], answers[1]]) == tokens(expected)
    assert usage.prefilled == len(behind[0]) + 2
    prefix.save(tmp_path / "prefix.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["prefix.safetensors"]
    loaded = rf.load_prefix(model, tmp_path / "prefix.safetensors")
    assert tokens(rf.generate(model, behind, CONFIG, prefix=loaded)) == tokens(expected)
    other = rf.load(golden.DIRECTORY / "modelA0")
    with pytest.raises(ValueError, match="computed by another model"):
        rf.load_prefix(other, tmp_path / "prefix.safetensors")
    with pytest.raises(ValueError, match="before its weights changed"):
        rf.generate(model.replace(params=other.params), behind, CONFIG, prefix=prefix)
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"is no file that Prefix\.save wrote"):
        rf.load_prefix(model, tmp_path / "junk")
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        rf.generate(model, [[]], CONFIG, prefix=prefix)


def test_a_prefix_in_bfloat16_is_saved_and_read(model_dir: Path, mixed: list[list[int]], tmp_path: Path) -> None:
    half = rf.load(model_dir, dtype="bfloat16")
    prefix = rf.cache_prefix(half, mixed[20][:30])
    prefix.save(tmp_path / "prefix")
    loaded = rf.load_prefix(half, tmp_path / "prefix")
    assert loaded.token_ids == prefix.token_ids
    for one, other in zip(loaded.cache.__dict__.values(), prefix.cache.__dict__.values(), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


# --- stop strings -------------------------------------------------------------------------------------------


def pieces(model: rf.Model, out: rf.Generation) -> list[str]:
    """The text after each token."""
    assert model.tokenizer is not None
    return [model.tokenizer.decode(out.token_ids[:count]) for count in range(len(out.token_ids) + 1)]


@pytest.mark.parametrize("method", ["refusion", "ar"])
def test_a_stop_string_cuts_the_answer_and_ends_it(
    model: rf.Model, mixed: list[list[int]], alone: list[rf.Generation], method: Any
) -> None:
    """Wherever it stands, in any batch: the text ends before it, and the tokens are those that lie wholly before it."""
    config = dataclasses.replace(CONFIG, method=method)
    whole = rf.generate(model, mixed, config, batch_size=8)
    words = whole[10].text.split()
    stop = (words[len(words) // 2], "no such text")
    cut = rf.generate(model, mixed, dataclasses.replace(config, stop=stop), batch_size=8)
    assert tokens(rf.generate(model, mixed, dataclasses.replace(config, stop=stop), batch_size=1)) == tokens(cut)
    stopped = 0
    for out, before in zip(cut, whole, strict=True):
        at = before.text.find(stop[0])
        if at < 0:
            assert out.token_ids == before.token_ids
            continue
        stopped += 1
        assert out.text == before.text[:at]
        assert out.finish_reason == "stop"
        texts = pieces(model, before)
        assert len(out.token_ids) == max(count for count, text in enumerate(texts) if len(text) <= at)
        assert out.token_ids == before.token_ids[: len(out.token_ids)]
        assert len(out.logprobs) == len(out.token_ids) == len(out.commit_order)
    assert 0 < stopped < len(mixed)


def test_a_stop_string_saves_the_work_behind_it(model: rf.Model, mixed: list[list[int]]) -> None:
    config = rf.DecodeConfig(method="ar", max_new_tokens=200)
    [whole] = rf.generate(model, [mixed[3]], config)
    stop = (whole.text.split()[0],)
    [cut] = rf.generate(model, [mixed[3]], dataclasses.replace(config, stop=stop))
    assert cut.text == "" and cut.token_ids == []
    assert cut.stats.forwards <= whole.stats.forwards
    assert cut.stats.forwards <= 16


def test_stop_strings_that_are_none_are_refused(model: rf.Model, mixed: list[list[int]]) -> None:
    for stop in ("text", ["text"], ("text", ""), (7,)):
        with pytest.raises(ValueError, match="must be a tuple of strings"):
            rf.DecodeConfig(stop=stop)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no tokenizer"):
        rf.generate(dataclasses.replace(model, tokenizer=None), mixed[:1], rf.DecodeConfig(stop=("text",)))


# --- streams ------------------------------------------------------------------------------------------------


def test_a_stream_only_grows_and_ends_with_the_answers(
    model: rf.Model, mixed: list[list[int]], alone: list[rf.Generation]
) -> None:
    """What is provisional may change; what is text stays."""
    config = dataclasses.replace(CONFIG, stop=(alone[10].text.split()[2],))
    expected = rf.generate(model, mixed, config, batch_size=4)
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    answers: dict[int, rf.Generation] = {}
    provisional = 0
    for update in rf.stream(model, mixed, config, batch_size=4):
        assert update.number not in answers
        if update.answer is not None:
            assert (update.text, update.token_ids) == (update.answer.text, update.answer.token_ids)
            answers[update.number] = update.answer
        else:
            before = ids.get(update.number, [])
            assert update.token_ids[: len(before)] == before
            ids[update.number] = update.token_ids
            assert all(offset >= len(update.token_ids) for offset, _ in update.provisional)
            provisional += len(update.provisional)
        assert update.text.startswith(texts.get(update.number, ""))
        texts[update.number] = update.text
    assert tokens([answers[number] for number in range(len(mixed))]) == tokens(expected)
    assert provisional > 0


def test_a_stream_is_checked_before_its_first_update(model: rf.Model, mixed: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        rf.stream(model, [mixed[0], []])
    with pytest.raises(ValueError, match="every=0 must be an integer"):
        rf.stream(model, mixed, every=0)
    assert list(rf.stream(model, [])) == []
