"""Segments of KV: how they are named, found, pinned and evicted.

A segment's key says everything its KV depends on, so equal keys mean equal KV:

* the root: model fingerprint and cache salt;
* a **document** (independent segment): root, the key of the prefix it was encoded after (or none),
  the gap, its tokens;
* a **page of text** (contextual segment): the key of all text before it, its tokens, and the keys
  of the documents that stand between them, with how they are seen.

Keys are SHA-256 over an unambiguous encoding; two users' contents never share a key by accident.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lazyattn_jax.cache.awaited import Awaited
from lazyattn_jax.cache.eviction import GreedyDual, NewPolicy
from lazyattn_jax.cache.host import HostStore
from lazyattn_jax.cache.pages import PageAllocator


def root_key(fingerprint: bytes, salt: str) -> bytes:
    """The key that every other key of one model and one salt descends from."""
    return _digest(b"root", fingerprint, salt.encode())


def document_key(root: bytes, prefix: bytes | None, gap: int, tokens: Sequence[int]) -> bytes:
    """Key of a document encoded after a prefix (its last page's key) and a gap, or alone."""
    return _digest(b"document", root, prefix or b"", str(gap).encode(), _token_bytes(tokens))


def seen_key(document: bytes, skipped: int, temperature: float) -> bytes:
    """Key of what text sees of a document: all but its first tokens, at some temperature."""
    return _digest(b"seen", document, str(skipped).encode(), repr(temperature).encode())


def page_key(previous: bytes, content: Iterable[Sequence[int] | bytes]) -> bytes:
    """Key of one page of contextual tokens.

    Args:
      previous: key of the page before, or the root.
      content: in reading order, runs of token ids and keys (bytes) of documents between them.
    """
    parts = [b"d" + c if isinstance(c, bytes) else b"t" + _token_bytes(c) for c in content]
    return _digest(b"page", previous, *parts)


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _token_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


@dataclass(eq=False)
class Segment:
    """Published KV in pool pages; immutable from the moment it is in the index.

    ``pins`` counts the placements of running requests that need it, and one if it is kept;
    ``uses`` the requests that have been computed with it.
    """

    key: bytes
    pages: tuple[int, ...]
    num_tokens: int
    is_document: bool
    pins: int = 0
    uses: int = 0


class SegmentIndex:
    """Finds segments by key, and makes room by evicting unpinned ones.

    Args:
      allocator: of the pool's pages.
      policy: makes what says which go first of those that nobody in line needs;
        GreedyDual-Size-Frequency by default.
      store: where evicted documents go; by default nowhere.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        policy: NewPolicy = GreedyDual,
        store: HostStore | None = None,
    ) -> None:
        self._allocator = allocator
        self.store = store or HostStore()
        self._unpinned = Awaited(policy)
        self._segments: dict[bytes, Segment] = {}
        self._unpinned_pages = 0
        self._kept: dict[bytes, int] = {}  # pages by key; pinned while in the index
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, key: bytes) -> bool:
        return key in self._segments

    @property
    def num_available(self) -> int:
        """Pages that are free or can be made free."""
        return self._allocator.num_free + self._unpinned_pages

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        """Pages held by segments."""
        return sum(len(s.pages) for s in self._segments.values())

    def segments(self) -> list[Segment]:
        """All segments, in no particular order."""
        return list(self._segments.values())

    def pin(self, key: bytes) -> Segment | None:
        """Finds a segment and keeps it from eviction until ``unpin``; none if it is not here."""
        segment = self._segments.get(key)
        if segment is None:
            return None
        if segment.pins == 0:
            self._unpinned.remove(segment)
            self._unpinned_pages -= len(segment.pages)
        segment.pins += 1
        return segment

    def pin_chain(self, keys: Iterable[bytes]) -> list[Segment]:
        """Pins one segment after the other, up to the first that is not here."""
        found = []
        for key in keys:
            segment = self.pin(key)
            if segment is None:
                break
            found.append(segment)
        return found

    def unpin(self, *segments: Segment) -> None:
        """Gives one pin of each back; after its last one a segment may be evicted.

        Raises:
          RuntimeError: a segment is not pinned.
        """
        for segment in segments:
            if segment.pins < 1:
                raise RuntimeError(
                    f"segment {segment.key.hex()[:12]} is unpinned more often than pinned"
                )
            segment.pins -= 1
            if segment.pins == 0:
                self._evictable(segment)

    def want(self, keys: Iterable[bytes], turn: int) -> None:
        """Notes what a request in line will need, here or not; the lowest turn comes first."""
        for key in keys:
            self._unpinned.want(key, turn)

    def unwant(self, keys: Iterable[bytes], turn: int) -> None:
        """Takes ``want`` back."""
        for key in keys:
            self._unpinned.drop(key, turn)

    @property
    def num_wanted(self) -> int:
        """Keys that requests in line need."""
        return self._unpinned.num_wanted

    def keep(self, key: bytes, num_pages: int) -> None:
        """Pins a segment for good: now if it is here, else as soon as it is published.

        Args:
          key: of the segment.
          num_pages: pages that it takes or will take.
        """
        if key not in self._kept:
            self._kept[key] = num_pages
            self.pin(key)

    def let_go(self, key: bytes) -> None:
        """Ends ``keep``; harmless for what is not kept."""
        if self._kept.pop(key, None) is not None and key in self._segments:
            self.unpin(self._segments[key])

    def is_kept(self, key: bytes) -> bool:
        """Whether ``keep`` holds for a key."""
        return key in self._kept

    @property
    def num_kept(self) -> int:
        """Pages that kept segments take or will take."""
        return sum(self._kept.values())

    def publish(
        self, key: bytes, pages: Sequence[int], num_tokens: int, *, is_document: bool
    ) -> Segment | None:
        """Makes private pages a segment, unpinned unless kept; none if the key is taken.

        When none is returned the pages still belong to the caller.
        """
        if key in self._segments:
            return None
        segment = Segment(key, tuple(pages), num_tokens, is_document)
        self._segments[key] = segment
        self._evictable(segment)
        if key in self._kept:
            self.pin(key)
        return segment

    def allocate(self, count: int) -> list[int] | None:
        """Takes ``count`` pages, evicting where needed; takes and evicts none if that cannot do."""
        if count > self.num_available:
            return None
        while self._allocator.num_free < count:
            segment = self._unpinned.take()
            self._evict(segment)
            self.store.offer(segment)
        return self._allocator.allocate(count)

    def free(self, pages: Iterable[int]) -> None:
        """Gives private pages back."""
        self._allocator.free(pages)

    def discard(self, key: bytes) -> None:
        """Evicts a segment if it is here and not pinned; it is not stored either."""
        self.store.discard(key)
        if key in self._unpinned:
            self._unpinned.remove(self._segments[key])
            self._evict(self._segments[key])

    def clear(self) -> None:
        """Evicts every segment that is not pinned, and forgets how often what is gone was used."""
        for key in list(self._segments):
            self.discard(key)
        self.store.clear()
        self._unpinned.forget_uses()

    def _evictable(self, segment: Segment) -> None:
        self._unpinned.add(segment)
        self._unpinned_pages += len(segment.pages)

    def _evict(self, segment: Segment) -> None:
        self._unpinned_pages -= len(segment.pages)
        del self._segments[segment.key]
        self._allocator.free(segment.pages)
        self.num_evicted += 1

    def check_integrity(self, private: Iterable[int], pins: dict[bytes, int]) -> None:
        """Checks that every page is accounted for exactly once, and every pin has an owner.

        Args:
          private: pages that requests and encode jobs hold for themselves.
          pins: how many pins the requests and jobs hold, by segment key.

        Raises:
          RuntimeError: the first disagreement, with the page or segment it concerns.
        """
        owner: dict[int, str] = {}
        claims = [("the free list", self._allocator.free_pages()), ("a request", private)]
        claims += [(f"segment {s.key.hex()[:12]}", s.pages) for s in self._segments.values()]
        for name, pages in claims:
            for page in pages:
                if page in owner:
                    raise RuntimeError(f"page {page} belongs to {owner[page]} and to {name}")
                owner[page] = name
        if len(owner) != self._allocator.num_pages:
            lost = sorted(set(range(self._allocator.num_pages)) - set(owner))
            raise RuntimeError(f"{len(lost)} pages belong to nobody, among them page {lost[0]}")
        for key, segment in self._segments.items():
            held = pins.get(key, 0) + (key in self._kept)
            if segment.pins != held:
                raise RuntimeError(
                    f"segment {key.hex()[:12]} has {segment.pins} pins, its users hold {held}"
                )
            if (key in self._unpinned) != (segment.pins == 0):
                raise RuntimeError(f"segment {key.hex()[:12]} is filed wrongly for eviction")
        if unknown := set(pins) - set(self._segments):
            raise RuntimeError(f"a pinned segment was evicted: {unknown.pop().hex()[:12]}")
