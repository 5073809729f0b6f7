"""How right an answer is, and how sure a mean of that is."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NORMAL_95 = 1.959963984540054
_RESAMPLES = 2000


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, words one space apart (as SQuAD does it)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def substring_match(output: str, answers: Sequence[str]) -> bool:
    """Whether the output contains one of the answers, both normalised."""
    text = normalise(output)
    return any(answer in text for answer in map(normalise, answers) if answer)


def token_f1(output: str, answers: Sequence[str]) -> float:
    """The best F1 of the output's normalised words against those of an answer, 0 to 1."""
    return max(_f1(normalise(output).split(), normalise(answer).split()) for answer in answers)


def _f1(output: Sequence[str], answer: Sequence[str]) -> float:
    common = sum((Counter(output) & Counter(answer)).values())
    return 2 * common / (len(output) + len(answer)) if common else 0.0


def wilson(share: float, count: int) -> Interval:
    """Wilson's interval of a share of ``count`` independent trials."""
    z = _NORMAL_95**2 / count
    centre = (share + z / 2) / (1 + z)
    half = math.sqrt(z * share * (1 - share) + z * z / 4) / (1 + z)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def bootstrap(values: Float[np.ndarray, "n"], *, seed: int = 0) -> Interval:
    """The interval of a mean by resampling its values (percentiles)."""
    rng = np.random.default_rng(seed)
    means = [values[rng.integers(0, len(values), len(values))].mean() for _ in range(_RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(values.mean()), float(low), float(high))


@dataclass(frozen=True)
class Mark:
    """How right the answer to one question is, in one mode and order of the documents."""

    question: int
    order: int
    mode: str
    match: bool
    f1: float


def summarise(marks: Sequence[Mark], *, against: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each mode, in the order they come in.

    Shares and F1 are means over questions and orders, 0 to 1. Their intervals, and those of the
    ``differences`` to each mode of ``against`` on the same questions, are over questions: with
    several orders Wilson's is then on the safe side. ``order_deviation`` is the sample standard
    deviation of the share of matches over orders.
    """
    marks_of: dict[str, list[Mark]] = {}
    for mark in marks:
        marks_of.setdefault(mark.mode, []).append(mark)
    tables = {name: _by_question(some) for name, some in marks_of.items()}
    rows = []
    for name, (match, f1) in tables.items():
        row: dict[str, Any] = {"mode": name, "questions": len(match), "orders": match.shape[1]}
        row["match"] = wilson(float(match.mean()), len(match))
        row["f1"] = bootstrap(f1.mean(1))
        if match.shape[1] > 1:
            row["order_deviation"] = float(match.mean(0).std(ddof=1))
        row["differences"] = {
            other: {
                "match": bootstrap((match - tables[other][0]).mean(1)),
                "f1": bootstrap((f1 - tables[other][1]).mean(1)),
            }
            for other in against
            if other in tables and other != name
        }
        rows.append(row)
    return rows


def _by_question(
    marks: Sequence[Mark],
) -> tuple[Float[np.ndarray, "questions orders"], Float[np.ndarray, "questions orders"]]:
    shape = 1 + max(m.question for m in marks), 1 + max(m.order for m in marks)
    match, f1 = np.full((2, *shape), np.nan)
    for mark in marks:
        match[mark.question, mark.order] = mark.match
        f1[mark.question, mark.order] = mark.f1
    return match, f1
