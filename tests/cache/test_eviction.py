"""Eviction policies: against a plain computation of their rules, and on traces."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyattn_jax.bench.eviction import Trace, hit_rate, zipf
from lazyattn_jax.cache.eviction import (
    POLICIES,
    GreedyDual,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    NewPolicy,
)
from lazyattn_jax.cache.pages import PageAllocator
from lazyattn_jax.cache.segments import Segment, SegmentIndex
from lazyattn_jax.engine.config import EngineConfig


def segment(name: int, pages: int = 1, tokens: int = 16, uses: int = 1) -> Segment:
    key = name.to_bytes(4, "little")
    return Segment(key, tuple(range(pages)), tokens, is_document=True, uses=uses)


def take_all(policy, count: int) -> list[int]:
    return [int.from_bytes(policy.take().key, "little") for _ in range(count)]


def test_least_recently_used_goes_first():
    policy, parts = LeastRecentlyUsed(), [segment(i, uses=9 - i) for i in range(4)]
    for part in parts:
        policy.add(part)
    policy.remove(parts[0])
    policy.add(parts[0])
    assert take_all(policy, 4) == [1, 2, 3, 0]


def test_what_brings_least_for_its_pages_goes_first():
    """16 tokens a page once, 4 tokens a page three times, and 16 tokens a page twice."""
    policy = GreedyDual()
    for part in (segment(0, 2, 32, 2), segment(1, 1, 4, 3), segment(2, 3, 48, 1), segment(3)):
        policy.add(part)
    assert take_all(policy, 4) == [1, 2, 3, 0]  # of equal ones the older


def test_what_was_used_often_long_ago_goes_in_the_end():
    policy = GreedyDual()
    policy.add(segment(0, uses=50))
    for i in range(1, 200):
        policy.add(segment(i))
        if 0 in take_all(policy, 1):
            break
    # Each one-time segment moves the clock on by its own worth: after 50 of them it is even.
    assert i == 50


def test_a_count_outlives_eviction_for_documents_only():
    """Three uses, evicted, and one more: that is four. A page of text starts again."""
    policy = LeastFrequentlyUsed()
    for part in (segment(0, uses=3), replace(segment(1, uses=3), is_document=False)):
        policy.add(part)
    assert take_all(policy, 2) == [0, 1]
    back = segment(0, uses=1), replace(segment(1, uses=1), is_document=False)
    for part in (*back, segment(2, uses=3), segment(3, uses=2)):
        policy.add(part)
    assert take_all(policy, 4) == [1, 3, 2, 0]


def test_counts_of_the_latest_evicted_are_kept():
    class Short(LeastFrequentlyUsed):
        MEMORY = 1

    policy = Short()
    for i in range(65):  # of as many as it remembers at least, and one more
        policy.add(segment(i, uses=5))
        take_all(policy, 1)
    for i in (0, 1, 100):
        policy.add(segment(i, uses=1))
    assert take_all(policy, 3) == [0, 100, 1]


@pytest.mark.parametrize("name", POLICIES)
def test_a_cleared_index_is_like_a_new_one(name):
    """Documents used often before it was cleared count no more than others."""
    index = SegmentIndex(PageAllocator(4), POLICIES[name])

    def use(*names: int) -> None:
        for key in (bytes([n]) for n in names):
            if key not in index:
                index.publish(key, index.allocate(1), 16, is_document=True)
            part = index.pin(key)
            part.uses += 1
            index.unpin(part)

    use(*range(8), *[0] * 20, 1)
    pinned = index.pin(bytes([1]))
    index.clear()
    assert [s.key for s in index.segments()] == [bytes([1])]
    index.unpin(pinned)
    use(0, 2, 2, 3, 3, 1, 4)
    assert bytes([0]) not in index


def test_counts_are_halved_in_time():
    """An old favourite, 63 other additions, and one that is used five times since."""

    class Soon(LeastFrequentlyUsed):
        PERIOD = 1

    for uses, last in ((8, [0, 100]), (12, [100, 0])):
        policy = Soon()
        policy.add(segment(0, uses=uses))
        for i in range(1, 64):
            policy.add(segment(i))
        policy.add(segment(100, uses=5))
        assert take_all(policy, 65)[-2:] == last


def test_uses_are_counted_once():
    """Filed again after each use, and given up in between without being evicted."""
    policy, often, seldom = LeastFrequentlyUsed(), segment(0), segment(1, uses=4)
    policy.add(seldom)
    for uses in (1, 2, 3):
        often.uses = uses
        policy.add(often)
        policy.remove(often)
    policy.add(often)
    policy.add(segment(2, uses=3))
    assert take_all(policy, 3) == [0, 2, 1]
    assert not policy._counts


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["lfu", "gdsf", "lru"]))
def test_any_order_of_events_follows_the_rule(seed, name):
    """Against a list that is searched through each time."""
    rng, policy = random.Random(seed), POLICIES[name]()
    held: dict[int, tuple[float, int, Segment]] = {}
    uses: dict[int, int] = {}
    clock, number = 0.0, 0
    evicted: dict[int, int] = {}
    for _ in range(300):
        what = rng.random()
        if what < 0.6:
            i = rng.randrange(40)
            if i in held:
                policy.remove(held.pop(i)[2])
            part = segment(i, rng.randrange(1, 5), rng.randrange(1, 64), rng.randrange(4))
            policy.add(part)
            uses[i] = part.uses + (evicted.pop(i, 0) if name == "lfu" else 0)
            worth = max(1, uses[i]) * part.num_tokens / len(part.pages)
            held[i] = (0 if name == "lru" else clock + worth, number, part)
            number += 1
        elif held and what < 0.8:
            i = rng.choice(list(held))
            policy.remove(held.pop(i)[2])
        elif held:
            i = min(held, key=lambda k: held[k][:2])
            priority, _, part = held.pop(i)
            assert policy.take() is part
            if name == "gdsf":
                clock = priority
            evicted[i] = uses[i]


def test_a_scan_of_one_time_documents_does_not_wipe_out_the_hot_ones():
    """As many one-time tokens as three pools, while nothing hot is asked for."""
    rates = {}
    for name in POLICIES:
        trace = Trace(seed=1, num_pages=400)
        hot = [trace.document(pages=10) for _ in range(20)]
        for _ in range(10):
            trace.ask(hot)
        index = trace.replay(POLICIES[name])
        for _ in range(120):
            index.ask(trace.document(pages=10))
        rates[name] = sum(index.holds(document) for document in hot) / len(hot)
    assert rates == {"lfu": 1.0, "gdsf": 1.0, "lru": 0.0}


@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize("scan", [0.0, 0.3])
def test_policies_on_a_zipf_trace(share, scan):
    rates = {}
    for name, policy in POLICIES.items():
        trace = zipf(seed=3, documents=500, requests=4000, share=share, scan=scan)
        rates[name] = hit_rate(trace, policy)
    assert EngineConfig().eviction == "gdsf"
    assert rates["lfu"] > rates["gdsf"] + 0.01
    assert rates["gdsf"] > rates["lru"] + 0.01


def chat_hit_rate(policy: NewPolicy) -> float:
    """Ten chats take turns, four pages a turn, up to forty; there is room for twice as many."""
    rng, index = random.Random(0), SegmentIndex(PageAllocator(1000), policy)
    chats, names, found, asked = [[] for _ in range(10)], itertools.count(), 0, 0
    for _ in range(3000):
        chat = rng.choice(chats)
        if len(chat) == 40:
            chat.clear()
        # Pages are found up to the first that is missing, and the others computed again.
        held = list(itertools.takewhile(bool, map(index.pin, chat)))
        found, asked = found + len(held), asked + len(chat)
        chat += [next(names).to_bytes(8, "little") for _ in range(4)]
        for key in chat[len(held) :]:
            index.publish(key, index.allocate(1), 16, is_document=False)
            held.append(index.pin(key))
        for part in held:
            part.uses += 1
            index.unpin(part)
    return found / asked


def test_chats_that_grow_are_found_again_by_the_default():
    rates = {name: chat_hit_rate(policy) for name, policy in POLICIES.items()}
    assert rates["gdsf"] > 0.99
    assert rates["lru"] == 1
    assert rates["lfu"] < 0.5
