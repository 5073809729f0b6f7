"""An engine in a thread of its own, used from asyncio.

The thread takes commands from a queue, runs ``Engine.step`` while there is work, and sleeps on the
queue when there is none. Everything that touches the engine runs there, between two steps. News
goes the other way through ``loop.call_soon_threadsafe``, all of one step in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lazyattn_jax.engine.engine import Engine, Output
from lazyattn_jax.engine.request import RequestError
from lazyattn_jax.engine.runs import Request
from lazyattn_jax.llm import Usage
from lazyattn_jax.server.errors import (
    DeadlineExceeded,
    EngineFault,
    EngineUnavailable,
    LineFull,
    RequestFailed,
)
from lazyattn_jax.server.jobs import Event, Job, Submission

log = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Requests that may wait, by default."""


class Observer:
    """Is told what happens, in the engine's thread; whoever wants to know overrides methods."""

    def added(self, request: Request) -> None:
        """A request has been put in line."""

    def started(self, request: Request) -> None:
        """A request has its first news: what it reused is known."""

    def progress(self, output: Output) -> None:
        """There is news of a request."""


Command = Callable[[Engine | EngineUnavailable], None]
"""What the queue holds; called in the engine's thread with the engine, or why there is none."""


class AsyncEngine:
    """Loads an engine in a background thread and drives it there.

    ``start`` must be called on the event loop that all other methods are used from.

    Args:
      load: builds the engine; called in the thread. What it raises ends up in ``load_error``.
      max_waiting: requests that may wait for a seat or for pages.
    """

    def __init__(self, load: Callable[[], Engine], max_waiting: int = MAX_WAITING) -> None:
        self._load = load
        self._max_waiting = max_waiting
        self._ended: deque[float] = deque(maxlen=64)  # when the last requests ended
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._jobs: dict[str, tuple[Job, int]] = {}  # of the thread, by request id
        self._unstarted: set[str] = set()  # of the thread, request ids
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loaded = asyncio.Event()
        self._stopping = False  # set on the loop
        self._stopped = False  # set in the thread
        self._fault: str | None = None
        self.observers: list[Observer] = []  # complete before ``start``
        self.engine: Engine | None = None
        self.load_error: Exception | None = None

    # On the event loop ----------------------------------------------------------------------------

    def start(self) -> None:
        """Starts to load."""
        self.loop = asyncio.get_running_loop()
        self._thread.start()

    async def loaded(self) -> None:
        """Waits until loading has ended, well or badly."""
        await self._loaded.wait()

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    @property
    def unavailable(self) -> EngineUnavailable | None:
        """Why requests cannot be taken at present, or none if they can."""
        if self._stopping:
            return EngineUnavailable("the server is shutting down", code="shutting_down")
        if self._fault is not None:
            return EngineUnavailable(f"the engine has failed: {self._fault}", code="failed")
        if self.engine is None:
            return EngineUnavailable("the model is still being loaded", code="loading")
        return None

    def ready(self) -> Engine:
        """The engine.

        Raises:
          EngineUnavailable: there is none.
        """
        if reason := self.unavailable:
            raise reason
        assert self.engine is not None
        return self.engine

    async def call[T](self, work: Callable[[Engine], T]) -> T:
        """Runs ``work`` in the engine's thread between two steps, and returns what it returns.

        Raises:
          EngineUnavailable: there is no engine.
          Exception: what ``work`` raises.
        """
        self.ready()
        answer: asyncio.Future[T] = self.loop.create_future()

        def command(engine: Engine | EngineUnavailable) -> None:
            try:
                if isinstance(engine, EngineUnavailable):
                    raise engine
                result = work(engine)
            except Exception as error:
                self._post(_settle, answer, answer.set_exception, error)
            else:
                self._post(_settle, answer, answer.set_result, result)

        self._commands.put(command)
        return await answer

    async def submit(self, name: str, submissions: Sequence[Submission]) -> Job:
        """Puts requests in line: all of them, or none if one cannot be served.

        Args:
          name: a name that no other job has.
          submissions: the requests.

        Raises:
          RequestError: a request can never be served.
          LineFull: too many are waiting.
          EngineUnavailable: there is no engine.
        """
        job = Job(name, len(submissions), self._abort)
        try:
            await self.call(lambda engine: self._add(engine, job, submissions))
        except asyncio.CancelledError:
            job.close()
            raise
        return job

    def request_stop(self) -> None:
        """Tells the thread to end; jobs that still run get ``EngineUnavailable``."""

        def stop(_: Engine | EngineUnavailable) -> None:
            self._stopped = True

        if not self._stopping:
            self._stopping = True
            self._commands.put(stop)

    async def stop(self, timeout: float) -> None:
        """Ends the thread, waiting at most ``timeout`` seconds for the step under way.

        A thread that is still loading cannot be interrupted, and is not waited for.
        """
        self.request_stop()
        if self._loaded.is_set():
            await asyncio.to_thread(self._thread.join, timeout)

    def _abort(self, job: Job) -> None:
        def command(engine: Engine | EngineUnavailable) -> None:
            for name in job.ids:
                self._jobs.pop(name, None)
                self._unstarted.discard(name)
                if isinstance(engine, Engine):
                    engine.abort(name)

        self._commands.put(command)

    # In the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._load()
        except Exception as error:
            log.debug("loading failed", exc_info=True)
            self.load_error = error
            self._fault = f"{type(error).__name__}: {error}"
        else:
            self.engine = engine
            self._post(self._loaded.set)
            try:
                self._drive(engine)
            except Exception as error:
                # The pool's arrays may be gone with the step, so there is no going on.
                log.exception("the engine failed")
                self._fault = f"{type(error).__name__}: {error}"
        self._post(self._loaded.set)
        self._end_jobs()
        self._refuse()

    def _drive(self, engine: Engine) -> None:
        while not self._stopped:
            with contextlib.suppress(queue.Empty):
                self._commands.get(block=not engine.has_work)(engine)
                while not self._stopped:
                    self._commands.get_nowait()(engine)
            if engine.has_work and not self._stopped:
                self._dispatch(engine.step())

    def _add(self, engine: Engine, job: Job, submissions: Sequence[Submission]) -> None:
        self._check_line(engine, len(submissions))
        requests: list[Request] = []
        leader: Request | None = None
        try:
            for i, (name, submission) in enumerate(zip(job.ids, submissions, strict=True)):
                if not submission.shares_prompt:
                    leader = None
                requests.append(_add_one(engine, name, submission, leader))
                leader = leader or requests[-1]
                self._jobs[name] = (job, i)
            kept = zip(requests, submissions, strict=True)
            _keep(engine, [request for request, submission in kept if submission.keep])
        except Exception:
            for name in job.ids:
                self._jobs.pop(name, None)
                engine.abort(name)
            raise
        self._unstarted.update(job.ids)
        for observer in self.observers:
            for request in requests:
                observer.added(request)

    def _check_line(self, engine: Engine, new: int) -> None:
        if new > self._max_waiting:
            raise RequestError(
                "prompt",
                f"{new} answers are asked for at once, at most {self._max_waiting} requests may "
                "wait (--max-waiting)",
            )
        waiting = engine.num_waiting
        if waiting + new > self._max_waiting:
            raise LineFull(waiting, self._max_waiting, self._seconds_for(waiting))

    def _seconds_for(self, waiting: int) -> int:
        """How long a line takes at the pace of the last requests, from 1 to 60 seconds."""
        if len(self._ended) < 2:
            return 1
        each = (time.monotonic() - self._ended[0]) / len(self._ended)
        return max(1, min(60, round(waiting * each)))

    def _dispatch(self, outputs: Sequence[Output]) -> None:
        news: list[tuple[Job, Event | Exception]] = []
        for output in outputs:
            name, reason = output.request.id, output.finish_reason
            for observer in self.observers:
                if name in self._unstarted:
                    observer.started(output.request)
                observer.progress(output)
            self._unstarted.discard(name)
            if reason:
                self._ended.append(time.monotonic())
            if name in self._jobs and (output.text or output.logprobs or reason):
                job, index = self._jobs[name]
                news.append((job, _news_of(output, index)))
                if reason:
                    del self._jobs[name]
        if news:
            self._post(_deliver, news)

    def _end_jobs(self) -> None:
        jobs = {job for job, _ in self._jobs.values()}
        self._jobs.clear()
        fault = self._fault
        self._post(
            _deliver,
            [(job, self._shutting_down() if fault is None else EngineFault(fault)) for job in jobs],
        )

    def _refuse(self) -> None:
        """Answers what is still in the queue, and after a fault also what comes until the stop."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get(block=not self._stopped)
                command(self.unavailable or self._shutting_down())

    def _shutting_down(self) -> EngineUnavailable:
        return EngineUnavailable("the server is shutting down", code="shutting_down")

    def _post(self, function: Callable[..., object], *args: Any) -> None:
        # When the loop is closed nobody is left who could listen.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)


def _news_of(output: Output, index: int) -> Event | Exception:
    request, reason = output.request, output.finish_reason
    if reason == "error":
        return RequestFailed()
    if reason == "timeout":
        return DeadlineExceeded(request.timeout)
    if reason is None:
        return Event(index, output.text, logprobs=output.logprobs)
    usage, of_prompt = Usage.of(request), request.prompt_logprobs
    return Event(index, output.text, reason, usage, output.logprobs, of_prompt)


def _add_one(engine: Engine, name: str, submission: Submission, leader: Request | None) -> Request:
    add = partial(
        engine.add,
        submission.prompt,
        request_id=name,
        cache_salt=submission.cache_salt,
        timeout=submission.timeout,
        leader=leader,
        context=submission.context,
        encode_only=submission.encode_only,
    )
    try:
        return add(submission.params)
    except RequestError as error:
        if error.param != "max_tokens" or not submission.shorten:
            raise
        return add(replace(submission.params, max_tokens=None))


def _keep(engine: Engine, requests: Sequence[Request]) -> None:
    """Sees to it that the documents of requests stay in the pool once they are there."""
    index, limits = engine.scheduler.index, engine.limits
    pages = {
        d.key: limits.pages_for(len(d.piece.tokens)) for r in requests for d in r.layout.documents
    }
    new = {key: count for key, count in pages.items() if not index.is_kept(key)}
    if index.num_kept + sum(new.values()) > limits.max_kept_pages:
        raise RequestError(
            "pinned",
            f"the documents take {sum(new.values())} pages, {index.num_kept} are pinned already, "
            f"at most {limits.max_kept_pages} of the pool's {limits.num_pages} can be: half of it, "
            "and no more than the longest request leaves (kv_pool_bytes, max_model_len)",
        )
    for key, count in new.items():
        index.keep(key, count)


def _deliver(news: Sequence[tuple[Job, Event | Exception]]) -> None:
    for job, item in news:
        job.put(item)


def _settle(answer: asyncio.Future[Any], settle: Callable[[Any], None], value: Any) -> None:
    if not answer.done():  # its caller may have been cancelled
        settle(value)
