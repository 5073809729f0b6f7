"""Work lists of fixed-size items, which the XLA path and the reference take. Host code (numpy).

An item is a block of query rows times a few pages. Unused entries are zeros (rows of decode items:
past the last row); the loop over items only looks at the first ``num_items``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from lazyattn_jax.kernels.work import DecodeWork, PrefillWork, References, Runs, WorkLists

BLOCK_ROWS = 64
"""Query rows of one prefill item."""

ITEM_SLOTS = 128
"""Slots of one item: long enough to keep the loop short, short enough not to waste."""

DECODE_WIDTHS = (1, 8)
"""Rows of one decode item: alone, and shared between requests."""


def item_pages(page_size: int) -> int:
    """Pages of one item."""
    return max(1, ITEM_SLOTS // page_size)


@dataclass(frozen=True)
class DenseLists(WorkLists):
    """``WorkLists`` of ``PrefillWork`` and ``DecodeWork``.

    Attributes:
      page_size: slots of a page.
      prefill_items: items that a prefill step holds, by bucket.
      decode_items: items that each list of a decode step holds, by bucket.
    """

    page_size: int
    prefill_items: Mapping[int, int]
    decode_items: Mapping[int, int]

    @property
    def _slots(self) -> int:
        return item_pages(self.page_size) * self.page_size

    def prefill(self, references: References, runs: Runs, bucket: int) -> tuple[PrefillWork] | None:
        """One list: rows cut into blocks, runs into items, without what no row of a block sees."""
        blocks, block = spread(-(-references.num_rows // BLOCK_ROWS))
        of_block = References(*(column[blocks] for column in references))
        first = block * BLOCK_ROWS
        num_rows = np.minimum(of_block.num_rows - first, BLOCK_ROWS)
        causal = of_block.causal + first
        seen = np.minimum(runs.length[of_block.run], causal + num_rows)
        item, piece = spread(-(-np.maximum(seen, 0) // self._slots))
        capacity = self.prefill_items[bucket]
        if len(item) > capacity:
            return None
        at = piece * self._slots
        kv_len = np.minimum(seen[item] - at, self._slots)
        work = PrefillWork(
            row=_padded((of_block.row + first)[item], capacity),
            num_rows=_padded(num_rows[item], capacity),
            turn=_padded(of_block.turn[item], capacity),
            pages=_padded(self._pages(runs, of_block.run[item], at, kv_len), capacity),
            kv_len=_padded(kv_len, capacity),
            causal=_padded(causal[item] - at, capacity),
            num_items=np.int32(len(item)),
        )
        return (work,)

    def decode(
        self, arranged: References, runs: Runs, bucket: int
    ) -> tuple[DecodeWork, DecodeWork] | None:
        """Two lists: runs that one row holds, and runs read once for several rows."""
        references, (narrow, wide) = arranged, DECODE_WIDTHS
        order, place = _share(references.row, references.run, wide)
        item = np.cumsum(place == 0) - 1
        size = np.bincount(item)
        rows = np.full((len(size), wide), bucket, np.int32)
        turns = np.zeros((len(size), wide), np.int32)
        rows[item, place] = references.row[order]
        turns[item, place] = references.turn[order]
        run = references.run[order][place == 0]

        def work(width: int, chosen: Bool[np.ndarray, "I"]) -> DecodeWork | None:
            args = rows[chosen, :width], turns[chosen, :width], run[chosen]
            return self._decode_work(*args, runs, bucket)

        alone, shared = work(narrow, size == 1), work(wide, size > 1)
        return None if alone is None or shared is None else (alone, shared)

    def _decode_work(
        self,
        rows: Int[np.ndarray, "I R"],
        turns: Int[np.ndarray, "I R"],
        run: Int[np.ndarray, "I"],
        runs: Runs,
        bucket: int,
    ) -> DecodeWork | None:
        length = runs.length[run]
        item, piece = spread(-(-length // self._slots))
        capacity = self.decode_items[bucket]
        if len(item) > capacity:
            return None
        at = piece * self._slots
        kv_len = np.minimum(length[item] - at, self._slots)
        return DecodeWork(
            rows=_padded(rows[item], capacity, fill=bucket),
            turns=_padded(turns[item], capacity),
            pages=_padded(self._pages(runs, run[item], at, kv_len), capacity),
            kv_len=_padded(kv_len, capacity),
            num_items=np.int32(len(item)),
        )

    def _pages(
        self,
        runs: Runs,
        run: Int[np.ndarray, "I"],
        at: Int[np.ndarray, "I"],
        kv_len: Int[np.ndarray, "I"],
    ) -> Int[np.ndarray, "I C"]:
        """Pages of ``kv_len`` slots from slot ``at`` of some runs on."""
        page = np.arange(item_pages(self.page_size))
        used = page * self.page_size < kv_len[:, None]
        index = (runs.start[run] + at // self.page_size)[:, None] + page
        return np.where(used, runs.pages[np.where(used, index, 0)], 0)


def _share(
    row: Int[np.ndarray, "n"], run: Int[np.ndarray, "n"], width: int
) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """Sorts references into items of up to ``width`` different rows of one run.

    Returns the references item by item, and the place of each in its item.
    """
    order = np.lexsort((row, run))
    # A row may hold one document twice; the rows of an item must differ. So all first references of
    # rows to a run go together, then all second ones.
    row, run = row[order], run[order]
    again = _place(run * (row.max(initial=0) + 1) + row)
    group = run * (again.max(initial=0) + 1) + again
    by_group = np.argsort(group, kind="stable")
    return order[by_group], _place(group[by_group]) % width


def _place(keys: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """Place of each among its equals, which stand side by side."""
    first = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1))
    return np.arange(len(keys)) - np.repeat(first, np.diff(first, append=len(keys)))


def spread(counts: Int[np.ndarray, "n"]) -> tuple[Int[np.ndarray, "m"], Int[np.ndarray, "m"]]:
    """``counts[i]`` entries for each ``i``: which ``i`` an entry is of, and its place there."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _padded(values: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    out = np.full((size, *values.shape[1:]), fill, np.int32)
    out[: len(values)] = values
    return out
