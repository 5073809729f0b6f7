"""The work list of the Hopper prefill kernel. Pure host code (numpy).

Consecutive tokens of a request are cut into blocks whose packed rows fill two warpgroups. An *item*
is a block and what it attends to, or, where few rows must fill the chip, a piece of that. What an
item does to one run of pages is an *entry*: consecutive tiles of ``TILE`` slots under one turn.
Items are sorted longest first; workers take (item, KV head) pairs from that line in turn, every
other round backwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lazyattn_jax.kernels.dense import spread
from lazyattn_jax.kernels.mosaic_gpu.tables import padded
from lazyattn_jax.kernels.work import References, Runs

if TYPE_CHECKING:
    from jaxtyping import Array, Int

TILE = 128
"""Slots that the kernel attends to at once."""

PACKED = 128
"""Rows of a block: query rows times heads of a padded group."""

MOST_PIECES = 16
"""The most pieces of a block."""

ROUNDS = 3
"""Items a worker up to which cutting blocks into more pieces is tried."""

SCALARS = 11
"""What the memory warpgroup hands to the others for an entry."""


class HopperPrefillWork(NamedTuple):
    """Items of one step; see the module.

    Columns of ``items``: first query row, number of query rows, first entry, number of entries.
    Columns of ``entries``: first tile, number of tiles, how many of these every row sees in full,
    slots of the run from the first tile on, the causal bound of row 0 from there on, rows before
    the first that sees the run at all, turn. ``tiles`` holds the pages of a tile.
    ``worker_entries`` says how many entries a worker goes through.

    Where items are cut into pieces, each has ``PACKED`` rows of a buffer for its results, and query
    row ``t`` has the partial results ``part_at[f]``, see ``merge.merge``, for ``f`` from
    ``first_part[t]`` to before ``first_part[t + 1]``. Otherwise ``part_at`` is empty and results go
    to their query rows.
    """

    num_items: Int[Array, "1"]
    worker_entries: Int[Array, "W"]
    items: Int[Array, "I 4"]
    entries: Int[Array, "E 7"]
    tiles: Int[Array, "tiles boxes"]
    first_part: Int[Array, "T+1"]
    part_at: Int[Array, "F 2"]


@dataclass(frozen=True)
class Capacity:
    """Fixed sizes of a work list, so that shapes do not change from step to step."""

    items: int
    entries: int
    tiles: int
    parts: int


def padded_group(group: int) -> int:
    """Query heads of a KV head as the kernel packs them: the next power of two."""
    return 1 << (group - 1).bit_length()


def rows_per_block(group: int) -> int:
    """Tokens of a block: their packed heads fill the rows of two warpgroups."""
    return PACKED // padded_group(group)


def most_pieces(num_rows: int, group: int, kv_heads: int, workers: int) -> int:
    """Into how many pieces the blocks of a step of so many query rows may be cut.

    One, where the blocks all but fill the chip: merging then costs more than cutting brings.
    """
    blocks = -(-num_rows // rows_per_block(group))
    return MOST_PIECES if blocks * kv_heads <= workers * 3 // 4 else 1


def plan_prefill(
    references: References,
    runs: Runs,
    *,
    num_rows: int,
    page_size: int,
    group: int,
    kv_heads: int,
    workers: int = 132,
    most_pieces: int = 1,
    capacity: Capacity | None = None,
) -> HopperPrefillWork:
    """Work list of one prefill step.

    Args:
      references: what rows attend to, in any order. Rows of one request are consecutive, and one
        of its references covers them all.
      runs: the runs of pages.
      num_rows: query rows of the step, padding included.
      page_size: slots of a page: 16, 32, 64 or 128.
      group: query heads a KV head.
      kv_heads: KV heads.
      workers: cores of the chip.
      most_pieces: pieces that a block may be cut into where blocks are too few to fill the chip.
      capacity: fixed sizes; what is needed, if not given.

    Raises:
      DoesNotFit: the step does not fit into the capacity.
    """
    size = rows_per_block(group)
    first_row, block_rows = _blocks(references, num_rows, size)
    block, entries, run = _entries(references, runs, first_row, block_rows)
    cost = np.bincount(block, entries[:, 1], len(first_row)).astype(np.int64)
    pieces = _pieces(cost, kv_heads, workers, most_pieces)
    block, piece, entries, run = _cut(block, entries, run, cost, pieces)

    # Items, longest first: their blocks, pieces and entries.
    key = np.concatenate([np.cumsum(pieces) - pieces, [pieces.sum()]])
    item_of = key[block] + piece
    item_block = np.repeat(np.arange(len(first_row)), pieces)
    item_cost = np.bincount(item_of, entries[:, 1], len(item_block))
    order = np.argsort(-item_cost, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    sorting = np.argsort(place[item_of], kind="stable")
    entries, run, item_of = entries[sorting], run[sorting], place[item_of][sorting]
    item_block = item_block[order]
    count = np.bincount(item_of, minlength=len(order))

    tiles = _tile_pages(runs, run, entries, page_size)
    entries[:, 0] = np.cumsum(entries[:, 1]) - entries[:, 1]
    items = np.stack(
        [first_row[item_block], block_rows[item_block], np.cumsum(count) - count, count], 1
    )
    if most_pieces > 1:
        first_part, part_at = _parts(items, num_rows, padded_group(group))
    else:
        first_part, part_at = np.zeros(num_rows + 1, np.int32), np.zeros((0, 2), np.int32)
    work = HopperPrefillWork(
        np.array([len(items)], np.int32),
        _worker_entries(count, kv_heads, workers),
        items.astype(np.int32),
        entries.astype(np.int32),
        tiles,
        first_part,
        part_at,
    )
    return _padded(work, capacity)


def _blocks(references: References, num_rows: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """First row and number of rows of every block; rows that attend to nothing are covered too."""
    order = np.argsort(references.row, kind="stable")
    begin = references.row[order]
    end = np.maximum.accumulate(begin + references.num_rows[order]) if len(begin) else begin
    new = np.append(True, begin[1:] >= end[:-1])[: len(begin)]
    start = begin[new]
    stop = end[np.append(new[1:], True)[: len(new)]] if len(begin) else end
    # The gaps between requests are spans as well, without entries: their results are zeros.
    start = np.stack([np.append(0, stop), np.append(start, num_rows)], 1).reshape(-1)
    length = np.diff(np.append(start, num_rows))
    start, length = start[length > 0], length[length > 0]
    blocks = -(-length // size)
    span, within = spread(blocks)
    first = start[span] + within * size
    return first, np.minimum(size, (start + length)[span] - first)


def _entries(
    references: References, runs: Runs, first_row: np.ndarray, block_rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Block, columns and run of every entry, in the order of blocks; the first tile is 0.

    A block without any has one entry without tiles, so that its rows are written.
    """
    length = runs.length[references.run]
    used = length > 0
    low = np.searchsorted(first_row, references.row, side="right") - 1
    high = np.searchsorted(first_row, references.row + references.num_rows, side="left")
    count = np.where(used, high - low, 0)
    ref, within = spread(count)
    block = low[ref] + within
    skip = np.maximum(0, references.row[ref] - first_row[block])
    # The causal bound of the first row of the block that sees the run.
    causal = references.causal[ref] + first_row[block] + skip - references.row[ref]
    limit = length[ref]
    last = np.minimum(limit, causal + block_rows[block] - skip)
    plain = np.where(skip > 0, 0, np.minimum(limit, causal + 1) // TILE)
    tiles = -(-last // TILE)
    columns = np.stack(
        [np.zeros_like(tiles), tiles, plain, limit, causal, skip, references.turn[ref]], 1
    )
    idle = np.flatnonzero(np.bincount(block, minlength=len(first_row)) == 0)
    block = np.append(block, idle)
    columns = np.concatenate([columns, np.zeros((len(idle), columns.shape[1]), np.int64)])
    order = np.argsort(block, kind="stable")
    return block[order], columns[order], np.append(references.run[ref], 0 * idle)[order]


def _pieces(
    cost: Int[np.ndarray, "blocks"], kv_heads: int, workers: int, most_pieces: int
) -> Int[np.ndarray, "blocks"]:
    """Pieces to cut each block into, so that the busiest worker ends as early as can be."""
    pieces = best = np.ones(len(cost), np.int64)
    least = _longest(cost, pieces, kv_heads, workers)
    for count in range(2, most_pieces + 1):
        if pieces.sum() * kv_heads > ROUNDS * workers:
            break
        pieces = np.maximum(1, -(-cost * count // max(1, cost.max(initial=0))))
        longest = _longest(cost, pieces, kv_heads, workers)
        if longest < least:
            least, best = longest, pieces
    return best


def _longest(
    cost: Int[np.ndarray, "blocks"],
    pieces: Int[np.ndarray, "blocks"],
    kv_heads: int,
    workers: int,
) -> int:
    """Tiles of the busiest worker; each item takes a tile's time for its start and its end."""
    each = -(-cost // pieces) + 1
    if pieces.sum() * kv_heads <= workers:
        return int(each.max(initial=0))
    line = np.repeat(np.sort(np.repeat(each, pieces))[::-1], kv_heads)
    rounds = np.append(line, np.zeros(-len(line) % workers, np.int64)).reshape(-1, workers)
    rounds[1::2] = rounds[1::2, ::-1]
    return int(rounds.sum(0).max())


def _cut(
    block: np.ndarray, entries: np.ndarray, run: np.ndarray, cost: np.ndarray, pieces: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cuts the line of tiles of every block into equal pieces; gives the piece of each entry."""
    if (pieces == 1).all():
        return block, np.zeros(len(block), np.int64), entries, run
    end = np.cumsum(entries[:, 1])
    begin = end - entries[:, 1]
    block_begin = np.cumsum(cost) - cost
    piece_block, piece = spread(pieces)
    piece_begin = block_begin[piece_block] + piece * cost[piece_block] // pieces[piece_block]
    # Entries without tiles keep their block's only piece.
    some = entries[:, 1] > 0
    cuts = np.union1d(begin[some], piece_begin[cost[piece_block] > 0])
    of = np.flatnonzero(some)[np.searchsorted(begin[some], cuts, side="right") - 1]
    count = np.diff(np.append(cuts, end[-1]))
    inside = cuts - begin[of]
    new = entries[of].copy()
    new[:, 0] = entries[of, 0] + inside
    new[:, 1] = count
    new[:, 2] = np.clip(entries[of, 2] - inside, 0, count)
    new[:, 3] -= inside * TILE
    new[:, 4] -= inside * TILE
    real = cost[piece_block] > 0
    at = np.searchsorted(piece_begin[real], cuts, side="right") - 1
    cut_piece = piece[real][at]
    rest = ~some & (cost[block] == 0)
    order = np.argsort(np.append(block[of], block[rest]), kind="stable")
    return (
        np.append(block[of], block[rest])[order],
        np.append(cut_piece, np.zeros(rest.sum(), np.int64))[order],
        np.concatenate([new, entries[rest]])[order],
        np.append(run[of], run[rest])[order],
    )


def _tile_pages(runs: Runs, run: np.ndarray, entries: np.ndarray, page_size: int) -> np.ndarray:
    boxes = TILE // page_size
    entry, tile = spread(entries[:, 1])
    box = (entries[entry, 0] + tile)[:, None] * boxes + np.arange(boxes)
    # Boxes past the run read its last page again; their slots are masked.
    pages = -(-runs.length[run[entry]] // page_size)
    page = np.minimum(box, pages[:, None] - 1)
    return runs.pages[runs.start[run[entry]][:, None] + page].astype(np.int32)


def _parts(
    items: Int[np.ndarray, "I 4"], num_rows: int, group: int
) -> tuple[Int[np.ndarray, "T+1"], Int[np.ndarray, "F 2"]]:
    """Where the partial results of each query row are, and their log-sum-exps: in step."""
    item, within = spread(items[:, 1])
    row, place = items[item, 0] + within, item * PACKED + within * group
    order = np.argsort(row, kind="stable")
    first_part = np.append(0, np.cumsum(np.bincount(row, minlength=num_rows)))
    place = place[order].astype(np.int32)
    return first_part.astype(np.int32), np.stack([place, place], 1)


def _worker_entries(count: np.ndarray, kv_heads: int, workers: int) -> np.ndarray:
    """Entries that each worker goes through: see ``prefill_memory.bring`` for the order."""
    pair = np.arange(len(count) * kv_heads)
    turn, place = pair // workers, pair % workers
    worker = np.where(turn % 2 == 0, place, workers - 1 - place)
    return np.bincount(worker, count[pair // kv_heads], workers).astype(np.int32)


def _padded(work: HopperPrefillWork, capacity: Capacity | None) -> HopperPrefillWork:
    # Of a table without any rows a kernel still reads the first.
    limits = capacity or Capacity(
        max(1, len(work.items)),
        max(1, len(work.entries)),
        max(1, len(work.tiles)),
        len(work.part_at),
    )
    return work._replace(
        items=padded(work.items, "items", limits.items),
        entries=padded(work.entries, "entries", limits.entries),
        tiles=padded(work.tiles, "tiles", limits.tiles),
        part_at=padded(work.part_at, "parts", limits.parts),
    )
