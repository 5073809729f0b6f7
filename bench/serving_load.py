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
    """Clients that each send their next request when the last one has ended.

    Args:
      concurrency: clients.
      begin: when the first of them comes.
      ramp: seconds in which they come, one after another: requests that begin at once would end at
        once, and the next ones too.
    """

    def __init__(self, concurrency: int, begin: float = 0.0, ramp: float = 0.0) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}, must be at least 1")
        self._concurrency = concurrency
        self._begin = begin
        self._gap = ramp / concurrency
        self._come = 0

    def due(self, now: float, running: int) -> list[float]:
        """See ``Load``."""
        while self.next_at() <= now:
            self._come += 1
        return [now] * (self._come - running)

    def next_at(self) -> float:
        """See ``Load``."""
        if self._come == self._concurrency:
            return math.inf
        return self._begin + self._come * self._gap
