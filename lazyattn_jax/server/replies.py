"""From the engine's events to response bodies and chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

from lazyattn_jax.engine.runs import TokenLogprobs
from lazyattn_jax.llm import Usage
from lazyattn_jax.models.tokenizer import Tokenizer
from lazyattn_jax.server.jobs import Event, Job
from lazyattn_jax.server.logprobs import chat_logprobs, prompt_logprobs, text_logprobs
from lazyattn_jax.server.protocol import (
    ChatChoice,
    ChatMessage,
    DocumentTokens,
    PromptTokens,
    Response,
    TextChoice,
    UsageInfo,
)

DONE = b"data: [DONE]\n\n"

# Line breaks to Python's str.splitlines, and so to some clients; escaped they are just characters.
_LINE_BREAKS = {mark.encode(): f"\\u{ord(mark):04x}".encode() for mark in "\x85\u2028\u2029"}


class Replies:
    """Builds the responses of one request.

    Args:
      chat: answers are messages, not plain text.
      model: the name that the server goes by.
      n: answers to each prompt.
      tokenizer: shows the tokens of log-probabilities.
    """

    def __init__(self, *, chat: bool, model: str, n: int, tokenizer: Tokenizer) -> None:
        self.chat = chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._model = model
        self._n = n
        self._tokenizer = tokenizer
        self._offsets: dict[int, int] = {}  # characters of each answer that have been sent
        self._created = int(time.time())
        self.usage: UsageInfo | None = None  # once all is finished

    async def whole(self, job: Job) -> bytes:
        """The body of a response that is not streamed."""
        texts = [""] * len(job.ids)
        logprobs: list[list[TokenLogprobs]] = [[] for _ in job.ids]
        last: dict[int, Event] = {}
        async for event in job:
            texts[event.index] += event.text
            if event.logprobs is not None:
                logprobs[event.index].append(event.logprobs)
            if event.usage is not None:
                last[event.index] = event
        self.usage = _total({i: e.usage for i, e in last.items() if e.usage}, self._n)
        choices = [
            self._choice(i, text, last[i].finish_reason, logprobs[i])
            for i, text in enumerate(texts)
        ]
        prompts = [last[i].prompt_logprobs for i in range(len(texts))]
        extra: dict[str, Any] = {}
        if prompts[0] is not None:
            shown = [prompt_logprobs(self._tokenizer, p or ()) for p in prompts]
            if self.chat:
                extra["prompt_logprobs"] = shown[0]
            for choice, each in zip(choices, shown, strict=True):
                if isinstance(choice, TextChoice):
                    choice.prompt_logprobs = each
        return self._response(choices, usage=self.usage, **extra).to_json()

    async def stream(self, job: Job, include_usage: bool) -> AsyncGenerator[bytes]:
        """The lines of a stream, each ready to send."""
        usages: dict[int, Usage] = {}
        begun: set[int] = set()
        # With include_usage every chunk has the field, and only the last one has a value in it.
        extra: dict[str, Any] = {"usage": None} if include_usage else {}
        async for event in job:
            choice = self._piece(event, first=event.index not in begun)
            begun.add(event.index)
            if event.usage is not None:
                usages[event.index] = event.usage
            yield data_line(self._response([choice], chunk=True, **extra).to_json())
        self.usage = _total(usages, self._n)
        if include_usage:
            yield data_line(self._response([], chunk=True, usage=self.usage).to_json())
        yield DONE

    def _choice(
        self, index: int, text: str, reason: str | None, logprobs: Sequence[TokenLogprobs]
    ) -> ChatChoice | TextChoice:
        shown = self._logprobs(index, logprobs)
        if not self.chat:
            return TextChoice(index=index, text=text, logprobs=shown, finish_reason=reason)
        message = ChatMessage(role="assistant", content=text)
        return ChatChoice(index=index, message=message, logprobs=shown, finish_reason=reason)

    def _piece(self, event: Event, *, first: bool) -> ChatChoice | TextChoice:
        index, reason = event.index, event.finish_reason
        logprobs = self._logprobs(index, [] if event.logprobs is None else [event.logprobs])
        if not self.chat:
            return TextChoice(index=index, text=event.text, logprobs=logprobs, finish_reason=reason)
        if first:
            delta = ChatMessage(role="assistant", content=event.text)
        else:
            delta = ChatMessage(content=event.text) if event.text else ChatMessage()
        return ChatChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not tokens:
            return None
        if self.chat:
            return chat_logprobs(self._tokenizer, tokens)
        offset = self._offsets.get(index, 0)
        shown = text_logprobs(self._tokenizer, tokens, offset)
        self._offsets[index] = offset + sum(map(len, shown["tokens"]))
        return shown

    def _response(
        self, choices: Sequence[ChatChoice | TextChoice], *, chunk: bool = False, **extra: Any
    ) -> Response:
        kind: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return Response(
            id=self.id,
            object=kind,
            created=self._created,
            model=self._model,
            choices=choices,
            **extra,
        )


def data_line(body: bytes) -> bytes:
    """One event of a stream."""
    for mark, escaped in _LINE_BREAKS.items():
        body = body.replace(mark, escaped)
    return b"data: " + body + b"\n\n"


def error_line(body: dict[str, Any]) -> bytes:
    """The event that ends a stream in which something failed."""
    return data_line(json.dumps(body).encode())


def _total(usages: dict[int, Usage], n: int) -> UsageInfo:
    """The counts of a whole request: each prompt once, however many answers it got."""
    prompts = [usages[i] for i in range(0, len(usages), n)]
    # Every prompt got the same documents, so they are added up one by one.
    documents = [
        DocumentTokens(
            id=same[0].name,
            tokens=sum(d.tokens for d in same),
            cached_tokens=sum(d.cached_tokens for d in same),
        )
        for same in zip(*(u.documents for u in prompts), strict=True)
    ]
    details = PromptTokens(cached_tokens=sum(u.cached_tokens for u in prompts))
    if documents:
        details.documents = documents
    if selection_tokens := sum(u.selection_tokens for u in prompts):
        details.selection_tokens = selection_tokens
        if len(prompts) == 1:  # others may have chosen differently
            for shown, document in zip(documents, prompts[0].documents, strict=True):
                shown.used, shown.score = document.used, document.score
    prompt_tokens = sum(u.prompt_tokens for u in prompts)
    completion_tokens = sum(u.completion_tokens for u in usages.values())
    return UsageInfo(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=details,
    )
