"""Samples: what is drawn for them, how they are made to fit, and how they are packed."""

from __future__ import annotations

import dataclasses
import gzip
import json

import numpy as np
import pytest
from finetune_helpers import END, RECIPE, write_questions

from lazyattn_jax.finetune.batches import BatchShape, Source
from lazyattn_jax.finetune.data import Questions, Recipe, cloze, draw, make_sample
from lazyattn_jax.models.tokenizer import dummy_tokenizer
from lazyattn_jax.prompt import Document

TOKENIZER = dummy_tokenizer(512)


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Questions:
    return Questions(write_questions(tmp_path_factory.mktemp("data") / "questions.jsonl"))


def test_the_longest_answer_that_stands_in_the_documents_is_the_target(tmp_path):
    lines = [
        {"question": "q", "answers": ["a tall Red", "RED", "a red"], "text": "It is a red one."},
        {"question": "q", "answers": ["x"], "documents": ["one", {"title": "t", "text": "two"}]},
    ]
    path = tmp_path / "questions.jsonl.gz"
    path.write_bytes(gzip.compress("\n\n".join(map(json.dumps, lines)).encode()))
    first, second = Questions(path).all
    assert first.answer == "a red"
    assert second.answer == "x"
    assert second.documents == (Document("one"), Document("two", "t"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 1: Expecting"),
        ("[]", r"line 1 is no JSON object"),
        ('{"question": " "}', r"line 1 has no 'question'"),
        ('{"question": "q", "answers": "x"}', r"line 1 has no 'answers', a list"),
        ('{"question": "q", "answers": ["x"]}', r"line 1: .*'text'"),
        ('{"question": "q", "answers": ["x"], "documents": []}', r"line 1 has no documents"),
        ("", r"has no questions"),
    ],
)
def test_files_that_are_no_questions(tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        Questions(tmp_path / "bad.jsonl")


def test_documents_are_the_own_passage_among_others(questions):
    """Each once, in every number and at every place, and the same for the same random numbers."""
    counts, places = set(), set()
    for seed in range(60):
        documents = draw(questions, 5, RECIPE, np.random.default_rng(seed))
        texts = [d.text for d in documents]
        assert len(set(texts)) == len(texts)
        counts.add(len(texts))
        places.add(texts.index("n5 is blue."))
        assert all(bool(d.title) == bool(documents[0].title) for d in documents)
    assert counts == {2, 3}
    assert places == {0, 1, 2}
    again = draw(questions, 5, RECIPE, np.random.default_rng(59))
    assert again == documents


def test_joined_documents_are_several_passages(questions):
    recipe = dataclasses.replace(RECIPE, joined=1.0)
    for seed in range(10):
        documents = draw(questions, 5, recipe, np.random.default_rng(seed))
        lines = [d.text.split("\n") for d in documents]
        assert all(2 <= len(part) <= 5 for part in lines)
        assert sum(part.count("n5 is blue.") for part in lines) == 1


def test_a_sample_is_cut_to_length_but_keeps_its_answer(questions):
    documents = draw(questions, 5, Recipe((10, 10), 0, 0), np.random.default_rng(0))
    question = questions.all[5]
    whole = make_sample(TOKENIZER, RECIPE, question, documents, END, 10_000)
    cut = make_sample(TOKENIZER, RECIPE, question, documents, END, 120)
    assert len(cut.tokens) <= 120 < len(whole.tokens)
    text = TOKENIZER.decode(cut.tokens.tolist())
    assert "n5 is blue." in text
    assert text.startswith("system: Be short.\nuser: Title: ")
    assert text.endswith("colour of n5?\nassistant: blue")
    assert cut.tokens[-cut.num_answer :].tolist() == [*TOKENIZER.encode("blue"), END]
    assert make_sample(TOKENIZER, RECIPE, question, documents, END, 40) is None


def test_a_gap_in_a_sentence():
    passage = Document(
        "It rained. In the old town of Velmora the harbour was built by Ada Lindqvist."
    )
    seen = {cloze(passage, np.random.default_rng(seed)) for seed in range(40)}
    assert {answer for _, answer in seen} == {"Velmora", "Ada Lindqvist"}
    words = set(passage.text.replace(".", "").split()) | {"____"}
    for text, answer in seen:
        assert text.count("____") == 1
        assert answer not in text
        assert set(text.replace(".", "").split()) <= words
    assert cloze(Document("no names in here, and nothing that is counted at all"), None) is None


def test_every_question_is_packed_once_an_epoch(questions):
    shape = BatchShape(parts=2, rows=2, length=320, targets=16)
    source = Source([questions], TOKENIZER, RECIPE, shape, end=END, seed=3)
    found = []
    for batch in source.some(1000):
        assert batch.tokens.shape == (2, 2, 320)
        assert batch.weight.sum() == pytest.approx(1, abs=1e-6)
        for part, row in np.ndindex(2, 2):
            b = type(batch)(*(x[part, row] for x in batch))
            for i in range(b.sample.max() + 1):
                (here,) = np.nonzero(b.sample == i)
                assert b.positions[here].tolist() == list(range(len(here)))
                (mine,) = np.nonzero(b.owner == i)
                # What follows each place is its target, and the last one ends the sample.
                assert b.tokens[b.place[mine] + 1].tolist() == b.target[mine].tolist()
                assert b.place[mine][-1] + 1 == here[-1]
                assert b.target[mine][-1] == END
                assert len(set(b.weight[mine])) == 1
                found.append(TOKENIZER.decode(b.tokens[here].tolist()).split("colour of ")[1])
    answers = ("red", "blue", "green", "gold")
    want = [f"n{i}?\nassistant: {answers[i % 4]}" for i in range(24)]
    assert sorted(found) == sorted(want)


def test_batches_depend_on_the_seed_and_their_number_alone(questions):
    shape = BatchShape(rows=2, length=256, targets=16)
    source, other = (
        Source([questions], TOKENIZER, RECIPE, shape, end=END, seed=seed) for seed in (0, 1)
    )
    first = source.endless()
    batches = [next(first) for _ in range(9)]  # more than an epoch
    later = next(source.endless(skip=8))
    for ours, theirs in zip(batches[8], later, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(batches[8].tokens, batches[7].tokens)
    assert not np.array_equal(batches[0].tokens, next(other.endless()).tokens)
