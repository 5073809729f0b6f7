"""Load on an OpenAI-compatible server, as its clients put it on: streamed over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from typing import Any

from lazyattn_jax.bench.serving_engine import Outcome, Span, is_correct
from lazyattn_jax.bench.serving_load import Load
from lazyattn_jax.bench.serving_metrics import Record
from lazyattn_jax.bench.serving_points import Point, Progress
from lazyattn_jax.bench.workloads import Query, make_words

_POLL_SECONDS = 0.01


class UrlTarget:
    """A server; lengths of random contents are in words, of which most tokenizers make a token.

    Args:
      url: with the ``/v1``.
      model: what it calls the model; by default the first that it names.
      documents: ``field`` sends documents beside the messages, ``inline`` before the question.
      api_key: that it wants.

    Raises:
      ValueError: the ``openai`` package is not installed.
    """

    def __init__(self, url: str, model: str | None, documents: str, api_key: str) -> None:
        try:
            from openai import AsyncOpenAI
        except ImportError:
            raise ValueError("--url needs the openai package: pip install openai") from None
        self._make_client = lambda: AsyncOpenAI(base_url=url, api_key=api_key, max_retries=0)
        self._model = model
        self._documents = documents

    @classmethod
    def of(cls, args: argparse.Namespace) -> UrlTarget:
        """The server that a command line names."""
        return cls(args.url, args.url_model, args.url_documents, args.url_key)

    def run(self, point: Point, span: Span, progress: Progress) -> Outcome:
        """See ``Target``."""
        queries = point.workload.queries(make_words)
        return asyncio.run(self._run(queries, point, span, progress))

    async def _run(
        self, queries: Iterator[Query], point: Point, span: Span, progress: Progress
    ) -> Outcome:
        async with self._make_client() as client:
            model = self._model or await self._first_model(client)
            start = time.perf_counter()
            load: Load = point.load(start, span)
            outcome = Outcome(begin=start + span.warmup)
            running: set[asyncio.Task[None]] = set()
            sent = 0
            while True:
                now = time.perf_counter()
                answered = sent - len(running)
                progress(now - start, answered)
                if now >= outcome.begin + span.duration or answered == span.requests:
                    break
                for arrived in load.due(now, len(running)):
                    if sent == span.requests:
                        break
                    record = Record(arrived)
                    outcome.records.append(record)
                    task = asyncio.create_task(self._ask(client, model, next(queries), record))
                    running.add(task)
                    task.add_done_callback(running.discard)
                    sent += 1
                wait = min(_POLL_SECONDS, max(0.0, load.next_at() - now))
                if running:
                    await asyncio.wait(running, timeout=wait, return_when="FIRST_COMPLETED")
                else:
                    await asyncio.sleep(wait)
            outcome.end = now
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return outcome

    async def _first_model(self, client: Any) -> str:
        try:
            return str((await client.models.list()).data[0].id)
        except Exception as error:
            raise ValueError(
                f"asked for its models, {client.base_url} does not answer as a server does "
                f"({error}); --url should end with /v1, and --url-key be what the server wants"
            ) from error

    async def _ask(self, client: Any, model: str, query: Query, record: Record) -> None:
        """Sends one request and notes what comes back."""
        text = ""
        try:
            stream = await client.chat.completions.create(
                model=model,
                **request_fields(query, self._documents),
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                now = time.perf_counter()
                if chunk.usage is not None:
                    self._note_usage(record, chunk.usage)
                if chunk.choices and chunk.choices[0].delta.content:
                    text += chunk.choices[0].delta.content
                    record.note(now, 1)
            record.ended = record.times[-1] if record.times else None
            if query.answers:
                record.correct = is_correct(text, query.answers)
            if not record.times:
                record.error = "no output"
        except Exception as error:  # what the server or the network did wrong is a result
            record.error = repr(error)

    def _note_usage(self, record: Record, usage: Any) -> None:
        record.prompt_tokens = usage.prompt_tokens
        details = usage.prompt_tokens_details
        record.cached_tokens = (details.cached_tokens or 0) if details else 0
        missing = usage.completion_tokens - sum(record.counts)
        if record.counts and missing > 0:  # a chunk may hold several tokens, or none
            record.counts[-1] += missing


def request_fields(query: Query, documents: str) -> dict[str, Any]:
    """The fields of a chat request for a query."""
    messages = [{"role": "system", "content": query.system}] if query.system else []
    extra: dict[str, Any] = {} if query.answers else {"ignore_eos": True}
    question = str(query.question)
    if documents == "field":
        extra["documents"] = list(query.documents)
    else:
        question = "\n\n".join([*map(str, query.documents), question])
    messages.append({"role": "user", "content": question})
    return {
        "messages": messages,
        "max_tokens": query.output_tokens,
        "temperature": 0,
        "extra_body": extra,
    }
