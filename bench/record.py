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
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python -m lazyattn_jax.bench " + " ".join(sys.argv[1:]),
        "device": f"{device.device_kind} ({platform.processor() or platform.machine()})",
        "jax": jax.__version__,
        "commit": commit.stdout.strip() or "unknown",
    }


def write(path: Path, results: dict[str, Any]) -> None:
    """Writes results with their stamp as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stamp() | results, indent=2) + "\n", encoding="utf-8")
