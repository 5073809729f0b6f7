"""Single steps of an engine against what the memory could do at best.

``alone``: time to first token of one request whose documents are all cached, against the time to
read the weights once. ``decode``: a decode step of requests that share nothing, against the time to
read the weights and their KV once. ``host``: the host's own work for a step with many requests
running, and what of it the device does not hide. ``text``: decode steps without documents.
``prefill``: documents being encoded.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lazyattn_jax.bench import record
from lazyattn_jax.bench.step_times import NAMES, Sizes, measure_steps
from lazyattn_jax.llm import keep_compiled, load_for, start_engine
from lazyattn_jax.models.load import EMBEDDED
from lazyattn_jax.options import MODEL_HELP, add_engine_options, engine_config


def add_sizes(group: argparse._ActionsContainer) -> None:
    """Adds an option for every size but the lengths of documents and questions."""
    for name, what in (
        ("alone_documents", "of the request alone"),
        ("decode_requests", "that share nothing"),
        ("decode_documents", "of each request that decodes"),
        ("host_document_tokens", "small, for a step to hold all requests"),
        ("host_requests", "that the host's work is measured with"),
        ("host_pool", "documents that they draw from"),
        ("steps", "decode steps timed"),
    ):
        option, default = "--" + name.replace("_", "-"), getattr(Sizes, name)
        group.add_argument(option, type=int, default=default, help=f"{what}; %(default)s")


def sizes_of(args: argparse.Namespace) -> Sizes:
    """The sizes that a command line asks for."""
    return Sizes(**{f.name: getattr(args, f.name) for f in fields(Sizes)})


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "steps", help="single steps against the memory's speed", description=__doc__
    )
    add = parser.add_argument
    add("--model", default=EMBEDDED, help=MODEL_HELP)
    add("--only", nargs="+", choices=NAMES, default=NAMES, help="default: all")
    add("--document-tokens", type=int, default=Sizes.document_tokens, help="default: %(default)s")
    add("--question-tokens", type=int, default=Sizes.question_tokens, help="default: %(default)s")
    add_sizes(parser)
    add("--json", type=Path, help="also write the results there")
    add("--compilation-cache", metavar="DIR", help="keep compiled programs there (default: off)")
    add_engine_options(parser.add_argument_group("engine"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table, and writes JSON where asked.

    Raises:
      SystemExit: memory that does not suffice, or options that are out of range.
    """
    try:
        if args.compilation_cache is not None:
            keep_compiled(args.compilation_cache)
        config = engine_config(args)
        loaded = load_for(config, args.model, args.adapter)
        found = measure_steps(start_engine(loaded, config), sizes_of(args), args.only)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    Console().print(table_of(found))
    if args.json:
        record.write(args.json, found)


def table_of(found: dict[str, Any]) -> Table:
    """What was measured, next to the least that reading takes."""
    ceiling, weights, results = (found[k] for k in ("read_ceiling", "weight_bytes", "results"))
    table = Table(
        title=f"Steps (read ceiling {ceiling / 1e12:.2f} TB/s, weights {weights / 1e9:.2f} GB)",
        title_justify="left",
        box=box.MARKDOWN,
    )
    for name in ("", "measured", "reading takes", "to that"):
        table.add_column(name, justify="right" if name else "left")

    def row(label: str, seconds: float, best: float | None = None) -> None:
        shown = ["", ""] if best is None else [f"{1000 * best:.2f} ms", f"{seconds / best:.2f}"]
        table.add_row(label, f"{1000 * seconds:.2f} ms", *shown)

    if one := results.get("alone"):
        row("alone: time to first token", one["seconds"], one["best_seconds"])
    if one := results.get("decode"):
        label = f"decode: a step of {one['requests']:.0f} requests"
        row(label, one["seconds"], one["best_seconds"])
    if one := results.get("host"):
        row(f"host: a step of {one['requests']:.0f} requests", one["seconds"])
        row("host's work of it", one["host_seconds"])
        row("device's work of it, once launched", one["device_seconds"])
        row("host's work not hidden behind it, at most", one["not_hidden_seconds"])
    if one := results.get("text"):
        row("text: a decode step of 1 request", one["one_seconds"])
        row(f"text: a decode step of {one['requests']:.0f} requests", one["all_seconds"])
    if one := results.get("prefill"):
        label = f"prefill: {one['tokens']:.0f} tokens, {one['tokens_per_second']:.0f} a second"
        row(label, one["seconds"])
    return table
