"""The attention kernels on a GPU: decode against the read ceiling, prefill against cuDNN.

bfloat16, 32 query heads, 8 KV heads, random data. Every kernel is checked against float64 before
it is timed. Times are those of a call in a chain of calls; "kernels" is what CUPTI says of them.
Without a GPU or TPU, --aot compiles the kernels for one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lazyattn_jax.bench import record, tpu_kernels
from lazyattn_jax.bench.kernel_ahead import compile_all
from lazyattn_jax.bench.kernel_cases import CASES, HEADLINE, variants
from lazyattn_jax.bench.kernel_copies import COPIES, measure_copies
from lazyattn_jax.bench.kernel_extra import WRITES, measure_plans, measure_writes
from lazyattn_jax.bench.kernel_report import save_plot, tables
from lazyattn_jax.bench.kernel_runs import Result, measure_case
from lazyattn_jax.bench.timing import read_ceiling
from lazyattn_jax.kernels.mosaic_gpu.support import check_device
from lazyattn_jax.kernels.mosaic_tpu.ahead import TOPOLOGIES

NAMES = (*(case.name for case in CASES), *COPIES, "write", "plan")

NO_GPU = "needs an NVIDIA Hopper GPU; without one use --aot h200"


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "kernels", help="the attention kernels on a GPU", description=__doc__
    )
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}"
    )
    parser.add_argument("--quick", action="store_true", help="the headline variant of each case")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--plot", type=Path, help="also draw them there, as SVG, PNG or PDF")
    parser.add_argument(
        "--aot",
        choices=["h200", *TOPOLOGIES],
        help="compile every kernel for that device instead, which need not be there; h200: reports "
        "registers and spills; TPUs: memory, and cycles beside jax's own kernel (with "
        "--only, --quick and --json)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measures, prints tables, and writes what is asked for.

    Raises:
      SystemExit: no GPU to measure on; a kernel that is wrong or fails; a kernel that spills.
    """
    console = Console()
    if args.aot:
        names = args.only or NAMES
        is_good = (
            compile_all(console)
            if args.aot == "h200"
            else tpu_kernels.compile_all(args.aot, names, args.quick, args.json, console)
        )
        if not is_good:
            raise SystemExit(1)
        return
    if not has_hopper():
        raise SystemExit(NO_GPU)
    ceiling, results = measure(args.only or NAMES, args.quick, console)
    for table in tables(results, ceiling):
        console.print(table)
    if args.json:
        record.write(
            args.json,
            {"read_ceiling": ceiling, "results": [asdict(result) for result in results]},
        )
    if args.plot:
        save_plot(args.plot, results, jax.devices()[0].device_kind)
    failed = [f"{r.case} {r.variant}".strip() for r in results if r.problem is not None]
    if failed:
        raise SystemExit(f"wrong or failed: {'; '.join(failed)}")


def _copies(name: str, page_sizes: tuple[int, ...], ceiling: float) -> Iterator[Result]:
    return measure_copies((name,), page_sizes=page_sizes)


def has_hopper() -> bool:
    """Whether jax runs on an NVIDIA GPU that the kernels are for."""
    try:
        check_device(jax.devices()[0])
    except NotImplementedError:
        return False
    return True


def measure(
    names: tuple[str, ...] | list[str], quick: bool, console: Console
) -> tuple[float, list[Result]]:
    """The read ceiling, and the results of the named cases."""
    jobs: list[tuple[str, int, Callable[[float], Iterator[Result]]]] = []
    for case in CASES:
        chosen = variants(case, quick)
        if case.name in names and chosen:
            jobs.append((case.name, len(chosen), partial(measure_case, case, chosen)))
    for copied in (name for name in COPIES if name in names):
        sizes = (HEADLINE.page_size,) if quick else (HEADLINE.page_size, 16)
        jobs.append((copied, 2 * len(sizes), partial(_copies, copied, sizes)))
    if "write" in names and not quick:
        jobs.append(("write", len(WRITES), lambda ceiling: measure_writes()))
    if "plan" in names:
        jobs.append(("plan", 2, lambda ceiling: measure_plans()))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("read ceiling", total=1 + sum(count for _, count, _ in jobs))
        ceiling = read_ceiling()
        progress.advance(task)
        for name, _, job in jobs:
            progress.update(task, description=name)
            for result in job(ceiling):
                results.append(result)
                progress.advance(task)
    return ceiling, results
