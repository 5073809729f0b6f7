"""How much of the documents' tokens is found in the pool under each eviction policy.

Traces of requests for documents are played on the segment index alone: a request pins its documents
and lets them go; what is missing is encoded. Popularity follows a Zipf law, sizes a log-normal one.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lazyattn_jax.bench import record
from lazyattn_jax.cache.eviction import POLICIES, NewPolicy
from lazyattn_jax.cache.pages import PageAllocator
from lazyattn_jax.cache.segments import SegmentIndex

PAGE_SIZE = 16
_SHARES = (0.05, 0.125, 0.25)  # of all documents that fit the pool
_SCANS = (0.0, 0.3)  # one-time documents among those that are asked for


class TracedDocument(NamedTuple):
    """A document of a trace."""

    key: bytes
    tokens: int

    @property
    def pages(self) -> int:
        """Pages of the pool that it takes."""
        return -(-self.tokens // PAGE_SIZE)


class Replay:
    """A pool that documents are asked for from."""

    def __init__(self, num_pages: int, policy: NewPolicy) -> None:
        self._index = SegmentIndex(PageAllocator(num_pages), policy)
        self.hit_tokens = 0
        self.tokens = 0

    def holds(self, document: TracedDocument) -> bool:
        """Whether a document is in the pool."""
        return document.key in self._index

    def ask(self, document: TracedDocument) -> None:
        """Uses a document, after encoding it if need be."""
        index = self._index
        segment = index.pin(document.key)
        self.tokens += document.tokens
        if segment is not None:
            self.hit_tokens += document.tokens
        else:
            pages = index.allocate(document.pages)
            if pages is None:
                raise ValueError(f"the pool is smaller than a document of {document.pages} pages")
            index.publish(document.key, pages, document.tokens, is_document=True)
            segment = index.pin(document.key)
            assert segment is not None
        segment.uses += 1
        index.unpin(segment)


class Trace:
    """Documents in the order they are asked for, and the pool they are asked from."""

    def __init__(self, *, seed: int, num_pages: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_pages = num_pages
        self.asked: list[TracedDocument] = []
        self._numbers = itertools.count()

    def document(self, *, pages: int | None = None) -> TracedDocument:
        """A new document, of about 300 tokens if nothing is said."""
        tokens = pages and pages * PAGE_SIZE
        tokens = tokens or int(np.clip(self.rng.lognormal(np.log(300), 0.8), 16, 4096))
        return TracedDocument(next(self._numbers).to_bytes(8, "little"), tokens)

    def ask(self, documents: Sequence[TracedDocument]) -> None:
        """Puts requests for documents at the end."""
        self.asked += documents

    def replay(self, policy: NewPolicy) -> Replay:
        """Plays all of it on an empty pool."""
        replay = Replay(self.num_pages, policy)
        for document in self.asked:
            replay.ask(document)
        return replay


def zipf(
    *,
    seed: int,
    documents: int,
    requests: int,
    share: float,
    scan: float = 0.0,
    drift: bool = False,
    exponent: float = 0.9,
) -> Trace:
    """A trace whose documents' popularity follows a Zipf law.

    Args:
      seed: of everything random.
      documents: that come back.
      requests: documents asked for, one after another.
      share: of the documents that fits the pool.
      scan: share of the requests that are for documents that never come back.
      drift: after half of the requests other documents are the popular ones.
      exponent: of the law.
    """
    trace = Trace(seed=seed, num_pages=0)
    known = [trace.document() for _ in range(documents)]
    total = sum(d.pages for d in known)
    trace.num_pages = max(int(total * share), max(d.pages for d in known))
    weights = np.arange(1, documents + 1, dtype=np.float64) ** -exponent
    ranks = trace.rng.choice(documents, requests, p=weights / weights.sum())
    once = trace.rng.random(requests) < scan
    moved = trace.rng.permutation(documents)
    for i, rank in enumerate(ranks.tolist()):
        place = int(moved[rank]) if drift and i >= requests // 2 else rank
        trace.ask([trace.document() if once[i] else known[place]])
    return trace


def hit_rate(trace: Trace, policy: NewPolicy) -> float:
    """Share of the tokens asked for that were in the pool."""
    replay = trace.replay(policy)
    return replay.hit_tokens / replay.tokens


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("eviction", help="hit rates of the eviction policies on traces")
    parser.add_argument("--documents", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=50_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="also write the results there as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Plays the traces, prints a table, and writes JSON where asked."""
    cases = [(s, scan, False) for s in _SHARES for scan in _SCANS]
    cases += [(s, 0.0, True) for s in _SHARES]
    results = []
    for share, scan, drift in track(cases, description="Replaying", transient=True):
        row: dict[str, Any] = {"share": share, "scan": scan, "drift": drift}
        for name, policy in POLICIES.items():
            sizes = {"documents": args.documents, "requests": args.requests}
            trace = zipf(seed=args.seed, share=share, scan=scan, drift=drift, **sizes)
            row[name] = round(hit_rate(trace, policy), 4)
        results.append(row)
    Console().print(_table(results))
    if args.output:
        settings = {k: getattr(args, k) for k in ("documents", "requests", "seed")}
        record.write(args.output, {"settings": settings, "results": results})


def _table(results: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Tokens found in the pool", title_justify="left")
    table.add_column("pool, of all documents")
    table.add_column("trace")
    for name in POLICIES:
        table.add_column(name, justify="right")
    for row in results:
        trace = "popularity changes halfway" if row["drift"] else "Zipf"
        trace += f", {row['scan']:.0%} one-time documents" if row["scan"] else ""
        rates = (f"{row[name]:.1%}" for name in POLICIES)
        table.add_row(f"{row['share']:.1%}", trace, *rates)
    return table
