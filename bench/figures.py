"""The figures of load in the docs, from what ``bench compare`` and ``bench serve`` have found."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from lazyattn_jax.bench.serving_plots import save_plots
from lazyattn_jax.bench.serving_report import tables


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("figures", help="the docs' figures of load", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw them there, as SVG")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints tables and draws."""
    found = [json.loads(path.read_text()) for path in args.results]
    results = [row for one in found for row in one["results"]]
    console = Console()
    for table in tables(results):
        console.print(table)
    if args.plot:
        for path in save_plots(args.plot, results):
            console.print(f"drawn: {path}")
