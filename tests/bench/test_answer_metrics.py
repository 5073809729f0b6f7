"""How answers are scored, and the statistics over them."""

from __future__ import annotations

import numpy as np
import pytest

from lazyattn_jax.bench.answer_metrics import (
    Mark,
    bootstrap,
    normalise,
    substring_match,
    summarise,
    token_f1,
    wilson,
)
from lazyattn_jax.bench.quality import perplexity


def test_case_punctuation_and_articles_do_not_count():
    assert normalise("  The U.S.  a Theory, an\napple!") == "us theory apple"


@pytest.mark.parametrize(
    ("output", "answers", "match"),
    [
        ("It was April Kepner, M.D.", ["April Kepner M.D."], True),
        ("the devastator.", ["Executor", "The Devastator"], True),
        ("Devast", ["Devastator"], False),
        ("A king", ["Kings"], False),
        ("anything", ["The"], False),  # nothing is left of it
        ("in 1874", ["1874"], True),
    ],
)
def test_substring_match(output, answers, match):
    assert substring_match(output, answers) is match


@pytest.mark.parametrize(
    ("output", "answers", "f1"),
    [
        ("the red granite", ["red granite"], 1.0),
        ("red", ["red granite"], 2 / 3),  # precision 1, recall 1/2
        ("red red granite of Osk", ["red granite"], 2 * 2 / (5 + 2)),  # a word counts once
        ("blue", ["red granite"], 0.0),
        ("", ["red"], 0.0),
        ("green light", ["red", "a green flag"], 0.5),  # the best of the answers
    ],
)
def test_token_f1(output, answers, f1):
    assert token_f1(output, answers) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [
        (0.1, 10, 0.0178762, 0.4041500),  # statsmodels.stats.proportion.proportion_confint
        (0.0, 20, 0.0, 0.1611252),
        (1.0, 20, 0.8388748, 1.0),
    ],
)
def test_wilson(share, count, low, high):
    assert wilson(share, count) == pytest.approx((share, low, high), abs=1e-6)


def test_bootstrap_is_that_of_a_normal_mean():
    """Of 2,500 normal values: 1.96 standard errors to both sides, within sampling error."""
    values = np.random.default_rng(1).normal(3, 2, 2500)
    mean, low, high = bootstrap(values)
    error = values.std(ddof=1) / 50
    assert mean == values.mean()
    assert (mean - low) / error == pytest.approx(1.96, rel=0.1)
    assert (high - mean) / error == pytest.approx(1.96, rel=0.1)
    assert bootstrap(values) == (mean, low, high)


def test_modes_are_compared_question_by_question():
    """Two modes that differ on one question of four, in both orders."""
    right = {
        "full": [[1, 1], [1, 0], [0, 0], [1, 1]],
        "none": [[1, 1], [1, 0], [0, 0], [0, 0]],
    }
    marks = [
        Mark(question, order, mode, bool(match), match / 2)
        for mode, table in right.items()
        for question, orders in enumerate(table)
        for order, match in enumerate(orders)
    ]
    full, none = summarise(marks, against=["full", "absent"])
    assert (full["mode"], none["mode"]) == ("full", "none")
    assert full["questions"] == 4
    assert full["match"].mean == 5 / 8
    assert none["f1"].mean == 3 / 16
    # Shares of 3/4 and 2/4, and of 2/4 and 1/4: 1/4 apart.
    assert full["order_deviation"] == pytest.approx(0.25 / 2**0.5)
    assert full["differences"] == {}
    difference = none["differences"].pop("full")
    assert none["differences"] == {}
    assert difference["match"] == (-0.25, -0.75, 0)
    assert difference["f1"].mean == -0.125


def test_perplexity_is_over_tokens():
    """Three tokens of 1/2 and one of 1/16: the geometric mean, whatever text they are in."""
    ln2 = np.log(2)
    mean, low, high = perplexity([[ln2, ln2, ln2], [4 * ln2], []])
    assert mean == pytest.approx(2 ** (7 / 4))
    assert low < mean < high
    with pytest.raises(ValueError, match="two tokens"):
        perplexity([[], []])
