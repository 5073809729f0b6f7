"""Tables of what a model did under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table

_SPREADS = {
    "ttft_ms": "time to first token (TTFT)",
    "tpot_ms": "time per output token (TPOT)",
    "itl_ms": "gap between tokens (ITL)",
    "e2e_ms": "end to end",
}
_FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "steady_requests_per_second": ("requests a second, steady", "{:.2f}".format),
    "steady_seconds": ("seconds that this is taken from", "{:.1f}".format),
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
    "requests_begun": ("requests with a first token", "{:.0f}".format),
    "requests": ("requests ended", "{:.0f}".format),
    "errors": ("errors", "{:.0f}".format),
    "seconds": ("seconds", "{:.1f}".format),
}


_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], Any], Callable[[Any], str]], ...] = (
    ("steady/s", lambda row: row["steady_requests_per_second"], "{:.2f}".format),
    ("of", lambda row: row["steady_seconds"], "{:.1f} s".format),
    ("begun/s", lambda row: row["requests_begun"] / row["seconds"], "{:.2f}".format),
    ("ended/s", lambda row: row["requests_per_second"], "{:.2f}".format),
    ("tokens/s", lambda row: row["output_tokens_per_second"], "{:.0f}".format),
    ("TTFT p50", lambda row: row["ttft_ms"] and row["ttft_ms"]["p50"], "{:.0f} ms".format),
    ("p99", lambda row: row["ttft_ms"] and row["ttft_ms"]["p99"], "{:.0f} ms".format),
    ("TPOT p50", lambda row: row["tpot_ms"] and row["tpot_ms"]["p50"], "{:.1f} ms".format),
    ("found", lambda row: row["document_hit_rate"], "{:.0%}".format),
    ("at a time", lambda row: row.get("running"), "{:.0f}".format),
    ("ended", lambda row: row["requests"], "{:.0f}".format),
    ("host", lambda row: row.get("host_ms_per_step"), "{:.1f} ms".format),
    ("waiting", lambda row: row.get("wait_ms_per_step"), "{:.1f} ms".format),
)


def tables(results: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """One table for each workload and load, with a column for each way of reusing KV."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in results:
        groups.setdefault(_title(row), []).append(row)
    for title, rows in groups.items():
        yield _table(title, rows)


def lines(title: str, results: Sequence[dict[str, Any]]) -> Table:
    """The most important figures, with a line for each run."""
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for name in ("reuse", "load", *(name for name, _, _ in _COLUMNS)):
        table.add_column(name, justify="left" if name in ("reuse", "load") else "right")
    for row in results:
        cells = (_shown(get(row), show) for _, get, show in _COLUMNS)
        table.add_row(row["reuse"] or "server", _title(row, short=True), *cells)
    return table


def _title(row: dict[str, Any], *, short: bool = False) -> str:
    workload = row["workload"]
    words = [workload["name"]]
    if workload["name"] == "zipf":
        documents = "" if short else f", {workload['pool']} documents"
        words.append(f"alpha {workload['alpha']:g}{documents}")
    if workload["name"] != "jsonl" and not short:
        words.append(f"{workload['documents']} x {workload['document_tokens']} tokens a request")
    rate, concurrency = row["rate"], row["concurrency"]
    words.append(f"{rate:.3g} a second" if rate else f"{concurrency} at a time")
    if row["pool_share"] < 1:
        share = f"{row['pool_share']:.0%}"
        words.append(share if short else f"{share} of the pool")
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


def _shown(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)
