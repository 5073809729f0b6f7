"""Reads a work list and the pages it names, ahead of the work; inside a kernel.

A kernel goes through the tiles of a list in order. Numbers of the stream come into a ring in scalar
memory, angles and tiles of pages into rings in vector memory, by asynchronous copies that are
started as soon as there is room for them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lazyattn_jax.kernels.mosaic_tpu.layout import LANES
from lazyattn_jax.kernels.mosaic_tpu.stream import CHUNK, HEADER

_CHUNKS = 4
_IN_FLIGHT = 2 * 2**20
"""Bytes of pages that should be on their way at any time: what memory brings in its latency."""

_MOST_TILES = 16

AT_ONCE = 4
"""Pages that are asked for one after the other without a loop."""

_SILENCED = 32
"""Slots that are silenced at once, in all heads."""


class _At(enum.IntEnum):
    """Where a kernel is: place in the rings and position in the stream.

    ``NEXT`` is the tile that is brought next, ``WORK`` the one that is worked on.
    """

    NEXT_STAGE = 0
    NEXT_POSITION = 1
    WORK_STAGE = 2
    WORK_POSITION = 3
    CHUNK = 4


@dataclass(frozen=True)
class Tile:
    """Scalars of a tile, and where its others, its rows, and its data in the rings are."""

    turns: Any
    others: Any
    rows: Any
    stage: Any


@dataclass(frozen=True)
class Sizes:
    """Static sizes of a reader.

    Attributes:
      page_size: slots of a page.
      tile: slots that a kernel attends to at once.
      turns: the most turns that come with a tile.
      rows: the most rows that a record names.
      others: numbers of a record that are the kernel's own; the third are the pieces in which
        something must be silenced, the second the slots of a piece.
      seen: where the others say how many slots of a piece are attended to, and the same of the
        next piece.
      heads: KV heads that a core attends with at once.
      pools: arrays that the pages are in.
      dtype: of the pages.
    """

    page_size: int
    tile: int
    turns: int
    rows: int
    others: int
    seen: tuple[int, int]
    heads: int
    pools: int
    dtype: Any

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in all arrays."""
        return self.pools * self.heads * self.tile * LANES * jnp.dtype(self.dtype).itemsize

    @property
    def depth(self) -> int:
        """Tiles of the ring: one is worked on while the others come.

        The numbers of all of them are in scalar memory, where three chunks are kept.
        """
        within = min(_MOST_TILES, CHUNK // self.most_words - 2)
        return 1 + min(within, max(1, _IN_FLIGHT // self.tile_bytes))

    @property
    def places(self) -> int:
        """Pages of a tile."""
        return self.tile // self.page_size

    @property
    def pieces(self) -> int:
        """The most pieces of a tile."""
        first, step = self.seen
        return (self.others - first) // step

    @property
    def silenced(self) -> int:
        """Slots that are silenced at once."""
        return min(_SILENCED, self.page_size)

    @property
    def fixed_words(self) -> int:
        """Numbers of a record before the turns."""
        return HEADER + self.others + self.places

    @property
    def most_words(self) -> int:
        """The most numbers of a record."""
        return self.fixed_words + self.turns + self.rows

    def scratch(self) -> list[Any]:
        """What a kernel has to allocate for a reader."""
        ring = pltpu.VMEM((self.depth, self.places, self.heads, self.page_size, LANES), self.dtype)
        return [
            [ring] * self.pools,
            pltpu.VMEM((self.depth, self.turns, 1, LANES), jnp.float32),
            pltpu.SMEM((_CHUNKS * CHUNK,), jnp.int32),
            pltpu.SMEM((len(_At),), jnp.int32),
            pltpu.SemaphoreType.DMA((self.depth,)),
            pltpu.SemaphoreType.DMA((self.depth,)),
            pltpu.SemaphoreType.DMA((2,)),
        ]


@dataclass(frozen=True)
class Reader:
    """The stream, angles and arrays of pages of a kernel, and what ``Sizes.scratch`` allocated."""

    sizes: Sizes
    heads: Any
    stream: Any
    angles: Any
    pools: Any
    rings: Any
    angle_ring: Any
    words: Any
    at: Any
    page_sems: Any
    angle_sems: Any
    chunk_sems: Any

    def start(self):
        """Starts with the first tile."""
        for i in range(len(_At)):
            self.at[i] = 0
        self._chunk(0).start()
        # Where no page comes nothing is written: it must not be NaN, which a weight of 0 keeps.
        values = self.rings[-1]

        @pl.loop(0, self.sizes.depth)
        def _(stage):
            values[stage] = jnp.zeros(values.shape[1:], values.dtype)

        self._chunk(0).wait()
        self._chunk(1).start()

        @pl.loop(0, self.sizes.depth - 1)
        def _(_):
            self.bring_next()

    def stop(self):
        """Waits for what is on its way after the last tile."""
        self._chunk(self.at[_At.CHUNK] + 1).wait()

    def word(self, position):
        """A number of the stream."""
        return self.words[position & (_CHUNKS * CHUNK - 1)]

    def peek(self):
        """The tile that is worked on next, of which only the numbers are there."""
        position = self.at[_At.WORK_POSITION]
        turns, rows = self.word(position + 2), position + self.sizes.fixed_words
        return Tile(turns, position + HEADER, rows + turns, self.at[_At.WORK_STAGE])

    def keys_and_values(self, tile, head, slots):
        """The first slots of a tile, ``[slots, 128]`` each."""
        pages = pl.ds(0, max(1, slots // self.sizes.page_size))
        found = (ring[tile.stage, pages, head] for ring in (self.rings[0], self.rings[-1]))
        return (x.reshape(-1, LANES)[:slots] for x in found)

    def bring_next(self):
        """Starts to bring one more tile, if there is one; its place in the rings must be free."""
        sizes, position, stage = self.sizes, self.at[_At.NEXT_POSITION], self.at[_At.NEXT_STAGE]
        self._bring_words(position + sizes.most_words)
        size, pages, turns = (self.word(position + i) for i in range(HEADER))

        @pl.when(size > 0)
        def _():
            first = position + HEADER + sizes.others

            @pl.loop(0, turns)
            def _(turn):
                index = self.word(position + sizes.fixed_words + turn)
                self._angles(index, stage, turn).start()

            step = min(sizes.places, AT_ONCE)

            @pl.when(pages == sizes.places)
            def _():
                @pl.loop(0, sizes.places, step=step)
                def _(place):
                    for i in range(step):
                        self._bring(self.word(first + place + i), stage, place + i)

            @pl.when(pages < sizes.places)
            def _():
                @pl.loop(0, sizes.places)
                def _(place):
                    page = self.word(first + place)

                    @pl.when(page >= 0)
                    def _():
                        self._bring(page, stage, place)

            self.at[_At.NEXT_STAGE] = self._after(stage)
            self.at[_At.NEXT_POSITION] = position + size

    def tiles(self, count, work):
        """Calls ``work(tile)`` for so many tiles, whose pages and angles are there."""
        sizes = self.sizes

        @pl.loop(0, count)
        def _(_tile):
            tile, position = self.peek(), self.at[_At.WORK_POSITION]
            size, pages = self.word(position), self.word(position + 1)
            self.at[_At.WORK_POSITION] = position + size
            self.at[_At.WORK_STAGE] = self._after(tile.stage)
            self.bring_next()

            @pl.loop(0, tile.turns)
            def _(turn):
                self._angles(0, tile.stage, turn).wait()

            @pl.when(pages == sizes.places)
            def _():
                for ring in self.rings:
                    self._arrival(ring.at[tile.stage], tile.stage).wait()

            @pl.when(pages < sizes.places)
            def _():
                @pl.loop(0, pages)
                def _(_page):
                    for ring in self.rings:
                        self._arrival(ring.at[tile.stage, 0], tile.stage).wait()

            self._silence(tile)
            work(tile)

    def _silence(self, tile):
        # A weight of 0 does not silence a NaN left in a slot past the run.
        sizes, values = self.sizes, self.rings[-1]
        some = sizes.silenced
        shape, shift = (some, LANES), some.bit_length() - 1

        @pl.when(self.word(tile.others + 2) > 0)
        def _():
            pieces = []
            for piece in range(sizes.pieces):
                start = piece * self.word(tile.others + 1)
                seen = self.word(tile.others + sizes.seen[0] + piece * sizes.seen[1])
                end = (seen + sizes.page_size - 1) & -sizes.page_size
                place = (start + seen) >> (sizes.page_size.bit_length() - 1)
                pieces.append((seen, end, place))
            for seen, end, place in pieces:

                @pl.loop(seen >> shift, end >> shift)
                def _(i, seen=seen, place=place):
                    at = pl.multiple_of((i * some) & (sizes.page_size - 1), some)
                    is_seen = lax.broadcasted_iota(jnp.int32, shape, 0) < seen - i * some
                    for head in range(sizes.heads):
                        few = values.at[tile.stage, place, head, pl.ds(at, some)]
                        few[...] = jnp.where(is_seen, few[...], jnp.zeros(shape, values.dtype))

    def _bring_words(self, end):
        """Has the stream up to a position in scalar memory."""
        chunk = self.at[_At.CHUNK]

        @pl.when(end > (chunk + 1) * CHUNK)
        def _():
            self._chunk(chunk + 1).wait()
            self._chunk(chunk + 2).start()
            self.at[_At.CHUNK] = chunk + 1

    def _chunk(self, chunk):
        place = chunk & (_CHUNKS - 1)
        return pltpu.make_async_copy(
            self.stream.at[pl.ds(chunk * CHUNK, CHUNK)],
            self.words.at[pl.ds(place * CHUNK, CHUNK)],
            self.chunk_sems.at[chunk & 1],
        )

    def _angles(self, index, stage, turn):
        return pltpu.make_async_copy(
            self.angles.at[index], self.angle_ring.at[stage, turn], self.angle_sems.at[stage]
        )

    def _bring(self, page, stage, place):
        for pool, ring in zip(self.pools, self.rings, strict=True):
            pltpu.make_async_copy(
                pool.at[page, self.heads], ring.at[stage, place], self.page_sems.at[stage]
            ).start()

    def _arrival(self, data, stage):
        """To wait for as many bytes as ``data`` has."""
        return pltpu.make_async_copy(data, data, self.page_sems.at[stage])

    def _after(self, stage):
        return jnp.where(stage == self.sizes.depth - 1, 0, stage + 1)
