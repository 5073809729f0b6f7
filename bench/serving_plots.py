"""Plots of what a model did under load, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lazyattn_jax.bench.serving_metrics import throughput

type Row = dict[str, Any]

_SETTINGS: dict[str, Callable[[Row], Any]] = {
    "rate": lambda row: row["rate"],
    "concurrency": lambda row: row["concurrency"],
    "pool_share": lambda row: row["pool_share"],
    "alpha": lambda row: row["workload"]["alpha"],
}
# Colours that are told apart also by those who see fewer (Okabe and Ito).
_COLORS = {"lazy": "#0072b2", "block": "#d55e00", "prefix": "#009e73", "none": "#777777"}
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lazyattn_jax",  # the same results are the same file
}


@dataclass(frozen=True)
class Plot:
    """A figure against one setting, for each way of reusing KV.

    Attributes:
      name: of the file.
      setting: what differs, of ``_SETTINGS``.
      title: what is drawn.
      label: of the horizontal axis.
      lines: the figures drawn, each with a line style.
      place: where on the horizontal axis a result stands; by default at its setting.
      log: of the axes, ``x`` or ``y`` or both.
      ticks: name what was measured, and no other places.
      percent: the figures are shares.
    """

    name: str
    setting: str
    title: str
    label: str
    lines: tuple[tuple[Callable[[Row], float | None], str], ...]
    place: Callable[[Row], float] | None = None
    log: str = ""
    ticks: bool = False
    percent: bool = False

    def draw(self, axes: Any, rows: Sequence[Row]) -> None:
        """Draws results, in order of the setting."""
        place = self.place or _SETTINGS[self.setting]
        for reuse in [name for name in (*_COLORS, None) if any(r["reuse"] == name for r in rows)]:
            mine = [row for row in rows if row["reuse"] == reuse]
            color = _COLORS.get(reuse or "", "black")
            for i, (value, style) in enumerate(self.lines):
                label = None if i else reuse or "server"
                values = np.array([value(row) for row in mine], float)
                axes.plot(
                    [*map(place, mine)],
                    values,
                    style,
                    marker="o",
                    color=color,
                    label=label,
                    clip_on=False,
                )
        if "x" in self.log:
            axes.set_xscale("log")
        if self.ticks:
            axes.set_xticks(ticks := sorted({place(row) for row in rows}))
            axes.set_xticklabels([f"{tick:.3g}" for tick in ticks])
            axes.set_xticks([], minor=True)
        else:
            axes.set_xlim(left=0)
        if "y" in self.log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1 if self.percent else None)
        axes.yaxis.set_major_formatter("{x:.0%}" if self.percent else "{x:,g}")
        axes.set_title(self.title, loc="left", fontsize=10)
        axes.set_xlabel(self.label)
        axes.legend(loc="best")


def _percentile(key: str, name: str) -> Callable[[Row], float | None]:
    return lambda row: row[key] and row[key][name]


PLOTS = (
    Plot(
        "ttft-rate",
        "rate",
        "Time to first token in ms: p50, and p99 dashed",
        "requests a second (open loop)",
        ((_percentile("ttft_ms", "p50"), "-"), (_percentile("ttft_ms", "p99"), "--")),
        log="y",
    ),
    Plot(
        "throughput-concurrency",
        "concurrency",
        "Requests a second",
        "requests at a time (closed loop)",
        ((throughput, "-"),),
        log="x",
        ticks=True,
    ),
    Plot(
        "throughput-alpha",
        "alpha",
        "Requests a second",
        "exponent of the Zipf law (0: uniform)",
        ((throughput, "-"),),
        ticks=True,
    ),
    Plot(
        "hits-pool",
        "pool_share",
        "Document tokens found in the pool",
        "KV pool in GB",
        ((lambda row: row["document_hit_rate"], "-"),),
        place=lambda row: row["kv_pool_bytes"] / 1e9,
        ticks=True,
        percent=True,
    ),
)


def save_plots(folder: Path, results: Sequence[Row]) -> list[Path]:
    """Draws every plot whose setting takes more than one value.

    Raises:
      SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'lazyattn-jax[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(_STYLE):
        for plot in PLOTS:
            rows = points(results, plot.setting)
            if rows:
                figure = Figure(figsize=(5.2, 3.3), layout="constrained")
                plot.draw(figure.subplots(), rows)
                paths.append(folder / f"{plot.name}.svg")
                figure.savefig(paths[-1], metadata={"Date": None})
    return paths


def points(results: Sequence[Row], setting: str) -> list[Row]:
    """The results to draw against a setting: the largest group that differs in nothing else.

    Empty where none takes more than one value of it.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in results:
        others = tuple(get(row) for name, get in _SETTINGS.items() if name != setting)
        if _SETTINGS[setting](row) is not None and row["reuse"] in (*_COLORS, None):
            groups.setdefault((row["workload"]["name"], *others), []).append(row)
    best = max(groups.values(), key=len, default=[])
    if len({_SETTINGS[setting](row) for row in best}) < 2:
        return []
    return sorted(best, key=_SETTINGS[setting])
