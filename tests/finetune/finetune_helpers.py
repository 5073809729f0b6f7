"""A toy set of questions, and runs of the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from lazyattn_jax.finetune.__main__ import main
from lazyattn_jax.finetune.batches import BatchShape
from lazyattn_jax.finetune.data import Recipe

END = 0
RECIPE = Recipe((2, 3), untitled=0.2, joined=0.0, system="Be short.", ask="{question}")
SHAPE = BatchShape(parts=1, rows=2, length=256, targets=16)
OPTIONS = {
    "--model": "dummy:tiny",
    "--documents": "2 3",
    "--system": "Be short.",
    "--ask": "{question}",
    "--rows": "2",
    "--length": "256",
    "--targets": "16",
    "--joined": "0",
}


def write_questions(path: Path, count: int = 24) -> Path:
    colours = ("red", "blue", "green", "gold")
    lines = [
        {
            "question": f"colour of n{i}?",
            "answers": [colours[i % 4], "no colour"],
            "title": f"n{i}",
            "text": f"n{i} is {colours[i % 4]}.",
        }
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return path


def flags(data: Path, output: Path, **options: Any) -> list[str]:
    """The command line; options by their names, with underscores."""
    given = OPTIONS | {"--" + name.replace("_", "-"): str(x) for name, x in options.items()}
    arguments = [f"--data={data}", f"--output={output}"]
    for name, value in given.items():
        two = name in ("--documents", "--export")
        arguments += [name, *value.split()] if two else [f"{name}={value}"]
    return arguments


def finetune(data: Path, output: Path, *more: str, **options: Any) -> int:
    """Runs the command in this process."""
    return main([*flags(data, output, **options), *more])


def log_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text("utf-8").splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
