"""Processor time of the host for the plan of a step on a Hopper GPU; needs no GPU.

Decode steps of many requests over documents, drawn from a pool by Zipf's law or of their own: of
requests that are all new, in another order than before, with one gone and another come, and with
nothing but a token more each than in the step before. Prefill steps: two documents and 16 questions
over cached documents, and a question alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lazyattn_jax.bench import record
from lazyattn_jax.engine.limits import Limits, work_lists
from lazyattn_jax.engine.plan import Planner
from lazyattn_jax.engine.runs import Chunk, EncodeJob, Placement, TokenRun
from lazyattn_jax.models.config import NAMED_SHAPES

QUESTION = 64
"""Tokens of a question, and of the leading text."""

POOL = 1000
"""Documents drawn from."""


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("plans", help="host time of plans", description=__doc__)
    add = parser.add_argument
    add("--requests", type=int, default=256, help="default: %(default)s")
    add("--documents", type=int, default=10, help="a request; default: %(default)s")
    add("--document-tokens", type=int, default=256, help="default: %(default)s")
    add("--page-size", type=int, default=16, help="default: %(default)s")
    add("--max-model-len", type=int, default=131072, help="default: %(default)s")
    add("--repeats", type=int, default=40, help="of each; default: %(default)s")
    add("--json", type=Path, help="also write the results there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table, and writes JSON where asked."""
    table = Table(title="Processor time of plans, median", title_justify="left")
    table.add_column("")
    table.add_column("ms", justify="right")
    results = {}
    for name, seconds in measure(args):
        results[name] = seconds
        table.add_row(name, f"{1000 * seconds:.2f}")
    Console().print(table)
    if args.json:
        record.write(args.json, {"seconds": results})


def measure(args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """What is measured, and the processor seconds of a plan."""

    def seconds[T](prepare: Callable[[], T], plan: Callable[[T], object]) -> float:
        times = []
        for _ in range(args.repeats):
            prepared = prepare()
            start = time.thread_time()
            plan(prepared)
            times.append(time.thread_time() - start)
        return statistics.median(times)

    for zipf in (1.0, 0.0):
        traffic = Traffic(args, zipf)
        plan = traffic.planner.decode
        name = f"decode, {args.requests} requests, {f'Zipf {zipf}' if zipf else 'unshared'}: "
        yield name + "all new", seconds(traffic.renewed, plan)
        yield name + "in another order", seconds(traffic.shuffled, plan)
        yield name + "one gone, one come", seconds(traffic.changed, plan)
        yield name + "a token more", seconds(traffic.grown, plan)
    traffic = Traffic(args, 1.0)
    yield (
        "prefill, 2 documents, 16 questions",
        seconds(
            lambda: (
                [traffic.chunk(512) for _ in range(2)]
                + [traffic.chunk(QUESTION, traffic.request()) for _ in range(16)]
            ),
            traffic.planner.prefill,
        ),
    )
    yield (
        "prefill, 1 question",
        seconds(lambda: [traffic.chunk(QUESTION, traffic.request())], traffic.planner.prefill),
    )


class Traffic:
    """Requests that run, whose documents are cached.

    Args:
      args: sizes.
      zipf: exponent of the law that documents are drawn by; 0 for documents of their own.
    """

    def __init__(self, args: argparse.Namespace, zipf: float) -> None:
        self._args = args
        self._rng = np.random.default_rng(0)
        self._weights = 1 / np.arange(1, POOL + 1) ** zipf if zipf else None
        shape = NAMED_SHAPES["llama3-8b"]
        each = args.documents * args.document_tokens + 8 * args.repeats + 1000
        self._limits = Limits(
            page_size=args.page_size,
            num_pages=(args.requests + 40 * args.repeats) * each // args.page_size,
            max_model_len=args.max_model_len,
            max_num_seqs=args.requests,
            max_num_batched_tokens=4096,
            max_documents=256,
        )
        lists = work_lists(
            self._limits,
            "mosaic_gpu",
            group=shape.num_heads // shape.num_kv_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_cores=132,
        )
        frequencies = shape.rope.inverse_frequencies(shape.head_dim)
        self.planner = Planner(self._limits, lists, frequencies)
        self._free = iter(self._rng.permutation(self._limits.num_pages).tolist())
        self._documents: dict[int, tuple[int, ...]] = {}
        self._own = count(POOL)
        self._leading = Placement(self._pages(QUESTION), QUESTION, is_leading=True)
        self._running = [self.request() for _ in range(args.requests)]

    def request(self) -> TokenRun:
        """A question over cached documents."""
        args = self._args
        if self._weights is None:
            drawn = [next(self._own) for _ in range(args.documents)]
        else:
            odds = self._weights / self._weights.sum()
            drawn = self._rng.choice(POOL, args.documents, replace=False, p=odds).tolist()
        for document in drawn:
            if document not in self._documents:
                self._documents[document] = self._pages(args.document_tokens)
        starts = QUESTION + args.document_tokens * np.arange(args.documents + 1)
        run = TokenRun([0] * QUESTION, range(starts[-1], starts[-1] + QUESTION))
        run.pages = array("i", self._pages(QUESTION + 4 * args.repeats))
        run.private = set(run.pages)
        placements = zip(drawn, starts.tolist(), strict=False)
        documents = (
            Placement(self._documents[d], args.document_tokens, delta) for d, delta in placements
        )
        run.context = (self._leading, *documents)
        return run

    def chunk(self, tokens: int, run: TokenRun | None = None) -> Chunk:
        """All of a question, or of a document to be encoded."""
        if run is None:
            run = TokenRun([0] * tokens, range(QUESTION, QUESTION + tokens))
            run.pages = array("i", self._pages(tokens))
            run.private, run.context = set(run.pages), (self._leading,)
        return Chunk(run, 0, tokens, EncodeJob(b"", run))

    def grown(self) -> list[TokenRun]:
        """The running requests, with a token more each."""
        for run in self._running:
            run.append_pending()
            run.fill(0)
        return self._running

    def shuffled(self) -> list[TokenRun]:
        """The running requests in another order: what each sees is known, but not the batch."""
        self._rng.shuffle(self._running)
        return self._running

    def changed(self) -> list[TokenRun]:
        """The same, after one request has gone and another, prefilled before, has come."""
        del self._running[self._rng.integers(len(self._running))]
        new = self.request()
        self.planner.prefill([self.chunk(QUESTION, new)])
        self._running.append(new)
        return self.grown()

    def renewed(self) -> list[TokenRun]:
        """The running requests in another order, and with nothing known of what they see."""
        old, self._running = self.shuffled(), []
        for run in old:
            new = TokenRun(run.tokens, run.positions)
            new.pages, new.private, new.context = run.pages, run.private, run.context
            self._running.append(new)
        return self._running

    def _pages(self, tokens: int) -> tuple[int, ...]:
        return tuple(next(self._free) for _ in range(self._limits.pages_for(tokens)))
