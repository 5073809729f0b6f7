"""What is evicted from the pool, and kept in the host's memory."""

from __future__ import annotations

import pytest

from lazyattn_jax.cache.host import HostStore
from lazyattn_jax.cache.pages import PageAllocator
from lazyattn_jax.cache.segments import Segment, SegmentIndex


def segment(key: bytes, pages: int = 2, *, is_document: bool = True) -> Segment:
    return Segment(key, tuple(range(pages)), 4 * pages, is_document)


def stored(*keys: bytes, capacity: int = 6) -> HostStore:
    """A store with documents of two pages."""
    store = HostStore(capacity)
    for key in keys:
        store.put(key, 2, key + b"'s KV")
    return store


def test_documents_are_found_until_others_need_their_place():
    store = stored(b"a", b"b", b"c")
    assert store.find(b"a") == b"a's KV"  # now b has been of no use for the longest time
    store.put(b"d", 2, "new")
    assert [key for key in (b"a", b"b", b"c", b"d") if key in store] == [b"a", b"c", b"d"]
    assert store.find(b"b") is None
    assert store.num_pages == 6
    store.put(b"e", 5, "large")
    assert [key for key in (b"a", b"c", b"d", b"e") if key in store] == [b"e"]
    assert store.num_pages == 5


def test_what_is_larger_than_the_store_drives_nothing_out():
    store = stored(b"a")
    store.put(b"b", 7, "too large")
    assert b"a" in store
    assert b"b" not in store


def test_a_document_is_stored_once():
    store = stored(b"a", b"b", b"c")
    for key in (b"a", b"d"):
        store.offer(segment(key))
    assert [s.key for s in store.take_leaving()] == [b"d"]
    assert not store.take_leaving()
    store.put(b"d", 2, "new")
    assert b"a" in store  # offered again: of use not long ago
    assert b"b" not in store


@pytest.mark.parametrize(("capacity", "is_document"), [(0, True), (6, False)])
def test_what_is_not_stored(capacity, is_document):
    store = HostStore(capacity)
    store.offer(segment(b"a", is_document=is_document))
    assert not store.take_leaving()


def test_what_is_discarded_is_forgotten_on_its_way_too():
    store = stored(b"a")
    store.offer(segment(b"b"))
    for key in (b"a", b"b", b"c"):
        store.discard(key)
    assert not store.take_leaving()
    assert b"a" not in store
    assert store.num_pages == 0


def test_an_index_offers_what_it_evicts_and_not_what_is_discarded():
    allocator, store = PageAllocator(6), HostStore(10)
    index = SegmentIndex(allocator, store=store)
    for key in (b"a", b"b", b"c"):
        index.publish(key, allocator.allocate(2), 8, is_document=key != b"b")
    index.discard(b"c")
    index.allocate(6)
    leaving = store.take_leaving()
    assert [s.key for s in leaving] == [b"a"]
    store.put(b"a", 2, "KV")
    index.discard(b"a")
    assert b"a" not in store
    store.put(b"a", 2, "KV")
    index.clear()
    assert store.num_pages == 0
