"""The check on what a step attends to."""

from __future__ import annotations

import numpy as np
import pytest

from lazyattn_jax.kernels.work import References, Runs, check_references

REFERENCES = References(*np.array([[0, 2, 0, 0, 40], [2, 1, 1, 1, 3]]).T)
RUNS = Runs(np.array([4, 7, 9, 1]), np.array([0, 3]), np.array([40, 16]))
SIZES = {"num_rows": 3, "num_pages": 10, "page_size": 16}


def test_a_right_plan_passes():
    check_references(REFERENCES, RUNS, **SIZES)


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("pages", 1, 10, "run 0 has page 10, the pool has 10"),
        ("pages", 3, -1, "run 1 has page -1, the pool has 10"),
        ("length", 1, 17, "run 1 of 17 slots takes pages 3 to 5 of a list of 4"),
        ("start", 0, 2, "run 0 of 40 slots takes pages 2 to 5 of a list of 4"),
    ],
)
def test_wrong_runs_are_named(field, index, value, message):
    changed = getattr(RUNS, field).copy()
    changed[index] = value
    with pytest.raises(ValueError, match=message):
        check_references(REFERENCES, RUNS._replace(**{field: changed}), **SIZES)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("row", 3, "row 3, must be below 3"),
        ("num_rows", 2, "last row 4, must be below 4"),
        ("run", 2, "run 2, must be below 2"),
    ],
)
def test_wrong_references_are_named(field, value, message):
    changed = getattr(REFERENCES, field).copy()
    changed[1] = value
    with pytest.raises(ValueError, match=message):
        check_references(REFERENCES._replace(**{field: changed}), RUNS, **SIZES)
