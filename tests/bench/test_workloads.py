"""The draws of the workloads, and when their requests are sent."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from lazyattn_jax.bench.serving_load import ClosedLoop, OpenLoop
from lazyattn_jax.bench.workloads import Workload, draw_distinct, make_words, token_maker

TOKENS = token_maker(1000)


def queries(count, **options):
    small = {"pool": 20, "documents": 3, "document_tokens": 5, "question_tokens": 4}
    return list(itertools.islice(Workload(**(small | options)).queries(TOKENS), count))


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.1])
def test_single_draws_follow_the_zipf_law(alpha):
    rng = np.random.default_rng(0)
    pool, draws = 50, 20_000
    counts = np.bincount([draw_distinct(rng, pool, 1, alpha)[0] for _ in range(draws)], None, pool)
    weights = 1 / np.arange(1, pool + 1) ** alpha
    expected = draws * weights / weights.sum()
    # A count is binomial; 4.5 standard deviations: one of 50 is beyond by chance once in 3000 runs.
    assert (np.abs(counts - expected) < 4.5 * np.sqrt(expected) + 1).all()


def test_draws_without_replacement_are_successive_draws():
    """Every ordered pair of 3: first by weight, then by weight among the two that are left."""
    rng = np.random.default_rng(1)
    draws, alpha = 30_000, 1.0
    found = [frozenset(draw_distinct(rng, 3, 2, alpha)) for _ in range(draws)]
    weights = np.array([1, 1 / 2, 1 / 3])
    p = weights / weights.sum()
    for a, b in itertools.combinations(range(3), 2):
        expected = p[a] * p[b] / (1 - p[a]) + p[b] * p[a] / (1 - p[b])
        share = found.count(frozenset((a, b))) / draws
        assert abs(share - expected) < 4.5 * math.sqrt(expected * (1 - expected) / draws)


def test_order_does_not_depend_on_rank():
    rng = np.random.default_rng(2)
    draws = [draw_distinct(rng, 10, 4, 2.0) for _ in range(4000)]
    with_first = [d.index(0) for d in draws if 0 in d]
    share = np.bincount(with_first, minlength=4) / len(with_first)
    assert (np.abs(share - 0.25) < 4.5 * math.sqrt(0.25 * 0.75 / len(with_first))).all()


def test_zipf_requests_share_documents_and_nothing_else():
    asked = queries(200)
    assert all(len(set(q.documents)) == 3 for q in asked)
    assert len({d for q in asked for d in q.documents}) == 20
    assert len({q.question for q in asked}) == 200
    assert len({q.system for q in asked}) == 1
    lengths = {(len(q.system), *map(len, q.documents), len(q.question)) for q in asked}
    assert lengths == {(32, 5, 5, 5, 4)}


def test_permute_and_unique():
    permuted = queries(100, name="permute")
    assert len({frozenset(q.documents) for q in permuted}) == 1
    assert len({q.documents for q in permuted}) == math.factorial(3)
    unique = queries(50, name="unique")
    assert len({d for q in unique for d in q.documents}) == 150


def test_usual_documents_are_those_that_requests_ask_for_in_order_of_rank():
    workload = Workload(pool=20, documents=3, alpha=2.0, document_tokens=5, question_tokens=4)
    system, usual = workload.usual(TOKENS)
    ranked = list(usual)
    asked = list(itertools.islice(workload.queries(TOKENS), 400))
    counts = Counter(d for q in asked for d in q.documents)
    assert {q.system for q in asked} == {system}
    assert set(counts) == set(ranked)
    assert [d for d, _ in counts.most_common(3)] == ranked[:3]
    assert not list(replace(workload, name="unique").usual(TOKENS)[1])


def test_a_seed_is_a_workload():
    assert queries(5, seed=1) == queries(5, seed=1)
    assert queries(5, seed=1) != queries(5, seed=2)
    more = queries(5, seed=1, documents=4)
    assert more[0].question == queries(1, seed=1)[0].question


def test_jsonl(tmp_path):
    path = tmp_path / "questions.jsonl"
    lines = [
        {"question": "Who?", "documents": ["One.", {"title": "T", "text": "Two."}], "answers": [1]},
        {"question": "Where?", "documents": ["One."]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    asked = queries(3, name="jsonl", file=str(path))
    assert [q.question for q in asked] == ["Who?", "Where?", "Who?"]
    assert asked[0].documents == ("One.", "T\nTwo.")
    assert asked[0].answers == ("1",)
    path.write_text('{"question": "Who?"}\n')
    with pytest.raises(ValueError, match=r"questions.jsonl, line 1 is no object"):
        queries(1, name="jsonl", file=str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "other"}, "workload is 'other'"),
        ({"documents": 21}, "documents is 21 a request, the pool has 20"),
        ({"name": "jsonl"}, "'jsonl' needs a file"),
        ({"file": "x"}, "no other takes one"),
        ({"alpha": -1.0}, "alpha is -1.0"),
        ({"output_tokens": 0}, "output_tokens is 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        queries(1, **options)


def test_words():
    rng = np.random.default_rng(0)
    assert len(make_words(rng, 7).split()) == 7


def test_poisson_arrivals():
    load = OpenLoop(20.0, begin=100.0)
    times = []
    for now in np.arange(100, 400, 0.5):
        assert load.next_at() > now - 0.5
        times += load.due(float(now), running=7)
    gaps = np.diff([100.0, *times])
    assert (gaps > 0).all()
    # Mean and variance of exponential gaps of 0.05: of n gaps the mean is good to 1 / sqrt(n).
    n = len(gaps)
    assert abs(n - 20 * 300) < 4.5 * math.sqrt(20 * 300)
    assert abs(gaps.mean() * 20 - 1) < 4.5 / math.sqrt(n)
    assert abs((gaps > 0.05).mean() - math.exp(-1)) < 4.5 * math.sqrt(0.25 / n)
    assert OpenLoop(1.0, 0.0, seed=1).next_at() != OpenLoop(1.0, 0.0, seed=2).next_at()


def test_a_closed_loop_replaces_what_ends():
    load = ClosedLoop(3)
    assert load.due(1.0, running=0) == [1.0] * 3
    assert load.due(2.0, running=3) == []
    assert load.due(3.0, running=2) == [3.0]
    for make in (lambda: ClosedLoop(0), lambda: OpenLoop(0.0, 0.0)):
        with pytest.raises(ValueError, match="is 0"):
            make()
