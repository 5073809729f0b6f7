"""Eviction policies: against a plain computation of their rules, and on traces."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyattn_jax.bench.eviction import Trace, hit_rate, zipf
from lazyattn_jax.cache.eviction import POLICIES, GreedyDual, LeastRecentlyUsed
from lazyattn_jax.cache.segments import Segment


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


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["gdsf", "lru"]))
def test_any_order_of_events_follows_the_rule(seed, name):
    """Against a list that is searched through each time."""
    rng, policy = random.Random(seed), POLICIES[name]()
    held: dict[int, tuple[float, int, Segment]] = {}
    clock, number = 0.0, 0
    for _ in range(300):
        what = rng.random()
        if what < 0.6:
            i = rng.randrange(40)
            if i in held:
                policy.remove(held.pop(i)[2])
            part = segment(i, rng.randrange(1, 5), rng.randrange(1, 64), rng.randrange(4))
            policy.add(part)
            worth = max(1, part.uses) * part.num_tokens / len(part.pages)
            held[i] = (clock + worth if name == "gdsf" else 0, number, part)
            number += 1
        elif held and what < 0.8:
            i = rng.choice(list(held))
            policy.remove(held.pop(i)[2])
        elif held:
            i = min(held, key=lambda k: held[k][:2])
            clock, _, part = held.pop(i)
            assert policy.take() is part


def test_a_scan_of_one_time_documents_does_not_wipe_out_the_hot_ones():
    """As many one-time tokens as three pools, while nothing hot is asked for."""
    rates = {}
    for name in POLICIES:
        trace = Trace(seed=1, num_pages=400)
        hot = [trace.document(pages=10) for _ in range(20)]
        for _ in range(10):
            trace.ask(hot)
        index = trace.replay(POLICIES[name]())
        for _ in range(120):
            index.ask(trace.document(pages=10))
        rates[name] = sum(index.holds(document) for document in hot) / len(hot)
    assert rates == {"gdsf": 1.0, "lru": 0.0}


@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize("scan", [0.0, 0.3])
def test_the_default_is_the_better_one_on_a_zipf_trace(share, scan):
    rates = {}
    for name, policy in POLICIES.items():
        trace = zipf(seed=3, documents=500, requests=4000, share=share, scan=scan)
        rates[name] = hit_rate(trace, policy())
    assert rates["gdsf"] > rates["lru"] + 0.01
