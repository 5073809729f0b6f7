"""What asyncio and the engine's thread hand to each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import DocumentContext, Prompt
from lazyattn_jax.engine.runs import TokenLogprobs
from lazyattn_jax.llm import Usage


@dataclass(frozen=True)
class Submission:
    """One request for the engine.

    With ``shorten`` a ``max_tokens`` that does not fit is cut down to what does: the client did not
    ask for that many, it is a default. With ``shares_prompt`` it is another answer to the prompt of
    the submission before it. With ``encode_only`` nothing is generated: the prompt's
    documents are put into the pool, and with ``keep`` they stay there.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    shorten: bool = False
    shares_prompt: bool = False
    timeout: float | None = None
    context: DocumentContext | None = None
    encode_only: bool = False
    keep: bool = False


@dataclass(frozen=True)
class Event:
    """More of one request of a job; the last one has a finish reason and the token counts."""

    index: int
    text: str
    finish_reason: str | None = None
    usage: Usage | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Job:
    """Requests that were submitted together, as asyncio sees them.

    Leaving the ``with`` block ends those that still run.
    """

    def __init__(self, name: str, size: int, abort: Callable[[Job], None]) -> None:
        self.ids = tuple(f"{name}-{i}" for i in range(size))
        self._queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._unfinished = size
        self._abort = abort

    def put(self, news: Event | Exception) -> None:
        """Hands over an event, or the error that ends the job. For the event loop's thread."""
        self._queue.put_nowait(news)

    def __aiter__(self) -> Job:
        """The events of all requests as they come, until all are finished."""
        return self

    async def __anext__(self) -> Event:
        """The next event.

        Raises:
          EngineFault: the engine failed.
          EngineUnavailable: the server shuts down.
          RequestFailed, DeadlineExceeded: one of the requests failed; the others are ended.
        """
        if not self._unfinished:
            raise StopAsyncIteration
        news = await self._queue.get()
        if isinstance(news, Exception):
            self.close()
            raise news
        self._unfinished -= news.finish_reason is not None
        return news

    def close(self) -> None:
        """Ends the requests that still run; harmless at any time."""
        if self._unfinished:
            self._unfinished = 0
            self._abort(self)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
