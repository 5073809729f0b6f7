"""The side by side comparison: its arithmetic by hand, and all of it on a small model."""

from __future__ import annotations

import json

import pytest

from lazyattn_jax.bench import __main__ as command
from lazyattn_jax.bench import step_times
from lazyattn_jax.bench.goals import gains, goals
from lazyattn_jax.bench.serving_metrics import throughput

TINY = {
    "--model": "dummy:tiny",
    "--pool": 6,
    "--documents": 2,
    "--document-tokens": 20,
    "--question-tokens": 8,
    "--system-tokens": 8,
    "--output-tokens": 4,
    "--kv-pool-bytes": "512KiB",
    "--max-model-len": 128,
    "--max-num-batched-tokens": 64,
    "--max-documents": 4,
    "--max-num-seqs": 2,
    "--page-size": 16,
    "--decode-buckets": 2,
    "--prefill-buckets": 64,
    "--pool-share": 0.5,
    "--requests": 4,
    "--concurrency": 2,
    "--unique-requests": 3,
    "--alone-documents": 3,
    "--decode-requests": 2,
    "--decode-documents": 2,
    "--host-requests": 2,
    "--host-document-tokens": 20,
    "--host-pool": 3,
    "--steps": 3,
    "--reuse": "lazy,block",
}


def bench(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["bench", *map(str, arguments)])
    assert command.main() == 0


def compare(monkeypatch, path, *arguments):
    options = [x for pair in TINY.items() for x in pair]
    bench(monkeypatch, "compare", *options, "--json", path, *arguments)


def test_all_parts_on_a_small_model(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(step_times, "read_ceiling", lambda num_bytes: 1e10)
    path = tmp_path / "found.json"
    parts = ["closed", "loads", "open", "steps", "unique", "gain"]
    compare(monkeypatch, path, "--preload", "--loads", 1, "--only", *parts)
    assert "a document is read once a step" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["parts"] == parts
    rows = {part: [r for r in found["results"] if r["part"] == part] for part in parts}
    assert [r["reuse"] for r in rows["closed"]] == ["lazy", "block"]
    # The pool of 16 pages holds all six documents of two pages before the first request comes.
    assert rows["closed"][0]["document_hit_rate"] == 1
    token_bytes = 512  # dummy:tiny in float32
    assert rows["closed"][0]["kv_pool_bytes"] == 512 * 1024 // 2
    rate = max(throughput(rows[part][1]) for part in ("closed", "loads"))
    assert [r["rate"] for r in rows["open"]] == pytest.approx([0.8 * rate] * 2)
    assert [r["reuse"] for r in rows["unique"]] == ["lazy", "none", "none", "lazy"]
    assert {r["document_hit_rate"] for r in rows["unique"]} == {0}
    ways = [(r["reuse"], r["concurrency"], r["pool_share"]) for r in rows["gain"]]
    few = ways[1][1]
    assert few == max(1, round(rows["closed"][1].get("running", 0)))
    share = 0.5 + few * 2 * 2 * 16 * token_bytes / (512 * 1024)
    assert ways == [("lazy-unshared", 2, 0.5), ("lazy-unshared", few, 0.5), ("block", few, share)]
    for row in found["results"]:
        assert (row["errors"], row["compilations"]) == (0, 0)
    _check_steps(found["steps"], token_bytes)

    compare(monkeypatch, path, "--preload", "--only", "closed", "open", "gain")
    assert json.loads(path.read_text()) == found  # what is complete is not measured again
    assert "throughput, closed loop, lazy to block" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="results of other options"):
        compare(monkeypatch, path, "--only", "closed")
    with pytest.raises(SystemExit, match=r"pool_share 0\.1 leaves 6 pages, .* may take 14"):
        compare(monkeypatch, tmp_path / "few.json", "--only", "closed", "--pool-share", "0.1")

    pytest.importorskip("matplotlib")
    bench(monkeypatch, "figures", path, "--plot", tmp_path / "plots")
    assert [p.name for p in (tmp_path / "plots").iterdir()] == ["throughput-concurrency.svg"]


def _check_steps(found, token_bytes):
    weights, ceiling = found["weight_bytes"], found["read_ceiling"]
    alone, decode, host, text, prefill = found["results"].values()
    assert found["token_bytes"] == token_bytes
    assert alone["best_seconds"] == pytest.approx(weights / ceiling)
    # Two requests: 32 tokens of system text, 40 of documents, 8 of the question, and a few more.
    assert 2 * 80 < decode["kv_tokens"] < 2 * (80 + 24)
    size = weights + decode["kv_tokens"] * token_bytes
    assert decode["best_seconds"] == pytest.approx(size / ceiling)
    assert host["requests"] == 2
    assert host["host_seconds"] > 0
    assert host["not_hidden_seconds"] == max(0, host["seconds"] - host["device_seconds"])
    assert text["one_kv_tokens"] < text["all_kv_tokens"] < 2 * (40 + 24)
    assert prefill["tokens"] == 4 * 64 // 20 * 20
    assert prefill["tokens_per_second"] == pytest.approx(prefill["tokens"] / prefill["seconds"])


def row(part, reuse, rate, *, alpha=1.0, ttft=(100.0, 200.0), seconds=10.0):
    return {
        "part": part,
        "reuse": reuse,
        "workload": {"alpha": alpha},
        "steady_requests_per_second": rate,
        "ttft_ms": {"p50": ttft[0], "p99": ttft[1]},
        "seconds": seconds,
    }


def test_goals_by_hand():
    rows = [
        row("closed", "lazy", 1000),
        row("closed", "block", 300),
        row("closed", "none", 200),
        row("open", "lazy", 300, ttft=(40, 110)),
        row("open", "block", 300),
        row("alphas", "lazy", 900, alpha=0.0),
        row("alphas", "lazy", 4000, alpha=2.1),
        row("alphas", "block", 1000, alpha=0.0),
        row("alphas", "block", 1000, alpha=2.1),
        row("unique", "lazy", 0, seconds=10.0),
        row("unique", "none", 0, seconds=10.0),
        row("unique", "none", 0, seconds=9.9),
        row("unique", "lazy", 0, seconds=10.2),
    ]
    steps = {"alone": {"to_best": 1.4}, "host": {"not_hidden_seconds": 0.0012}}
    found = goals({"results": rows, "steps": {"results": steps}})
    assert [(round(g.value, 6), g.reached) for g in found] == [
        (round(10 / 3, 6), True),
        (5.0, False),
        (0.4, True),
        (0.55, False),
        (0.9, False),
        (4.0, True),
        (1.4, True),
        (1.2, False),
        (round(20.2 / 19.9, 6), True),
    ]
    assert goals({"results": []}) == []


def test_gains_multiply_to_the_whole():
    rows = [row("closed", "lazy", 1200), row("closed", "block", 100)]
    assert gains({"results": rows}) == []
    assert gains({"results": [rows[1], *[row("gain", "", 1)] * 3]}) == []
    rows += [row("gain", way, n) for way, n in (("", 600), ("", 400), ("block", 200))]
    assert [factor for _, factor in gains({"results": rows})] == [2.0, 1.5, 2.0, 2.0]
