"""What the side by side comparison set out to reach, and what came out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from lazyattn_jax.bench.serving_metrics import throughput

type Row = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """A figure and its limit: at least that, or with ``most`` at most."""

    label: str
    value: float
    limit: float
    most: bool = False

    @property
    def reached(self) -> bool:
        """Whether the figure keeps the limit."""
        return self.value <= self.limit if self.most else self.value >= self.limit


def goals(found: dict[str, Any]) -> list[Goal]:
    """The goals of the parts that were measured, from what ``bench compare`` keeps."""
    parts: dict[str, list[Row]] = {}
    for row in found["results"]:
        parts.setdefault(row["part"], []).append(row)
    return [
        *_closed(parts.get("closed", [])),
        *_open(parts.get("open", [])),
        *_alphas(parts.get("alphas", [])),
        *_steps(found.get("steps", {}).get("results", {})),
        *_unique(parts.get("unique", [])),
    ]


def gains(found: dict[str, Any]) -> list[tuple[str, float]]:
    """What lazy gains over block, in factors that multiply to the whole; all measured or none."""
    closed = {r["reuse"]: r for r in found["results"] if r["part"] == "closed"}
    rows = [r for r in found["results"] if r["part"] == "gain"]
    if len(rows) != 3 or not {"lazy", "block"} <= set(closed):
        return []
    names = (
        "a document is read once a step for all its requests",
        "more requests fit at a time",
        "documents are not copied",
        "copies take no room from cached documents",
    )
    chain = [throughput(row) for row in (closed["lazy"], *rows, closed["block"])]
    return [(name, a / b) for name, (a, b) in zip(names, pairwise(chain), strict=True)]


def table_of(reached: Sequence[Goal]) -> Table:
    """Goals and what was measured."""
    table = Table(box=box.MARKDOWN)
    table.add_column("")
    for name in ("measured", "goal", "reached"):
        table.add_column(name, justify="right")
    for goal in reached:
        limit = f"{'at most' if goal.most else 'at least'} {goal.limit:g}"
        yes = "yes" if goal.reached else "no"
        table.add_row(goal.label, f"{goal.value:.3g}", limit, yes)
    return table


def table_of_gains(factors: Sequence[tuple[str, float]]) -> Table:
    """What the gain is made of."""
    table = Table(box=box.MARKDOWN)
    table.add_column("lazy over block")
    table.add_column("factor", justify="right")
    for name, factor in factors:
        table.add_row(name, f"{factor:.2f}")
    table.add_row("together", f"{np.prod([factor for _, factor in factors]):.2f}")
    return table


def _pairs(rows: Sequence[Row], over: str) -> Iterator[tuple[Row, Row]]:
    """Rows of lazy, each with that of another way under the same load."""
    for ours in rows:
        for theirs in rows:
            same = ours["workload"] == theirs["workload"]
            if same and ours["reuse"] == "lazy" and theirs["reuse"] == over:
                yield ours, theirs


def _closed(rows: Sequence[Row]) -> Iterator[Goal]:
    for over, limit in (("block", 3.0), ("none", 8.0)):
        for ours, theirs in _pairs(rows, over):
            label = f"throughput, closed loop, lazy to {over}"
            yield Goal(label, throughput(ours) / throughput(theirs), limit)


def _open(rows: Sequence[Row]) -> Iterator[Goal]:
    for ours, theirs in _pairs(rows, "block"):
        for name in ("p50", "p99"):
            label = f"TTFT {name}, open loop, lazy to block"
            yield Goal(label, ours["ttft_ms"][name] / theirs["ttft_ms"][name], 0.5, most=True)


def _alphas(rows: Sequence[Row]) -> Iterator[Goal]:
    for ours, theirs in _pairs(rows, "block"):
        label = f"throughput, alpha {ours['workload']['alpha']:g}, lazy to block"
        yield Goal(label, throughput(ours) / throughput(theirs), 1.0)


def _steps(results: dict[str, dict[str, float]]) -> Iterator[Goal]:
    if "alone" in results:
        label = "TTFT of a request alone, to reading the weights"
        yield Goal(label, results["alone"]["to_best"], 1.5, most=True)
    if "decode" in results:
        label = "decode step, nothing shared, to reading weights and KV"
        yield Goal(label, results["decode"]["to_best"], 1.25, most=True)
    if "host" in results:
        label = "host, ms a step not hidden behind the device"
        yield Goal(label, 1000 * results["host"]["not_hidden_seconds"], 1.0, most=True)


def _unique(rows: Sequence[Row]) -> Iterator[Goal]:
    seconds = {
        mode: [row["seconds"] for row in rows if row["reuse"] == mode] for mode in ("lazy", "none")
    }
    if all(seconds.values()):
        label = "time for the same requests, nothing shared, lazy to none"
        yield Goal(
            label, float(np.mean(seconds["lazy"]) / np.mean(seconds["none"])), 1.02, most=True
        )
