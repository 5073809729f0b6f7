"""Work lists of the TPU kernels against what the references say, slot by slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_steps import SHAPE, Step, decode_step, decode_steps, prefill_steps, step_of

from lazyattn_jax.kernels.mosaic_tpu.plan import (
    DECODE_OTHERS,
    DECODE_PIECES,
    DECODE_TILE,
    PREFILL_OTHERS,
    PREFILL_TILE,
    ROWS,
    decode_words,
    plan_decode,
    plan_prefill,
    prefill_words,
    window_rows,
)
from lazyattn_jax.kernels.mosaic_tpu.stream import CHUNK, Record, records


def decode_records(work, page_size: int) -> list[Record]:
    return list(records(work.stream, DECODE_OTHERS, DECODE_TILE // page_size))


def prefill_records(work, page_size: int) -> list[Record]:
    return list(records(work.stream, PREFILL_OTHERS, PREFILL_TILE // page_size))


def slots_of(step: Step, record: Record, piece: int, seen: int) -> np.ndarray:
    """Slots of the pool that a piece of a tile names; all of them hold something."""
    slots = record.others[1]
    size = step.page_size
    pages = record.pages[piece * slots // size : (piece + 1) * slots // size]
    needed = -(-seen // size)
    assert 1 <= seen <= slots
    assert (pages[:needed] >= 0).all()
    # No page is brought that no row sees.
    assert (pages[needed:] == -1).all()
    found = (pages[:, None] * size + np.arange(size)).reshape(-1)[:seen]
    assert step.valid()[found].all()
    return found


def check_silence(record: Record, seen: list[int], page_size: int) -> None:
    """Slots are silenced in a tile with a page that is not full."""
    ragged = any(n % page_size for n in seen)
    assert record.others[2] == (len(seen) if ragged else 0)


def decode_listed(step: Step, work) -> np.ndarray:
    """The same as ``Step.named``, by what the kernel does with the work list."""
    named = np.zeros_like(step.named())
    found = iter(decode_records(work, step.page_size))
    for _ in range(int(work.num_entries[0])):
        record = next(found)
        kind, tiles, rows = record.others[1], record.others[3], record.rows
        assert 1 <= len(rows) == record.others[4] <= ROWS
        turns = np.zeros(DECODE_PIECES, int)
        for tile in range(tiles):
            record = record if tile == 0 else next(found)
            used, slots, _, _, _, *seen = record.others
            assert slots == kind
            pieces = DECODE_TILE // slots
            assert 1 <= used <= pieces
            if len(rows) > 1:
                assert pieces == 1
                turns = record.turns if tile == 0 else turns
            else:
                assert len(record.turns) == used if pieces > 1 else len(record.turns) <= 1
                turns = record.turns if len(record.turns) else turns
            check_silence(record, seen[:used], step.page_size)
            for piece in range(used):
                at = slots_of(step, record, piece, seen[piece])
                of_piece = turns if len(rows) > 1 else turns[piece : piece + 1]
                for turn, row in zip(of_piece, rows, strict=True):
                    named[turn, row, at] += 1
    assert next(found, None) is None
    return named


def prefill_listed(step: Step, work) -> np.ndarray:
    named = np.zeros_like(step.named())
    size = window_rows(step.group)
    found = prefill_records(work, step.page_size)
    assert work.first_tile[-1] == len(found)
    for window, (first_tile, last) in enumerate(
        zip(work.first_tile[:-1], work.first_tile[1:], strict=True)
    ):
        turns = None
        for record in found[first_tile:last]:
            used, slots, _, first, end, *of_pieces = record.others
            assert 0 <= first < end <= size
            assert 1 <= used <= PREFILL_TILE // slots
            turns = record.turns if len(record.turns) else turns
            assert len(turns) == used
            seen, here = of_pieces[: 2 * used : 2], of_pieces[1 : 2 * used : 2]
            check_silence(record, seen, step.page_size)
            for piece in range(used):
                slots_seen = slots_of(step, record, piece, seen[piece])
                visible = np.minimum(seen[piece], here[piece] + np.arange(size) + 1)
                # No slot is brought that no row sees.
                assert visible[end - 1] == seen[piece]
                # Where a tile is of several runs, every row sees all of it.
                assert used == 1 or visible[first] == seen[piece]
                for row in range(first, end):
                    at = slots_seen[: max(0, visible[row])]
                    named[turns[piece], window * size + row, at] += 1
    return named


@settings(max_examples=150, deadline=None)
@given(decode_steps(), st.booleans())
def test_decode_covers_what_references_name(step, share):
    work = plan_decode(step.references, step.runs, page_size=step.page_size, share=share)
    np.testing.assert_array_equal(decode_listed(step, work), step.named())


@settings(max_examples=150, deadline=None)
@given(prefill_steps())
def test_prefill_covers_what_references_name(step):
    options = {"num_rows": step.num_rows, "page_size": step.page_size, "group": step.group}
    work = plan_prefill(step.references, step.runs, **options)
    assert len(work.first_tile) == -(-step.num_rows // window_rows(step.group)) + 1
    np.testing.assert_array_equal(prefill_listed(step, work), step.named())


def test_rows_that_share_a_run_are_in_as_few_equal_entries_as_there_can_be():
    step = decode_step([[0]] * 35 + [[1]], [100, 20], **SHAPE)
    work = plan_decode(step.references, step.runs, page_size=64)
    found = decode_records(work, 64)
    assert sorted((r.others[5], len(r.turns)) for r in found) == [
        (20, 1),
        (100, 11),
        (100, 12),
        (100, 12),
    ]
    apart = plan_decode(step.references, step.runs, page_size=64, share=False)
    assert apart.num_entries.tolist() == [36]


def test_runs_of_one_row_are_in_one_entry_and_short_ones_in_one_tile():
    step = decode_step([[0, 1, 2, 3], [4, 5]], [600, 100, 128, 129, 30, 300], **SHAPE)
    work = plan_decode(step.references, step.runs, page_size=64)
    found = [(r.others.tolist(), len(r.turns)) for r in decode_records(work, 64)]
    # Pieces, slots of one, pieces with slots to silence, tiles and rows of the entry, slots seen.
    two = ([2, 128, 2, 1, 1, 100, 128], 2)
    assert two in found
    assert found.index(two) == 0 or len(found) == 8
    one = sorted((others[3:6], turns) for others, turns in found if others[1] == 256)
    begun = [([4, 1], 1), ([3, 1], 1)]
    assert [(others[:2], turns) for others, turns in one if others[0]] == sorted(begun)
    assert sorted(others[2] for others, _ in one) == [30, 44, 88, 129, 256, 256, 256]
    assert sum(turns for _, turns in one) == 4
    assert work.num_entries.tolist() == [3]


def test_short_documents_are_in_one_tile_of_a_window():
    """Quarters and halves of a tile; what some rows see only part of has a tile of its own."""
    rows = [(0, 10, run, length) for run, length in enumerate([100, 128, 60, 1, 90, 200, 250, 300])]
    lengths = [100, 128, 60, 1, 90, 200, 250, 300, 10]
    step = step_of([*rows, (0, 10, 8, 0)], lengths, num_rows=10, **SHAPE)
    work = plan_prefill(step.references, step.runs, num_rows=10, page_size=64, group=4)
    found = prefill_records(work, 64)
    kinds = sorted((int(r.others[1]), int(r.others[0]), len(r.turns)) for r in found)
    # The fifth short document is alone, like the longest one and the tokens' own run.
    assert kinds == [(128, 4, 4), (256, 2, 2), (512, 1, 1), (512, 1, 1), (512, 1, 1)]


def test_a_document_is_listed_once_for_each_window_that_sees_it():
    """At 4 heads a group a window is 128 tokens: rows 100 to 299 are in windows 0, 1 and 2."""
    step = step_of([(100, 200, 0, 500)], [500], num_rows=400, **SHAPE)
    work = plan_prefill(step.references, step.runs, num_rows=400, page_size=64, group=4)
    assert work.first_tile.tolist() == [0, 1, 2, 3, 3]
    found = [r.others[[6, 3, 4]].tolist() for r in prefill_records(work, 64)]
    assert found == [[400, 100, 128], [528, 0, 128], [656, 0, 44]]


@pytest.mark.parametrize(
    ("kind", "needed"),
    # Runs 0 and 2 are of one row and share a tile, so one record names no row.
    [("decode", 2 * decode_words(64) + 1), ("prefill", 2 * prefill_words(64))],
)
def test_capacity(kind, needed):
    if kind == "decode":
        step = decode_step([[0, 2], [1]], [100, 20, 64], **SHAPE)

        def plan(capacity=None):
            return plan_decode(step.references, step.runs, page_size=64, capacity=capacity)
    else:
        step = step_of([(0, 70, 0, 30), (0, 70, 1, 500)], [100, 128], num_rows=80, **SHAPE)

        def plan(capacity=None):
            options = {"num_rows": 80, "page_size": 64, "group": 4, "capacity": capacity}
            return plan_prefill(step.references, step.runs, **options)

    for exact, padded in zip(plan(needed), plan(needed + CHUNK), strict=True):
        assert exact.dtype == padded.dtype == np.int32
        np.testing.assert_array_equal(exact, padded[: len(exact)])
    with pytest.raises(ValueError, match=f"takes {needed} numbers, there is room for {needed - 1}"):
        plan(needed - 1)


def test_nothing():
    step = step_of([], [], num_rows=40, **SHAPE)
    assert plan_decode(step.references, step.runs, page_size=64).num_entries.tolist() == [0]
    work = plan_prefill(step.references, step.runs, num_rows=40, page_size=64, group=4)
    assert work.first_tile.tolist() == [0, 0]
    # The kernel brings a chunk, and the next one, whatever there is to do.
    assert work.stream.shape == (2 * CHUNK,)
