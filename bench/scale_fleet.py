"""A fleet of servers behind a router, simulated: what their caches find."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lazyattn_jax.bench.scale_model import Traffic
from lazyattn_jax.bench.workloads import draw_distinct

SLACK = 0.1  # a replica may get so much more than its share


class Replica:
    """A cache of documents of which the least recently used go."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._cached: dict[int, None] = {}
        self.requests = 0

    def has(self, documents: Sequence[int]) -> int:
        """How many of some documents it has."""
        return sum(document in self._cached for document in documents)

    def take(self, documents: Sequence[int]) -> None:
        """Answers a request for them."""
        self.requests += 1
        for document in documents:
            self._cached.pop(document, None)
            self._cached[document] = None
        while len(self._cached) > self._size:
            del self._cached[next(iter(self._cached))]


def fleet_hits(
    traffic: Traffic, replicas: int, cached: float, *, aware: bool, topics: int = 1, seed: int = 0
) -> float:
    """Share of the documents asked for that the replica which gets the request has.

    Args:
      traffic: what is asked.
      replicas: servers.
      cached: documents that each has room for.
      aware: requests go to the replica that has most of their documents, among those that have not
        had ``SLACK`` more than their share; else each replica gets every so-manieth.
      topics: parts of the documents that requests keep to, each request to one of them, by chance.
      seed: of the requests.
    """
    rng = np.random.default_rng(seed)
    servers = [Replica(int(cached)) for _ in range(replicas)]
    warm = 2 + int(2 * replicas * cached / traffic.documents)
    pool, found, asked = traffic.pool // topics, 0, 0
    for i in range(2 * warm + 500):
        first = int(rng.integers(topics)) * pool
        documents = [first + d for d in draw_distinct(rng, pool, traffic.documents, traffic.alpha)]
        server = servers[i % replicas]
        if aware:
            most = (1 + SLACK) * i / replicas + 1
            free = [s for s in servers if s.requests < most]
            server = max(free, key=lambda s: (s.has(documents), -s.requests))
        if i >= warm:
            found, asked = found + server.has(documents), asked + len(documents)
        server.take(documents)
    return found / asked
