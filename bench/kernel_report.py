"""The tables and the plot of the kernel benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from lazyattn_jax.bench.kernel_runs import Result


def is_met(result: Result) -> bool | None:
    """Whether a result reaches its goal; none where it has no goal or no value."""
    if result.goal is None or result.value is None:
        return None
    if result.table in ("decode", "copy"):
        return result.value >= result.goal
    return result.value <= result.goal


def tables(results: Sequence[Result], ceiling: float | None) -> list[Table]:
    """One table for each kind of result that there is."""
    makers = {
        "decode": _decode,
        "prefill": _prefill,
        "copy": _copies,
        "write": _writes,
        "plan": _plans,
    }
    found = []
    for kind, make in makers.items():
        mine = [result for result in results if result.table == kind]
        if mine:
            found.append(make(mine, ceiling))
    return found


def _decode(results: Sequence[Result], ceiling: float | None) -> Table:
    table = _table(
        f"Decode (read ceiling {ceiling / 1e12:.2f} TB/s)" if ceiling else "Decode",
        "distinct: K and V bytes of distinct documents, each once; of ceiling: these over the time",
        ["case", "variant"],
        ["time", "kernels", "distinct", "of ceiling", "goal", "headline to this", "goal"],
    )
    for r in results:
        table.add_row(
            r.case,
            r.variant,
            *_times(r),
            "" if r.bytes is None else f"{r.bytes / 1e6:.0f} MB",
            *_judged(r.value, r.goal, is_met(r), "≥"),
            *_judged(
                r.headline,
                r.headline_goal,
                None
                if r.headline is None or r.headline_goal is None
                else r.headline <= r.headline_goal,
                "≤",
            ),
        )
    return table


def _prefill(results: Sequence[Result], ceiling: float | None) -> Table:
    table = _table(
        "Prefill",
        "cuDNN: contiguous keys and values, no rotation; causal for E1 and E2 only",
        ["case", "variant"],
        ["time", "kernels", "TFLOP/s", "cuDNN", "of cuDNN", "goal"],
    )
    for r in results:
        fast = "" if r.flops is None or r.seconds is None else f"{r.flops / r.seconds / 1e12:.0f}"
        table.add_row(
            r.case,
            r.variant,
            *_times(r),
            fast,
            escape(r.baseline_problem or _microseconds(r.baseline_seconds)),
            *_judged(r.value, r.goal, is_met(r), "≤"),
        )
    return table


def _copies(results: Sequence[Result], ceiling: float | None) -> Table:
    table = _table(
        "Documents copied within the pool, keys turned",
        "moved: bytes read and written; stream: as many, read and written one after another",
        ["case", "variant"],
        ["time", "moved", "TB/s", "stream", "of its bandwidth", "goal"],
    )
    for r in results:
        fast = "" if r.bytes is None or r.seconds is None else f"{r.bytes / r.seconds / 1e12:.2f}"
        table.add_row(
            r.case,
            r.variant,
            _times(r)[0],
            "" if r.bytes is None else f"{r.bytes / 1e6:.0f} MB",
            fast,
            _microseconds(r.baseline_seconds),
            *_judged(r.value, r.goal, is_met(r), "≥"),
        )
    return table


def _writes(results: Sequence[Result], ceiling: float | None) -> Table:
    table = _table(
        "New keys and values into pages",
        "consecutive: as many bytes into consecutive slots",
        ["written"],
        ["time", "bytes", "consecutive", "of consecutive"],
    )
    for r in results:
        table.add_row(
            r.variant,
            _times(r)[0],
            "" if r.bytes is None else f"{r.bytes / 1e6:.2f} MB",
            _microseconds(r.baseline_seconds),
            "" if r.value is None else f"{r.value:.2f}",
        )
    return table


def _plans(results: Sequence[Result], ceiling: float | None) -> Table:
    table = _table("Plans on the host", None, ["plan", "of"], ["time"])
    for r in results:
        table.add_row(r.case, r.variant, _times(r)[0])
    return table


def _table(title: str, caption: str | None, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _times(result: Result) -> tuple[str, str]:
    if result.problem is not None:
        return f"[red]{escape(result.problem)}[/red]", ""
    return _microseconds(result.seconds), _microseconds(result.kernel_seconds)


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:.1f} µs"


def _judged(value: float | None, goal: float | None, met: bool | None, sign: str) -> list[str]:
    """A value, green or red where there is a goal, and the goal."""
    if value is None:
        return ["", ""]
    text = f"{value:.3f}"
    if goal is None or met is None:
        return [text, ""]
    color = "green" if met else "red"
    return [f"[{color}]{text}[/{color}]", f"{sign} {goal:.2f}"]


def save_plot(path: Path, results: Sequence[Result], device: str) -> None:
    """Draws the results that have a goal, decode and prefill side by side.

    Raises:
      SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'lazyattn-jax[bench]'") from None
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    labels = {
        "decode": "fraction of the read ceiling (more is better)",
        "prefill": "time, of cuDNN's (less is better)",
    }
    for axes, (table, label) in zip(panels, labels.items(), strict=True):
        mine = [r for r in results if r.table == table and is_met(r) is not None]
        names = [f"{r.case} {r.variant}".strip() for r in mine]
        colors = ["tab:blue" if is_met(r) else "tab:red" for r in mine]
        axes.barh(names, [r.value or 0 for r in mine], color=colors, height=0.6)
        for place, r in enumerate(mine):
            axes.plot([r.goal, r.goal], [place - 0.4, place + 0.4], color="black")
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Kernels on {device}; black: goals")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
