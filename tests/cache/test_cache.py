"""Pages and segments: nothing is lost, nothing is handed out twice, keys say all that matters."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lazyattn_jax.cache.eviction import LeastRecentlyUsed
from lazyattn_jax.cache.pages import PageAllocator
from lazyattn_jax.cache.segments import SegmentIndex, document_key, page_key, root_key


def test_pages_are_handed_out_once_and_come_back():
    allocator = PageAllocator(5)
    first, second = allocator.allocate(2), allocator.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert allocator.allocate(1) is None
    assert allocator.allocate(0) == []
    allocator.free(first)
    assert allocator.num_free == 2
    assert allocator.allocate(3) is None
    assert sorted(allocator.allocate(2)) == sorted(first)


def test_freeing_twice_is_noticed():
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.free(pages)
    with pytest.raises(RuntimeError, match=f"page {pages[0]} is freed twice"):
        allocator.free(pages)


def index_with(num_pages: int, *lengths: int) -> tuple[SegmentIndex, list[bytes]]:
    index = SegmentIndex(PageAllocator(num_pages), LeastRecentlyUsed)
    keys = [bytes([i]) for i in range(len(lengths))]
    for key, length in zip(keys, lengths, strict=True):
        index.publish(key, index.allocate(length), length, is_document=True)
    return index, keys


def test_eviction_takes_the_least_recently_used_and_no_more_than_needed():
    index, (a, b, c) = index_with(6, 2, 2, 2)
    index.unpin(index.pin(a))  # b is now the oldest
    assert len(index.allocate(1)) == 1
    assert b not in index
    assert a in index
    assert c in index
    assert index.num_evicted == 1


def test_pinned_segments_stay_and_what_cannot_do_evicts_nothing():
    index, (a, b) = index_with(4, 2, 2)
    segment = index.pin(a)
    assert index.num_available == 2
    assert index.allocate(3) is None
    assert a in index
    assert b in index
    index.unpin(segment)
    assert len(index.allocate(4)) == 4
    assert len(index) == 0


def test_a_kept_segment_is_pinned_when_it_comes_and_until_it_is_let_go():
    index, (a,) = index_with(4, 2)
    b = b"later"
    index.keep(a, 2)
    index.keep(b, 2)
    assert index.num_kept == 4
    assert index.publish(b, index.allocate(2), 2, is_document=True).pins == 1
    assert index.num_available == 0
    assert index.allocate(1) is None
    index.discard(a)
    assert a in index
    index.check_integrity([], {})
    index.let_go(a)
    assert not index.is_kept(a)
    assert index.is_kept(b)
    assert len(index.allocate(2)) == 2
    assert a not in index


def test_unpinning_too_often_is_noticed():
    index, (a,) = index_with(2, 2)
    segment = index.pin(a)
    index.unpin(segment)
    with pytest.raises(RuntimeError, match="unpinned more often than pinned"):
        index.unpin(segment)


def test_a_taken_key_leaves_the_pages_with_the_caller():
    index, (a,) = index_with(4, 2)
    pages = index.allocate(2)
    assert index.publish(a, pages, 2, is_document=True) is None
    index.check_integrity(pages, {})
    index.free(pages)
    index.check_integrity([], {})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index, segment: index._allocator.allocate(1), "1 pages belong to nobody"),
        (lambda index, segment: index._allocator.free(segment.pages), "belongs to .* and to"),
        (lambda index, segment: setattr(segment, "pins", 2), "has 2 pins, its users hold 1"),
        (lambda index, segment: index._evict_for_test(segment.key), "pinned segment was evicted"),
    ],
)
def test_integrity_check_notices(damage, message):
    index, (a, _) = index_with(6, 2, 2)
    segment = index.pin(a)
    index.check_integrity([], {a: 1})

    def evict(key: bytes) -> None:
        del index._segments[key]
        index._allocator.free(segment.pages)

    index._evict_for_test = evict
    damage(index, segment)
    with pytest.raises(RuntimeError, match=message):
        index.check_integrity([], {a: 1})


def test_keys_differ_by_everything_the_kv_depends_on():
    root = root_key(b"model", "")
    keys = [
        root,
        root_key(b"model2", ""),
        root_key(b"model", "salt"),
        root_key(b"mode", "l"),
        document_key(root, None, 0, [1, 2, 3]),
        document_key(root, None, 0, [1, 2]),
        document_key(root, None, 200, [1, 2, 3]),
        document_key(root, root, 0, [1, 2, 3]),
        document_key(root_key(b"model", "salt"), None, 0, [1, 2, 3]),
        page_key(root, [[1, 2, 3]]),
        page_key(root, [[1, 2], [3]]),
        page_key(root, [[1], root, [2, 3]]),
        page_key(root, [[1, 2], root, [3]]),
        page_key(root, [[], root, [1, 2, 3]]),
        page_key(root, [[1, 2, 3], root, []]),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)


class IndexMachine(RuleBasedStateMachine):
    """Random publishing, pinning, unpinning and allocating against a model in plain Python."""

    NUM_PAGES = 12
    pins = Bundle("pins")
    private = Bundle("private")

    def __init__(self) -> None:
        super().__init__()
        self.index = SegmentIndex(PageAllocator(self.NUM_PAGES), LeastRecentlyUsed)
        self.held: dict[bytes, int] = {}
        self.loose: list[int] = []
        self.order: list[bytes] = []  # unpinned keys, least recently used first
        self.sizes: dict[bytes, int] = {}
        self.kept: set[bytes] = set()
        self.count = 0

    @rule(target=private, count=st.integers(1, 5))
    def allocate(self, count):
        free = self.NUM_PAGES - len(self.loose) - sum(self.sizes.values())
        available = free + sum(self.sizes[k] for k in self.order)
        pages = self.index.allocate(count)
        assert (pages is None) == (count > available)
        if pages is None:
            return []
        while free < count:
            key = self.order.pop(0)
            free += self.sizes.pop(key)
        assert not set(pages) & set(self.loose)
        self.loose += pages
        return pages

    @rule(pages=consumes(private), publish=st.booleans())
    def dispose(self, pages, publish):
        self.loose = [p for p in self.loose if p not in pages]
        if publish and pages:
            key = self.count.to_bytes(4, "little")
            self.count += 1
            assert self.index.publish(key, pages, len(pages), is_document=True)
            self.sizes[key] = len(pages)
            if key not in self.kept:
                self.order.append(key)
        else:
            self.index.free(pages)

    @rule(target=pins, number=st.integers(0, 20))
    def pin(self, number):
        key = number.to_bytes(4, "little")
        segment = self.index.pin(key)
        assert (segment is not None) == (key in self.sizes)
        if segment is not None:
            self.held[key] = self.held.get(key, 0) + 1
            if key in self.order:
                self.order.remove(key)
        return segment

    @rule(segment=consumes(pins))
    def unpin(self, segment):
        if segment is not None:
            self.index.unpin(segment)
            self.held[segment.key] -= 1
            if not self.held[segment.key]:
                del self.held[segment.key]
                if segment.key not in self.kept:
                    self.order.append(segment.key)

    @rule(number=st.integers(0, 20))
    def keep(self, number):
        """Also what is not there yet."""
        key = number.to_bytes(4, "little")
        self.index.keep(key, 2)
        self.kept.add(key)
        if key in self.order:
            self.order.remove(key)

    @rule(number=st.integers(0, 20))
    def let_go(self, number):
        key = number.to_bytes(4, "little")
        self.index.let_go(key)
        if key in self.kept and key in self.sizes and key not in self.held:
            self.order.append(key)
        self.kept.discard(key)

    @rule(number=st.integers(0, 20))
    def discard(self, number):
        key = number.to_bytes(4, "little")
        self.index.discard(key)
        if key in self.order:
            self.order.remove(key)
            del self.sizes[key]

    @invariant()
    def consistent(self):
        self.index.check_integrity(self.loose, self.held)
        assert {s.key for s in self.index.segments()} == set(self.sizes)
        assert self.index.num_cached == sum(self.sizes.values())
        assert self.index.num_kept == 2 * len(self.kept)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_scheduler_cache_and_plan_do_not_load_jax():
    modules = ["engine.scheduler", "engine.plan", "engine.request", "cache.segments"]
    code = "import sys\n" + "".join(f"import lazyattn_jax.{m}\n" for m in modules)
    code += "sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
