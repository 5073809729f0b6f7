"""The figure set of the docs: a model under rising load, and with a smaller and smaller pool.

Closed loops give throughput against concurrency; open loops, at shares of the request rate that the
first way of reuse reached in the largest closed loop, time to first token against rate; and the
largest closed loop on a part of the pool the hit rate against its size.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from lazyattn_jax.bench.serve import Runs, add_options, measure_all, workloads


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
    measure_all(args, Console(), _measure)


def _measure(args: argparse.Namespace, runs: Runs) -> None:
    workload = next(workloads(args))
    for concurrency in args.concurrency:
        runs.measure(workload, concurrency=concurrency)
    most = runs.results[-len(runs.modes)]["requests_per_second"]
    for share in args.rate_shares:
        runs.measure(workload, rate=share * most)
    for share in args.pool_shares:
        runs.measure(workload, concurrency=args.concurrency[-1], pool_share=share)
