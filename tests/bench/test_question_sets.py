"""What questions are asked over."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from lazyattn_jax.bench.question_sets import question_sets, reordered


def line(i: int, passage: int) -> dict:
    return {"question": f"q{i}", "answers": [f"a{i}"], "title": "t", "text": f"passage {passage}"}


def write(path, lines):
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    return path


@pytest.fixture
def passages(tmp_path):
    """30 questions over 15 passages."""
    return write(tmp_path / "a.jsonl.gz", [line(i, i // 2) for i in range(30)])


def test_the_passage_is_there_once_among_others(passages):
    sets = question_sets(passages, 6, seed=0, limit=None)
    assert [s.question for s in sets] == [f"q{i}" for i in range(30)]
    places = set()
    for i, asked in enumerate(sets):
        texts = [d.text for d in asked.documents]
        assert len(texts) == len(set(texts)) == 6
        places.add(texts.index(f"passage {i // 2}"))
        assert asked.answers == (f"a{i}",)
    assert places == set(range(6))
    everything = question_sets(passages, 15, seed=0, limit=None)
    assert all(len({d.text for d in s.documents}) == 15 for s in everything)


def test_the_seed_decides_and_the_limit_does_not(passages):
    sets = question_sets(passages, 6, seed=0, limit=None)
    assert question_sets(passages, 6, seed=0, limit=7) == sets[:7]
    other = question_sets(passages, 6, seed=1, limit=None)
    assert sum(a.documents != b.documents for a, b in zip(sets, other, strict=True)) > 25


def test_orders_are_those_of_the_same_documents(passages):
    sets = question_sets(passages, 6, seed=0, limit=None)
    assert reordered(sets, 0, seed=0) == sets
    again = reordered(sets, 1, seed=0)
    assert again == reordered(sets, 1, seed=0) != reordered(sets, 2, seed=0)
    assert all(
        set(a.documents) == set(b.documents) and a.question == b.question
        for a, b in zip(sets, again, strict=True)
    )
    assert sum(a.documents != b.documents for a, b in zip(sets, again, strict=True)) > 25


def test_own_documents_are_kept(tmp_path):
    """The first ones, in a drawn order; no others come to them."""
    documents = [{"title": "", "text": f"own {i}"} for i in range(10)]
    one = {"question": "q", "answers": ["a"], "documents": documents}
    path = tmp_path / "plain.jsonl"
    path.write_text(json.dumps(one) + "\n\n" + json.dumps(line(0, 0)) + "\n")
    with pytest.raises(ValueError, match="1 passages, fewer than 10"):
        question_sets(path, 10, seed=0, limit=None)
    path.write_text(json.dumps(one) + "\n\n" + json.dumps(one) + "\n")
    for count in (4, 10, 12):
        first, second = question_sets(path, count, seed=3, limit=None)
        assert {d.text for d in first.documents} == {f"own {i}" for i in range(min(count, 10))}
        assert set(second.documents) == set(first.documents)
    assert first.documents != second.documents


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no questions"),
        ("{}", "line 1 has no 'question'"),
        ('{"question": "q", "answers": "a", "text": "t"}', "no 'answers', a list"),
        ('{"question": "q", "answers": ["a"]}', "line 1: a document with .* has no 'text'"),
        ('{"question": "q", "answers": ["a"], "documents": []}', "line 1 has no documents"),
        ("[1]", "line 1 is no JSON object"),
        ("\n{", "line 2: "),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, text, message):
    path = tmp_path / "wrong.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        question_sets(path, 1, seed=0, limit=None)


def test_unreadable_files(tmp_path):
    with pytest.raises(ValueError, match="cannot read"):
        question_sets(tmp_path / "absent", 1, seed=0, limit=None)
    damaged = tmp_path / "damaged.gz"
    damaged.write_bytes(gzip.compress(random.Random(0).randbytes(1000))[:500])
    with pytest.raises(ValueError, match="cannot read"):
        question_sets(damaged, 1, seed=0, limit=None)
