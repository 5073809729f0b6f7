"""Reads a work list and the pages it names, ahead of the work; inside a kernel.

A kernel goes through the tiles of all entries in order. Numbers of the stream come into a ring in
scalar memory, angles and tiles of pages into rings in vector memory, by asynchronous copies that
are started as soon as there is room for them.
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


class _At(enum.IntEnum):
    """Where a kernel is: entry, tile, place in the rings and position in the stream.

    ``NEXT`` is what is brought next, ``WORK`` what is worked on.
    """

    NEXT_ENTRY = 0
    NEXT_TILE = 1
    NEXT_STAGE = 2
    NEXT_POSITION = 3
    WORK_ENTRY = 4
    WORK_STAGE = 5
    WORK_POSITION = 6
    CHUNK = 7


@dataclass(frozen=True)
class Entry:
    """Scalars of an entry; ``others`` is where the kernel's own numbers are in the stream."""

    length: Any
    count: Any
    others: Any


@dataclass(frozen=True)
class Sizes:
    """Static sizes of a reader.

    Attributes:
      page_size: slots of a page.
      tile: slots that a kernel attends to at once.
      rows: the most turns of an entry.
      heads: KV heads that a core attends with at once.
      pools: arrays that the pages are in.
      dtype: of the pages.
    """

    page_size: int
    tile: int
    rows: int
    heads: int
    pools: int
    dtype: Any

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in all arrays."""
        return self.pools * self.heads * self.tile * LANES * jnp.dtype(self.dtype).itemsize

    @property
    def depth(self) -> int:
        """Tiles of the ring: one is worked on while the others come."""
        return 1 + min(_MOST_TILES, max(1, _IN_FLIGHT // self.tile_bytes))

    def scratch(self) -> list[Any]:
        """What a kernel has to allocate for a reader."""
        ring = pltpu.VMEM((self.depth, self.heads, self.tile, LANES), self.dtype)
        return [
            [ring] * self.pools,
            pltpu.VMEM((self.depth, self.rows, 1, LANES), jnp.float32),
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
    num_entries: Any
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
        """Starts with the first entry."""
        for i in range(len(_At)):
            self.at[i] = 0
        self._chunk(0).start()
        self._chunk(0).wait()
        self._chunk(1).start()

        @pl.loop(0, self.sizes.depth - 1)
        def _(_):
            self.bring_next()

    def stop(self):
        """Waits for what is on its way after the last entry."""
        self._chunk(self.at[_At.CHUNK] + 1).wait()

    def word(self, position):
        """A number of the stream."""
        return self.words[lax.rem(position, _CHUNKS * CHUNK)]

    def bring_next(self):
        """Starts to bring one more tile, if there is one; its place in the ring must be free."""
        entry, tile, stage = (self.at[i] for i in (_At.NEXT_ENTRY, _At.NEXT_TILE, _At.NEXT_STAGE))

        @pl.when(entry < self.num_entries)
        def _():
            position = self.at[_At.NEXT_POSITION]
            self._bring_words(position + HEADER)
            length, count, before = (self.word(position + i) for i in range(HEADER))
            first = position + before + tile * (self.sizes.tile // self.sizes.page_size)
            pages = self._pages(length, tile)
            self._bring_words(first + pages)

            @pl.when(tile == 0)
            def _():
                @pl.loop(0, count)
                def _(row):
                    self._angles(self.word(position + HEADER + row), entry, row).start()

            @pl.loop(0, pages)
            def _(box):
                for copy in self._copies(self.word(first + box), stage, box):
                    copy.start()

            is_last = (tile + 1) * self.sizes.tile >= length
            self.at[_At.NEXT_ENTRY] = jnp.where(is_last, entry + 1, entry)
            self.at[_At.NEXT_TILE] = jnp.where(is_last, 0, tile + 1)
            self.at[_At.NEXT_STAGE] = self._after(stage)
            self.at[_At.NEXT_POSITION] = jnp.where(is_last, first + pages, position)

    def entries(self, count, work):
        """Calls ``work(entry, angles)`` for so many entries.

        ``work`` has to go through ``tiles(entry)``. ``angles`` are those of the entry's turns.
        """

        @pl.loop(0, count)
        def _(_entry):
            position, number = self.at[_At.WORK_POSITION], self.at[_At.WORK_ENTRY]
            length, turns, before = (self.word(position + i) for i in range(HEADER))
            self.at[_At.WORK_POSITION] = (
                position + before + self._div_up(length, self.sizes.page_size)
            )
            self.at[_At.WORK_ENTRY] = number + 1

            @pl.loop(0, turns)
            def _(row):
                self._angles(0, number, row).wait()

            place = lax.rem(number, self.sizes.depth)
            work(Entry(length, turns, position + HEADER + turns), self.angle_ring.at[place])

    def tiles(self, entry, work):
        """Calls ``work(tile, left, stage)`` for every tile of an entry.

        ``left`` are the slots of the run from the tile on, ``stage`` its place in the rings.
        """

        @pl.loop(0, self._div_up(entry.length, self.sizes.tile))
        def _(tile):
            stage = self.at[_At.WORK_STAGE]
            self.at[_At.WORK_STAGE] = self._after(stage)
            self.bring_next()
            left = entry.length - tile * self.sizes.tile

            @pl.loop(0, self._pages(entry.length, tile))
            def _(box):
                for copy in self._copies(0, stage, box):
                    copy.wait()

            @pl.when(left < self.sizes.tile)
            def _():
                self._silence(left, stage)

            work(tile, left, stage)

    def _silence(self, left, stage):
        # A weight of 0 does not silence a NaN left in a slot past the run.
        @pl.loop(0, self.sizes.heads)
        def _(head):
            values = self.rings[-1].at[stage, head]
            slot = lax.broadcasted_iota(jnp.int32, values.shape, 0)
            values[...] = jnp.where(slot < left, values[...], jnp.zeros(values.shape, values.dtype))

    def _bring_words(self, end):
        """Has the stream up to a position in scalar memory."""
        chunk = self.at[_At.CHUNK]

        @pl.when(end > (chunk + 1) * CHUNK)
        def _():
            self._chunk(chunk + 1).wait()
            self._chunk(chunk + 2).start()
            self.at[_At.CHUNK] = chunk + 1

    def _chunk(self, chunk):
        place = lax.rem(chunk, _CHUNKS)
        return pltpu.make_async_copy(
            self.stream.at[pl.ds(chunk * CHUNK, CHUNK)],
            self.words.at[pl.ds(place * CHUNK, CHUNK)],
            self.chunk_sems.at[lax.rem(chunk, 2)],
        )

    def _angles(self, turn, entry, row):
        place = lax.rem(entry, self.sizes.depth)
        return pltpu.make_async_copy(
            self.angles.at[turn], self.angle_ring.at[place, row], self.angle_sems.at[place]
        )

    def _copies(self, page, stage, box):
        size = self.sizes.page_size
        at = pl.ds(pl.multiple_of(box * size, size), size)
        return [
            pltpu.make_async_copy(
                pool.at[page, self.heads], ring.at[stage, :, at], self.page_sems.at[stage]
            )
            for pool, ring in zip(self.pools, self.rings, strict=True)
        ]

    def _pages(self, length, tile):
        """Pages of a tile of a run."""
        left = jnp.minimum(length - tile * self.sizes.tile, self.sizes.tile)
        return self._div_up(left, self.sizes.page_size)

    def _after(self, stage):
        return jnp.where(stage == self.sizes.depth - 1, 0, stage + 1)

    @staticmethod
    def _div_up(x, y):
        return lax.div(x + y - 1, y)
