"""Load on an engine in this process: one loop sends what is due and takes step after step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from lazyattn_jax.bench.serving_load import Load
from lazyattn_jax.bench.serving_metrics import Record
from lazyattn_jax.bench.workloads import Content, Query
from lazyattn_jax.engine.engine import Engine, Output
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import DocumentPiece, Prompt
from lazyattn_jax.engine.runs import Request
from lazyattn_jax.models.tokenizer import Tokenizer
from lazyattn_jax.prompt import Document, chat_prompt, text_prompt

_SAMPLE_SECONDS = 0.5  # between looks at the pool, which take a millisecond or two


@dataclass(frozen=True)
class Span:
    """How long load is put on: ``warmup`` seconds that do not count, then ``duration``.

    With ``requests`` it ends when so many have been answered, the warm-up's included, if that is
    earlier.
    """

    warmup: float = 0.0
    duration: float = float("inf")
    requests: int | None = None

    def __post_init__(self) -> None:
        if self.requests is None and self.duration == float("inf"):
            raise ValueError("duration or requests must be given, else the load never ends")


@dataclass
class Outcome:
    """What happened, the window that counts, and what the target itself says of it."""

    records: list[Record] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


def drive(
    engine: Engine,
    queries: Iterator[Query],
    make_load: Callable[[float], Load],
    span: Span,
    *,
    progress: Callable[[float, int], None] = lambda seconds, answered: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Puts load on an engine until the span ends, and ends what is under way then.

    Args:
      engine: idle.
      queries: what is asked, without end.
      make_load: from the time the load begins, says when requests are sent.
      span: how long.
      progress: told of the seconds gone by and the requests answered.
      clock: in seconds.
      sleep: for so many seconds, while nothing is to be done.
    """
    start = clock()
    load = make_load(start)
    outcome = Outcome(begin=start + span.warmup)
    watch = _Watch(engine, outcome.begin)
    running: dict[str, _Sent] = {}
    sent = answered = 0
    while True:
        now = clock()
        watch.look(now)
        progress(now - start, answered)
        if now >= outcome.begin + span.duration or answered == span.requests:
            break
        for arrived in load.due(now, len(running)):
            if sent == span.requests:
                break
            one = _send(engine, next(queries), arrived)
            running[one.request.id] = one
            outcome.records.append(one.record)
            sent += 1
        if engine.has_work:
            outputs = engine.step()
            now = clock()
            for output in outputs:
                one = running[output.request.id]
                one.note(output, now)
                if output.finish_reason:
                    del running[output.request.id]
                    answered += 1
        else:
            until = min(load.next_at(), outcome.begin + span.duration)
            sleep(max(0.0, until - now))
    outcome.end = now
    outcome.figures = watch.figures()
    for name in running:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    return outcome


def make_prompt(query: Query, tokenizer: Tokenizer) -> Prompt:
    """A query as pieces of token ids; text goes through the chat template where there is one."""
    if not isinstance(query.question, str):
        pieces = [DocumentPiece(_ids(d)) for d in query.documents]
        return [_ids(query.system), *pieces, query.question]
    documents = [Document(str(d)) for d in query.documents]
    if tokenizer.chat_template is None:
        return text_prompt(tokenizer, query.question, documents)
    return chat_prompt(tokenizer, [{"role": "user", "content": query.question}], documents)


def _ids(content: Content) -> tuple[int, ...]:
    assert not isinstance(content, str)
    return content


@dataclass
class _Sent:
    query: Query
    request: Request
    record: Record
    places: list[tuple[int, int]]  # first token and length of each document in the prompt
    text: str = ""

    def note(self, output: Output, now: float) -> None:
        record, request = self.record, self.request
        if output.token_ids:
            if not record.times:
                record.cached_tokens = request.cached_tokens or 0
                record.cached_document_tokens = self._cached_document_tokens()
            record.note(now, len(output.token_ids))
        self.text += output.text
        if output.finish_reason:
            record.ended = now
            if output.finish_reason not in ("stop", "length"):
                record.error = output.finish_reason
            elif self.query.answers:
                record.correct = is_correct(self.text, self.query.answers)

    def _cached_document_tokens(self) -> int:
        if self.request.layout.documents:
            return sum(self.request.cached_document_tokens)
        # Documents as text like any other: what the equal beginning of an earlier prompt covers.
        found = self.record.cached_tokens
        return sum(min(length, max(0, found - start)) for start, length in self.places)


def is_correct(text: str, answers: tuple[str, ...]) -> bool:
    """Whether an output contains one of the expected answers, whatever their case."""
    return any(answer.lower() in text.lower() for answer in answers)


def _send(engine: Engine, query: Query, arrived: float) -> _Sent:
    prompt = make_prompt(query, engine.loaded.tokenizer)
    params = SamplingParams(
        temperature=0, max_tokens=query.output_tokens, ignore_eos=not query.answers
    )
    request = engine.add(prompt, params)
    places, at = [], 0
    for piece in prompt:
        length = len(piece.tokens) if isinstance(piece, DocumentPiece) else len(piece)
        if isinstance(piece, DocumentPiece):
            places.append((at, length))
        at += length
    record = Record(
        arrived,
        output_tokens=0 if query.answers else query.output_tokens,
        prompt_tokens=request.prompt_tokens,
        document_tokens=sum(length for _, length in places),
    )
    return _Sent(query, request, record, places)


class _Watch:
    """Looks at an engine's counts from when the window begins."""

    def __init__(self, engine: Engine, begin: float) -> None:
        self._engine = engine
        self._begin = begin
        self._next = begin + _SAMPLE_SECONDS
        self._before: tuple[float, ...] | None = None
        self._samples: list[tuple[int, int, int]] = []

    def look(self, now: float) -> None:
        """Takes a sample when it is time for one."""
        if self._before is None and now >= self._begin:
            self._before = self._counts()
        if now >= self._next:
            self._next = now + _SAMPLE_SECONDS
            self._sample()

    def _sample(self) -> None:
        running = self._engine.scheduler.active
        pages = kv_pages(running, self._engine.limits.num_pages)
        self._samples.append((len(running), *pages))

    def _counts(self) -> tuple[float, ...]:
        stats = self._engine.stats
        preemptions = self._engine.scheduler.num_preemptions
        return (
            stats.steps,
            stats.host_seconds,
            stats.wait_seconds,
            preemptions,
            stats.compilations,
            stats.restored_tokens,
        )

    def figures(self) -> dict[str, Any]:
        """Means over the samples, and what has been counted since the window began."""
        if not self._samples:
            self._sample()
        running, distinct, referenced = np.mean(self._samples, axis=0).tolist()
        size = self._engine.page_bytes
        found: dict[str, Any] = {
            "running": running,
            "kv_bytes_distinct": distinct * size,
            "kv_bytes_referenced": referenced * size,
        }
        if self._before is not None:
            steps, host, wait, preemptions, compilations, restored = (
                after - before for after, before in zip(self._counts(), self._before, strict=True)
            )
            found |= {"preemptions": preemptions, "steps": steps, "compilations": compilations}
            found["restored_tokens"] = restored
            if steps:
                found["host_ms_per_step"] = 1000 * host / steps
                found["wait_ms_per_step"] = 1000 * wait / steps
        return found


def kv_pages(requests: Sequence[Request], num_pages: int) -> tuple[int, int]:
    """Pages that requests attend to: each page once, and once for each request."""
    seen, referenced = np.zeros(num_pages, bool), 0
    for pages in chain(
        (np.frombuffer(r.run.pages, np.int32) for r in requests if r.run.pages),
        (np.array(p.pages) for r in requests for p in r.run.context),
    ):
        seen[pages] = True
        referenced += len(pages)
    return int(seen.sum()), referenced
