"""Dense work lists against what the references say, slot by slot."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyattn_jax.kernels.dense import BLOCK_ROWS, DECODE_WIDTHS, DenseLists, item_pages
from lazyattn_jax.kernels.work import References, Runs

PAGE_SIZES = pytest.mark.parametrize("page_size", [16, 64, 256])
BUCKET, TURNS = 256, 3
lengths = st.lists(st.integers(0, 600), min_size=1, max_size=5)


def stored(lengths: list[int], page_size: int) -> Runs:
    """Runs of pages in no order, in a table that has others before, between and after them."""
    counts = np.array([-(-n // page_size) for n in lengths])
    start = 2 + np.cumsum(counts + 1) - (counts + 1)
    pages = np.random.default_rng(0).permutation(int(start[-1] + counts[-1]) + 3)
    return Runs(pages.astype(np.int32), start, np.array(lengths))


def references_of(rows: list[tuple[int, ...]]) -> References:
    return References(*np.array(rows, int).reshape(-1, 5).T)


def named(references: References, runs: Runs, page_size: int) -> np.ndarray:
    """How often each row sees each slot of the pool with each turn, by what references mean."""
    seen = np.zeros((TURNS, BUCKET, len(runs.pages) * page_size), int)
    for row, num_rows, run, turn, causal in zip(*references, strict=True):
        for r in range(num_rows):
            for slot in range(min(runs.length[run], causal + r + 1)):
                page = runs.pages[runs.start[run] + slot // page_size]
                seen[turn, row + r, page * page_size + slot % page_size] += 1
    return seen


def slots_of(pages: np.ndarray, count: int, page_size: int) -> np.ndarray:
    return (pages[:, None] * page_size + np.arange(page_size)).ravel()[:count]


def listed(works, num_pages: int, page_size: int) -> np.ndarray:
    """The same, by what the work lists mean."""
    seen = np.zeros((TURNS, BUCKET, num_pages * page_size), int)
    for work in works:
        for i in range(work.num_items):
            if hasattr(work, "causal"):
                for r in range(work.num_rows[i]):
                    visible = max(0, min(work.kv_len[i], work.causal[i] + r + 1))
                    slots = slots_of(work.pages[i], visible, page_size)
                    seen[work.turn[i], work.row[i] + r, slots] += 1
            else:
                used = work.rows[i] < BUCKET
                slots = slots_of(work.pages[i], work.kv_len[i], page_size)
                for row, turn in zip(work.rows[i, used], work.turns[i, used], strict=True):
                    seen[turn, row, slots] += 1
    return seen


def of_capacity(page_size: int, capacity: int) -> DenseLists:
    return DenseLists(page_size, {BUCKET: capacity}, {BUCKET: capacity})


def assert_just_fits(kind: str, references: References, runs: Runs, page_size: int, works) -> None:
    """Lists of just the needed capacity come out the same; one item less does not fit."""
    needed = max(int(work.num_items) for work in works)
    exact = getattr(of_capacity(page_size, needed), kind)(references, runs, BUCKET)
    for work, other in zip(works, exact, strict=True):
        for column, same in zip(work, other, strict=True):
            np.testing.assert_array_equal(column[:needed] if column.ndim else column, same)
    if needed:
        assert getattr(of_capacity(page_size, needed - 1), kind)(references, runs, BUCKET) is None


@PAGE_SIZES
@settings(max_examples=25, deadline=None)
@given(lengths=lengths, data=st.data())
def test_prefill_lists_what_is_referred_to(page_size, lengths, data):
    runs = stored(lengths, page_size)
    rows = []
    for _ in range(data.draw(st.integers(0, 4), label="references")):
        run = data.draw(st.integers(0, len(lengths) - 1))
        num_rows = data.draw(st.integers(1, 150))
        row = data.draw(st.integers(0, BUCKET - num_rows))
        causal = data.draw(st.one_of(st.just(lengths[run]), st.integers(0, 600)))
        rows.append((row, num_rows, run, data.draw(st.integers(0, TURNS - 1)), causal))
    references = references_of(rows)
    works = of_capacity(page_size, 500).prefill(references, runs, BUCKET)
    (work,) = works
    np.testing.assert_array_equal(
        listed(works, len(runs.pages), page_size), named(references, runs, page_size)
    )
    real = slice(0, int(work.num_items))
    assert (work.num_rows[real] <= BLOCK_ROWS).all()
    assert work.pages.shape == (500, item_pages(page_size))
    # Of every item the last row sees the last slot: nothing is read that nobody sees.
    assert (work.kv_len[real] <= work.causal[real] + work.num_rows[real]).all()
    assert (work.kv_len[real] > 0).all()
    assert_just_fits("prefill", references, runs, page_size, works)


@PAGE_SIZES
@settings(max_examples=25, deadline=None)
@given(lengths=lengths, data=st.data())
def test_decode_lists_what_is_referred_to(page_size, lengths, data):
    """Rows may hold a run several times, with one turn or with several."""
    runs = stored(lengths, page_size)
    held = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, 19), st.integers(0, len(lengths) - 1), st.integers(0, TURNS - 1)
            ),
            max_size=60,
        ),
        label="row, run, turn",
    )
    references = references_of([(row, 1, run, turn, lengths[run]) for row, run, turn in held])
    works = of_capacity(page_size, 500).decode(references, runs, BUCKET)
    np.testing.assert_array_equal(
        listed(works, len(runs.pages), page_size), named(references, runs, page_size)
    )
    for work, width in zip(works, DECODE_WIDTHS, strict=True):
        assert work.rows.shape == (500, width)
        for rows in work.rows[: work.num_items]:
            used = rows[rows < BUCKET]
            assert len(used) == len(set(used.tolist()))
        assert (work.rows[work.num_items :] == BUCKET).all()
    assert_just_fits("decode", references, runs, page_size, works)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=80))
def test_a_run_is_read_once_for_eight_rows(held):
    """Where rows hold a run several times, their second references share items, and so on."""
    runs = stored([16, 10, 1, 16], 16)
    references = references_of([(row, 1, run, 0, 16) for row, run in held])
    works = of_capacity(16, 500).decode(references, runs, BUCKET)
    reads = Counter(work.pages[i, 0] for work in works for i in range(work.num_items))
    times = Counter(held)
    for run in range(4):
        levels = Counter(
            level for (_, r), count in times.items() if r == run for level in range(count)
        )
        assert reads[runs.pages[runs.start[run]]] == sum(-(-n // 8) for n in levels.values())


@pytest.mark.parametrize("prefill", [True, False], ids=["prefill", "decode"])
def test_empty_lists_have_the_shapes_of_full_ones(prefill):
    lists = DenseLists(16, {64: 30, 512: 240}, {1: 7, 4: 28})
    runs = stored([100, 200], 16)
    references = references_of([(0, 1, 0, 0, 100), (0, 1, 1, 1, 200)])
    for bucket in lists.prefill_items if prefill else lists.decode_items:
        full = (lists.prefill if prefill else lists.decode)(references, runs, bucket)
        empty = lists.empty(prefill, bucket)
        assert [[x.shape for x in work] for work in empty] == [
            [x.shape for x in work] for work in full
        ]
        assert [[x.dtype for x in work] for work in empty] == [
            [x.dtype for x in work] for work in full
        ]
        assert all(work.num_items == 0 for work in empty)
