"""What requests in line need is evicted last: against a plain list, and in an index."""

from __future__ import annotations

import random

import pytest

from lazyattn_jax.cache.awaited import Awaited
from lazyattn_jax.cache.eviction import LeastRecentlyUsed
from lazyattn_jax.cache.pages import PageAllocator
from lazyattn_jax.cache.segments import Segment, SegmentIndex


def names(index: SegmentIndex) -> bytes:
    return b"".join(sorted(s.key for s in index.segments()))


def publish(index: SegmentIndex, keys: bytes) -> None:
    for key in (bytes([k]) for k in keys):
        pages = index.allocate(1)
        assert pages is not None
        index.publish(key, pages, 16, is_document=True)


def test_what_is_needed_latest_goes_first_of_what_is_needed():
    index = SegmentIndex(PageAllocator(4), LeastRecentlyUsed)
    publish(index, b"abcd")
    index.want([b"a", b"c"], 1)
    index.want([b"a", b"x"], 2)
    index.want([b"b", b"c"], 3)
    publish(index, b"x")  # nobody needs d
    assert names(index) == b"abcx"
    publish(index, b"e")  # b is needed third, x second, a and c first
    assert names(index) == b"acex"
    index.unwant([b"a", b"c"], 1)
    publish(index, b"f")  # nobody needs e
    assert names(index) == b"acfx"
    index.pin(b"f")
    publish(index, b"g")  # c is needed third, a and x second
    assert names(index) == b"afgx"


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events(seed):
    rng, turns = random.Random(seed), iter(range(10**6))
    policy = Awaited(LeastRecentlyUsed)
    segments = [Segment(bytes([i]), (i,), 16, is_document=True) for i in range(12)]
    filed: list[Segment] = []  # what nobody needs: the least recently filed first
    wants: list[tuple[int, Segment]] = []

    def needed(segment):
        return min((turn for turn, s in wants if s is segment), default=None)

    def refile(segment, before):
        """What is needed no more, or was not needed, goes to the end."""
        if segment in filed and (before is None) != (needed(segment) is None):
            filed.remove(segment)
            filed.append(segment)

    for _ in range(500):
        segment, event = rng.choice(segments), rng.randrange(5)
        before = needed(segment)
        if event == 0:
            turn = next(turns) * rng.choice([1, -1])
            policy.want(segment.key, turn)
            wants.append((turn, segment))
            refile(segment, before)
        elif event == 1 and wants:
            turn, segment = gone = rng.choice(wants)
            before = needed(segment)
            policy.drop(segment.key, turn)
            wants.remove(gone)
            refile(segment, before)
        elif event == 2 and segment not in filed:
            policy.add(segment)
            filed.append(segment)
        elif event == 3 and segment in filed:
            policy.remove(segment)
            filed.remove(segment)
        elif event == 4 and filed:
            free = [s for s in filed if needed(s) is None]
            expected = free[0] if free else max(filed, key=needed)
            assert policy.take() is expected
            filed.remove(expected)
        for s in segments:
            assert (s.key in policy) == (s in filed)
