"""Work lists of decode and prefill steps on a TPU. Pure host code (numpy).

Decode: an entry is a run of pages and the rows that attend to all of it. The running results of
every row stay in the core's memory, so entries may come in any order and nothing is merged.

Prefill: the rows of a step are cut into windows, whatever requests they belong to. An entry is a
run of pages, and consecutive rows of a window that see some of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lazyattn_jax.kernels.dense import spread
from lazyattn_jax.kernels.mosaic_tpu.stream import stream_of
from lazyattn_jax.kernels.work import References, Runs

if TYPE_CHECKING:
    from jaxtyping import Array, Int

ROWS = 16
"""The most query rows of an entry of a decode step."""

DECODE_WORDS = 3 + 2
"""Numbers of a record of a decode step with one row, without its pages."""

PREFILL_WORDS = 3 + 1 + 3
"""Numbers of a record of a prefill step without its pages."""


class TpuDecodeWork(NamedTuple):
    """Number of entries, and their records: see ``stream.py``; other numbers are the rows."""

    num_entries: Int[Array, "1"]
    stream: Int[Array, "words"]


class TpuPrefillWork(NamedTuple):
    """First entry of every window, in the order of windows, and the records of entries.

    Other numbers of a record, counted from row 0 of the window: how many slots row 0 would see,
    less one (row ``r`` sees ``r`` more), the first row, and the row after the last.
    """

    first_entry: Int[Array, "W+1"]
    stream: Int[Array, "words"]


def block_rows(group: int) -> int:
    """Tokens that the prefill kernel attends with at once: 256 rows, or more for many heads."""
    return max(16, 256 // (1 << (group - 1).bit_length()))


def window_rows(group: int) -> int:
    """Tokens of a window."""
    return 2 * block_rows(group)


def plan_decode(
    references: References,
    runs: Runs,
    *,
    page_size: int,
    share: bool = True,
    capacity: int | None = None,
) -> TpuDecodeWork:
    """Work list of one decode step.

    Args:
      references: what rows attend to, in any order.
      runs: the runs of pages.
      page_size: slots of a page.
      share: read a run once for all its rows; otherwise once for each.
      capacity: numbers of the stream; what is needed, if not given.

    Raises:
      DoesNotFit: the step does not fit into the capacity.
    """
    used = np.flatnonzero(runs.length[references.run] > 0)
    used = used[np.argsort(references.run[used], kind="stable")]
    row, run, turn = (x[used] for x in (references.row, references.run, references.turn))
    held = np.bincount(run)
    held = held[held > 0]
    # Equal entries rather than full ones and a small rest.
    each = -(-held // -(-held // ROWS)) if share else np.ones_like(held)
    owner, within = spread(held)
    first = np.flatnonzero(within % each[owner] == 0)
    rows = np.diff(first, append=len(run))
    of_entry = run[first]
    stream = stream_of(
        runs.length[of_entry],
        (rows, turn),
        (rows, row),
        runs.start[of_entry],
        runs,
        page_size,
        capacity,
    )
    return TpuDecodeWork(np.array([len(first)], np.int32), stream)


def plan_prefill(
    references: References,
    runs: Runs,
    *,
    num_rows: int,
    page_size: int,
    group: int,
    capacity: int | None = None,
) -> TpuPrefillWork:
    """Work list of one prefill step.

    Args:
      references: what rows attend to, in any order.
      runs: the runs of pages.
      num_rows: query rows of the step, padding included.
      page_size: slots of a page.
      group: query heads a KV head.
      capacity: numbers of the stream; what is needed, if not given.

    Raises:
      DoesNotFit: the step does not fit into the capacity.
    """
    size = window_rows(group)
    low = references.row // size
    high = (references.row + references.num_rows - 1) // size
    ref, within = spread(np.where(runs.length[references.run] > 0, high - low + 1, 0))
    window = low[ref] + within
    order = np.argsort(window, kind="stable")
    ref, window = ref[order], window[order]
    at = references.row[ref] - window * size
    first, end = np.maximum(at, 0), np.minimum(at + references.num_rows[ref], size)
    causal = references.causal[ref] - at
    run = references.run[ref]
    one = np.ones_like(run)
    stream = stream_of(
        np.minimum(runs.length[run], causal + end),
        (one, references.turn[ref]),
        (3 * one, np.stack([causal, first, end], 1).reshape(-1)),
        runs.start[run],
        runs,
        page_size,
        capacity,
    )
    windows = np.arange(-(-num_rows // size) + 1)
    return TpuPrefillWork(np.searchsorted(window, windows).astype(np.int32), stream)
