"""Canvases as text and as tokens, and how they are masked."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from refusion_jax.data import worksheet
from refusion_jax.nap.canvas import Budgets, Canvas, lay_out, parse, tag_ids, tags, with_tags
from refusion_jax.nap.masking import StructuredMasking, cart_weights

TEXT = "<think 1> 3 + 4\n</think 1>\n<think 2>7</think 2> <summary>7</summary>\n"


def test_a_canvas_is_read_and_written() -> None:
    canvas = parse(TEXT)
    assert canvas == Canvas((" 3 + 4\n", "7"), "7")
    assert canvas.render() == "<think 1> 3 + 4\n</think 1><think 2>7</think 2><summary>7</summary>"
    assert parse(canvas.render()) == canvas


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("7", "a text with 0 tags is no canvas"),
        ("<summary>7</summary>", "a text with 2 tags"),
        ("<think 1>1</think 1><summary>7", "a text with 3 tags"),
        ("<think 2>1</think 2><summary>7</summary>", "has <think 2> where <think 1> must stand"),
        ("<think 1>1</think 1><think 1>1</think 1><summary>7</summary>", "has <think 1> where <think 2> must stand"),
        ("<summary>7</summary><think 1>1</think 1>", "has <summary> where <think 1> must stand"),
        ("<think 1><think 2></think 2></think 1>", "has <think 2> where </think 1> must stand"),
        ("so <think 1>1</think 1><summary>7</summary>", "'so' stands outside"),
        ("<think 1>1</think 1><summary>7</summary> 8", "'8' stands outside"),
        ("<think 1> </think 1><summary>7</summary>", "the text behind <think 1> is empty"),
        ("<think 1>1</think 1><summary></summary>", "the text behind <summary> is empty"),
    ],
)
def test_what_is_no_canvas_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text)


def test_texts_hold_no_tags() -> None:
    with pytest.raises(ValueError, match="behind <think 2> holds </summary>"):
        Canvas(("1", "2 </summary>"), "3")
    with pytest.raises(ValueError, match="at least one path"):
        Canvas((), "3")


def test_shuffled_paths_are_the_same_paths() -> None:
    canvas = Canvas(tuple("abcdef"), "s")
    shuffled = canvas.shuffled(np.random.default_rng(1))
    assert sorted(shuffled.paths) == list(canvas.paths) != list(shuffled.paths)
    assert shuffled.summary == "s"


def test_tags_are_tokens_of_their_own() -> None:
    tokenizer = worksheet.tokenizer()
    with pytest.raises(ValueError, match="no token <think 1>"):
        tag_ids(tokenizer, 2)
    extended = with_tags(tokenizer, 2)
    assert tag_ids(extended, 2) == list(range(len(tokenizer), len(tokenizer) + 6))
    assert with_tags(extended, 2) is extended
    assert tag_ids(with_tags(extended, 3), 2) == tag_ids(extended, 2)
    ids = extended.encode("<think 1>3 + 4</think 1><summary>7</summary>")
    assert [extended.token_text(token) for token in ids] == [
        "<think 1>", "3", "+", "4", "</think 1>", "<summary>", "7", "</summary>",
    ]  # fmt: skip
    assert extended.decode(ids) == "3 + 4 7"


def test_positions_by_hand() -> None:
    """Two prompt tokens, two paths of 4, a summary of 3: <1> ....</1><2> ....</2><s> ...</s>."""
    budgets = Budgets(2, 4, 3)
    assert budgets.total == 17
    assert budgets.tags == (0, 5, 6, 11, 12, 16)
    assert budgets.starts == (1, 7, 13)
    laid = lay_out([50, 51], [[1], [2, 3, 4], [5]], budgets, range(90, 96), 99)
    assert laid.tokens.tolist() == [50, 51, 90, 91, 92, 93, 94, 95, 1, 99, 2, 3, 4, 99, 5, 99]
    assert laid.positions.tolist() == [0, 1, 2, 7, 8, 13, 14, 18, 3, 4, 9, 10, 11, 12, 15, 16]
    assert (laid.given, laid.lengths) == (8, (2, 4, 2))


def test_texts_must_fit() -> None:
    budgets = Budgets(1, 4, 3)
    with pytest.raises(ValueError, match=r"behind <think 1> has 4 tokens .* its budget of 4"):
        lay_out([0], [[1] * 4, [1]], budgets, range(4), 9)
    with pytest.raises(ValueError, match=r"behind <summary> has 3 tokens .* its budget of 3"):
        lay_out([0], [[1], [1] * 3], budgets, range(4), 9)
    with pytest.raises(ValueError, match="the canvas has 2 paths, and the budgets are those of 1"):
        lay_out([0], [[1]] * 3, budgets, range(4), 9)
    with pytest.raises(ValueError, match="path=0 must be at least 1"):
        Budgets(1, 0, 3)


def test_tags_come_in_pairs() -> None:
    assert tags(1) == [("<think 1>", "</think 1>"), ("<summary>", "</summary>")]


# ---- Masking ----


def test_rates_by_hand() -> None:
    masking = StructuredMasking()
    path, summary = masking.rates(0.1, [3, 3])
    np.testing.assert_allclose(path, [0.09, 0.09, 0.09])
    np.testing.assert_allclose(summary, [0.09, 0.135, 0.18])
    path, summary = masking.rates(0.21, [3, 3])  # 1 - t is below 0.8
    np.testing.assert_allclose(path, [0.189] * 3)
    np.testing.assert_allclose(summary, [1, 1, 1])
    path, other, _ = StructuredMasking(path_slope=-1, largest=1).rates(0.5, [3, 1, 1])
    np.testing.assert_allclose(path, [0.5, 0.25, 0])
    np.testing.assert_allclose(other, [0.5])
    np.testing.assert_allclose(StructuredMasking(path_slope=3).rates(1, [2, 1])[0], [0.9, 1])


@pytest.mark.parametrize(
    "setting", [{"largest": 1.1}, {"summary_from": -0.1}, {"path_slope": -2}, {"summary_slope": -2}]
)
def test_settings_out_of_range_are_refused(setting: dict[str, float]) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=f"{name}=.* must be"):
        StructuredMasking(**setting)  # type: ignore[arg-type]


LENGTHS = (6, 9, 8)
DRAWS = 10_000
SETTINGS = [
    StructuredMasking(),
    StructuredMasking(largest=1, path_slope=-0.5, summary_slope=0),
    StructuredMasking(largest=0.6, summary_from=0.5, path_slope=2, summary_slope=3),
]


def mean_rate(masking: StructuredMasking, region: int, z: float) -> float:
    """The rate of a token, over all t: by the formula, at many levels."""
    level = (np.arange(200_000) + 0.5) / 200_000
    rate = np.minimum(1, level * masking.largest)
    slope = masking.summary_slope if region == 2 else masking.path_slope
    rates = np.clip(rate * (1 + slope * z), 0, 1)
    return float(np.mean(np.where((region == 2) & (1 - level < masking.summary_from), 1, rates)))


@pytest.mark.parametrize("masking", SETTINGS)
def test_tokens_are_masked_at_their_rates(masking: StructuredMasking) -> None:
    rng = np.random.default_rng(7)
    counts = np.sum([masking.draw(LENGTHS, rng).masked for _ in range(DRAWS)], axis=0)
    expected = DRAWS * np.array(
        [mean_rate(masking, region, z) for region, length in enumerate(LENGTHS) for z in np.linspace(0, 1, length)]
    )
    for found, mean in zip(counts, expected, strict=True):
        test = scipy.stats.chisquare([found, DRAWS - found], [mean, DRAWS - mean])
        assert test.pvalue > 1e-3 / len(counts)  # of all positions together once in a thousand


def test_the_summary_is_hidden_until_little_is_masked() -> None:
    """Whole while t is above 0.2: in four of five canvases. Otherwise at most one token of five."""
    rng = np.random.default_rng(8)
    summaries = np.array([StructuredMasking().draw((40, 40), rng).masked[40:] for _ in range(DRAWS)])
    whole = summaries.all(axis=1)
    assert scipy.stats.chisquare([whole.sum(), DRAWS - whole.sum()], [0.8 * DRAWS, 0.2 * DRAWS]).pvalue > 1e-3
    assert summaries[~whole].mean() == pytest.approx(0.1 * 0.9 * 1.5, abs=0.005)


def test_a_masked_token_weighs_one_over_its_rate() -> None:
    rng = np.random.default_rng(9)
    draws = [StructuredMasking().draw((3, 3), rng) for _ in range(DRAWS)]
    weights = np.array([draw.weights for draw in draws])
    assert all(np.array_equal(draw.weights > 0, draw.masked) for draw in draws)
    np.testing.assert_allclose(weights[:, :3].mean(axis=0), 1, atol=0.15)  # of any token, over all noise
    np.testing.assert_allclose(weights[:, 3:].mean(axis=0), 1, atol=0.15)


def test_clean_neighbours_make_a_masked_token_weigh_more() -> None:
    rng = np.random.default_rng(10)
    for p in (0.1, 0.5, 1.0):
        masked = rng.random(50) < 0.6
        by_definition = [
            sum(p * (1 - p) ** (abs(i - n) - 1) / 2 for i in range(50) if not masked[i]) if masked[n] else 0
            for n in range(50)
        ]
        np.testing.assert_allclose(cart_weights(masked, p), by_definition, rtol=1e-12)
    assert not cart_weights(np.ones(5, bool)).any()
    with pytest.raises(ValueError, match="p=0 must be above 0"):
        cart_weights(np.ones(5, bool), 0)
