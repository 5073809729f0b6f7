"""What every result carries: when, where and with what it was measured."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax


def stamp() -> dict[str, str]:
    """Date, command, device, versions and commit of this run."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python -m lazyattn_jax.bench " + " ".join(sys.argv[1:]),
        "device": f"{device.device_kind} ({platform.processor() or platform.machine()})",
        "jax": jax.__version__,
        "commit": _commit() or "unknown",
    }


def _commit() -> str:
    """The commit this runs from; empty where there is no repository, or no git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def write(path: Path, results: dict[str, Any]) -> None:
    """Writes results with their stamp as JSON; the file is complete at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(stamp() | results, indent=2) + "\n", encoding="utf-8")
    new.replace(path)
