"""When requests are sent: in an open loop at a rate, in a closed loop as others end."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np


class Load(Protocol):
    """Says which requests are due."""

    def due(self, now: float, running: int) -> list[float]:
        """Arrival times of the requests to send now; each is given once."""

    def next_at(self) -> float:
        """When the next one is due, if no request ends until then."""


class OpenLoop:
    """Poisson arrivals, whatever the server does.

    Args:
      rate: requests a second on average.
      begin: when the first gap begins.
      seed: of the gaps.
    """

    def __init__(self, rate: float, begin: float, seed: int = 0) -> None:
        if not rate > 0:
            raise ValueError(f"rate is {rate}, must be above 0")
        self._mean = 1 / rate
        self._rng = np.random.default_rng((seed, 4))
        self._next = begin + self._rng.exponential(self._mean)

    def due(self, now: float, running: int) -> list[float]:
        """See ``Load``."""
        arrivals = []
        while self._next <= now:
            arrivals.append(self._next)
            self._next += self._rng.exponential(self._mean)
        return arrivals

    def next_at(self) -> float:
        """See ``Load``."""
        return self._next


class ClosedLoop:
    """Always so many requests under way: the next is sent when one ends."""

    def __init__(self, concurrency: int) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}, must be at least 1")
        self._concurrency = concurrency

    def due(self, now: float, running: int) -> list[float]:
        """See ``Load``."""
        return [now] * (self._concurrency - running)

    def next_at(self) -> float:
        """See ``Load``."""
        return math.inf
