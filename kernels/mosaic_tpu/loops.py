"""How often every loop of the TPU kernels runs for a work list, in the order of their sources.

Pure host code (numpy), and as ``schedule.cycles`` wants it. A loop of one trip that is known when
the kernel is compiled is no loop in its schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lazyattn_jax.kernels.dense import spread
from lazyattn_jax.kernels.mosaic_tpu import decode, prefill
from lazyattn_jax.kernels.mosaic_tpu.plan import TpuDecodeWork, TpuPrefillWork, block_rows
from lazyattn_jax.kernels.mosaic_tpu.reader import Sizes
from lazyattn_jax.kernels.mosaic_tpu.schedule import Loop
from lazyattn_jax.kernels.mosaic_tpu.stream import Record, records

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


class _Tiles(NamedTuple):
    """Tiles of all entries, as a core goes through them.

    ``left`` are slots of the run from the tile on, ``turns`` those that come with it.
    """

    entry: Int[np.ndarray, "t"]
    number: Int[np.ndarray, "t"]
    left: Int[np.ndarray, "t"]
    pages: Int[np.ndarray, "t"]
    turns: Int[np.ndarray, "t"]


def decode_loops(shape: Any, blocks: int, work: TpuDecodeWork) -> tuple[Loop, ...]:
    """Loops of the decode kernel.

    Args:
      shape: of the kernel, see ``decode.kernel_shape``.
      blocks: blocks of KV heads that a core goes through.
      work: the work list.
    """
    sizes = shape.reader
    found = list(records(np.asarray(work.stream), int(work.num_entries[0]), sizes.page_size))
    tiles, entries, turns = _tiles(found, sizes), len(found), sum(len(r.turns) for r in found)
    count = np.array([len(r.turns) for r in found], int)
    loops = [
        Loop("turns to wait for", entries, turns),
        Loop("queries to turn", entries, turns),
    ]
    for less, most in zip((0, *decode.WIDTHS), decode.WIDTHS, strict=False):
        mine = (count > less) & (count <= most)
        which = mine[tiles.entry]
        inner = _tile_loops(tiles, which, sizes)
        loops.append(Loop(f"tiles of {most} rows", int(mine.sum()), int(which.sum()), inner))
    loops.append(Loop("results to add", entries, turns))
    kernel = (
        *_fixed("rows to start", 1, shape.num_rows),
        *_start(tiles, sizes),
        Loop("entries", 1, entries, tuple(loops)),
        *_fixed("rows to end", 1, shape.num_rows),
    )
    return _fixed("blocks of heads", 1, blocks, _scaled(kernel, blocks))


def prefill_loops(shape: Any, blocks: int, work: TpuPrefillWork) -> tuple[Loop, ...]:
    """Loops of the prefill kernel; for the arguments see ``decode_loops``."""
    sizes, first_entry = shape.reader, np.asarray(work.first_entry)
    windows, entries = len(first_entry) - 1, int(first_entry[-1])
    found = list(records(np.asarray(work.stream), entries, sizes.page_size))
    tiles, size, heads = _tiles(found, sizes), block_rows(shape.group), sizes.heads
    causal, first, end = np.array([r.others for r in found], int).reshape(-1, 3).T
    low, high = first // size, -(-end // size)
    inner = [
        Loop("turns to wait for", entries, entries),
        *_over_blocks("queries to turn", np.ones(entries, bool), high - low, heads),
    ]
    here = causal[tiles.entry] - tiles.number * sizes.tile
    seen = high[tiles.entry] - np.maximum(low[tiles.entry], np.maximum(-here, 0) // size)
    whole = (first % size == 0) & (end % size == 0)
    plain = whole[tiles.entry] & (tiles.left >= sizes.tile)
    plain &= here + first[tiles.entry] >= sizes.tile - 1
    attend = [*_over_blocks("whole tiles", plain, seen, heads)]
    for less, slots in zip((0, *prefill.WIDTHS), prefill.WIDTHS, strict=False):
        fits = (tiles.left > less) & ((tiles.left <= slots) | (slots == sizes.tile))
        attend += _over_blocks(f"tiles of {slots} slots", ~plain & fits, seen, heads)
    every = np.ones(len(tiles.entry), bool)
    tile_loops = (*_tile_loops(tiles, every, sizes), *attend)
    inner.append(Loop("tiles", entries, len(tiles.entry), tile_loops))
    window = (
        *_start(tiles, sizes),
        *_fixed("heads to start", windows, heads),
        Loop("entries", windows, entries, tuple(inner)),
        *_fixed("heads to end", windows, heads),
    )
    return _fixed("windows", 1, blocks * windows, _scaled(window, blocks))


def _tiles(found: list[Record], sizes: Sizes) -> _Tiles:
    length = np.array([record.length for record in found], int)
    entry, number = spread(-(-length // sizes.tile))
    left = length[entry] - number * sizes.tile
    pages = -(-np.minimum(left, sizes.tile) // sizes.page_size)
    turns = np.array([len(record.turns) for record in found], int)
    return _Tiles(entry, number, left, pages, np.where(number == 0, turns[entry], 0))


def _bring(tiles: _Tiles, which: Int[np.ndarray, "n"]) -> tuple[Loop, ...]:
    """Loops of ``Reader.bring_next`` for so many tiles."""
    turns, pages = tiles.turns[which], tiles.pages[which]
    return (
        Loop("turns to bring", int((turns > 0).sum()), int(turns.sum())),
        Loop("pages to bring", len(which), int(pages.sum())),
    )


def _start(tiles: _Tiles, sizes: Sizes) -> tuple[Loop, ...]:
    ahead = sizes.depth - 1
    return _fixed("tiles ahead", 1, ahead, _bring(tiles, np.arange(min(ahead, len(tiles.entry)))))


def _tile_loops(tiles: _Tiles, which: Bool[np.ndarray, "t"], sizes: Sizes) -> tuple[Loop, ...]:
    """Loops of ``Reader.tiles`` around some tiles, up to the work."""
    [at] = np.nonzero(which)
    partial = int((tiles.left[at] < sizes.tile).sum())
    brought = at + sizes.depth - 1
    return (
        *_bring(tiles, brought[brought < len(which)]),
        Loop("pages to wait for", len(at), int(tiles.pages[at].sum())),
        *_fixed("heads to silence", partial, sizes.heads),
    )


def _over_blocks(
    name: str, which: Bool[np.ndarray, "n"], blocks: Int[np.ndarray, "n"], heads: int
) -> tuple[Loop, ...]:
    """A loop over heads, and in it one over blocks of rows."""
    begun = int(which.sum())
    rows = Loop(f"{name}, blocks", begun * heads, int(blocks[which].sum()) * heads)
    return _fixed(f"{name}, heads", begun, heads, (rows,))


def _fixed(name: str, begun: int, each: int, inner: tuple[Loop, ...] = ()) -> tuple[Loop, ...]:
    """A loop of so many trips each time; its body if it is one."""
    return inner if each == 1 else (Loop(name, begun, begun * each, inner),)


def _scaled(loops: tuple[Loop, ...], times: int) -> tuple[Loop, ...]:
    return tuple(
        Loop(name, begun * times, trips * times, _scaled(inner, times))
        for name, begun, trips, inner in loops
    )
