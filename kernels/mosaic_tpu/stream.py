"""Work lists of the TPU kernels: one stream of records each. Pure host code (numpy).

A *tile* is as many slots as a core attends to at once: of one run of pages, or one *piece* each of
several short runs. A record of the stream says everything about a tile. A core reads the stream
from front to back, a little ahead of its work, so that a list of any length takes only a few KiB of
its scalar memory. A record of no numbers is the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lazyattn_jax.kernels.dense import spread
from lazyattn_jax.kernels.work import DoesNotFit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Int

CHUNK = 1024
"""Numbers that are brought together."""

HEADER = 3
"""Numbers at the start of a record: all that it has, pages and turns that come with the tile."""

type Column = tuple["Int[np.ndarray, 'T']", "Int[np.ndarray, 'n']"]
"""How many values each tile has, and the values of all tiles, tile by tile."""


def stream_of(
    others: Int[np.ndarray, "T o"],
    pages: Int[np.ndarray, "T p"],
    turns: Column,
    rows: Column,
    capacity: int | None,
) -> Int[np.ndarray, "words"]:
    """Records of tiles: the header, what else a kernel needs, pages, turns and rows.

    Args:
      others: numbers of each tile that are the kernel's own.
      pages: pages of each tile, -1 in places where none is needed.
      turns: turns of the runs that begin in each tile.
      rows: query rows of the tiles that name them.
      capacity: numbers that the stream has room for; what is needed, if not given.

    Raises:
      DoesNotFit: the records take more.
    """
    fixed = HEADER + others.shape[1] + pages.shape[1]
    size = fixed + turns[0] + rows[0]
    end = np.cumsum(size)
    needed = int(end[-1]) if len(end) else 0
    if capacity is not None and needed > capacity:
        raise DoesNotFit(f"the step takes {needed} numbers, there is room for {capacity}")
    # A core brings the chunk after the one that it reads, and reads a record past the last.
    out = np.zeros((-(-(capacity or needed) // CHUNK) + 2) * CHUNK, np.int32)
    at = end - size
    header = np.stack([size, (pages >= 0).sum(1), turns[0]], 1)
    out[at[:, None] + np.arange(fixed)] = np.concatenate([header, others, pages], 1)
    at = at + fixed
    for counts, values in (turns, rows):
        owner, place = spread(counts)
        out[at[owner] + place] = values
        at = at + counts
    return out


class Record(NamedTuple):
    """What the stream says of one tile."""

    others: Int[np.ndarray, "o"]
    pages: Int[np.ndarray, "p"]
    turns: Int[np.ndarray, "t"]
    rows: Int[np.ndarray, "r"]


def records(stream: Int[np.ndarray, "words"], others: int, pages: int) -> Iterator[Record]:
    """The tiles of a stream, as a kernel reads them.

    Args:
      stream: the numbers.
      others: how many of a record are the kernel's own.
      pages: places for pages in a tile.
    """
    at = 0
    while size := int(stream[at]):
        turns = int(stream[at + 2])
        ends = np.cumsum([HEADER, others, pages, turns])
        yield Record(*np.split(stream[at : at + size], ends)[1:])
        at += size
