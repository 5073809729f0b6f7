"""How often every loop of the TPU kernels runs for a work list, in the order of their sources.

Pure host code (numpy), and as ``schedule.cycles`` wants it. A loop of one trip that is known when
the kernel is compiled is no loop in its schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lazyattn_jax.kernels.mosaic_tpu.decode import WIDTHS as DECODE_WIDTHS
from lazyattn_jax.kernels.mosaic_tpu.plan import (
    DECODE_PIECES,
    DECODE_TILE,
    PREFILL_TILE,
    ROWS,
    TpuDecodeWork,
    TpuPrefillWork,
    block_rows,
)
from lazyattn_jax.kernels.mosaic_tpu.prefill import PIECES as PREFILL_PIECES
from lazyattn_jax.kernels.mosaic_tpu.prefill import WIDTHS as PREFILL_WIDTHS
from lazyattn_jax.kernels.mosaic_tpu.reader import AT_ONCE, Sizes
from lazyattn_jax.kernels.mosaic_tpu.schedule import Loop
from lazyattn_jax.kernels.mosaic_tpu.stream import records

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


class _Tiles:
    """Tiles of a work list, as a core goes through them: columns of what their records say."""

    def __init__(self, stream: Int[np.ndarray, "words"], sizes: Sizes) -> None:
        found = list(records(np.asarray(stream), sizes.others, sizes.places))
        places = np.array([r.pages for r in found], int).reshape(-1, sizes.places)
        self.sizes = sizes
        self.others = np.array([r.others for r in found], int).reshape(-1, sizes.others)
        self.pages = (places >= 0).sum(1)
        self.turns = np.array([len(r.turns) for r in found], int)

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def silenced(self) -> Int[np.ndarray, "T"]:
        """How often slots of each piece of a tile are silenced."""
        sizes, first = self.sizes, self.sizes.seen[0]
        seen = self.others[:, first :: sizes.seen[1]]
        end = -(-seen // sizes.page_size) * sizes.page_size
        return end // sizes.silenced - seen // sizes.silenced

    def bring(self, which: Int[np.ndarray, "n"]) -> tuple[Loop, ...]:
        """Loops of ``Reader.bring_next`` for these tiles."""
        sizes, turns, partial = self.sizes, self.turns[which], self.pages[which] < self.sizes.places
        step = min(sizes.places, AT_ONCE)
        return (
            _loop("turns to bring", turns),
            *_fixed("pages to bring", int((~partial).sum()), sizes.places // step),
            *_fixed("pages to bring, if any", int(partial.sum()), sizes.places),
        )

    def start(self) -> tuple[Loop, ...]:
        """Loops of ``Reader.start``."""
        ahead = self.sizes.depth - 1
        inner = self.bring(np.arange(min(ahead, len(self))))
        return (
            *_fixed("tiles to clear", 1, ahead + 1),
            *_fixed("tiles ahead", 1, ahead, inner),
        )

    def loops(self, which: Bool[np.ndarray, "T"]) -> tuple[Loop, ...]:
        """Loops of ``Reader.tiles`` around some tiles, up to the work."""
        [at] = np.nonzero(which)
        brought = at + self.sizes.depth - 1
        pages = self.pages[at]
        silenced = self.silenced[at]
        return (
            *self.bring(brought[brought < len(self)]),
            _loop("turns to wait for", self.turns[at]),
            _loop("pages to wait for", pages[pages < self.sizes.places]),
            *(_loop("slots to silence", silenced[:, i]) for i in range(self.sizes.pieces)),
        )


def decode_loops(shape: Any, blocks: int, work: TpuDecodeWork) -> tuple[Loop, ...]:
    """Loops of the decode kernel.

    Args:
      shape: of the kernel, see ``decode.kernel_shape``.
      blocks: blocks of KV heads that a core goes through.
      work: the work list.
    """
    tiles = _Tiles(work.stream, shape.reader)
    slots, begun, count = tiles.others[:, 1], tiles.others[:, 3], tiles.others[:, 4]
    count = count[begun > 0]
    entry = np.cumsum(begun > 0) - 1
    pieces = DECODE_TILE // slots[begun > 0]
    loops = [_loop("rows to name", count)]
    kinds = [
        (less, most, 1) for less, most in zip((0, *DECODE_WIDTHS), DECODE_WIDTHS, strict=False)
    ]
    for less, most, cut in (*kinds, (0, ROWS, DECODE_PIECES)):
        mine = (count > less) & (count <= most) & (pieces == cut)
        which = mine[entry] if len(entry) else np.zeros(0, bool)
        turn = [] if cut > 1 else [_loop("queries to turn", tiles.turns[which])]
        inner = (*tiles.loops(which), *turn)
        name = f"tiles of {most} rows" if cut == 1 else f"tiles in {cut} pieces"
        loops.append(Loop(name, int(mine.sum()), int(which.sum()), inner))
    loops.append(_loop("results to add", count))
    kernel = (
        *_fixed("rows to start", 1, shape.num_rows),
        *tiles.start(),
        Loop("entries", 1, len(count), tuple(loops)),
        *_fixed("rows to end", 1, shape.num_rows),
    )
    return _fixed("blocks of heads", 1, blocks, _scaled(kernel, blocks))


def prefill_loops(shape: Any, blocks: int, work: TpuPrefillWork) -> tuple[Loop, ...]:
    """Loops of the prefill kernel; for the arguments see ``decode_loops``."""
    tiles = _Tiles(work.stream, shape.reader)
    windows, size, heads = len(work.first_tile) - 1, block_rows(shape.group), shape.reader.heads
    slots, first, end, seen, here = tiles.others[:, [1, 3, 4, 5, 6]].T
    low, high = first // size, -(-end // size)
    causal_blocks = high - np.maximum(low, np.maximum(-here, 0) // size)
    is_one, sees_all = slots == PREFILL_TILE, here + first >= seen - 1
    is_whole = (first % size == 0) & (end % size == 0)
    plain = is_one & is_whole & sees_all & (seen == PREFILL_TILE)

    def over_heads(name: str, which: Bool[np.ndarray, "T"], blocks: Int[np.ndarray, "T"]) -> Loop:
        return _loop(name, blocks[which] * heads)

    attend = [over_heads("whole tiles", plain, high - low)]
    for less, most in zip((0, *PREFILL_WIDTHS), PREFILL_WIDTHS, strict=False):
        fits = is_one & ~plain & (seen > less) & (seen <= most)
        attend += [
            over_heads(f"tiles of {most} slots", fits & sees_all, high - low),
            over_heads(f"causal tiles of {most} slots", fits & ~sees_all, causal_blocks),
        ]
    for pieces in PREFILL_PIECES:
        cut = slots * pieces == PREFILL_TILE
        rows = _loop("blocks", np.repeat((high - low)[cut], heads))
        attend.append(_loop(f"tiles in {pieces} pieces", np.full(cut.sum(), heads), (rows,)))
    turns = np.where(is_one, tiles.turns, 0)
    turn = _loop("queries to turn", np.repeat(high - low, turns) * heads)
    inner = (
        *tiles.loops(np.ones(len(tiles), bool)),
        _loop("turns", turns, (turn,)),
        *attend,
    )
    window = (
        *tiles.start(),
        *_fixed("heads to start", windows, heads),
        Loop("tiles", windows, len(tiles), inner),
        *_fixed("heads to end", windows, heads),
    )
    return _fixed("windows", 1, blocks * windows, _scaled(window, blocks))


def _loop(name: str, trips: Int[np.ndarray, "n"], inner: tuple[Loop, ...] = ()) -> Loop:
    """A loop that is begun where it has trips."""
    return Loop(name, int((trips > 0).sum()), int(trips.sum()), inner)


def _fixed(name: str, begun: int, each: int, inner: tuple[Loop, ...] = ()) -> tuple[Loop, ...]:
    """A loop of so many trips each time; its body if it is one."""
    return inner if each == 1 else (Loop(name, begun, begun * each, inner),)


def _scaled(loops: tuple[Loop, ...], times: int) -> tuple[Loop, ...]:
    return tuple(
        Loop(name, begun * times, trips * times, _scaled(inner, times))
        for name, begun, trips, inner in loops
    )
