"""A model on paper: what a server does with more documents, longer ones, more requests, more GPUs.

Everything measured is an argument; nothing here is. Documents of rank ``i`` are drawn with
probability proportional to ``1 / i**alpha``, distinct within a request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

PREPARED = 2  # requests whose documents are held for copies that are still to be made; assumed


@dataclass(frozen=True)
class Machine:
    """What was measured of one model on one GPU, or on several as one.

    Attributes:
      weight_bytes: read in every decode step.
      token_bytes: KV of one token.
      pool_bytes: that KV may take.
      read: bytes a second of a decode step.
      copy: bytes a second, read and written, of copies within the pool.
      prefill: tokens a second of prefill steps.
      row: seconds that a decode step takes longer with each request, without attention.
      step: seconds that every decode step takes besides.
      turn: share by which turned queries slow the reads of documents down.
      headroom: share of the pool that requests leave when they are let in.
    """

    weight_bytes: float
    token_bytes: float
    pool_bytes: float
    read: float
    copy: float
    prefill: float
    row: float = 0.0
    step: float = 0.0
    turn: float = 0.0
    headroom: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """Requests of one kind; lengths in tokens. ``pool`` is the number of documents."""

    pool: int = 1000
    documents: int = 10
    alpha: float = 1.0
    document_tokens: int = 512
    text_tokens: int = 96  # system text and question
    output_tokens: int = 128

    def inclusion(self) -> Float[np.ndarray, "N"]:
        """Probability that a request holds the document of each rank.

        Draws one after another without replacement are the first ``documents`` of exponential
        clocks with rates ``1 / i**alpha``; by the time ``t`` at which so many have rung on average,
        clock ``i`` has with probability ``1 - exp(-t / i**alpha)``.
        """
        return _inclusion(self.pool, self.documents, self.alpha)

    def distinct(self, requests: float) -> float:
        """Documents that so many requests hold together, each counted once."""
        return float(self._held(requests).sum())

    def hit_rate(self, cached: float) -> float:
        """Share of the documents asked for that a cache of so many of them holds.

        Least recently used, by Che's approximation (IEEE JSAC 20(7), 2002).
        """
        p = self.inclusion()
        if cached >= self.pool:
            return 1.0
        if cached <= 0:
            return 0.0
        here = _solved(lambda t: -np.expm1(-t * p), cached)
        return float((p * here).sum() / p.sum())

    def hit_rate_of_line(self, cached: float, requests: float) -> float:
        """The same while requests wait in line, which tells the pool what to keep.

        It keeps what so many requests hold, and with the rest of the room what is asked for most.
        """
        p, here = self.inclusion(), self._held(requests)
        kept = np.arange(1, self.pool + 1) + here.sum() - np.cumsum(here)
        here[: np.searchsorted(kept, cached, side="right")] = 1.0
        return float((p * here).sum() / p.sum())

    def _held(self, requests: float) -> Float[np.ndarray, "N"]:
        """Probability that one of so many requests holds the document of each rank."""
        return 1 - (1 - self.inclusion()) ** requests


@dataclass(frozen=True)
class Rate:
    """What comes out.

    Attributes:
      requests: at a time.
      cached: documents that there is room for in the pool.
      hits: share of the documents asked for that are found.
      prefill_seconds, copy_seconds, decode_seconds: of each request.
    """

    requests: float
    cached: float
    hits: float
    prefill_seconds: float
    copy_seconds: float
    decode_seconds: float

    @property
    def per_second(self) -> float:
        """Requests a second."""
        return 1 / (self.prefill_seconds + self.copy_seconds + self.decode_seconds)


def rate(
    machine: Machine,
    traffic: Traffic,
    reuse: str,
    most: int = 256,
    hit_rate: Callable[[float], float] | None = None,
) -> Rate:
    """The rate of a server that is never idle.

    Args:
      machine: what was measured.
      traffic: what is asked.
      reuse: ``lazy``, ``block`` or ``none``.
      most: requests at a time, if the pool holds as many.
      hit_rate: share of the documents that is found, from how many are cached; by default that of
        one server's cache.
    """
    lazy, tokens = reuse == "lazy", machine.pool_bytes / machine.token_bytes
    own = traffic.text_tokens + traffic.output_tokens
    held = traffic.documents * traffic.document_tokens
    room = (1 - machine.headroom) * tokens - (reuse == "block") * PREPARED * held

    def kv_tokens(requests: float) -> float:
        documents = traffic.distinct(requests) * traffic.document_tokens
        return requests * own + (documents if lazy else requests * held)

    requests = float(most)
    if waits := kv_tokens(requests) > room:
        low, high = 0.0, requests
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if kv_tokens(middle) <= room else (low, middle)
        requests = low
    if reuse == "none":
        cached = hits = 0.0
    else:
        free = tokens - (requests * own if lazy else kv_tokens(requests))
        cached = free / traffic.document_tokens
        if hit_rate is not None:
            hits = hit_rate(cached)
        elif waits:
            hits = traffic.hit_rate_of_line(cached, requests if lazy else 0)
        else:
            hits = traffic.hit_rate(cached)
    computed = traffic.text_tokens + (1 - hits) * held
    copied = 2 * held * machine.token_bytes if reuse == "block" else 0.0
    return Rate(
        requests,
        cached,
        hits,
        computed / machine.prefill,
        copied / machine.copy,
        traffic.output_tokens * step_seconds(machine, traffic, reuse, requests) / requests,
    )


def step_seconds(machine: Machine, traffic: Traffic, reuse: str, requests: float) -> float:
    """A decode step of so many requests that are halfway through their output."""
    documents = requests * traffic.documents
    turned = 1.0
    if reuse == "lazy":
        documents, turned = traffic.distinct(requests), 1 + machine.turn
    own = requests * (traffic.text_tokens + traffic.output_tokens / 2)
    kv = (turned * documents * traffic.document_tokens + own) * machine.token_bytes
    return (machine.weight_bytes + kv) / machine.read + requests * machine.row + machine.step


def break_even_output(machine: Machine) -> float:
    """Output tokens up to which turning queries costs less than copying, nothing being shared.

    Infinite where turning costs nothing.
    """
    if not machine.turn:
        return float("inf")
    return 2 * machine.read / (machine.copy * machine.turn)


@functools.cache
def _inclusion(pool: int, documents: int, alpha: float) -> Float[np.ndarray, "N"]:
    rates = np.arange(1, pool + 1) ** -float(alpha)
    return _solved(lambda t: -np.expm1(-t * rates), documents)


def _solved(
    of_time: Callable[[float], Float[np.ndarray, "N"]], total: float
) -> Float[np.ndarray, "N"]:
    """The values of a rising function at the time at which they add up to ``total``."""
    low, high = 0.0, 1.0
    while of_time(high).sum() < total * (1 - 1e-12) and high < 1e300:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if of_time(middle).sum() < total else (low, middle)
    return of_time(high)
