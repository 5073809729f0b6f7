"""A model on paper: what a server does with more documents, longer ones, more requests, more GPUs.

Everything measured is an argument; nothing here is. Documents of rank ``i`` are drawn with
probability proportional to ``1 / i**alpha``, distinct within a request.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.table import Table


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
      turn: share by which turned queries slow the reads of documents down.
    """

    weight_bytes: float
    token_bytes: float
    pool_bytes: float
    read: float
    copy: float
    prefill: float
    row: float = 0.0
    turn: float = 0.0


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
        return float((1 - (1 - self.inclusion()) ** requests).sum())

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


@dataclass(frozen=True)
class Rate:
    """What comes out: ``requests`` at a time, ``hits`` of their documents, seconds of each part."""

    requests: float
    hits: float
    prefill_seconds: float
    copy_seconds: float
    decode_seconds: float

    @property
    def per_second(self) -> float:
        """Requests a second."""
        return 1 / (self.prefill_seconds + self.copy_seconds + self.decode_seconds)


def rate(machine: Machine, traffic: Traffic, reuse: str, most: int = 256, caches: int = 1) -> Rate:
    """The rate of a server that is never idle.

    Args:
      machine: what was measured.
      traffic: what is asked.
      reuse: ``lazy``, ``block`` or ``none``.
      most: requests at a time, if the pool holds as many.
      caches: replicas among which a router divides the documents, so that each caches its own part.
    """
    lazy, tokens = reuse == "lazy", machine.pool_bytes / machine.token_bytes
    own = traffic.text_tokens + traffic.output_tokens
    held = traffic.documents * traffic.document_tokens

    def kv_tokens(requests: float) -> float:
        documents = traffic.distinct(requests) * traffic.document_tokens
        return requests * own + (documents if lazy else requests * held)

    requests = float(most)
    if kv_tokens(requests) > tokens:
        low, high = 0.0, requests
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if kv_tokens(middle) <= tokens else (low, middle)
        requests = low
    if reuse == "none":
        hits = 0.0
    else:
        free = tokens - (requests * own if lazy else kv_tokens(requests))
        hits = traffic.hit_rate(caches * free / traffic.document_tokens)
    computed = traffic.text_tokens + (1 - hits) * held
    copied = 2 * held * machine.token_bytes if reuse == "block" else 0.0
    return Rate(
        requests,
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
    return (machine.weight_bytes + kv) / machine.read + requests * machine.row


def break_even_output(machine: Machine) -> float:
    """Output tokens up to which turning queries costs less than copying, nothing being shared."""
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


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("scale", help="a model on paper", description=__doc__)
    for name, what in (
        ("weight-bytes", "read in every decode step"),
        ("token-bytes", "KV of one token"),
        ("pool-bytes", "that KV may take"),
        ("read", "bytes a second of a decode step, measured"),
        ("copy", "bytes a second of copies, read and written, measured"),
        ("prefill", "tokens a second, measured"),
    ):
        parser.add_argument(f"--{name}", type=float, required=True, help=what)
    parser.add_argument("--row", type=float, default=0.0, help="seconds a request and step")
    parser.add_argument("--turn", type=float, default=0.0, help="cost of turning, as a share")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints what each way of reuse comes to as one quantity of the traffic varies."""
    names = Machine.__dataclass_fields__
    machine = Machine(**{name: getattr(args, name) for name in names})
    base = Traffic()
    variations: dict[str, tuple[float, ...]] = {
        "alpha": (0.0, 0.5, 1.0, 1.5, 2.1),
        "pool": (100, 1000, 10_000),
        "documents": (5, 10, 20, 40),
        "document_tokens": (128, 512, 2048),
        "output_tokens": (32, 128, 512),
    }
    table = Table(title="Requests a second, on paper", title_justify="left")
    for column in ("traffic", "lazy", "block", "none", "lazy to block", "at a time: lazy", "block"):
        table.add_column(column, justify="left" if column == "traffic" else "right")
    for name, values in variations.items():
        for value in values:
            traffic = replace(base, **{name: value})  # type: ignore[arg-type]
            lazy, block, none = (rate(machine, traffic, r) for r in ("lazy", "block", "none"))
            table.add_row(
                f"{name} {value:g}",
                *(f"{r.per_second:.2f}" for r in (lazy, block, none)),
                f"{lazy.per_second / block.per_second:.2f}",
                *(f"{r.requests:.0f}" for r in (lazy, block)),
            )
    Console().print(table)
    if machine.turn:
        print(f"nothing shared: lazy is ahead up to {break_even_output(machine):.0f} output tokens")
