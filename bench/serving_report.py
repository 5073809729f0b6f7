"""Tables of what a model did under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

_SPREADS = {
    "ttft_ms": "time to first token (TTFT)",
    "tpot_ms": "time per output token (TPOT)",
    "itl_ms": "gap between tokens (ITL)",
    "e2e_ms": "end to end",
}
_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "requests_per_second": ("requests a second", "{:.2f}".format),
    "goodput_requests_per_second": ("goodput, requests a second", "{:.2f}".format),
    "output_tokens_per_second": ("output tokens a second", "{:.0f}".format),
    "prompt_tokens_per_second": ("prompt tokens a second", "{:.0f}".format),
    "document_hit_rate": ("document tokens found", "{:.1%}".format),
    "token_hit_rate": ("prompt tokens found", "{:.1%}".format),
    "correct": ("answers with an expected text", "{:.1%}".format),
    "running": ("requests computed at a time", "{:.1f}".format),
    "kv_bytes_distinct": ("KV in use, distinct", lambda x: f"{x / 1e6:.1f} MB"),
    "kv_bytes_referenced": ("KV in use, by reference", lambda x: f"{x / 1e6:.1f} MB"),
    "preemptions": ("preemptions", "{:.0f}".format),
    "steps": ("steps", "{:.0f}".format),
    "host_ms_per_step": ("host, a step", "{:.2f} ms".format),
    "wait_ms_per_step": ("waiting for the device, a step", "{:.2f} ms".format),
    "compilations": ("compilations", "{:.0f}".format),
    "requests": ("requests ended", "{:.0f}".format),
    "errors": ("errors", "{:.0f}".format),
    "seconds": ("seconds", "{:.1f}".format),
}


def tables(results: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """One table for each workload and load, with a column for each way of reusing KV."""
    for title, group in groupby(results, key=_title):
        yield _table(title, list(group))


def _title(row: dict[str, Any]) -> str:
    workload = row["workload"]
    words = [workload["name"]]
    if workload["name"] == "zipf":
        words.append(f"alpha {workload['alpha']:g}, {workload['pool']} documents")
    if workload["name"] != "jsonl":
        words.append(f"{workload['documents']} x {workload['document_tokens']} tokens a request")
    rate, concurrency = row["rate"], row["concurrency"]
    words.append(f"{rate:.3g} requests a second" if rate else f"{concurrency} at a time")
    if row["pool_share"] < 1:
        words.append(f"{row['pool_share']:.0%} of the pool")
    return ", ".join(words)


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(row["reuse"] or "server", justify="right")
    for key, label in _SPREADS.items():
        for name in ("mean", "p50", "p95", "p99"):
            values = [row[key] and row[key][name] for row in rows]
            table.add_row(f"{label}, {name}", *(_shown(v, "{:.1f} ms".format) for v in values))
    for key, (label, show) in _FIGURES.items():
        values = [row.get(key) for row in rows]
        if any(value is not None for value in values):
            table.add_row(label, *(_shown(value, show) for value in values))
    return table


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)
