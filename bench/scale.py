"""A model on paper, from what was measured: how cost grows, and what more GPUs would do.

Reads what ``bench compare`` and ``bench kernels`` have written, and prints Markdown: how far the
model is from what was measured, one quantity of the traffic after another, a 70B model on eight
GPUs, and a fleet behind a router. All but the first are calculated.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from lazyattn_jax.bench.scale_fleet import fleet_hits
from lazyattn_jax.bench.scale_model import Machine, Rate, Traffic, break_even_output, rate
from lazyattn_jax.bench.serving_metrics import throughput
from lazyattn_jax.engine.scheduler import HEADROOM

BEGIN, END = "<!-- bench scale: begin -->", "<!-- bench scale: end -->"
VARIATIONS: dict[str, tuple[float, ...]] = {
    "alpha": (0.0, 0.5, 1.0, 1.5, 2.1),
    "pool": (100, 1000, 10_000),
    "documents": (5, 10, 20, 40),
    "document_tokens": (128, 512, 2048),
    "output_tokens": (32, 128, 512),
    "concurrency": (16, 64, 256),
}
# Llama 3 70B in bfloat16: 70.6e9 parameters, 80 layers of 8 KV heads of 128.
LARGE_WEIGHT_BYTES, LARGE_TOKEN_BYTES = 141e9, 2 * 80 * 8 * 128 * 2
GPUS, GPU_BYTES = 8, 141e9
MEMORY_SHARE = 0.9  # of it, for weights and KV
LINK_SECONDS = 2e-3  # assumed: two all-reduces a layer in each decode step


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("scale", help="a model on paper", description=__doc__)
    parser.add_argument("load", type=Path, help="JSON of bench compare, with its steps")
    parser.add_argument("kernels", type=Path, nargs="+", help="JSON of bench kernels, with copies")
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help=f"put it there, between {BEGIN} and {END}"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints tables, or writes them into a file.

    Raises:
      SystemExit: something was not measured, or the file does not say where.
    """
    load = json.loads(args.load.read_text())
    kernels = [row for path in args.kernels for row in json.loads(path.read_text())["results"]]
    try:
        text = report(load, kernels)
    except KeyError as error:
        raise SystemExit(f"error: {args.load} and the others lack {error}") from None
    if args.into is None:
        print(text)
        return
    old = args.into.read_text()
    if BEGIN not in old or END not in old:
        raise SystemExit(f"error: {args.into} has no line {BEGIN} with {END} after it")
    before, _, rest = old.partition(BEGIN)
    args.into.write_text(f"{before}{BEGIN}\n{text}{END}{rest.partition(END)[2]}")


def machine_of(load: dict[str, Any], kernels: Sequence[dict[str, Any]]) -> Machine:
    """The machine that was measured.

    Args:
      load: of ``bench compare``.
      kernels: results of ``bench kernels``.

    Raises:
      KeyError: something was not measured; names it.
    """
    steps = load["steps"]
    found, token_bytes, weights = steps["results"], steps["token_bytes"], steps["weight_bytes"]
    decode, text = found["decode"], found["text"]
    # What reading a byte and each request cost, from two equations: the step of many requests with
    # KV, and the difference that more requests without documents make.
    more = text["requests"] - 1
    more_bytes = token_bytes * (text["all_kv_tokens"] - text["one_kv_tokens"])
    equations = [
        [weights + token_bytes * decode["kv_tokens"], decode["requests"]],
        [more_bytes, more],
    ]
    byte, row = np.linalg.solve(
        equations, [decode["seconds"], text["all_seconds"] - text["one_seconds"]]
    ).tolist()
    copies = [r for r in kernels if r["table"] == "copy" and r["variant"].startswith("mosaic")]
    if not copies:
        raise KeyError("copies")
    largest = max(copies, key=lambda r: r["bytes"])
    return Machine(
        weight_bytes=weights,
        token_bytes=token_bytes,
        pool_bytes=_measured(load)[0]["kv_pool_bytes"],
        read=1 / byte,
        copy=largest["bytes"] / largest["seconds"],
        prefill=found["prefill"]["tokens_per_second"],
        row=max(0.0, row),
        turn=_turn(kernels),
        headroom=HEADROOM,
    )


def _turn(kernels: Sequence[dict[str, Any]]) -> float:
    """What turned queries cost at most: of the decode cases that were measured without as well."""
    seconds = {(r["case"], r["variant"]): r["seconds"] for r in kernels if r["table"] == "decode"}
    shares = [
        seconds[case, ""] / plain - 1
        for (case, variant), plain in seconds.items()
        if variant == "no rotation"
    ]
    return max(0.0, *shares) if shares else 0.0


def large_of(machine: Machine) -> Machine:
    """A 70B model on eight such GPUs that divide it, nothing lost but ``LINK_SECONDS`` a step."""
    larger = LARGE_WEIGHT_BYTES / machine.weight_bytes
    return Machine(
        weight_bytes=LARGE_WEIGHT_BYTES,
        token_bytes=LARGE_TOKEN_BYTES,
        pool_bytes=GPUS * GPU_BYTES * MEMORY_SHARE - LARGE_WEIGHT_BYTES,
        read=GPUS * machine.read,
        copy=GPUS * machine.copy,
        prefill=machine.prefill * GPUS / larger,
        row=machine.row * larger / GPUS,
        step=LINK_SECONDS,
        turn=machine.turn,
        headroom=machine.headroom,
    )


def report(load: dict[str, Any], kernels: Sequence[dict[str, Any]]) -> str:
    """All of it, in Markdown.

    Raises:
      KeyError: something was not measured; names it.
    """
    machine = machine_of(load, kernels)
    traffic = _traffic(_measured(load)[0])
    parts = [
        f"From steps measured on {load['date']} ({load['device']}, commit {load['commit']}): a "
        f"decode step reads {machine.read / 1e12:.2f} TB/s and takes {1e6 * machine.row:.0f} us "
        f"longer with each request; copies move {machine.copy / 1e12:.2f} TB/s; prefill computes "
        f"{machine.prefill:,.0f} tokens a second; turning queries costs at most {machine.turn:.1%} "
        "of a read.",
        "Requests a second, on paper and measured:",
        _markdown(["", "reuse", "paper", "measured", "paper to measured"], _checks(machine, load)),
        f"Calculated from here on. {machine.pool_bytes / 1e9:.0f} GB for KV, and other traffic:",
        _markdown(_COLUMNS, _variations(machine, traffic)),
        _even(machine),
        f"A 70B model on {GPUS} such GPUs. Weights and KV take {MEMORY_SHARE:.0%} of their memory; "
        f"{1000 * LINK_SECONDS:.0f} ms are assumed for communication in each decode step:",
        _markdown(_COLUMNS, _large(large_of(machine), traffic)),
        f"{GPUS} replicas of the model that was measured, each with its own pool, 10,000 "
        "documents, `lazy`:",
        _markdown(_FLEET, _fleet(machine, replace(traffic, pool=10_000))),
    ]
    return "\n\n".join(parts) + "\n"


_COLUMNS = ["traffic", "lazy", "block", "none", "lazy to block", "at a time: lazy", "block"]
_FLEET = ["documents of a request", "router", "documents found", "requests a second of the fleet"]


def _measured(load: dict[str, Any]) -> list[dict[str, Any]]:
    """The closed loops that the model speaks of; the first one is that of lazy."""
    parts, ways = ("closed", "alphas", "pools", "loads"), ("lazy", "block", "none")
    rows = [r for r in load["results"] if r["part"] in parts and r["reuse"] in ways]
    if not rows or rows[0]["reuse"] != "lazy":
        raise KeyError("closed")
    return rows


def _traffic(row: dict[str, Any]) -> Traffic:
    given = dict(row["workload"])
    text = given["system_tokens"] + given["question_tokens"]
    names = ("pool", "documents", "alpha", "document_tokens", "output_tokens")
    return Traffic(**{name: given[name] for name in names}, text_tokens=text)


def _checks(machine: Machine, load: dict[str, Any]) -> Iterator[list[str]]:
    for row in _measured(load):
        traffic, pool = _traffic(row), row["kv_pool_bytes"]
        on_paper = rate(
            replace(machine, pool_bytes=pool), traffic, row["reuse"], row["concurrency"]
        ).per_second
        measured = throughput(row)
        label = f"alpha {traffic.alpha:g}, {row['concurrency']} at a time, {pool / 1e9:.0f} GB"
        ratio = f"{on_paper / measured:.2f}"
        yield [label, row["reuse"], f"{on_paper:.2f}", f"{measured:.2f}", ratio]


def _line(label: str, machine: Machine, traffic: Traffic, most: int) -> list[str]:
    lazy, block, none = (rate(machine, traffic, r, most) for r in ("lazy", "block", "none"))
    if block.requests < 1:  # lazy holds at least as many
        return [label, *["-"] * 6]
    return [
        label,
        *(f"{r.per_second:.2f}" for r in (lazy, block, none)),
        f"{lazy.per_second / block.per_second:.2f}",
        *(f"{r.requests:.0f}" for r in (lazy, block)),
    ]


def _variations(machine: Machine, traffic: Traffic) -> Iterator[list[str]]:
    for name, values in VARIATIONS.items():
        for value in values:
            other, most = traffic, 256
            if name == "concurrency":
                most = int(value)
            else:
                other = replace(traffic, **{name: value})  # type: ignore[arg-type]
            yield _line(f"{name.replace('_', ' ')} {value:g}", machine, other, most)


def _even(machine: Machine) -> str:
    tokens = break_even_output(machine)
    if tokens == float("inf"):
        return "Where nothing is shared, lazy is never behind: turning costs nothing."
    return (
        "Where nothing is shared and memory is no limit, lazy is ahead of block up to "
        f"{tokens:,.0f} output tokens."
    )


def _large(machine: Machine, traffic: Traffic) -> Iterator[list[str]]:
    for name, values in (("alpha", (0.0, 1.0, 2.1)), ("pool", (1000, 10_000, 100_000))):
        for value in values:
            other = replace(traffic, **{name: value})  # type: ignore[arg-type]
            yield _line(f"{name} {value:g}", machine, other, 256)


def _fleet(machine: Machine, traffic: Traffic) -> Iterator[list[str]]:
    for topics in (1, GPUS):
        for aware in (False, True):

            def hits(cached: float, topics: int = topics, aware: bool = aware) -> float:
                return fleet_hits(traffic, GPUS, cached, aware=aware, topics=topics)

            found: Rate = rate(machine, traffic, "lazy", hit_rate=hits)
            what = "of one topic" if topics > 1 else "of any kind"
            router = "sees documents" if aware else "takes turns"
            yield [what, router, f"{found.hits:.1%}", f"{GPUS * found.per_second:.1f}"]


def _markdown(columns: Sequence[str], rows: Iterator[list[str]]) -> str:
    table = Table(box=box.MARKDOWN)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    out = Console(file=io.StringIO(), width=200)
    out.print(table)
    assert isinstance(out.file, io.StringIO)
    lines = (line.rstrip() for line in out.file.getvalue().splitlines())
    return "\n".join(line for line in lines if line)
