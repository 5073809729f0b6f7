"""Fixed sizes for the tables of a work list. Pure host code (numpy)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lazyattn_jax.kernels.work import DoesNotFit

if TYPE_CHECKING:
    from jaxtyping import Int


def padded(
    table: Int[np.ndarray, "n columns"], name: str, capacity: int | None, *, spare: int = 0
) -> Int[np.ndarray, "m columns"]:
    """A table as int32 with zeros up to its capacity.

    Args:
      table: what is needed.
      name: of the capacity, for the error.
      capacity: rows; as many as are needed, if not given.
      spare: rows beyond the capacity, that are read but mean nothing.

    Raises:
      DoesNotFit: more rows are needed.
    """
    out = zeros(len(table), table.shape[1], name, capacity, spare=spare)
    out[: len(table)] = table
    return out


def columns_of(
    columns: Sequence[Int[np.ndarray, "n"]], name: str, capacity: int | None, *, spare: int = 0
) -> Int[np.ndarray, "m columns"]:
    """``padded`` of a table that is given by its columns."""
    size = len(columns[0])
    out = zeros(size, len(columns), name, capacity, spare=spare)
    for i, column in enumerate(columns):
        out[:size, i] = column
    return out


def zeros(
    size: int, num_columns: int, name: str, capacity: int | None, *, spare: int = 0
) -> Int[np.ndarray, "m columns"]:
    """What ``padded`` makes of a table of zeros."""
    limit = size if capacity is None else capacity
    if size > limit:
        raise DoesNotFit(f"the step takes {size} {name}, Capacity.{name} is {limit}")
    return np.zeros((limit + spare, num_columns), np.int32)
