"""Metrics for Prometheus: vLLM's names with a prefix of our own, and what sharing brings.

Counters and histograms are kept as requests go on; what the scheduler knows is asked for with each
scrape.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lazyattn_jax.engine.engine import Engine, Output
from lazyattn_jax.engine.runs import Request, State
from lazyattn_jax.llm import Usage
from lazyattn_jax.server.async_engine import Observer

PREFIX = "lazyattn:"
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_FIRST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(frozen=True)
class EngineState:
    """What an engine and its scheduler know between two steps.

    Attributes:
      running: requests that hold pages.
      waiting: requests that do not.
      used: share of the pool that running requests and kept documents hold, 0 to 1.
      cached_bytes: KV of all segments, in use or not.
      kept_bytes: KV of documents that are pinned by their owners.
      host_bytes: KV in the host's memory.
      referenced_bytes: KV that running requests attend to, counted for each of them.
      distinct_bytes: the same, what several share counted once.
      decode_referenced: pages that requests which generate read in a step, counted for each.
      decode_distinct: the same, what several share counted once.
      preemptions: since the start.
      evictions: segments, since the start.
      steps: prefill and decode steps, since the start.
      host_seconds: the host's own work for them.
      wait_seconds: time that was left to wait for the device.
      selection_tokens: computed to choose documents, since the start.
      restored_tokens: of documents that came back from the host's memory, since the start.
      compilations: programs compiled since the engine was ready.
    """

    running: int
    waiting: int
    used: float
    cached_bytes: int
    kept_bytes: int
    host_bytes: int
    referenced_bytes: int
    distinct_bytes: int
    decode_referenced: int
    decode_distinct: int
    preemptions: int
    evictions: int
    steps: int
    host_seconds: float
    wait_seconds: float
    selection_tokens: int
    restored_tokens: int
    compilations: int


def engine_state(engine: Engine) -> EngineState:
    """The state of an engine; to be called in its thread."""
    scheduler, index = engine.scheduler, engine.scheduler.index
    referenced, distinct = _pages(scheduler.active)
    decode = _pages(r for r in scheduler.active if r.state is State.DECODE)
    return EngineState(
        running=len(scheduler.active),
        waiting=engine.num_waiting,
        used=1 - index.num_available / engine.limits.num_pages,
        cached_bytes=index.num_cached * engine.page_bytes,
        kept_bytes=index.num_kept * engine.page_bytes,
        host_bytes=index.store.num_pages * engine.page_bytes,
        referenced_bytes=referenced * engine.page_bytes,
        distinct_bytes=distinct * engine.page_bytes,
        decode_referenced=decode[0],
        decode_distinct=decode[1],
        preemptions=scheduler.num_preemptions,
        evictions=index.num_evicted,
        steps=engine.stats.steps,
        host_seconds=engine.stats.host_seconds,
        wait_seconds=engine.stats.wait_seconds,
        selection_tokens=engine.stats.selection_tokens,
        restored_tokens=engine.stats.restored_tokens,
        compilations=engine.stats.compilations,
    )


def _pages(requests: Iterable[Request]) -> tuple[int, int]:
    """Pages that requests attend to: counted for each request, and each page once."""
    count, pages = 0, set[int]()
    for request in requests:
        run = request.run
        for some in (run.pages, *(placement.pages for placement in run.context)):
            count += len(some)
            pages.update(some)
    return count, len(pages)


class Metrics(Observer):
    """Counts, and writes what it has counted as Prometheus' text."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._scheduler = _SchedulerCollector()
        self._registry.register(self._scheduler)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self._queries = self._counter("prefix_cache_queries", "Tokens of prompts, looked up")
        self._hits = self._counter("prefix_cache_hits", "Tokens of prompts that were not computed")
        self._document_queries = self._counter(
            "document_query_tokens", "Tokens of documents in prompts"
        )
        self._document_hits = self._counter(
            "document_hit_tokens", "Tokens of documents in prompts that were not computed"
        )
        self._finished = Counter(
            f"{PREFIX}request_success",
            "Finished requests",
            ["finished_reason"],
            registry=self._registry,
        )
        self._first = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _FIRST_BUCKETS
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Mean time of a request's later tokens", _TOKEN_BUCKETS
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token", _REQUEST_BUCKETS
        )

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(PREFIX + name, about, registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, about, buckets=buckets, registry=self._registry)

    def started(self, request: Request) -> None:
        """Counts the prompt and what of it was reused."""
        if not request.layout.stream:
            return  # only loads documents
        self._prompt_tokens.inc(request.prompt_tokens)
        self._queries.inc(request.prompt_tokens)
        self._hits.inc(request.cached_tokens or 0)
        usage = Usage.of(request)
        self._document_queries.inc(sum(d.tokens for d in usage.documents))
        self._document_hits.inc(sum(d.cached_tokens for d in usage.documents))
        if request.first_token_at is not None:
            self._first.observe(request.first_token_at - request.arrived_at)

    def progress(self, output: Output) -> None:
        """Counts tokens, and measures those who are finished."""
        request = output.request
        self._generation_tokens.inc(len(output.token_ids))
        if output.finish_reason is None or request.first_token_at is None:
            return
        now = time.monotonic()
        if output.finish_reason not in ("error", "timeout"):
            self._finished.labels(output.finish_reason).inc()
        self._whole.observe(now - request.arrived_at)
        if request.num_generated > 1:
            later = request.num_generated - 1
            self._per_token.observe((now - request.first_token_at) / later)

    def text(self, state: EngineState | None) -> bytes:
        """Everything, in Prometheus' text format; without a state only what is counted here."""
        self._scheduler.state = state
        return generate_latest(self._registry)


class _SchedulerCollector(Collector):
    """The metrics that come from a state."""

    def __init__(self) -> None:
        self.state: EngineState | None = None

    def collect(self) -> Iterator[Metric]:
        state = self.state
        if state is None:
            return
        gauges = {
            "num_requests_running": ("Requests that are being computed", state.running),
            "num_requests_waiting": ("Requests in line", state.waiting),
            "kv_cache_usage_perc": ("Share of the pool that is in use, 0 to 1", state.used),
            "kv_cached_bytes": ("KV of all segments, in use or not", state.cached_bytes),
            "kv_pinned_bytes": ("KV of pinned documents", state.kept_bytes),
            "kv_host_bytes": ("KV in the host's memory", state.host_bytes),
            "kv_referenced_bytes": (
                "KV that running requests attend to, counted for each of them",
                state.referenced_bytes,
            ),
            "kv_distinct_bytes": (
                "KV that running requests attend to, what they share counted once",
                state.distinct_bytes,
            ),
        }
        if state.decode_distinct:
            gauges["decode_sharing_factor"] = (
                "KV that a decode step attends to over what it has to read",
                state.decode_referenced / state.decode_distinct,
            )
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, about, value)
        counts = {
            "num_preemptions": ("Preemptions", state.preemptions),
            "evictions": ("Evicted segments", state.evictions),
            "engine_steps": ("Prefill and decode steps", state.steps),
            "engine_host_seconds": ("The host's own work for steps", state.host_seconds),
            "engine_wait_seconds": ("Waiting for the device", state.wait_seconds),
            "document_restored_tokens": (
                "Tokens of documents that came back from the host's memory",
                state.restored_tokens,
            ),
            "document_selection_tokens": (
                "Tokens that were computed to choose documents",
                state.selection_tokens,
            ),
            "recompiles": (
                "Programs compiled since the engine was ready; should stay 0",
                state.compilations,
            ),
        }
        for name, (about, value) in counts.items():
            yield CounterMetricFamily(PREFIX + name, about, value)
