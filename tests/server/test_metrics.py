"""/metrics: what Prometheus reads, against what the answers said."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_helpers import Gate, RunningServer, chat_body, running, wait_until

from lazyattn_jax.engine.engine import Engine

DOCUMENTS = ["The glass frog lives in cloud forests.", "The comet clock was built by Jonas Weir."]


def scrape(server: RunningServer) -> dict[str, float]:
    answer = server.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation
        for sample in family.samples:
            if "le" not in sample.labels:
                labels = "".join(f"{{{v}}}" for v in sample.labels.values())
                values[sample.name.removeprefix("lazyattn:") + labels] = sample.value
    return values


def change(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before.get(name, 0) for name in after}


def ask(server: RunningServer, text: str = "What?", **fields: Any) -> dict[str, Any]:
    answer = server.post("chat/completions", **chat_body(text, **fields))
    assert answer.status_code == 200
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def test_counts_are_those_of_the_answers(server: RunningServer) -> None:
    before = scrape(server)
    salt = {"cache_salt": "metrics", "documents": DOCUMENTS}
    usages = [ask(server, **salt), ask(server, **salt), ask(server, "Why?", n=2, **salt)]
    seen = change(before, scrape(server))
    prompts = [usages[0], usages[1], usages[2], usages[2]]  # the last one is computed twice
    expected = sum(u["prompt_tokens"] for u in prompts)
    assert seen["prompt_tokens_total"] == seen["prefix_cache_queries_total"] == expected
    assert seen["generation_tokens_total"] == 48
    assert seen["request_success_total{length}"] == 4
    tokens = usages[0]["prompt_tokens_details"]["documents"]
    tokens = sum(d["tokens"] for d in tokens)
    assert seen["document_query_tokens_total"] == 4 * tokens
    assert seen["document_hit_tokens_total"] == 3 * tokens
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in usages]
    assert cached[0] == 0
    # Of the two choices either may have found a little more than the other.
    assert seen["prefix_cache_hits_total"] >= cached[1] + 2 * tokens
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert seen[f"{name}_seconds_count"] == 4
        assert seen[f"{name}_seconds_sum"] > 0
    assert seen["time_per_output_token_seconds_count"] == 4
    parts = seen["time_to_first_token_seconds_sum"]
    parts += 11 * seen["time_per_output_token_seconds_sum"]
    assert seen["e2e_request_latency_seconds_sum"] == pytest.approx(parts)


def test_what_choosing_documents_takes(server: RunningServer) -> None:
    """Trials are no requests, and answers that share a choice count it once."""
    before = scrape(server)
    fields = {"cache_salt": "choice", "documents": DOCUMENTS, "document_select": 1}
    usages = [ask(server, n=n, **fields) for n in (1, 2)]
    seen = change(before, scrape(server))
    details = [u["prompt_tokens_details"] for u in usages]
    expected = sum(d["selection_tokens"] for d in details)
    assert seen["document_selection_tokens_total"] == expected > 0
    assert seen["prompt_tokens_total"] == usages[0]["prompt_tokens"] * 3
    assert seen["time_to_first_token_seconds_count"] == 3
    assert seen["num_requests_waiting"] == 0


def test_loading_documents_is_no_request(server: RunningServer) -> None:
    before = scrape(server)
    loaded = server.http.post("/v1/documents", json={"documents": ["abc"], "cache_salt": "m"})
    [card] = loaded.json()["data"]
    after = scrape(server)
    assert change(before, after)["prompt_tokens_total"] == 0
    assert change(before, after)["time_to_first_token_seconds_count"] == 0
    assert after["kv_pinned_bytes"] == 0
    server.http.post(
        "/v1/documents", json={"documents": ["abc"], "cache_salt": "m", "pinned": True}
    )
    page_bytes = server.call(lambda e: e.page_bytes)
    assert scrape(server)["kv_pinned_bytes"] == page_bytes
    server.http.delete(f"/v1/documents/{card['id']}?cache_salt=m")
    assert scrape(server)["kv_pinned_bytes"] == 0


def test_what_sharing_saves(server: RunningServer, engine: Engine) -> None:
    """Five requests over the same document of ten pages, each with text of its own."""
    salt = {"cache_salt": "sharing", "documents": ["d" * 158]}
    ask(server, **salt)
    idle = scrape(server)
    assert idle["num_requests_running"] == idle["num_requests_waiting"] == 0
    assert idle["kv_referenced_bytes"] == idle["kv_distinct_bytes"] == 0
    assert idle["kv_cache_usage_perc"] == 0
    assert "decode_sharing_factor" not in idle
    with Gate(engine) as gate, ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, server, f"{i} {'q' * 20}", **salt) for i in range(5)]
        wait_until(lambda: len(engine._streams) + server.engine._commands.qsize() == 5)
        gate.allow(7)  # enough for four prompts, not for twelve tokens
        wait_until(lambda: gate.taken == 7)
        scraped = pool.submit(scrape, server)
        wait_until(lambda: server.engine._commands.qsize() or scraped.done())
        gate.allow(1)
        busy = scraped.result()
        gate.open()
        for answer in answers:
            answer.result()
    assert busy["num_requests_running"] == 4  # max_num_seqs
    assert busy["num_requests_waiting"] == 1
    page_bytes = server.call(lambda e: e.page_bytes)
    saved = (busy["kv_referenced_bytes"] - busy["kv_distinct_bytes"]) / page_bytes
    assert saved >= 3 * 10  # the document is there once, not four times
    factor = busy["kv_referenced_bytes"] / busy["kv_distinct_bytes"]
    assert busy["decode_sharing_factor"] == factor > 2
    assert 0 < busy["kv_cache_usage_perc"] < 1
    assert busy["kv_cache_usage_perc"] == busy["kv_distinct_bytes"] / page_bytes / 128


def test_evictions_and_preemptions(server: RunningServer) -> None:
    before = scrape(server)
    evicted = server.call(lambda e: e.scheduler.index.num_evicted)
    assert before["evictions_total"] == evicted
    assert before["num_preemptions_total"] == server.call(lambda e: e.scheduler.num_preemptions)
    for i in range(12):
        ask(server, documents=[f"{i:3} {'x' * 200}"], cache_salt="evict")
    assert scrape(server)["evictions_total"] > evicted


def test_recompiles_are_counted(server: RunningServer, engine: Engine) -> None:
    with running(lambda: engine) as own:
        wait_until(lambda: own.engine.unavailable is None)
        ask(own)
        before = scrape(own)
        ask(own)
        assert scrape(own)["recompiles_total"] == before["recompiles_total"]
        jax.jit(lambda x: x * 41 + 1)(1)
        after = scrape(own)
        assert after["recompiles_total"] == before["recompiles_total"] + 1
        assert after["engine_steps_total"] > before["engine_steps_total"]
        assert after["engine_host_seconds_total"] > before["engine_host_seconds_total"]


def test_metrics_while_there_is_no_engine() -> None:
    def load() -> Engine:
        raise ValueError("no such model")

    with running(load) as server:
        wait_until(lambda: server.engine.load_error)
        values = scrape(server)
        assert values["prompt_tokens_total"] == 0
        assert "num_requests_running" not in values
