"""How training goes: a progress bar or lines, a log, and a plot of it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lazyattn_jax.finetune.train import Score, as_record

LOG = "log.jsonl"
PLOT = "loss.svg"
_LINE_EVERY = 10  # steps, where there is no terminal to show a bar on


class Report:
    """Shows and logs; used in a ``with`` block.

    Args:
      folder: of the run.
      steps: of the whole training.
      done: steps that earlier runs have done; what they logged after them is dropped.
    """

    def __init__(self, folder: Path, steps: int, done: int) -> None:
        path = folder / LOG
        kept = [r for r in read_log(path) if r["step"] <= done] if done else []
        self._file = path.open("w", encoding="utf-8", buffering=1)
        for record in kept:
            self._write(record)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._console = Console(soft_wrap=True)
        self._bar = Progress(
            *columns,
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, completed=done)
        self._steps, self._first = steps, done + 1

    def __enter__(self) -> Report:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        self._file.close()

    def trained(self, step: int, score: Score, rate: float) -> None:
        """One more step."""
        self._write({"kind": "train", "step": step, "rate": rate, **as_record(score)})
        loss = f"loss {score.full:.3f} full, {score.block:.3f} block"
        self._bar.update(self._task, completed=step, description=loss)
        if step == self._first:  # compiled by now
            self._begin = time.perf_counter()
        elif not self._console.is_terminal and step % _LINE_EVERY == 0:
            pace = (time.perf_counter() - self._begin) / (step - self._first)
            left = pace * (self._steps - step)
            print(f"step {step}  {loss}  {pace:.3f} s/step, {left:.0f} s left", flush=True)

    def evaluated(self, step: int, score: Score) -> None:
        """Held-out samples were scored."""
        self._write({"kind": "eval", "step": step, **as_record(score)})
        self._console.print(
            f"step {step}  held out: loss {score.full:.3f} full, {score.block:.3f} block; "
            f"word for word {100 * score.exact_full:.1f} % full, "
            f"{100 * score.exact_block:.1f} % block; KL {score.divergence:.3f}",
            highlight=False,
        )
        sys.stdout.flush()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def plot(folder: Path) -> bool:
    """Draws the log of a run; false where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    records = read_log(folder / LOG)
    for mask, colour in (("full", "C0"), ("block", "C1")):
        for kind, style in (("train", {"lw": 0.6, "alpha": 0.4}), ("eval", {"marker": "o"})):
            points = [(r["step"], r[mask]) for r in records if r["kind"] == kind]
            if points:
                name = f"{mask} mask, {'training' if kind == 'train' else 'held out'}"
                axes.plot(*zip(*points, strict=True), color=colour, label=name, **style)
    axes.set(xlabel="step", ylabel="loss, nats a token of the answer", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(folder / PLOT)
    return True
