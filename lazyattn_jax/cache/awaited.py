"""What requests in line will need: it is evicted last, and of it first what is needed latest."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from lazyattn_jax.cache.eviction import EvictionPolicy, NewPolicy, Ranked

if TYPE_CHECKING:
    from lazyattn_jax.cache.segments import Segment


class Awaited:
    """An eviction policy that knows who waits for what.

    Segments that nobody in line needs go first, in the order of another policy. Then go those whose
    next turn is the furthest: the best there is (Belady 1966), as far ahead as the line is long.

    Args:
      new_policy: makes the other policy.
    """

    def __init__(self, new_policy: NewPolicy) -> None:
        self._new_policy = new_policy
        self._policy: EvictionPolicy = new_policy()
        self._turns: dict[bytes, list[int]] = {}  # of those who wait, by key; rising
        self._filed: dict[bytes, Segment] = {}
        self._wanted = Ranked()  # those of the filed ones that somebody waits for

    def __contains__(self, key: bytes) -> bool:
        return key in self._filed

    def add(self, segment: Segment) -> None:
        """A segment may be evicted from now on."""
        self._filed[segment.key] = segment
        self._file(segment)

    def remove(self, segment: Segment) -> None:
        """A segment that was added may not be evicted any more, or is gone."""
        del self._filed[segment.key]
        self._unfile(segment)

    def take(self) -> Segment:
        """Removes the segment that is to be evicted next; there must be one."""
        if len(self._wanted) < len(self._filed):
            segment = self._policy.take()
        else:
            segment = self._wanted.take().segment
        del self._filed[segment.key]
        return segment

    @property
    def num_wanted(self) -> int:
        """Keys that somebody in line needs."""
        return len(self._turns)

    def want(self, key: bytes, turn: int) -> None:
        """Somebody in line needs a segment, here or not; the lowest turn comes first."""
        segment = self._filed.get(key)
        if segment is not None:
            self._unfile(segment)
        insort(self._turns.setdefault(key, []), turn)
        if segment is not None:
            self._file(segment)

    def drop(self, key: bytes, turn: int) -> None:
        """Takes ``want`` back."""
        segment = self._filed.get(key)
        if segment is not None:
            self._unfile(segment)
        turns = self._turns[key]
        del turns[bisect_left(turns, turn)]
        if not turns:
            del self._turns[key]
        if segment is not None:
            self._file(segment)

    def forget_uses(self) -> None:
        """Starts the other policy anew, when nothing is filed."""
        self._policy = self._new_policy()

    def _file(self, segment: Segment) -> None:
        turns = self._turns.get(segment.key)
        if turns is None:
            self._policy.add(segment)
        else:
            self._wanted.put(segment, -turns[0])

    def _unfile(self, segment: Segment) -> None:
        if segment in self._wanted:
            self._wanted.remove(segment)
        else:
            self._policy.remove(segment)
