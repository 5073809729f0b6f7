"""A model under load: latencies, throughput and reuse, for each way of reusing KV.

All ways run in one process on the same weights and the same requests, each on an empty pool. In an
open loop requests come at a rate whatever happens (Poisson); in a closed loop so many are under way
at any time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lazyattn_jax.bench import record
from lazyattn_jax.bench.serving_engine import Span
from lazyattn_jax.bench.serving_metrics import Limits, throughput
from lazyattn_jax.bench.serving_plots import save_plots
from lazyattn_jax.bench.serving_points import WAYS, EngineTarget, Point, Target, measure
from lazyattn_jax.bench.serving_report import tables
from lazyattn_jax.bench.serving_url import UrlTarget
from lazyattn_jax.bench.workloads import NAMES, Workload
from lazyattn_jax.llm import keep_compiled, load_for
from lazyattn_jax.models.load import EMBEDDED
from lazyattn_jax.options import MODEL_HELP, add_engine_options, engine_config


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("serve", help="a model under load", description=__doc__)
    add_options(parser)
    add = parser.add_argument
    add("--url", help="measure an OpenAI-compatible server there instead, e.g. http://host:8000/v1")
    add("--url-model", metavar="NAME", help="what that server calls the model (default: its first)")
    add("--url-key", default="none", metavar="KEY", help="the API key that it wants")
    add(
        "--url-documents",
        choices=("field", "inline"),
        default="inline",
        help="send documents to it beside the messages or within them (default: %(default)s)",
    )
    add("--alpha", type=float, nargs="+", default=[Workload.alpha], help="of zipf; %(default)s")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--concurrency", type=int, nargs="+", default=[], metavar="N", help="closed loops"
    )
    load.add_argument(
        "--rate", type=float, nargs="+", default=[], metavar="N", help="open loops, requests/s"
    )
    load.add_argument(
        "--rate-share",
        type=float,
        metavar="SHARE",
        help="then an open loop at that share of the request rate that --rate-share-of reached in "
        "the last closed loop",
    )
    load.add_argument("--rate-share-of", choices=tuple(WAYS), default="block", help="%(default)s")
    add("--plot", type=Path, metavar="DIR", help="also draw them there, as SVG")
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of every benchmark of a model under load."""
    add = parser.add_argument
    add("--model", default=EMBEDDED, help=MODEL_HELP)
    add(
        "--reuse",
        type=_modes,
        default=["lazy"],
        metavar="LIST",
        help=f"comma-separated, of {', '.join(WAYS)} (without one read of a document for all "
        "requests) (default: lazy)",
    )
    add("--json", type=Path, help="also write the results there, after every run")
    _add_workload(parser.add_argument_group("workload"))
    span = parser.add_argument_group("how long")
    span.add_argument("--warmup", type=float, default=0.0, help="seconds that do not count")
    span.add_argument("--duration", type=float, default=float("inf"), help="seconds that count")
    span.add_argument("--requests", type=int, help="end when so many are answered")
    limits = parser.add_argument_group("goodput: requests a second that keep both limits")
    limits.add_argument("--ttft-limit", type=float, default=Limits.ttft, help="s; %(default)s")
    limits.add_argument("--tpot-limit", type=float, default=Limits.tpot, help="s; %(default)s")
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--pool-share",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="use only that share of the KV pool (default: all)",
    )
    engine.add_argument(
        "--preload",
        action="store_true",
        help="begin each run with the documents that come again in the pool, those asked for most "
        "often first, where others would find them (default: with an empty pool)",
    )
    engine.add_argument(
        "--compilation-cache", metavar="DIR", help="keep compiled programs there (default: off)"
    )
    add_engine_options(engine)


def _add_workload(group: argparse._ArgumentGroup) -> None:
    add, default = group.add_argument, Workload()
    add("--workload", choices=NAMES, default=default.name, help="default: %(default)s")
    add("--pool", type=int, default=default.pool, help="documents of zipf; %(default)s")
    add("--documents", type=int, default=default.documents, help="a request; %(default)s")
    for part in ("document", "system", "question", "output"):
        name = f"{part}_tokens"
        value = getattr(default, name)
        add(f"--{part}-tokens", type=int, default=value, help="default: %(default)s")
    add("--file", help="of jsonl")
    add("--seed", type=int, default=default.seed, help="default: %(default)s")


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    for mode in modes:
        if mode not in WAYS:
            raise argparse.ArgumentTypeError(f"{mode!r} must be one of {', '.join(WAYS)}")
    return modes


def run(args: argparse.Namespace) -> None:
    """Measures, prints tables, and writes what is asked for.

    Raises:
      SystemExit: options that contradict each other, or memory that does not suffice.
    """
    if not args.concurrency and not args.rate:
        raise SystemExit("give --concurrency or --rate")
    if args.rate_share and not (args.concurrency and args.rate_share_of in args.reuse):
        raise SystemExit(
            f"--rate-share needs a closed loop (--concurrency) of --reuse {args.rate_share_of}"
        )
    try:
        with Runs(args, Console(), UrlTarget.of(args) if args.url else None) as runs:
            if args.url:
                runs.kept["settings"] = {"url": args.url, "documents": args.url_documents}
            _measure(args, runs)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if args.plot:
        save_plots(args.plot, runs.results)


def _measure(args: argparse.Namespace, runs: Runs) -> None:
    modes: list[str | None] = [None] if args.url else args.reuse
    for alpha in args.alpha:
        workload = replace(workload_of(args), alpha=alpha)
        for concurrency in args.concurrency:
            runs.show(runs.measure(workload, modes, concurrency=concurrency))
        for rate in args.rate:
            runs.show(runs.measure(workload, modes, rate=rate))
        if args.rate_share:
            closed = [r for r in runs.results if r["reuse"] == args.rate_share_of]
            rate = args.rate_share * throughput(closed[-1])
            runs.show(runs.measure(workload, modes, rate=rate))


def workload_of(args: argparse.Namespace) -> Workload:
    """The workload that is asked for, with alpha as usual."""
    given = {f.name: getattr(args, f.name) for f in fields(Workload) if f.name in args}
    return Workload(args.workload, **(given | {"alpha": Workload.alpha}))


class Runs:
    """Measures points on what the command line names, with a progress bar for each.

    Args:
      args: of ``add_options``.
      console: for progress and tables.
      target: where load is put on; by default an engine in this process.

    Attributes:
      target: see above.
      results: what was measured; written each time.
      kept: what else is written.
    """

    def __init__(
        self, args: argparse.Namespace, console: Console, target: Target | None = None
    ) -> None:
        self._args = args
        self.results: list[dict[str, Any]] = []
        self.kept: dict[str, Any] = {"settings": {}}
        self.span = Span(args.warmup, args.duration, args.requests)
        self._limits = Limits(args.ttft_limit, args.tpot_limit)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[answered]} done"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.target = target or self._engine_target(args, console)

    def __enter__(self) -> Runs:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _engine_target(self, args: argparse.Namespace, console: Console) -> EngineTarget:
        if args.compilation_cache is not None:
            keep_compiled(args.compilation_cache)
        for way in args.reuse:
            config = engine_config(args, **WAYS[way])  # raises now rather than after the first run
        ways = {name for way in WAYS.values() for name in way}
        settings = {k: v for k, v in asdict(config).items() if v and k not in ways}
        self.kept["settings"] = {"model": args.model, "preload": args.preload} | settings
        with console.status(f"Loading {args.model}"):
            loaded = load_for(config, args.model, args.adapter)
        return EngineTarget(loaded, config, self._compiled, preload=args.preload)

    def _compiled(self, done: int, total: int) -> None:
        if total and done == 0:
            self._compiling = self._progress.add_task("Compiling", total=total, answered=0)
        elif total:
            self._progress.update(self._compiling, completed=done, answered=done)

    def measure(
        self,
        workload: Workload,
        modes: Sequence[str | None],
        *,
        pool_share: float | None = None,
        span: Span | None = None,
        **more: Any,
    ) -> list[dict[str, Any]]:
        """Measures one load for each way of reuse.

        Args:
          workload: what is asked.
          modes: of ``WAYS``; none for a server.
          pool_share: of the KV pool that may be used, if it is not as the command line says.
          span: how long, likewise.
          more: ``rate`` or ``concurrency``; and what is kept with the results.
        """
        load = {name: more.pop(name) for name in ("rate", "concurrency") if name in more}
        share = pool_share or self._args.pool_share
        points = [Point(workload, mode, pool_share=share, **load) for mode in modes]
        found = []
        for point in points:
            found.append(self._measure(point, span or self.span) | more)
            self.results.append(found[-1])
            self.write()
        return found

    def write(self) -> None:
        """Writes what was found so far, if that is asked for."""
        if self._args.json:
            record.write(self._args.json, self.kept | {"results": self.results})

    def show(self, found: Sequence[dict[str, Any]]) -> None:
        """Prints tables of some results."""
        for table in tables(found):
            self._progress.console.print(table)

    def _measure(self, point: Point, span: Span) -> dict[str, Any]:
        whole = span.warmup + span.duration
        by_count = span.requests is not None and whole == float("inf")
        total = span.requests if by_count else whole
        task = self._progress.add_task(point.label, total=total, answered=0)

        def progress(seconds: float, answered: int) -> None:
            done = answered if by_count else seconds
            self._progress.update(task, completed=done, answered=answered)

        return measure(self.target, point, span, self._limits, progress)
