"""Documents that are kept in the host's memory when the pool has no room for them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lazyattn_jax.cache.segments import Segment


class _Stored(NamedTuple):
    num_pages: int
    kv: Any


class HostStore:
    """KV of documents that were evicted from the pool, to come back without being computed again.

    A document's KV never changes, so it is stored when it is evicted for the first time and stays
    when it comes back to the pool. When the store is full the document goes that has not been
    evicted or found for the longest time.

    Args:
      capacity: pages that are stored at most; with 0 nothing is.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.num_pages = 0
        self._stored: OrderedDict[bytes, _Stored] = OrderedDict()
        self._leaving: dict[bytes, Segment] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._stored

    def offer(self, segment: Segment) -> None:
        """A segment leaves the pool; its pages hold what they held until the next step starts."""
        if segment.key in self._stored:
            self._stored.move_to_end(segment.key)
        elif segment.is_document and self.capacity:
            self._leaving[segment.key] = segment

    def take_leaving(self) -> list[Segment]:
        """Documents that have left the pool since the last call and are not stored."""
        leaving, self._leaving = self._leaving, {}
        return list(leaving.values())

    def put(self, key: bytes, num_pages: int, kv: Any) -> None:
        """Stores a document that is not here yet, in the place of others if need be.

        Args:
          key: of the segment.
          num_pages: that its KV takes here; a document larger than the store is not stored.
          kv: whatever can be made its KV again.
        """
        if num_pages > self.capacity:
            return
        while self.num_pages + num_pages > self.capacity:
            self.discard(next(iter(self._stored)))
        self._stored[key] = _Stored(num_pages, kv)
        self.num_pages += num_pages

    def find(self, key: bytes) -> Any:
        """A document's KV; none if it is not here."""
        stored = self._stored.get(key)
        if stored is None:
            return None
        self._stored.move_to_end(key)
        return stored.kv

    def discard(self, key: bytes) -> None:
        """Forgets a document, if it is here or on its way."""
        self._leaving.pop(key, None)
        stored = self._stored.pop(key, None)
        if stored is not None:
            self.num_pages -= stored.num_pages

    def clear(self) -> None:
        """Forgets everything."""
        for key in [*self._stored, *self._leaving]:
            self.discard(key)
