"""The loop: admit, prefill, decode, publish, and hand out text."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from lazyattn_jax.cache.pool import bytes_per_token
from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.engine.output import TextStream
from lazyattn_jax.engine.request import (
    DocumentContext,
    DocumentPiece,
    Layout,
    Prompt,
    RequestError,
    SamplingParams,
    lay_out,
)
from lazyattn_jax.engine.runner import Runner
from lazyattn_jax.engine.runs import Request
from lazyattn_jax.engine.scheduler import Scheduler
from lazyattn_jax.models.checkpoint import LoadedModel


@dataclass(frozen=True)
class Output:
    """News of one request: more text, or its end.

    ``finish_reason`` is ``stop`` (end token or stop string), ``length``, or none while it goes on.
    """

    request: Request
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


class Engine:
    """Computes requests in batches over one shared pool. Not thread-safe: one thread drives it.

    Args:
      loaded: the model.
      config: options.
      progress: told of compiled batch shapes: done, total.

    Raises:
      ValueError: pool or context do not fit; see ``EngineConfig.resolve_limits``.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        config = config or EngineConfig()
        dtype = loaded.model.embed.embedding.dtype
        self.loaded = loaded
        self.config = config
        self.limits = config.resolve_limits(loaded.config, dtype)
        self.page_bytes = self.limits.page_size * bytes_per_token(loaded.config, dtype)
        self.scheduler = Scheduler(self.limits)
        self._runner = Runner(loaded, self.limits, config.attention, check=config.check_invariants)
        self._context = DocumentContext(config.document_context == "prefix", config.document_gap)
        self._streams: dict[str, tuple[Request, TextStream]] = {}
        ends = loaded.config.eos_token_ids or (loaded.tokenizer.eos_token_id,)
        self._end_tokens = frozenset(end for end in ends if end is not None)
        self._ids = itertools.count()
        self._runner.compile(progress)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        encode_only: bool = False,
    ) -> Request:
        """Puts a request in line.

        Args:
          prompt: token ids and documents in reading order.
          params: sampling parameters.
          request_id: a name that no unfinished request has; made up by default.
          cache_salt: requests share segments only with requests of the same salt.
          encode_only: only see to it that the prompt's documents are in the pool.

        Raises:
          RequestError: the request can never be served; it names the value and the limit.
        """
        if request_id is None:
            request_id = f"request-{next(self._ids)}"
        if request_id in self._streams:
            raise RequestError("request_id", f"request id {request_id!r} is in use")
        self._check_tokens(prompt)
        layout = lay_out(
            prompt,
            page_size=self.limits.page_size,
            fingerprint=self.loaded.fingerprint,
            salt=cache_salt,
            context=self._context,
            encode_only=encode_only,
        )
        if encode_only:
            max_tokens = self._fit(layout, None, least=0)
        else:
            max_tokens = self._fit(layout, params.max_tokens, least=1)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(request_id, layout, params, max_tokens=max_tokens, seed=seed)
        self._streams[request_id] = (request, TextStream(self.loaded.tokenizer, params.stop))
        self.scheduler.add(request)
        return request

    def abort(self, request_id: str) -> None:
        """Ends a request at any stage and frees what it held; unknown ids are ignored."""
        entry = self._streams.pop(request_id, None)
        if entry is not None:
            self.scheduler.finish(entry[0])

    def step(self) -> list[Output]:
        """Admits what fits, runs a prefill step and a decode step, and returns the news.

        A prefill step goes first so that new requests start soon; a decode step always follows so
        that running ones never wait for more than one prefill.
        """
        scheduler = self.scheduler
        scheduler.admit()
        outputs: list[Output] = []
        if chunks := scheduler.schedule_prefill():
            result = self._runner.prefill(chunks)
            scheduler.finish_prefill(chunks)
            owners = [c.owner for c in chunks if c.samples and isinstance(c.owner, Request)]
            outputs += self._accept(owners, result.tokens.tolist())
        outputs += self._finish_encoded()
        if requests := scheduler.schedule_decode():
            result = self._runner.decode(requests)
            scheduler.finish_decode(requests)
            outputs += self._accept(requests, result.tokens.tolist())
        if self.config.check_invariants:
            scheduler.check_integrity()
        return outputs

    def _accept(self, requests: list[Request], tokens: list[int]) -> list[Output]:
        now = time.monotonic()
        outputs = []
        for request, token in zip(requests, tokens, strict=True):
            request.run.append(token)
            request.num_generated += 1
            request.first_token_at = request.first_token_at or now
            _, stream = self._streams[request.id]
            text, reason = "", None
            if token in self._end_tokens and not request.params.ignore_eos:
                reason = "stop"
            else:
                text, stopped = stream.push(token)
                if stopped:
                    reason = "stop"
                elif request.num_generated >= request.max_tokens:
                    reason = "length"
            if reason:
                text += stream.flush()
                self.abort(request.id)
            outputs.append(Output(request, text, (token,), reason))
        return outputs

    def _finish_encoded(self) -> list[Output]:
        done, self.scheduler.encoded = self.scheduler.encoded, []
        for request in done:
            self.abort(request.id)
        return [Output(request, "", (), "stop") for request in done]

    def _check_tokens(self, prompt: Prompt) -> None:
        vocab = self.loaded.config.vocab_size
        for piece in prompt:
            tokens = piece.tokens if isinstance(piece, DocumentPiece) else piece
            for token in tokens:
                if not 0 <= token < vocab:
                    raise RequestError(
                        "prompt", f"token id {token} is not in the vocabulary of {vocab} tokens"
                    )

    def _fit(self, layout: Layout, wanted: int | None, *, least: int) -> int:
        """Tokens that may be generated."""
        limits, prompt = self.limits, layout.num_tokens
        if len(layout.documents) > limits.max_documents:
            raise RequestError(
                "documents",
                f"{len(layout.documents)} documents, at most {limits.max_documents} are allowed "
                "(max_documents)",
            )
        context_room = limits.max_model_len - prompt
        if context_room < least:
            raise RequestError(
                "prompt",
                f"the prompt with its documents has {prompt} tokens, at most "
                f"{limits.max_model_len - least} fit in the context of {limits.max_model_len} "
                f"(max_model_len) with {least} tokens of output",
            )
        if wanted is not None and wanted > context_room:
            raise RequestError(
                "max_tokens",
                f"max_tokens is {wanted}, the prompt of {prompt} tokens leaves {context_room} of "
                f"the context of {limits.max_model_len} (max_model_len)",
            )
        distinct = {d.key: d for d in layout.documents}.values()
        fixed = len(layout.leading_keys)
        fixed += sum(limits.pages_for(len(d.piece.tokens)) for d in distinct)
        pool_room = (limits.num_pages - fixed) * limits.page_size - len(layout.stream)
        if pool_room < (wanted or least):
            needed = fixed + limits.pages_for(len(layout.stream) + (wanted or least))
            raise RequestError(
                "prompt",
                f"the prompt of {prompt} tokens with {wanted or least} tokens of output takes "
                f"{needed} pages, the whole pool has {limits.num_pages} (kv_pool_bytes)",
            )
        return wanted or min(context_room, pool_room)
