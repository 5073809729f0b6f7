"""Ways of reusing KV side by side, in one process, the most important figures first.

What is measured comes in parts. ``closed``: all ways in a closed loop. ``loads``: lazy and block
with other concurrencies. ``open``: lazy and block in an open loop at a share of the most that block
reached in any closed one. ``steps``: single steps, as ``bench steps``. ``unique``: lazy and none,
nothing being shared, until the same requests are answered. ``alphas``: lazy and block with other
exponents of the Zipf law. ``gain``: what lazy gains over block, one thing switched off after
another. ``rates``, ``pools``: lazy and block with other request rates and sizes of the pool.

With ``--json`` results are written after every run, and parts that the file has already are not
measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.console import Console

from lazyattn_jax.bench.goals import gains, goals, table_of, table_of_gains
from lazyattn_jax.bench.serve import Runs, add_options, workload_of
from lazyattn_jax.bench.serving_engine import Span
from lazyattn_jax.bench.serving_metrics import throughput
from lazyattn_jax.bench.serving_points import EngineTarget
from lazyattn_jax.bench.serving_report import lines
from lazyattn_jax.bench.step_times import measure_steps
from lazyattn_jax.bench.steps import add_sizes, sizes_of
from lazyattn_jax.bench.steps import table_of as table_of_steps

BOTH = ("lazy", "block")


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("compare", help="ways of reuse side by side", description=__doc__)
    add_options(parser)
    parser.set_defaults(reuse=["lazy", "block", "prefix", "none"])
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    add = parser.add_argument_group("loads").add_argument
    add("--concurrency", type=int, default=16, help="of the closed loops; %(default)s")
    add("--rate-share", type=float, default=0.8, help="of open, of block's most; %(default)s")
    add("--open-duration", type=float, help="seconds that count of open (default: --duration)")
    add("--alphas", type=float, nargs="+", default=[0.0, 1.5, 2.1], help="default: %(default)s")
    add("--unique-concurrency", type=int, default=32, help="default: %(default)s")
    add("--unique-requests", type=int, default=64, help="default: %(default)s")
    add("--loads", type=int, nargs="+", default=[4, 8], help="concurrencies; %(default)s")
    add(
        "--rate-shares",
        type=float,
        nargs="+",
        default=[0.4, 0.6, 1.2, 1.8],
        help="of block's most, above 1 for lazy alone; default: %(default)s",
    )
    add(
        "--pool-shares",
        type=float,
        nargs="+",
        default=[0.25, 0.75, 1.0],
        help="of the KV pool; default: %(default)s",
    )
    add_sizes(parser.add_argument_group("single steps"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measures part after part, and prints what came out.

    Raises:
      SystemExit: options that contradict each other, or memory that does not suffice.
    """
    console = Console()
    try:
        with Runs(args, console) as runs:
            _resume(args, runs)
            for part in args.only:
                if part in runs.kept["parts"]:
                    continue
                before, begin = len(runs.results), time.monotonic()
                PARTS[part](args, runs)
                runs.kept["parts"].append(part)
                runs.write()
                title = f"{part}, {time.monotonic() - begin:.0f} s"
                if part == "steps":
                    console.print(title, table_of_steps(runs.kept["steps"]), sep="\n")
                else:
                    console.print(lines(title, runs.results[before:]))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    found = runs.kept | {"results": runs.results}
    console.print(table_of(goals(found)))
    if factors := gains(found):
        console.print(table_of_gains(factors))


def _resume(args: argparse.Namespace, runs: Runs) -> None:
    """Takes over what the parts that are complete have found.

    Raises:
      ValueError: it was found with other options of the engine.
    """
    runs.kept["parts"] = []
    if not args.json or not args.json.exists():
        return
    kept = json.loads(args.json.read_text())
    settings = json.loads(json.dumps(runs.kept["settings"]))
    if kept["settings"] != settings:
        raise ValueError(f"{args.json} has results of other options; name another file")
    runs.kept |= {name: kept[name] for name in ("parts", "steps") if name in kept}
    runs.results += [row for row in kept["results"] if row["part"] in kept["parts"]]


def _closed(args: argparse.Namespace, runs: Runs) -> None:
    load = {"concurrency": args.concurrency, "part": "closed"}
    runs.measure(workload_of(args), args.reuse, **load)


def _loads(args: argparse.Namespace, runs: Runs) -> None:
    for mode in BOTH:
        for concurrency in args.loads:
            runs.measure(workload_of(args), [mode], concurrency=concurrency, part="loads")


def _open(args: argparse.Namespace, runs: Runs) -> None:
    rate = args.rate_share * _most(runs)
    span = replace(runs.span, duration=args.open_duration or runs.span.duration)
    runs.measure(workload_of(args), BOTH, rate=rate, span=span, part="open")


def _steps(args: argparse.Namespace, runs: Runs) -> None:
    runs.kept["steps"] = measure_steps(_target(runs).engine("lazy"), sizes_of(args))


def _unique(args: argparse.Namespace, runs: Runs) -> None:
    workload = replace(workload_of(args), name="unique")
    span = Span(requests=args.unique_requests)
    load = {"concurrency": args.unique_concurrency, "part": "unique"}
    # There and back, so that what drifts meets both.
    runs.measure(workload, ("lazy", "none", "none", "lazy"), span=span, **load)


def _alphas(args: argparse.Namespace, runs: Runs) -> None:
    for mode in BOTH:
        for alpha in args.alphas:
            workload = replace(workload_of(args), alpha=alpha)
            runs.measure(workload, [mode], concurrency=args.concurrency, part="alphas")


def _gain(args: argparse.Namespace, runs: Runs) -> None:
    """From lazy to block in four steps, each of which takes one thing away.

    Documents are no longer read once for all; then no more requests run at a time than block's
    memory allows; then documents are copied, but the copies get memory of their own; and the last
    step, to block as it is, takes that memory away.
    """
    workload, most = workload_of(args), args.concurrency
    few = max(1, round(_closed_row(runs, "block")["running"]))
    limits = _target(runs).engine("lazy-unshared", args.pool_share).limits
    copies = few * workload.documents * limits.pages_for(workload.document_tokens)
    share = min(1.0, args.pool_share + copies / limits.num_pages)
    for concurrency in (most, few):
        runs.measure(workload, ["lazy-unshared"], concurrency=concurrency, part="gain")
    runs.measure(workload, ["block"], concurrency=few, pool_share=share, part="gain")


def _rates(args: argparse.Namespace, runs: Runs) -> None:
    most = _most(runs)
    for mode in BOTH:
        for share in args.rate_shares:
            if mode == "lazy" or share <= 1:
                runs.measure(workload_of(args), [mode], rate=share * most, part="rates")


def _pools(args: argparse.Namespace, runs: Runs) -> None:
    for mode in BOTH:
        for share in args.pool_shares:
            load = {"concurrency": args.concurrency, "pool_share": share, "part": "pools"}
            runs.measure(workload_of(args), [mode], **load)


PARTS: dict[str, Callable[[argparse.Namespace, Runs], None]] = {
    "closed": _closed,
    "loads": _loads,
    "open": _open,
    "steps": _steps,
    "unique": _unique,
    "alphas": _alphas,
    "gain": _gain,
    "rates": _rates,
    "pools": _pools,
}


def _closed_row(runs: Runs, mode: str) -> dict[str, Any]:
    for row in runs.results:
        if row["part"] == "closed" and row["reuse"] == mode:
            return row
    raise ValueError(f"that needs the part 'closed' with --reuse {mode} first")


def _most(runs: Runs) -> float:
    """The most requests a second that block reached, at whatever concurrency suits it best."""
    _closed_row(runs, "block")
    rows = [r for r in runs.results if r["part"] in ("closed", "loads")]
    return max(throughput(row) for row in rows if row["reuse"] == "block")


def _target(runs: Runs) -> EngineTarget:
    assert isinstance(runs.target, EngineTarget)
    return runs.target
