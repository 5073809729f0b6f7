"""The arithmetic of the reuse benchmark, and a tiny run of it."""

from __future__ import annotations

import json
import sys

import pytest

from lazyattn_jax.bench import __main__ as command
from lazyattn_jax.bench.reuse import Timing, summarise


def test_medians_and_ratios_are_taken_over_trials():
    results = summarise(
        {
            "cold": [Timing(1.0, 0.1), Timing(2.0, 0.1), Timing(4.0, 0.1)],
            "warm": [Timing(0.5, 0.2), Timing(0.2, 0.3), Timing(0.4, 0.3)],
            "plain": [Timing(3.0, 0.1), Timing(3.0, 0.2), Timing(3.0, 0.1)],
        }
    )
    assert results["cold_first_token_ms"] == 2000
    assert results["warm_first_token_ms"] == 400
    assert results["warm_to_cold"] == pytest.approx(0.1)  # of 0.5, 0.1, 0.1
    assert results["documents_to_plain"] == pytest.approx(2.0)  # of 2, 1.5, 3


def test_a_tiny_run_writes_its_record(tmp_path, monkeypatch, capsys):
    path = tmp_path / "results" / "reuse.json"
    arguments = ["--documents", "2", "--document-tokens", "20", "--output-tokens", "3"]
    arguments += ["--trials", "2", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench", "reuse", "--model", "dummy:tiny", *arguments])
    assert command.main() == 0
    record = json.loads(path.read_text())
    assert record["settings"]["documents"] == 2
    assert record["command"].startswith("python -m lazyattn_jax.bench reuse --model dummy:tiny")
    assert record["results"]["cold_first_token_ms"] > 0
    assert "warm to cold" in capsys.readouterr().out
