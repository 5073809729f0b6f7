"""Work lists of decode and prefill steps on a TPU. Pure host code (numpy).

Decode: an entry is some rows and the tiles that they attend to. The running results of every row
stay in the core's memory, so entries may come in any order and nothing is merged.

Prefill: the rows of a step are cut into windows, whatever requests they belong to. A tile comes
with consecutive rows of a window that see some of it.

Runs that are shorter than a tile stand in one together if the same rows attend to them, each in a
piece of it: a half, or in prefill a quarter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lazyattn_jax.kernels.dense import spread
from lazyattn_jax.kernels.mosaic_tpu.stream import HEADER, stream_of
from lazyattn_jax.kernels.work import References, Runs

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int

ROWS = 16
"""The most query rows of an entry of a decode step."""

DECODE_TILE, DECODE_PIECES = 256, 2
"""Slots that are attended to at once in a decode step, and the most runs that they are of."""

PREFILL_TILE, PREFILL_PIECES = 512, 4
"""The same in a prefill step."""

DECODE_OTHERS = 5 + DECODE_PIECES
"""Numbers of a tile of a decode step, see ``TpuDecodeWork``."""

PREFILL_OTHERS = 5 + 2 * PREFILL_PIECES
"""Numbers of a tile of a prefill step, see ``TpuPrefillWork``."""


class TpuDecodeWork(NamedTuple):
    """Number of entries, and the records of their tiles: see ``stream.py``.

    Other numbers of a record: pieces of the tile, slots of each, pieces in which something must be
    silenced, tiles of the entry, its rows, and the slots that are attended to in each piece.
    Tiles and rows are named by the first record of an entry.
    """

    num_entries: Int[Array, "1"]
    stream: Int[Array, "words"]


class TpuPrefillWork(NamedTuple):
    """First tile of every window, in the order of windows, and the records of tiles.

    Other numbers of a record: pieces of the tile, slots of each, pieces in which something must be
    silenced; the first row of the window that attends to the tile and the row after the last; then
    for each piece the slots attended to, and how many of it row 0 of the window would see, less one
    (row ``r`` sees ``r`` more).
    """

    first_tile: Int[Array, "W+1"]
    stream: Int[Array, "words"]


def decode_words(page_size: int) -> int:
    """Numbers of a record of a decode step with one turn and one row."""
    return HEADER + DECODE_OTHERS + DECODE_TILE // page_size + 2


def prefill_words(page_size: int) -> int:
    """Numbers of a record of a prefill step with one turn."""
    return HEADER + PREFILL_OTHERS + PREFILL_TILE // page_size + 1


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
    # Runs of one row stand together, so that its results are added up once.
    holder = np.where(rows == 1, row[first], len(references.row) + row.max(initial=0) + first)
    pieces = _pieces_for(runs.length[run[first]], DECODE_TILE, DECODE_PIECES, page_size)
    pieces[rows > 1] = 1
    order = np.lexsort((-pieces, holder))
    first, rows, holder, pieces = (x[order] for x in (first, rows, holder, pieces))
    run = run[first]
    packs = _packs(_changes(holder, pieces), pieces)
    cut = _cut(runs.length[run], packs, DECODE_TILE, page_size)
    others = np.zeros((cut.num_tiles, DECODE_OTHERS), int)
    others[:, :3] = cut.kinds
    starts = np.flatnonzero(_changes(holder, packs.pieces))
    begin = cut.first[starts]
    others[begin, 3] = np.diff(begin, append=cut.num_tiles)
    others[begin, 4] = rows[starts]
    others[cut.tile, 5 + cut.place] = cut.seen
    named = np.zeros(cut.num_tiles, int)
    named[begin] = rows[starts]
    brought, within = spread(rows)
    of_entry, at = spread(rows[starts])
    stream = stream_of(
        others,
        cut.pages(runs.pages, runs.start[run]),
        (np.bincount(cut.first, rows, cut.num_tiles).astype(int), turn[first[brought] + within]),
        (named, row[first[starts[of_entry]] + at]),
        capacity,
    )
    return TpuDecodeWork(np.array([len(starts)], np.int32), stream)


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
    at = references.row[ref] - window * size
    first, end = np.maximum(at, 0), np.minimum(at + references.num_rows[ref], size)
    causal = references.causal[ref] - at
    length = np.minimum(runs.length[references.run[ref]], causal + end)
    pieces = _pieces_for(length, PREFILL_TILE, PREFILL_PIECES, page_size)
    pieces[causal + first + 1 < length] = 1  # in a piece every row sees all that is attended to
    order = np.lexsort((pieces, end, first, window))
    columns = (ref, window, first, end, causal, length, pieces)
    ref, window, first, end, causal, length, pieces = (x[order] for x in columns)
    packs = _packs(_changes(window, first, end, pieces), pieces)
    cut = _cut(length, packs, PREFILL_TILE, page_size)
    others = np.zeros((cut.num_tiles, PREFILL_OTHERS), int)
    others[:, :3] = cut.kinds
    others[cut.tile, 3], others[cut.tile, 4] = first[cut.ref], end[cut.ref]
    others[cut.tile, 5 + 2 * cut.place] = cut.seen
    others[cut.tile, 6 + 2 * cut.place] = causal[cut.ref] - cut.number * PREFILL_TILE
    none = np.zeros(cut.num_tiles, int)
    stream = stream_of(
        others,
        cut.pages(runs.pages, runs.start[references.run[ref]]),
        (np.bincount(cut.first, minlength=cut.num_tiles), references.turn[ref]),
        (none, none[:0]),
        capacity,
    )
    of_tile = np.zeros(cut.num_tiles, int)
    of_tile[cut.tile] = window[cut.ref]
    windows = np.arange(-(-num_rows // size) + 1)
    return TpuPrefillWork(np.searchsorted(of_tile, windows).astype(np.int32), stream)


class _Packs(NamedTuple):
    """Into how many pieces the tile of each run is cut, and the run's place in it."""

    pieces: Int[np.ndarray, "R"]
    place: Int[np.ndarray, "R"]


class _Cut(NamedTuple):
    """Runs cut into tiles: for each piece its run, number in the run, tile, place and slots.

    ``first`` is the tile in which each run begins, ``kinds`` what a record says of its pieces.
    """

    ref: Int[np.ndarray, "n"]
    number: Int[np.ndarray, "n"]
    tile: Int[np.ndarray, "n"]
    place: Int[np.ndarray, "n"]
    seen: Int[np.ndarray, "n"]
    first: Int[np.ndarray, "R"]
    kinds: Int[np.ndarray, "T 3"]
    slots: int
    page_size: int

    @property
    def num_tiles(self) -> int:
        return len(self.kinds)

    def pages(
        self, table: Int[np.ndarray, "p"], start: Int[np.ndarray, "R"]
    ) -> Int[np.ndarray, "T p"]:
        """Pages of every tile; runs have theirs in ``table`` from ``start`` on."""
        places = self.slots // self.page_size
        out = np.full((self.num_tiles, places), -1)
        piece, at = spread(-(-self.seen // self.page_size))
        ref, tile = self.ref[piece], self.tile[piece]
        place = self.place[piece] * (self.kinds[tile, 1] // self.page_size) + at
        out[tile, place] = table[start[ref] + self.number[piece] * places + at]
        return out


def _pieces_for(
    length: Int[np.ndarray, "R"], tile: int, most: int, page_size: int
) -> Int[np.ndarray, "R"]:
    """Into how many pieces a tile can be cut so that a run fits into one."""
    pieces = np.ones_like(length)
    count = 2
    while count <= most and tile // count >= page_size:
        pieces[length * count <= tile] = count
        count *= 2
    return pieces


def _changes(*columns: Int[np.ndarray, "R"]) -> Bool[np.ndarray, "R"]:
    """Where any column has another value than before."""
    new = np.ones(len(columns[0]), bool)
    new[1:] = np.any([x[1:] != x[:-1] for x in columns], 0)
    return new


def _packs(new: Bool[np.ndarray, "R"], pieces: Int[np.ndarray, "R"]) -> _Packs:
    """Packs runs into tiles, from every ``new`` on; one that is alone has a tile of one piece."""
    starts = np.flatnonzero(new)
    place = (np.arange(len(new)) - starts[np.cumsum(new) - 1]) % pieces
    sizes = np.diff(np.flatnonzero(place == 0), append=len(new))
    return _Packs(np.where(np.repeat(sizes, sizes) == 1, 1, pieces), place)


def _cut(length: Int[np.ndarray, "R"], packs: _Packs, slots: int, page_size: int) -> _Cut:
    begun = np.where(packs.pieces == 1, -(-length // slots), packs.place == 0)
    end = np.cumsum(begun)
    first = end - np.maximum(begun, 1)
    ref, number = spread(np.maximum(begun, 1))
    tile = first[ref] + number
    seen = np.minimum(length[ref] - number * slots, slots)
    num_tiles = int(end[-1]) if len(end) else 0
    kinds = np.zeros((num_tiles, 3), int)
    kinds[:, 0] = np.bincount(tile, minlength=num_tiles)
    kinds[tile, 1] = slots // packs.pieces[ref]
    kinds[:, 2] = kinds[:, 0] * (np.bincount(tile, seen % page_size, num_tiles) > 0)
    return _Cut(ref, number, tile, packs.place[ref], seen, first, kinds, slots, page_size)
