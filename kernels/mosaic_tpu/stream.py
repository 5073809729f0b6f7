"""Work lists of the TPU kernels: one stream of records each. Pure host code (numpy).

What a core does to one run of pages is an *entry*, and a record of the stream says everything
about it. A core reads the stream from front to back, a little ahead of its work, so that a list of
any length takes only a few KiB of its scalar memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lazyattn_jax.kernels.dense import spread
from lazyattn_jax.kernels.work import DoesNotFit, Runs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Int

CHUNK = 1024
"""Numbers that are brought together."""

HEADER = 3
"""Numbers at the start of a record: slots of the run, turns, and numbers before the pages."""

type Column = tuple["Int[np.ndarray, 'E']", "Int[np.ndarray, 'n']"]
"""How many values each entry has, and the values of all entries, entry by entry."""


def stream_of(
    length: Int[np.ndarray, "E"],
    turns: Column,
    others: Column,
    first_page: Int[np.ndarray, "E"],
    runs: Runs,
    page_size: int,
    capacity: int | None,
) -> Int[np.ndarray, "words"]:
    """Records of entries: the header, turns, what else a kernel needs, and pages.

    Args:
      length: slots of each entry's run that are attended to.
      turns: turns of each entry.
      others: further numbers of each entry.
      first_page: where each entry's run starts in ``runs.pages``.
      runs: the runs of pages.
      page_size: slots of a page.
      capacity: numbers that the stream has room for; what is needed, if not given.

    Raises:
      DoesNotFit: the records take more.
    """
    entries = len(length)
    before = HEADER + turns[0] + others[0]
    count = -(-length // page_size)
    entry, within = spread(count)
    header = np.stack([length, turns[0], before], 1).reshape(-1)
    columns = (
        (np.full(entries, HEADER), header),
        turns,
        others,
        (count, runs.pages[first_page[entry] + within]),
    )
    end = np.cumsum(before + count)
    needed = int(end[-1]) if entries else 0
    if capacity is not None and needed > capacity:
        raise DoesNotFit(f"the step takes {needed} numbers, there is room for {capacity}")
    # A core brings the chunk after the one that it reads.
    out = np.zeros((-(-(capacity or needed) // CHUNK) + 2) * CHUNK, np.int32)
    at = end - before - count
    for counts, values in columns:
        owner, place = spread(counts)
        out[at[owner] + place] = values
        at = at + counts
    return out


class Record(NamedTuple):
    """What the stream says of one entry."""

    length: int
    turns: Int[np.ndarray, "t"]
    others: Int[np.ndarray, "o"]
    pages: Int[np.ndarray, "p"]


def records(stream: Int[np.ndarray, "words"], num_entries: int, page_size: int) -> Iterator[Record]:
    """The entries of a stream, as a kernel reads them."""
    at = 0
    for _ in range(num_entries):
        length, turns, before = (int(x) for x in stream[at : at + HEADER])
        pages = -(-length // page_size)
        first, end = at + HEADER + turns, at + before
        yield Record(
            length, stream[at + HEADER : first], stream[first:end], stream[end : end + pages]
        )
        at = end + pages
