"""Plots of what a model did under load, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_SETTINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "rate": lambda row: row["rate"],
    "concurrency": lambda row: row["concurrency"],
    "pool_share": lambda row: row["pool_share"],
    "alpha": lambda row: row["workload"]["alpha"],
}
_COLORS = {"lazy": "tab:blue", "block": "tab:orange", "prefix": "tab:green", "none": "tab:gray"}


@dataclass(frozen=True)
class Plot:
    """A figure against one setting, for each way of reusing KV.

    ``lines`` are the figures drawn, each with the name of a line style.
    """

    name: str
    setting: str
    label: str
    value_label: str
    lines: tuple[tuple[str, Callable[[dict[str, Any]], float | None], str], ...]
    log: bool = False


def _percentile(key: str, name: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda row: row[key] and row[key][name]


PLOTS = (
    Plot(
        "ttft-rate",
        "rate",
        "requests a second (open loop)",
        "time to first token, ms",
        (("p50", _percentile("ttft_ms", "p50"), "-"), ("p99", _percentile("ttft_ms", "p99"), ":")),
        log=True,
    ),
    Plot(
        "throughput-concurrency",
        "concurrency",
        "requests at a time (closed loop)",
        "output tokens a second",
        (("", lambda row: row["output_tokens_per_second"], "-"),),
    ),
    Plot(
        "throughput-alpha",
        "alpha",
        "exponent of the Zipf law",
        "output tokens a second",
        (("", lambda row: row["output_tokens_per_second"], "-"),),
    ),
    Plot(
        "hits-pool",
        "pool_share",
        "share of the KV pool used",
        "document tokens found in the pool",
        (("", lambda row: row["document_hit_rate"], "-"),),
    ),
)


def save_plots(folder: Path, results: Sequence[dict[str, Any]]) -> list[Path]:
    """Draws every plot whose setting takes more than one value.

    Raises:
      SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'lazyattn-jax[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for plot in PLOTS:
        rows = points(results, plot.setting)
        if not rows:
            continue
        figure = Figure(figsize=(5, 3.4), layout="constrained")
        axes = figure.subplots()
        for reuse in dict.fromkeys(row["reuse"] for row in rows):
            mine = [row for row in rows if row["reuse"] == reuse]
            for name, value, style in plot.lines:
                axes.plot(
                    [_SETTINGS[plot.setting](row) for row in mine],
                    np.array([value(row) for row in mine], float),
                    style,
                    marker="o",
                    markersize=3,
                    color=_COLORS.get(reuse, "black"),
                    label=f"{reuse or 'server'} {name}".strip(),
                )
        axes.set_xlabel(plot.label)
        axes.set_ylabel(plot.value_label)
        if plot.log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
        paths.append(folder / f"{plot.name}.svg")
        figure.savefig(paths[-1])
    return paths


def points(results: Sequence[dict[str, Any]], setting: str) -> list[dict[str, Any]]:
    """The results to draw against a setting: the largest group that differs in nothing else.

    Empty where none takes more than one value of it.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in results:
        others = tuple(get(row) for name, get in _SETTINGS.items() if name != setting)
        if _SETTINGS[setting](row) is not None:
            groups.setdefault((row["workload"]["name"], *others), []).append(row)
    best = max(groups.values(), key=len, default=[])
    if len({_SETTINGS[setting](row) for row in best}) < 2:
        return []
    return sorted(best, key=_SETTINGS[setting])
