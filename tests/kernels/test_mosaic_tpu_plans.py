"""Work lists of the TPU kernels against what the references say, slot by slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_steps import SHAPE, Step, decode_step, decode_steps, prefill_steps, step_of

from lazyattn_jax.kernels.mosaic_tpu.plan import (
    DECODE_WORDS,
    PREFILL_WORDS,
    ROWS,
    plan_decode,
    plan_prefill,
    window_rows,
)
from lazyattn_jax.kernels.mosaic_tpu.stream import CHUNK, records


def slots_of(step: Step, record) -> np.ndarray:
    """Slots of the pool that a record names; all of them hold something."""
    slots = (record.pages[:, None] * step.page_size + np.arange(step.page_size)).reshape(-1)
    slots = slots[: record.length]
    assert len(slots) == record.length
    assert step.valid()[slots].all()
    return slots


def decode_listed(step: Step, work) -> np.ndarray:
    """The same as ``Step.named``, by what the kernel does with the work list."""
    seen = np.zeros_like(step.named())
    for record in records(work.stream, int(work.num_entries[0]), step.page_size):
        assert record.length >= 1
        assert 1 <= len(record.turns) == len(record.others) <= ROWS
        slots = slots_of(step, record)
        for turn, row in zip(record.turns, record.others, strict=True):
            seen[turn, row, slots] += 1
    return seen


def prefill_listed(step: Step, work) -> np.ndarray:
    seen = np.zeros_like(step.named())
    size = window_rows(step.group)
    found = list(records(work.stream, int(work.first_entry[-1]), step.page_size))
    for window, (first_entry, last) in enumerate(
        zip(work.first_entry[:-1], work.first_entry[1:], strict=True)
    ):
        for record in found[first_entry:last]:
            (turn,), (causal, first, end) = record.turns, record.others
            assert 0 <= first < end <= size
            slots = slots_of(step, record)
            visible = np.minimum(record.length, causal + np.arange(size) + 1)
            # No slot is brought that no row sees.
            assert visible[end - 1] == record.length
            for row in range(first, end):
                seen[turn, window * size + row, slots[: max(0, visible[row])]] += 1
    return seen


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
    assert len(work.first_entry) == -(-step.num_rows // window_rows(step.group)) + 1
    np.testing.assert_array_equal(prefill_listed(step, work), step.named())


def test_rows_that_share_a_run_are_in_as_few_equal_entries_as_there_can_be():
    step = decode_step([[0]] * 35 + [[1]], [100, 20], **SHAPE)
    work = plan_decode(step.references, step.runs, page_size=64)
    found = list(records(work.stream, int(work.num_entries[0]), 64))
    assert [(r.length, len(r.turns)) for r in found] == [(100, 12), (100, 12), (100, 11), (20, 1)]
    apart = plan_decode(step.references, step.runs, page_size=64, share=False)
    assert apart.num_entries.tolist() == [36]


def test_a_document_is_listed_once_for_each_window_that_sees_it():
    """At 4 heads a group a window is 128 tokens: rows 100 to 299 are in windows 0, 1 and 2."""
    step = step_of([(100, 200, 0, 500)], [500], num_rows=400, **SHAPE)
    work = plan_prefill(step.references, step.runs, num_rows=400, page_size=64, group=4)
    assert work.first_entry.tolist() == [0, 1, 2, 3, 3]
    found = [r.others.tolist() for r in records(work.stream, 3, 64)]
    assert found == [[400, 100, 128], [528, 0, 128], [656, 0, 44]]


@pytest.mark.parametrize(
    ("kind", "needed"),
    [("decode", 3 * DECODE_WORDS + 2 + 1 + 1), ("prefill", 2 * PREFILL_WORDS + 2 + 2)],
)
def test_capacity(kind, needed):
    if kind == "decode":
        step = decode_step([[0], [1], [2]], [100, 20, 64], **SHAPE)

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
    assert work.first_entry.tolist() == [0, 0]
    # The kernel brings a chunk, and the next one, whatever there is to do.
    assert work.stream.shape == (2 * CHUNK,)
