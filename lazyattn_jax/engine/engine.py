"""The loop: admit, prefill, decode, publish, and hand out text."""

from __future__ import annotations

import heapq
import itertools
import math
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from lazyattn_jax.cache.eviction import POLICIES
from lazyattn_jax.cache.pool import bytes_per_token
from lazyattn_jax.engine.checks import check_prompt, fit
from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.engine.output import TextStream
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import (
    DocumentContext,
    Layout,
    Prompt,
    RequestError,
    as_text,
    lay_out,
)
from lazyattn_jax.engine.runner import Programs, Runner
from lazyattn_jax.engine.runs import Chunk, Request, State, TokenLogprobs
from lazyattn_jax.engine.scheduler import Scheduler
from lazyattn_jax.engine.selection import TRIAL, Selection
from lazyattn_jax.engine.started import Scores, Step, read_logprobs
from lazyattn_jax.engine.stats import EngineStats
from lazyattn_jax.engine.transfers import Transfers
from lazyattn_jax.models.checkpoint import LoadedModel


class Output(NamedTuple):
    """News of one request: more text, or its end.

    ``finish_reason`` is ``stop`` (end token, stop token or stop string), ``length``, ``timeout``,
    ``error`` (its logits are not all finite), or none while it goes on.
    """

    request: Request
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: TokenLogprobs | None = None


class Engine:
    """Computes requests in batches over one shared pool. Not thread-safe: one thread drives it.

    Args:
      loaded: the model.
      config: options.
      progress: told of compiled batch shapes: done, total.
      programs: those of another engine of the same model, with the same limits and attention.

    Raises:
      ValueError: pool or context do not fit; see ``EngineConfig.resolve_limits``.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        programs: Programs | None = None,
    ) -> None:
        config = config or EngineConfig()
        dtype = loaded.model.embed.embedding.dtype
        self.loaded = loaded
        self.config = config
        self.limits = config.resolve_limits(loaded.config, dtype)
        self.page_bytes = self.limits.page_size * bytes_per_token(loaded.config, dtype)
        ends = loaded.config.eos_token_ids or (loaded.tokenizer.eos_token_id,)
        self._end_tokens = frozenset(end for end in ends if end is not None)
        self.scheduler = Scheduler(
            self.limits, POLICIES[config.eviction], max_overtaken=config.max_overtaken
        )
        self._runner = Runner(
            loaded,
            self.limits,
            config.attention,
            end_tokens=len(self._end_tokens),
            share_reads=config.share_reads,
            check=config.check_invariants,
            programs=programs,
        )
        self._transfers = Transfers(self.scheduler, self._runner, self.limits.transferred_pages)
        self._reuse = config.reuse_mode
        self.context = config.context
        if config.document_context == "auto" and loaded.adapter_fingerprint is not None:
            self.context = replace(self.context, prefix=False)
        self._streams: dict[str, tuple[Request, TextStream]] = {}
        self._steps: deque[Step] = deque()  # started, but not read
        self._prefill_next = True
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; the number settles ties
        self._ids = itertools.count()
        self._runner.compile(progress)
        self.stats = EngineStats()

    @property
    def programs(self) -> Programs:
        """What has been compiled, for another engine to use."""
        return self._runner.programs

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or a step has been started and not been read."""
        return self.scheduler.has_work or bool(self._steps)

    @property
    def num_waiting(self) -> int:
        """Requests that have not been admitted, or have been preempted."""
        every = (request for request, _ in self._streams.values() if request.trial_of is None)
        return sum(request.state in (State.WAITING, State.SELECTING) for request in every)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        context: DocumentContext | None = None,
        encode_only: bool = False,
        timeout: float | None = None,
        leader: Request | None = None,
    ) -> Request:
        """Puts a request in line.

        If it is to be answered over some of its documents only, requests that try one of them each
        get in line first, and it goes on when they are done; see ``Selection``.

        Args:
          prompt: token ids and documents in reading order.
          params: sampling parameters of one answer; see ``SamplingParams.answers``.
          request_id: a name that no unfinished request has; made up by default.
          cache_salt: requests share segments only with requests of the same salt.
          context: what its documents are encoded after; by default as ``EngineConfig`` says.
          encode_only: only see to it that the prompt's documents are in the pool.
          timeout: seconds after which the request ends with the reason ``timeout``.
          leader: a request of the same prompt and salt; this one waits until its prompt has been
            computed, and shares it.

        Raises:
          RequestError: the request can never be served; it names the value and the limit.
        """
        if request_id is None:
            request_id = f"request-{next(self._ids)}"
        if request_id in self._streams:
            raise RequestError("request_id", f"request id {request_id!r} is in use")
        if params.n != 1:
            raise RequestError("n", f"n is {params.n}, but this gives one answer")
        if timeout is not None and not timeout > 0:
            raise RequestError("timeout", f"timeout is {timeout} seconds, must be above 0")
        check_prompt(prompt, self.loaded.config.vocab_size, self.limits.max_documents)
        params.check_tokens(self.loaded.config.vocab_size)
        if encode_only and not (self._reuse.independent and self._reuse.shared):
            raise RequestError(
                "documents",
                f"reuse is {self.config.reuse!r}: no request would find documents that are "
                "computed ahead of it",
            )
        if not self._reuse.shared:
            cache_salt += secrets.token_hex(16)  # a key that nobody else finds
        context = context or self.context
        lay = partial(self._lay_out, salt=cache_salt, context=context, encode_only=encode_only)
        selection = Selection(prompt, context.select, lay)
        chooses = selection.is_needed and not encode_only
        layout = selection.largest() if chooses else lay(prompt)
        if encode_only:
            max_tokens = fit(self.limits, layout, None, least=0)
        else:
            max_tokens = fit(self.limits, layout, params.max_tokens, least=1)
        ends = frozenset() if params.ignore_eos else self._end_tokens
        request = Request(
            request_id,
            layout,
            params,
            max_tokens=max_tokens,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            stop_tokens=ends.union(params.stop_token_ids),
            timeout=math.inf if timeout is None else timeout,
        )
        self._streams[request_id] = (request, TextStream(self.loaded.tokenizer, params.stop))
        if timeout is not None:
            if len(self._deadlines) > 2 * len(self._streams) + 100:  # mostly of finished requests
                self._deadlines = [d for d in self._deadlines if d[2].state is not State.FINISHED]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline, next(self._ids), request))
        if not chooses:
            self.scheduler.add(request, leader)
        elif leader is not None and leader.state is State.SELECTING:
            assert leader.selection is not None
            leader.selection.join(request)
        else:
            selection.join(request)
            self._try_documents(request, selection, cache_salt, context)
        return request

    def abort(self, request_id: str) -> None:
        """Ends a request at any stage and frees what it held; unknown ids are ignored."""
        entry = self._streams.pop(request_id, None)
        if entry is None:
            return
        request = entry[0]
        if request.state is not State.SELECTING:
            self.scheduler.finish(request)
            return
        request.state = State.FINISHED
        assert request.selection is not None
        request.selection.waiting.remove(request)
        if not request.selection.waiting:
            for trial in request.selection.trials.values():
                if trial.state is not State.FINISHED:
                    self.abort(trial.id)

    def step(self) -> list[Output]:
        """Starts a step, reads the one before it, and returns the news.

        Prefill and decode steps take turns: new requests start soon, and running ones never wait
        for more than one prefill step between two tokens. A step is started before the last one's
        tokens are read, so that the device has work while the host looks at them; what a step
        computes for a request that turns out to have ended is thrown away. First tokens are read at
        once if nobody has any other: to start the next step takes the host longer than that.
        """
        begin, self._waited = time.perf_counter(), 0.0
        outputs = self._expire()
        self.scheduler.admit(self._sit)
        self._transfers.store_evicted()
        self.stats.restored_tokens += self._transfers.bring_back()
        if copies := self.scheduler.take_copies():
            self._runner.copy(copies)
        started = self._start_prefill() if self._prefill_next else self._start_decode()
        if not started:
            started = self._start_decode() if self._prefill_next else self._start_prefill()
        if not started and not self._steps:
            self.stats.restored_tokens += self._transfers.bring_back(wait=True)
        outputs += self._finish_encoded()
        while len(self._steps) > 1 or (self._steps and (not started or self._only_first_tokens())):
            outputs += self._read(self._steps.popleft())
        outputs = self._settle(outputs)
        if self.config.check_invariants:
            self.scheduler.check_integrity()
        self.stats.count(started, time.perf_counter() - begin, self._waited)
        return outputs

    def _lay_out(
        self, prompt: Prompt, *, salt: str, context: DocumentContext, encode_only: bool
    ) -> Layout:
        return lay_out(
            prompt if self._reuse.independent else as_text(prompt),
            page_size=self.limits.page_size,
            fingerprint=self.loaded.fingerprint,
            adapter=self.loaded.adapter_fingerprint,
            salt=salt,
            context=context,
            encode_only=encode_only,
        )

    def _try_documents(
        self, request: Request, selection: Selection, salt: str, context: DocumentContext
    ) -> None:
        """Puts requests in line that try one document each."""
        try:
            for document in selection.candidates:
                trial = self.add(
                    selection.with_only([document]),
                    TRIAL,
                    request_id=f"{request.id}/{document}",
                    cache_salt=salt,
                    context=replace(context, select=0),
                )
                trial.trial_of = selection
                selection.trials[document] = trial
        except RequestError:
            self.abort(request.id)
            raise

    def _settle(self, outputs: list[Output]) -> list[Output]:
        """Takes the news of trials out; requests whose documents are chosen get in line."""
        news = []
        for output in outputs:
            selection = output.request.trial_of
            if selection is None:
                news.append(output)
            elif output.finish_reason == "error":
                news += self._end(list(selection.waiting), "error")
            elif selection.waiting and selection.decided:
                self._answer_over_chosen(selection)
        return news

    def _answer_over_chosen(self, selection: Selection) -> None:
        layout = selection.decide()
        self.stats.selection_tokens += selection.computed_tokens
        requests, selection.waiting = selection.waiting, []
        for request in requests:
            # The longest documents would have fitted, so these do.
            request.lay(layout, fit(self.limits, layout, request.params.max_tokens, least=1))
            request.state = State.WAITING
        first, *others = requests
        self.scheduler.add_first(first)
        for request in others:
            self.scheduler.add(request, first)

    def _sit(self, request: Request) -> None:
        if request.params.adjusts_logits:
            self._runner.sit(request)

    def _start_prefill(self) -> bool:
        chunks = self.scheduler.schedule_prefill()
        if not chunks:
            return False
        result = self._runner.prefill(chunks)
        scores = self._score(chunks, result.hidden)
        owners = [c.owner for c in chunks if c.samples and isinstance(c.owner, Request)]
        self.scheduler.finish_prefill(chunks)
        self._steps.append(
            Step(result.tokens, result.logprobs, result.sound, chunks, owners, scores)
        )
        self._prefill_next = False
        return True

    def _start_decode(self) -> bool:
        requests = self.scheduler.schedule_decode()
        self._transfers.store_evicted()
        if not requests:
            return False
        chunks = [Chunk(r.run, len(r.run.tokens) - 1, 1, r) for r in requests]
        result = self._runner.decode(requests)
        self.scheduler.finish_decode(requests)
        self._steps.append(Step(result.tokens, result.logprobs, result.sound, chunks, requests))
        self._prefill_next = True
        return True

    def _score(self, chunks: list[Chunk], hidden: Float[Array, "T D"] | None) -> Scores | None:
        """Starts on the log-probabilities of prompts that a prefill step computes."""
        rows, targets, places = [], [], []
        first_row = 0
        for chunk in chunks:
            if isinstance(chunk.owner, Request) and chunk.owner.prompt_logprobs is not None:
                layout = chunk.owner.layout
                after_documents = {d.insert_at for d in layout.reused}
                for at in range(chunk.start + 1, chunk.start + chunk.count + 1):
                    if at < len(layout.stream) and at not in after_documents:
                        rows.append(first_row + at - 1 - chunk.start)
                        targets.append(layout.stream[at])
                        places.append((chunk.owner, layout.stream_positions[at]))
            first_row += chunk.count
        if not rows:
            return None
        assert hidden is not None
        return Scores(self._runner.score(hidden, rows, targets), places, targets)

    def _read(self, step: Step) -> list[Output]:
        """Waits for a step's tokens."""
        begin = time.perf_counter()
        tokens = np.asarray(step.tokens).tolist()
        self._waited += time.perf_counter() - begin
        if step.scores is not None:
            step.scores.note()
        now = time.monotonic()
        logprobs = None
        if step.logprobs is not None:
            logprobs = read_logprobs([step.logprobs], tokens[: len(step.requests)])
        outputs = []
        for owner, at in step.unsound():
            outputs += self._end(self.scheduler.spoil(owner, at), "error")
        for i, (request, token) in enumerate(zip(step.requests, tokens, strict=False)):
            if request.state is not State.FINISHED:
                request.first_token_at = request.first_token_at or now
                own = logprobs[i] if logprobs and request.params.logprobs is not None else None
                outputs.append(self._accept(request, token, own))
        return outputs

    def _accept(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> Output:
        if token < 0:
            return self._end([request], "error")[0]
        self.scheduler.fill(request, token)
        _, stream = self._streams[request.id]
        text, reason = "", None
        may_stop = request.num_generated > request.params.min_tokens
        if token in request.stop_tokens and may_stop:
            reason = "stop"
        else:
            text, stopped = stream.push(token, may_stop=may_stop)
            if stopped:
                reason = "stop"
            elif request.num_generated >= request.max_tokens:
                reason = "length"
        if reason:
            text += stream.flush()
            self.abort(request.id)
        if logprobs is not None:
            logprobs = logprobs.first(request.params.logprobs)
        return Output(request, text, (token,), reason, logprobs)

    def _only_first_tokens(self) -> bool:
        """Whether there are requests, and all of them have sampled one token each."""
        waiting, active = self.scheduler.waiting, self.scheduler.active
        return bool(active) and not waiting and all(r.num_sampled == 1 for r in active)

    def _finish_encoded(self) -> list[Output]:
        done, self.scheduler.encoded = self.scheduler.encoded, []
        return self._end(done, "stop")

    def _expire(self) -> list[Output]:
        """Ends requests whose time is up."""
        now, late = time.monotonic(), []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if request.state is not State.FINISHED:
                late.append(request)
        return self._end(late, "timeout")

    def _end(self, requests: list[Request], reason: str) -> list[Output]:
        for request in requests:
            self.abort(request.id)
        return [Output(request, "", (), reason) for request in requests]
