"""Fixed sizes for the tables of a work list. Pure host code (numpy)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lazyattn_jax.kernels.work import DoesNotFit

if TYPE_CHECKING:
    from jaxtyping import Int


def padded(
    table: Int[np.ndarray, "n *columns"], name: str, capacity: int | None, *, spare: int = 0
) -> Int[np.ndarray, "m *columns"]:
    """A table as int32 with zeros up to its capacity.

    Args:
      table: what is needed.
      name: of the capacity, for the error.
      capacity: rows; as many as are needed, if not given.
      spare: rows beyond the capacity, that are read but mean nothing.

    Raises:
      DoesNotFit: more rows are needed.
    """
    limit = len(table) if capacity is None else capacity
    if len(table) > limit:
        raise DoesNotFit(f"the step takes {len(table)} {name}, Capacity.{name} is {limit}")
    out = np.zeros((limit + spare, *table.shape[1:]), np.int32)
    out[: len(table)] = table
    return out
