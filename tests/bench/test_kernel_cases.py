"""Sizes, draws and goals of the kernel benchmark's cases."""

from __future__ import annotations

import numpy as np
import pytest

from lazyattn_jax.bench.kernel_cases import (
    CASES,
    HEADLINE,
    Case,
    Variant,
    distinct_bytes,
    flops,
    goal,
    make_step,
    variants,
)

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("D1", 64 * 10 * 512 * 4096 / 1e6),  # a token has 2 x 8 x 128 x 2 bytes
        ("D2", 8 * 10 * 512 * 4096 / 1e6),
        ("D3", 64 * 512 * 4096 / 1e6),
        ("D4", 16 * 64 * 512 * 4096 / 1e6),
        ("D1-100", 64 * 50 * 100 * 4096 / 1e6),  # not the empty rest of a document's last page
        ("P1", 8 * (5120 + 64) * 4096 / 1e6),
        ("E2", 8192 * 4096 / 1e6),
    ],
)
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_bytes_are_those_of_valid_slots(name, megabytes, page_size):
    step = make_step(BY_NAME[name], page_size)
    assert distinct_bytes(step, 128) == pytest.approx(1e6 * megabytes, abs=0.5)
    assert distinct_bytes(step, 64) == pytest.approx(5e5 * megabytes, abs=0.5)


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("D1", 64 * 5120),
        ("S2", 256 * 5120),  # sharing saves bytes, not products
        ("P1", 8 * (64 * 5120 + 64 * 65 // 2)),
        ("P3", 128 * 32768 + 128 * 129 // 2),
        ("E1", 16 * 512 * 513 // 2),
        ("E2", 8192 * 8193 // 2),
        ("P1-100", 8 * (64 * 5000 + 64 * 65 // 2)),
    ],
)
def test_operations_are_those_of_visible_pairs(name, pairs):
    step = make_step(BY_NAME[name], 64)
    assert flops(step, 128) == 4 * 32 * 128 * pairs
    assert flops(step, 64) == 4 * 32 * 64 * pairs


@pytest.mark.parametrize("name", ["S1", "S2", "S3"])
def test_documents_are_distinct_within_a_request_and_shared_between(name):
    case = BY_NAME[name]
    step = make_step(case, 64)
    held = step.references.run.reshape(case.requests, case.held)
    assert all(len(set(documents)) == case.held for documents in held.tolist())
    distinct = len(np.unique(held))
    assert case.held < distinct <= case.documents
    assert distinct == len(step.runs.length)
    assert distinct_bytes(step, 128) == distinct * 512 * 4096


def test_popular_documents_are_held_by_more():
    case = Case("", 400, 2, documents=10, zipf=1.5)
    held = np.bincount(make_step(case, 64).references.run)
    assert held[0] > 2 * held[3] > 2 * held[9]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("page_size", [16, 128])
def test_pages_are_a_permutation_and_every_row_sees_its_runs(case, page_size):
    step = make_step(case, page_size)
    refs, runs = step.references, step.runs
    assert sorted(runs.pages.tolist()) == list(range(step.num_pages))
    assert (runs.pages != np.arange(step.num_pages)).any()
    counts = -(-runs.length // page_size)
    assert runs.start.tolist() == [0, *np.cumsum(counts)[:-1].tolist()]
    held = np.zeros(step.num_rows, int)
    for row, num_rows in zip(refs.row, refs.num_rows, strict=True):
        held[row : row + num_rows] += 1
    assert set(held) == {case.held + (case.new > 0)}
    own = refs.turn == 0
    assert own.sum() == (case.requests if case.new else 0)
    assert (refs.causal[own] == 0).all()
    assert (refs.causal[~own] == case.tokens).all()
    assert sorted(refs.turn[~own]) == list(range(1, 1 + (~own).sum()))
    assert len(step.deltas) == 1 + (~own).sum()
    assert step.deltas[0] == 0
    assert (step.deltas[1:] > 0).all()


def test_quick_takes_the_headline_of_each_case_only():
    assert [variants(case, quick=True) for case in CASES] == [
        [] if case.name.endswith("-100") else [HEADLINE] for case in CASES
    ]


def test_variants():
    labels = {case.name: [v.label for v in variants(case)] for case in CASES}
    pages = ["pages of 16", "pages of 32", "pages of 128"]
    assert labels["D1"] == ["", "no rotation", "unshared plan", "head_dim 64", *pages]
    assert labels["D4"] == ["", "no rotation"]
    assert labels["P1"] == ["", "head_dim 64", *pages]
    assert labels["D1-100"] == labels["P1-100"] == ["", *pages]
    assert labels["S1"] == labels["P4"] == labels["E2"] == [""]


def test_goals():
    assert goal(BY_NAME["D1"], HEADLINE) == 0.93
    assert goal(BY_NAME["D1"], Variant(head_dim=64)) == 0.88
    assert goal(BY_NAME["P1"], Variant(head_dim=64)) == 0.65
    assert goal(BY_NAME["D1"], Variant(page_size=16)) is None
    assert goal(BY_NAME["P1-100"], HEADLINE) is None
