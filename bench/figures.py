"""The figure set of the docs: a model under rising load, and with a smaller and smaller pool.

Closed loops give throughput against concurrency; open loops, at shares of the request rate that the
first way of reuse reached in the largest closed loop, time to first token against rate; and the
largest closed loop on a part of the pool the hit rate against its size.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from lazyattn_jax.bench.serve import Runs, add_options, finish, workloads
from lazyattn_jax.bench.serving_points import Point


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("figures", help="the docs' figures of load", description=__doc__)
    add_options(parser)
    add = parser.add_argument_group("load").add_argument
    add("--concurrency", type=int, nargs="+", default=[1, 4, 16], help="default: %(default)s")
    add(
        "--rate-shares",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 0.75, 0.9],
        help="default: %(default)s",
    )
    add(
        "--pool-shares",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 0.75],
        help="beside the whole; default: %(default)s",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measures, prints tables, draws.

    Raises:
      SystemExit: as ``bench serve``.
    """
    console = Console()
    try:
        results = _measure(args, console)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    finish(args, results, console)


def _measure(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    results = []
    with Runs(args, console) as runs:
        workload = next(workloads(args))

        def each(**point: Any) -> None:
            results.extend(runs.measure(Point(workload, m, **point)) for m in runs.modes)

        for concurrency in args.concurrency:
            each(concurrency=concurrency)
        most = results[-len(runs.modes)]["requests_per_second"]
        for share in args.rate_shares:
            each(rate=share * most)
        for share in args.pool_shares:
            each(concurrency=args.concurrency[-1], pool_share=share)
    return results
