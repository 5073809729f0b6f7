"""The work list of the Hopper decode kernel. Pure host code (numpy).

All pages that a step reads are laid out as one line of tiles (``tile_slots``). The line is cut
into equal pieces, one a worker, so that one long request fills the chip as well as many short ones
and no worker waits for another. What a worker does to one run of pages is an *entry*; consecutive
entries of the same query row go on in the same softmax and are written out once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lazyattn_jax.kernels.dense import spread
from lazyattn_jax.kernels.mosaic_gpu.tables import columns_of, padded, zeros
from lazyattn_jax.kernels.work import References, Runs

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int

ROWS = 16
"""The most query rows of an entry."""

PACKED = 64
"""Rows of a tensor core tile: query rows of an entry times heads of a group."""

MOST_SHARED = 16
"""The most shared runs of a query row, each of which makes a partial result of its own."""

STAGES = 2
"""Tiles of K and of V that a worker has on their way, or in use, at a time."""

COLUMNS = 8
"""Columns of ``HopperDecodeWork.entries``."""


class HopperDecodeWork(NamedTuple):
    """Entries of some query rows times consecutive tiles of one run, in worker order.

    Worker ``w`` takes the entries from ``workers[w, 0]`` to before ``workers[w + 1, 0]``, whose
    tiles are ``workers[w, 1]`` to before ``workers[w + 1, 1]``. Columns of ``entries``: first tile,
    number of tiles, valid slots of the last tile, first of the ``references``, number of query
    rows, whether the softmax is written out after it, whether it starts anew before it, and where
    its results go. ``references`` are query row and turn. ``tiles`` holds the page of each part of
    a tile: ``page * parts + part`` for pages longer than a tile. ``starts`` repeats what a worker
    starts with, so that it need not be looked up in several steps: the number of query rows of its
    first entry, their references, and its first ``STAGES + 1`` tiles.

    Query row ``b`` has the partial results ``first_part[b]`` to before ``first_part[b + 1]``;
    ``part_at`` says where each is, see ``merge.merge``. Results of an entry are written in eights
    of packed rows (query row of the entry, head of the group).
    """

    workers: Int[Array, "W+1 2"]
    starts: Int[Array, "W n"]
    entries: Int[Array, "E 8"]
    references: Int[Array, "R 2"]
    tiles: Int[Array, "tiles boxes"]
    first_part: Int[Array, "B+1"]
    part_at: Int[Array, "F 2"]


@dataclass(frozen=True)
class Capacity:
    """Fixed sizes of a work list, so that shapes do not change from step to step."""

    entries: int
    references: int
    tiles: int
    parts: int

    @classmethod
    def of(cls, rows: int, references: int, tiles: int, workers: int) -> Capacity:
        """What suffices for a step of so many rows, references and tiles (unshared).

        A worker's borders cut an entry, of at most ``ROWS`` references, in two.
        """
        parts = min(references, MOST_SHARED * rows) + rows + ROWS * workers
        return cls(references + workers, references, tiles, parts)


def tile_slots(head_dim: int) -> int:
    """Slots that the kernel attends to at once: tiles of keys take 16 KiB, whatever the head."""
    return 8192 // head_dim


def rows_per_entry(group: int) -> int:
    """The most rows of an entry: their heads fill the 64 rows of a tensor core tile."""
    return min(ROWS, PACKED // group)


def num_workers(kv_heads: int, num_cores: int = 132) -> int:
    """Workers a KV head, so that two blocks run on every core."""
    return max(1, 2 * num_cores // kv_heads)


class Arrangement(NamedTuple):
    """The references of a decode step, item by item in the order of the line of tiles.

    Item ``i`` is run ``run[i]`` for the ``size[i]`` references from ``first[i]`` on. ``references``
    are query row and turn, with ``ROWS`` spare ones; ``row`` are their rows again, for sorting.
    ``entries`` are what items make if no worker starts within or at them, but for what depends on
    lengths; the last column is the eights that their results take. An item goes on in the softmax
    of the item before where both are read for the same row alone.
    """

    references: Int[np.ndarray, "R+16 2"]
    row: Int[np.ndarray, "R"]
    first: Int[np.ndarray, "I"]
    size: Int[np.ndarray, "I"]
    run: Int[np.ndarray, "I"]
    entries: Int[np.ndarray, "I 8"]


def plan_decode(
    references: References,
    runs: Runs,
    *,
    num_rows: int,
    page_size: int,
    group: int,
    tile: int,
    workers: int,
    share: bool = True,
    capacity: Capacity | None = None,
) -> HopperDecodeWork:
    """Work list of one decode step.

    Args:
      references: what rows attend to, in any order.
      runs: the runs of pages.
      num_rows: query rows of the step, padding included.
      page_size: slots of a page: 16, 32, 64 or 128.
      group: query heads a KV head.
      tile: see ``tile_slots``.
      workers: see ``num_workers``.
      share: read a run once for all its rows where that is worth it; otherwise once for each.
      capacity: fixed sizes; what is needed, if not given.

    Raises:
      DoesNotFit: the step does not fit into the capacity.
    """
    return lay_out(
        arrange(references, runs, group=group, tile=tile, share=share),
        runs,
        num_rows=num_rows,
        page_size=page_size,
        group=group,
        tile=tile,
        workers=workers,
        capacity=capacity,
    )


def arrange(
    references: References, runs: Runs, *, group: int, tile: int, share: bool = True
) -> Arrangement:
    """The first half of ``plan_decode``, which stays while runs that one row holds grow.

    Lengths only decide which runs are worth sharing, and leave out runs that are empty.
    """
    row, _, run, turn, _ = references
    if not runs.length.all():
        used = runs.length[run] > 0
        row, run, turn = row[used], run[used], turn[used]
    row = _narrow(row)
    shared = np.zeros(len(row), bool)
    if share:
        shared = _worth_sharing(row, run, (runs.length + (tile - 1)) // tile)
    # Runs read for one row come first, by row, so that a row's runs follow one another.
    alone, together = np.flatnonzero(~shared), np.flatnonzero(shared)
    alone = alone[np.argsort(row[alone], kind="stable")]
    together = together[np.argsort(_narrow(run[together]), kind="stable")]
    order, n = np.concatenate([alone, together]), len(alone)
    row, run, turn = row[order], run[order], turn[order]
    first_together = n + _first_of_items(run[n:], rows_per_entry(group))
    bounds = np.concatenate([np.arange(n), first_together, [len(row)]])
    first, size = bounds[:-1], bounds[1:] - bounds[:-1]
    fresh = np.ones(len(bounds), bool)  # of the last item too, and of whatever comes after it
    fresh[1:n] = row[1:n] != row[: max(0, n - 1)]
    columns = (first, size, fresh[1:], fresh[:-1], (size * group + 7) // 8)
    entries = np.zeros((len(first), COLUMNS), np.int32)
    for i, column in enumerate(columns, 3):
        entries[:, i] = column
    table = columns_of((row, turn), "references", None, spare=ROWS)
    return Arrangement(table, row, first, size, run[first], entries)


def lay_out(
    arrangement: Arrangement,
    runs: Runs,
    *,
    num_rows: int,
    page_size: int,
    group: int,
    tile: int,
    workers: int,
    capacity: Capacity | None = None,
) -> HopperDecodeWork:
    """The second half of ``plan_decode``: cuts the line of tiles into entries.

    Args:
      arrangement: of ``arrange`` with the same ``group`` and ``tile``.
      runs: of the same numbers; those that one row holds may have grown.
    """
    references, row, first, size, run, uncut = arrangement
    length = runs.length[run]
    tiles = (length + (tile - 1)) // tile
    ends = np.cumsum(tiles)
    begin, total = ends - tiles, int(ends[-1]) if len(ends) else 0
    worker_begin = np.arange(workers + 1) * total // workers
    item, inside, cuts = _cut(begin, worker_begin)

    num_entries = max(1, len(item)) if capacity is None else capacity.entries
    padded_entries = zeros(len(item), COLUMNS, "entries", num_entries)
    entries = padded_entries[: len(item)]
    uncut.take(item, axis=0, out=entries, mode="clip")
    entries[:, 0], entries[:, 1] = cuts[:-1], cuts[1:] - cuts[:-1]
    entries[:, 2] = (length - (tiles - 1) * tile)[item]
    entries[inside - 1, 2] = tile
    worker_entry = np.searchsorted(cuts, worker_begin)
    starting = worker_entry[worker_entry < len(item)]
    entries[starting, 6] = True
    entries[starting[starting > 0] - 1, 5] = True
    eights = entries[:, 5] * entries[:, 7]
    results = entries[:, 7] = 8 * (np.cumsum(eights) - eights)

    # Partial results, by query row.
    written = np.flatnonzero(entries[:, 5])
    of = item[written]
    count, first_of = size[of], first[of]
    part = np.repeat(np.arange(len(written)), count)
    reference = np.arange(len(part)) + (first_of - (np.cumsum(count) - count))[part]
    part_row = row[reference]
    by_row = np.argsort(part_row, kind="stable")
    part, place = part[by_row], reference[by_row] * group
    first_of *= group
    part_at = (
        (results[written] - first_of)[part] + place,
        (written * PACKED - first_of)[part] + place,
    )
    parts = np.bincount(part_row, minlength=num_rows)

    # Of a table without any rows a kernel still reads the first.
    limits = capacity or Capacity(
        max(1, len(item)), max(1, len(row)), max(1, total), max(1, len(part))
    )
    # A worker reads the references of a whole entry, whatever its number of rows.
    references = padded(references[: len(row)], "references", limits.references, spare=ROWS)
    pages = zeros(total, max(1, tile // page_size), "tiles", limits.tiles)
    _fill_in_pages(pages[:total], runs, run, tiles, begin, page_size, tile)
    bounds = np.stack([worker_entry, worker_begin], 1)
    return HopperDecodeWork(
        bounds.astype(np.int32),
        _starts(bounds, entries, references, pages),
        padded_entries,
        references,
        pages,
        np.append(0, np.cumsum(parts)).astype(np.int32),
        columns_of(part_at, "parts", limits.parts),
    )


def _worth_sharing(
    row: Int[np.ndarray, "n"], run: Int[np.ndarray, "n"], run_tiles: Int[np.ndarray, "S"]
) -> Bool[np.ndarray, "n"]:
    """Whether each reference is served from a run that is read once for several rows.

    Each further row saves the run's tiles, but every row of the run then has one more partial
    result to write and to merge, which takes as long as a fraction of a tile.
    """
    holders = np.bincount(run, minlength=len(run_tiles))
    saved = (holders - 1) * run_tiles
    shared = ((holders > 1) & (saved >= 2 + holders // 4))[run]
    if np.bincount(row[shared], minlength=1).max() > MOST_SHARED:
        order = np.lexsort((run, -saved[run], row, ~shared))
        by_row = row[order]
        new = np.append(
            True, (by_row[1:] != by_row[:-1]) | (shared[order][1:] != shared[order][:-1])
        )
        start = np.maximum.accumulate(np.where(new, np.arange(len(row)), 0))
        shared[order[np.arange(len(row)) - start >= MOST_SHARED]] = False
    return shared


def _narrow(keys: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """As 16-bit integers if they fit: numpy sorts those by digits, several times faster."""
    return keys.astype(np.uint16) if keys.max(initial=0) < 1 << 16 else keys


def _first_of_items(run: Int[np.ndarray, "n"], width: int) -> Int[np.ndarray, "I"]:
    """The first reference of each item of some that are sorted by run: rows that share it."""
    bounds = np.concatenate([[0], np.flatnonzero(run[1:] != run[:-1]) + 1, [len(run)]])
    start, held = bounds[:-1], bounds[1:] - bounds[:-1]
    # Equal items rather than full ones and a small rest.
    items = -(-held // width)
    owner, place = spread(items)
    return start[owner] + place * -(-held // np.maximum(items, 1))[owner]


def _cut(
    begin: Int[np.ndarray, "I"], worker_begin: Int[np.ndarray, "W+1"]
) -> tuple[Int[np.ndarray, "E"], Int[np.ndarray, "n"], Int[np.ndarray, "E+1"]]:
    """Cuts the line of tiles where items begin, and where workers that have any tiles do.

    Returns the item of each entry, the entries that begin within an item, and where entries begin,
    with the end of the line.
    """
    inner = worker_begin[:-1][worker_begin[:-1] < worker_begin[1:]]
    of = np.searchsorted(begin, inner, side="right") - 1
    within = inner > begin[of]
    of, inner = of[within], inner[within]
    inside = of + np.arange(1, len(of) + 1)
    of_next = np.ones(len(begin) + len(of), np.int64)
    of_next[:1] = of_next[inside] = 0
    item = np.cumsum(of_next)
    cuts = np.empty(len(item) + 1, np.int64)
    begin.take(item, out=cuts[:-1], mode="clip")
    cuts[inside], cuts[-1] = inner, worker_begin[-1]
    return item, inside, cuts


def _fill_in_pages(
    out: Int[np.ndarray, "tiles boxes"],
    runs: Runs,
    run: Int[np.ndarray, "I"],
    tiles: Int[np.ndarray, "I"],
    begin: Int[np.ndarray, "I"],
    page_size: int,
    tile: int,
) -> None:
    """Writes the pages of every tile of the line."""
    boxes, parts = max(1, tile // page_size), max(1, page_size // tile)
    if len(runs.length) > runs.filled:
        # Of these the tiles are listed as they are: none needs a look at its boxes.
        pages = runs.pages[: len(runs.pages) // boxes * boxes].reshape(-1, boxes)
        if parts > 1:
            pages = (pages * np.int32(parts) + np.arange(parts, dtype=np.int32)).reshape(-1, 1)
        at = np.repeat(runs.start[run] * parts // boxes - begin, tiles)
        at += np.arange(len(at))
        pages.take(at, axis=0, out=out, mode="clip")
    some = np.flatnonzero(run < runs.filled)
    run, tiles, begin = run[some], tiles[some], begin[some]
    start, length = runs.start[run], runs.length[run]
    owner, place = spread(tiles)
    if parts > 1:
        rows = (runs.pages[start[owner] + place // parts] * parts + place % parts)[:, None]
    else:
        box = (start[owner] + place * boxes)[:, None] + np.arange(boxes)
        # Boxes past the run read its last page again; their slots are masked.
        rows = runs.pages[np.minimum(box, (start + (length - 1) // page_size)[owner, None])]
    out[begin[owner] + place] = rows


def _starts(
    bounds: Int[np.ndarray, "W+1 2"],
    entries: Int[np.ndarray, "E 8"],
    references: Int[np.ndarray, "R 2"],
    tiles: Int[np.ndarray, "tiles boxes"],
) -> Int[np.ndarray, "W n"]:
    """``HopperDecodeWork.starts``; of workers without entries nothing is read."""
    workers = len(bounds) - 1
    if not bounds.any():
        return np.zeros((workers, 1 + 2 * ROWS + (STAGES + 1) * tiles.shape[1]), np.int32)
    entry = entries.take(bounds[:-1, 0], axis=0, mode="clip")
    reference = entry[:, 3, None] + np.arange(ROWS)
    tile = bounds[:-1, 1, None] + np.arange(STAGES + 1)
    columns = (
        entry[:, 4, None],
        references.take(reference, axis=0).reshape(workers, -1),
        tiles.take(tile, axis=0, mode="clip").reshape(workers, -1),
    )
    return np.concatenate(columns, 1)
