"""The demo, as ``make demo`` runs it: real weights, real answers, everything but the first warm."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from lazyattn_jax.demo import QUESTIONS


def test_demo():
    run = subprocess.run(
        [sys.executable, "-m", "lazyattn_jax.demo"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
    )
    for answer in ("31 met", "town hall", "1902", "Ines Carvalho", "Petra Novak"):
        assert answer in run.stdout
    assert len(re.findall(r"│ warm │ +\d+ │ +643 \(9\d%\)", run.stdout)) == len(QUESTIONS) - 1
    assert len(re.findall(r"│ cold │ +\d+ │ +0 \(0%\)", run.stdout)) == 1
    copied = re.search(r"([\d.]+) MiB stored once.*?([\d.]+) MiB", run.stdout, re.DOTALL)
    assert copied
    assert float(copied[2]) > 4 * float(copied[1])
