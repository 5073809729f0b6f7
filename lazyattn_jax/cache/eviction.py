"""Which unpinned segment goes first when pages are needed."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


class Entry(NamedTuple):
    """A segment and its place in an order."""

    priority: float
    number: int  # of equal priorities the least recently used goes first
    segment: Segment


class Ranked:
    """Segments by priority, the lowest first."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._entries: dict[bytes, Entry] = {}
        self._heap: list[Entry] = []  # some are out of date

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, segment: Segment) -> bool:
        entry = self._entries.get(segment.key)
        return entry is not None and entry.segment is segment

    def put(self, segment: Segment, priority: float) -> None:
        """Files a segment."""
        entry = Entry(priority, next(self._numbers), segment)
        self._entries[segment.key] = entry
        heapq.heappush(self._heap, entry)

    def remove(self, segment: Segment) -> None:
        """Forgets a segment."""
        del self._entries[segment.key]
        if len(self._heap) > 2 * len(self._entries) + 100:
            self._rank(self._entries.values())

    def take(self) -> Entry:
        """Removes the first one."""
        while True:
            entry = heapq.heappop(self._heap)
            if self._entries.get(entry.segment.key) is entry:
                del self._entries[entry.segment.key]
                return entry

    def rank_anew(self, priority: Callable[[Segment], float]) -> None:
        """Gives every segment another priority; of equal ones the older still goes first."""
        entries = [
            entry._replace(priority=priority(entry.segment)) for entry in self._entries.values()
        ]
        self._entries = {entry.segment.key: entry for entry in entries}
        self._rank(entries)

    def _rank(self, entries: Iterable[Entry]) -> None:
        self._heap = list(entries)
        heapq.heapify(self._heap)


def _worth(segment: Segment, uses: float) -> float:
    """What a segment brings for a page of the pool: tokens that need not be encoded again."""
    return max(1, uses) * segment.num_tokens / len(segment.pages)


class GreedyDual:
    """GreedyDual-Size-Frequency (Cherkasova 1998): evicts what brings least for its pages.

    A segment's priority is ``clock + uses * tokens / pages``: tokens are what encoding it again
    costs, and what a step's budget counts. The clock is the priority of the last one evicted, so
    that what is used no more goes in the end, however often it once was. Documents that are used
    once cannot drive out those that are used often: they only wear off each other.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._ranked = Ranked()

    def add(self, segment: Segment) -> None:
        """Files a segment by its priority."""
        self._ranked.put(segment, self._clock + _worth(segment, segment.uses))

    def remove(self, segment: Segment) -> None:
        """Forgets a segment."""
        self._ranked.remove(segment)

    def take(self) -> Segment:
        """Removes the segment with the lowest priority, which the clock moves on to."""
        entry = self._ranked.take()
        self._clock = entry.priority
        return entry.segment


@dataclass
class _Count:
    segment: Segment
    seen: int = 0  # of the segment's uses
    uses: float = 0


class LeastFrequentlyUsed:
    """Evicts what is used least often for its pages, by a count that outlives eviction.

    The priority is ``uses * tokens / pages`` as in ``GreedyDual``, but there is no clock, and a
    document that was evicted and comes back goes on with its count: what comes back now and then is
    told from what comes once. So that old favourites go, all counts are halved after ``PERIOD``
    times as many additions as segments have been there at once, as in TinyLFU (Einziger 2017).
    Counts of evicted documents are kept for ``MEMORY`` times as many, the latest.
    """

    PERIOD = 30
    MEMORY = 8

    def __init__(self) -> None:
        self._ranked = Ranked()
        self._counts: dict[bytes, _Count] = {}  # of what is in the pool, as far as known
        self._evicted: OrderedDict[bytes, float] = OrderedDict()
        self._most = 64  # segments filed at once
        self._additions = 0

    def add(self, segment: Segment) -> None:
        """Files a segment by its priority."""
        count = self._counts.get(segment.key)
        if count is None or count.segment is not segment:
            count = _Count(segment, uses=self._evicted.pop(segment.key, 0))
            self._counts[segment.key] = count
        count.uses += segment.uses - count.seen
        count.seen = segment.uses
        self._ranked.put(segment, _worth(segment, count.uses))
        self._most = max(self._most, len(self._ranked))
        self._additions += 1
        if self._additions >= self.PERIOD * self._most:
            self._age()

    def remove(self, segment: Segment) -> None:
        """Takes a segment out of the order; its count stays, for it may be filed again."""
        self._ranked.remove(segment)

    def take(self) -> Segment:
        """Removes the segment with the lowest priority."""
        segment = self._ranked.take().segment
        count = self._counts.pop(segment.key)
        if segment.is_document:
            self._evicted[segment.key] = count.uses
            if len(self._evicted) > self.MEMORY * self._most:
                self._evicted.popitem(last=False)
        return segment

    def _age(self) -> None:
        self._additions = 0
        # Neither filed nor pinned: given up for another reason than room.
        gone = [
            c for c in self._counts.values() if not (c.segment.pins or c.segment in self._ranked)
        ]
        for count in gone:
            del self._counts[count.segment.key]
        for count in self._counts.values():
            count.uses /= 2
        self._evicted = OrderedDict((k, uses / 2) for k, uses in self._evicted.items())
        self._ranked.rank_anew(lambda segment: _worth(segment, self._counts[segment.key].uses))


type NewPolicy = Callable[[], EvictionPolicy]
"""Makes a policy that has seen nothing yet."""

POLICIES: dict[str, NewPolicy] = {
    "lfu": LeastFrequentlyUsed,
    "gdsf": GreedyDual,
    "lru": LeastRecentlyUsed,
}
"""By the names that options have for them."""
