"""The serving benchmark as a client of a real server."""

from __future__ import annotations

import json

import pytest

from lazyattn_jax.bench import __main__ as command
from lazyattn_jax.bench.serving_url import request_fields
from lazyattn_jax.bench.workloads import Query


@pytest.mark.parametrize("documents", ["field", "inline"])
def test_a_server_under_load(server, documents, monkeypatch, tmp_path):
    path = tmp_path / "found.json"
    sizes = ["--pool", "2", "--documents", "2", "--document-tokens", "6", "--output-tokens", "5"]
    sizes += ["--question-tokens", "3", "--system-tokens", "2", "--requests", "5"]
    load = ["--concurrency", "2", "--rate", "1000", "--url-documents", documents]
    arguments = ["--url", f"{server.url}/v1", "--json", str(path), *sizes, *load]
    monkeypatch.setattr("sys.argv", ["bench", "serve", *arguments])
    assert command.main() == 0
    rows = json.loads(path.read_text())["results"]
    assert [(r["concurrency"], r["rate"]) for r in rows] == [(2, None), (None, 1000.0)]
    for row in rows:
        assert (row["requests"], row["errors"], row["reuse"]) == (5, 0, None)
        assert row["output_tokens_per_second"] * row["seconds"] == pytest.approx(25)
        assert 0 < row["ttft_ms"]["p50"] < row["e2e_ms"]["p50"]
    assert rows[1]["token_hit_rate"] > 0  # both documents were asked for before


def test_errors_of_a_server_are_counted(server, monkeypatch, tmp_path):
    path = tmp_path / "found.json"
    sizes = ["--workload", "unique", "--document-tokens", "200", "--requests", "2"]
    arguments = ["--url", f"{server.url}/v1", "--json", str(path), *sizes, "--concurrency", "1"]
    monkeypatch.setattr("sys.argv", ["bench", "serve", *arguments])
    assert command.main() == 0
    (row,) = json.loads(path.read_text())["results"]
    assert (row["requests"], row["errors"], row["ttft_ms"]) == (0, 2, None)


def test_an_address_without_a_server_is_named(server, monkeypatch):
    for url in ("http://127.0.0.1:1/v1", f"{server.url}/elsewhere"):
        arguments = ["bench", "serve", "--url", url, "--concurrency", "1", "--requests", "1"]
        monkeypatch.setattr("sys.argv", arguments)
        with pytest.raises(SystemExit, match=f"error: .*{url}/ does not answer"):
            command.main()


def test_fields_of_a_request():
    query = Query("Be brief.", ("One.", "Two."), "Which?", 7)
    fields = request_fields(query, "field")
    assert fields["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Which?"},
    ]
    assert fields["max_tokens"] == 7
    assert fields["extra_body"] == {"ignore_eos": True, "documents": ["One.", "Two."]}
    inline = request_fields(Query("", ("One.", "Two."), "Which?", 7, ("One",)), "inline")
    assert inline["messages"] == [{"role": "user", "content": "One.\n\nTwo.\n\nWhich?"}]
    assert inline["extra_body"] == {}
