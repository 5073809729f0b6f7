"""What running streams notice of a long document that is being encoded beside them.

Some requests generate; then one comes with a document that nobody has asked for before. The gaps
between the tokens of those that run are measured before it comes and while it is encoded, for
several sizes of the prefill step, and so is the host's own work for each step.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lazyattn_jax.bench import record
from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import DocumentPiece
from lazyattn_jax.engine.runs import Request
from lazyattn_jax.llm import LLM
from lazyattn_jax.models.load import EMBEDDED


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "latency", help="gaps between tokens while a long document is encoded"
    )
    parser.add_argument("--model", default=EMBEDDED, help="default: %(default)s")
    parser.add_argument("--streams", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--document-tokens", type=int, default=2000, help="default: %(default)s")
    parser.add_argument(
        "--batched-tokens",
        type=int,
        nargs="+",
        default=[128, 256, 512],
        help="sizes of the prefill step; default: %(default)s",
    )
    parser.add_argument("--output", type=Path, help="also write the results there as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table, and writes JSON where asked."""
    results = []
    for size in args.batched_tokens:
        engine = LLM(args.model, max_num_batched_tokens=size, max_num_seqs=8).engine
        results.append({"batched_tokens": size} | measure(engine, args))
    Console().print(_table(results))
    if args.output:
        settings = {
            k: v for k, v in vars(args).items() if isinstance(v, int | str) and k != "command"
        }
        record.write(args.output, {"settings": settings, "results": results})


def measure(engine: Engine, args: argparse.Namespace) -> dict[str, float]:
    """Gaps in milliseconds, the late request's time to its first token, and the host's work."""
    rng = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        vocab = engine.loaded.config.vocab_size
        return tuple(rng.randrange(vocab // 2, vocab) for _ in range(count))

    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    streams = [engine.add([tokens(40)], params) for _ in range(args.streams)]
    while not all(r.num_generated > 3 for r in streams):
        engine.step()
    alone = _gaps(engine, streams, range(20))
    late = engine.add([tokens(30), DocumentPiece(tokens(args.document_tokens)), tokens(20)], params)
    begin = time.perf_counter()
    beside = _gaps(engine, streams, iter(lambda: late.num_generated == 0, False))
    seconds = time.perf_counter() - begin
    for request in [*streams, late]:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()
    return {
        "alone_median_ms": float(np.median(alone)),
        "alone_max_ms": max(alone),
        "beside_median_ms": float(np.median(beside)),
        "beside_max_ms": max(beside),
        "first_token_ms": 1000 * seconds,
        "host_ms_per_step": engine.stats.host_ms_per_step,
    }


def _gaps(engine: Engine, streams: list[Request], while_: Iterable[object]) -> list[float]:
    """Milliseconds between tokens, over all streams."""
    gaps, last = [], dict.fromkeys((r.id for r in streams), time.perf_counter())
    for _ in while_:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.token_ids and output.request.id in last:
                gaps.append(1000 * (now - last[output.request.id]))
                last[output.request.id] = now
    return gaps


def _table(results: list[dict[str, float]]) -> Table:
    table = Table(title="Gaps between tokens (ms)", title_justify="left")
    table.add_column("prefill step")
    for name in ("alone", "beside a document", "first token of it", "host, a step"):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            f"{r['batched_tokens']} tokens",
            f"{r['alone_median_ms']:.0f}, at most {r['alone_max_ms']:.0f}",
            f"{r['beside_median_ms']:.0f}, at most {r['beside_max_ms']:.0f}",
            f"{r['first_token_ms']:.0f}",
            f"{r['host_ms_per_step']:.2f}",
        )
    return table
