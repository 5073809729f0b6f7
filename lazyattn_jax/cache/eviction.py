"""Which unpinned segment goes first when pages are needed."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from lazyattn_jax.cache.segments import Segment


class EvictionPolicy(Protocol):
    """Knows the segments that may be evicted: those that nobody has pinned."""

    def add(self, segment: Segment) -> None:
        """A segment may be evicted from now on."""

    def remove(self, segment: Segment) -> None:
        """A segment that was added may not be evicted any more, or is gone."""

    def take(self) -> Segment:
        """Removes the segment that is to be evicted next; there must be one."""


class LeastRecentlyUsed:
    """Evicts what has not been used for the longest time."""

    def __init__(self) -> None:
        self._segments: OrderedDict[bytes, Segment] = OrderedDict()

    def add(self, segment: Segment) -> None:
        """Files a segment as the most recently used."""
        self._segments[segment.key] = segment

    def remove(self, segment: Segment) -> None:
        """Forgets a segment."""
        del self._segments[segment.key]

    def take(self) -> Segment:
        """Removes the least recently used segment."""
        return self._segments.popitem(last=False)[1]


class _Entry(NamedTuple):
    priority: float
    number: int  # of equal priorities the least recently used goes first
    segment: Segment


class GreedyDual:
    """GreedyDual-Size-Frequency (Cherkasova 1998): evicts what brings least for its pages.

    A segment's priority is ``clock + uses * tokens / pages``: tokens are what encoding it again
    costs, and what a step's budget counts. The clock is the priority of the last one evicted, so
    that what is used no more goes in the end, however often it once was. Documents that are used
    once cannot drive out those that are used often: they only wear off each other.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._numbers = itertools.count()
        self._entries: dict[bytes, _Entry] = {}
        self._heap: list[_Entry] = []  # some are out of date

    def add(self, segment: Segment) -> None:
        """Files a segment by its priority."""
        worth = max(1, segment.uses) * segment.num_tokens / len(segment.pages)
        entry = _Entry(self._clock + worth, next(self._numbers), segment)
        self._entries[segment.key] = entry
        heapq.heappush(self._heap, entry)

    def remove(self, segment: Segment) -> None:
        """Forgets a segment."""
        del self._entries[segment.key]
        if len(self._heap) > 2 * len(self._entries) + 100:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def take(self) -> Segment:
        """Removes the segment with the lowest priority, which the clock moves on to."""
        while True:
            entry = heapq.heappop(self._heap)
            if self._entries.get(entry.segment.key) is entry:
                del self._entries[entry.segment.key]
                self._clock = entry.priority
                return entry.segment


POLICIES: dict[str, type[EvictionPolicy]] = {"gdsf": GreedyDual, "lru": LeastRecentlyUsed}
"""By the names that options have for them."""
