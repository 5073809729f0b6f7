"""The offline API: a model in this process, called with prompts or conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.engine.engine import Engine, Output
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import DocumentContext, Prompt, RequestError
from lazyattn_jax.engine.runs import Request, TokenLogprobs
from lazyattn_jax.engine.selection import Selection
from lazyattn_jax.models.checkpoint import LoadedModel
from lazyattn_jax.models.load import EMBEDDED, load_model
from lazyattn_jax.prompt import Document, chat_prompt, parse_documents, text_prompt

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class DocumentUsage:
    """One document of a prompt: what it is called, its tokens, and how many were reused.

    Where documents were chosen, ``score`` is the log-probability of the text after them with this
    one alone, in nats, and ``used`` says whether the answer is over it.
    """

    name: str
    tokens: int
    cached_tokens: int
    used: bool = True
    score: float | None = None


@dataclass(frozen=True)
class Usage:
    """Token counts of one request. ``cached_tokens`` were found in the pool, not computed.

    Where documents were chosen, the prompt is what the request was answered over, ``documents`` are
    all that were given, and ``selection_tokens`` is what was computed to choose.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    documents: tuple[DocumentUsage, ...]
    selection_tokens: int = 0

    @classmethod
    def of(cls, request: Request) -> Usage:
        """The counts of a request so far."""
        documents = zip(request.layout.documents, request.cached_document_tokens, strict=True)
        usage = cls(
            request.prompt_tokens,
            request.num_generated,
            request.cached_tokens or 0,
            tuple(
                DocumentUsage(d.piece.name or str(i), len(d.piece.tokens), cached)
                for i, (d, cached) in enumerate(documents)
            ),
        )
        return usage if request.selection is None else usage._with(request.selection)

    def _with(self, selection: Selection) -> Usage:
        documents = tuple(
            DocumentUsage(
                document.name or str(i),
                len(document.tokens),
                selection.cached_tokens(i),
                i in selection.kept,
                selection.score(i),
            )
            for i, document in enumerate(selection.documents)
        )
        return replace(self, documents=documents, selection_tokens=selection.computed_tokens)


@dataclass(frozen=True)
class Completion:
    """An answer to one prompt.

    ``finish_reason`` is ``stop``, ``length`` or ``error`` (the model's logits were not finite).
    ``time_to_first_token`` is in seconds from when the request was put in line. ``logprobs`` has an
    entry for each of ``token_ids``, ``prompt_logprobs`` one for each token of the prompt in reading
    order, none for tokens that are not computed for this request (see ``SamplingParams``); both
    only if they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    time_to_first_token: float
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class LLM:
    """A model with its engine.

    Args:
      model: see ``models.load.load_model``; the default is the embedded SmolLM2-135M-Instruct.
      adapter: for requests with documents: a safetensors file, ``none``, or ``auto`` for the one
        that is shipped for the model, if there is one.
      progress: show a progress bar while batch shapes are compiled.
      options: fields of ``EngineConfig``.

    Raises:
      ValueError: the model cannot be loaded, an option is out of range, or memory does not suffice.
    """

    def __init__(
        self,
        model: str = EMBEDDED,
        *,
        adapter: str = "auto",
        progress: bool = True,
        **options: Any,
    ) -> None:
        config = EngineConfig(**options)
        loaded = load_for(config, model, adapter)
        self.engine = start_engine(loaded, config, progress=progress)
        self.tokenizer = loaded.tokenizer

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        documents: Sequence[Any] | None = None,
        context: DocumentContext | None = None,
    ) -> list[Completion]:
        """Completes plain prompts, given as text or token ids.

        Args:
          prompts: one prompt or several; several are computed as one batch.
          params: sampling parameters for all of them.
          documents: placed before each prompt: strings, ``Document`` or dictionaries with
            ``text`` and ``title``.
          context: how documents are treated; by default as the options say.

        Returns:
          ``params.n`` completions of the first prompt, then those of the next.

        Raises:
          RequestError: a prompt or document that cannot be served; nothing is computed then.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        every: Sequence[Any] = [prompts] if single else prompts
        parsed = parse_documents(documents)
        return self._run([text_prompt(self.tokenizer, p, parsed) for p in every], params, context)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | None = None,
        *,
        documents: Sequence[Any] | None = None,
        context: DocumentContext | None = None,
    ) -> list[Completion]:
        """Answers conversations; see ``prompt.chat_prompt`` for where documents stand.

        Args:
          messages: one conversation or several; several are computed as one batch.
          params: sampling parameters for all of them.
          documents: given to each conversation.
          context: how documents are treated; by default as the options say.

        Returns:
          ``params.n`` answers to the first conversation, then those to the next.

        Raises:
          RequestError: messages or documents that cannot be served; nothing is computed then.
        """
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        every: Sequence[Any] = [messages] if single or not messages else messages
        parsed = parse_documents(documents)
        return self._run([chat_prompt(self.tokenizer, m, parsed) for m in every], params, context)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        documents: Sequence[Any] | None = None,
        context: DocumentContext | None = None,
    ) -> Iterator[Output]:
        """Answers one conversation once, piece by piece; the last piece has a finish reason.

        Leaving the loop early ends the request.

        Raises:
          RequestError: as ``chat``.
        """
        prompt = chat_prompt(self.tokenizer, messages, parse_documents(documents))
        request = self.engine.add(prompt, params or SamplingParams(), context=context)
        try:
            while self.engine.has_work:
                yield from (o for o in self.engine.step() if o.request is request)
        finally:
            self.engine.abort(request.id)

    def cache_documents(
        self,
        documents: Sequence[Any],
        *,
        messages: Messages | None = None,
        context: DocumentContext | None = None,
    ) -> Usage:
        """Computes documents' KV ahead of requests.

        Args:
          documents: as for ``chat``.
          messages: with document context ``prefix`` documents are encoded after the leading text of
            the requests that use them: messages with the same system text. Plain prompts (none
            given) lead with at most the begin-of-text token.
          context: that of the requests that use them; by default as the options say.

        Returns:
          What had to be computed, and what was there already.

        Raises:
          RequestError: a document that cannot be served.
        """
        parsed = parse_documents(documents)
        if not parsed:
            raise RequestError("documents", "no documents are given")
        if messages is None:
            prompt = text_prompt(self.tokenizer, "", parsed)
        else:
            prompt = chat_prompt(self.tokenizer, messages, parsed)
        request = self.engine.add(prompt, SamplingParams(), context=context, encode_only=True)
        self._drain([request])
        return Usage.of(request)

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None,
        context: DocumentContext | None,
    ) -> list[Completion]:
        requests: list[Request] = []
        try:
            for prompt in prompts:
                leader: Request | None = None
                for each in (params or SamplingParams()).answers():
                    requests.append(self.engine.add(prompt, each, context=context, leader=leader))
                    leader = leader or requests[-1]
            return self._drain(requests)
        finally:
            for request in requests:
                self.engine.abort(request.id)

    def _drain(self, requests: Sequence[Request]) -> list[Completion]:
        texts = {r.id: "" for r in requests}
        logprobs: dict[str, list[TokenLogprobs]] = {r.id: [] for r in requests}
        reasons: dict[str, str] = {}
        while len(reasons) < len(requests):
            for output in self.engine.step():
                name = output.request.id
                if name in texts:
                    texts[name] += output.text
                    if output.logprobs is not None:
                        logprobs[name].append(output.logprobs)
                    if output.finish_reason:
                        reasons[name] = output.finish_reason
        return [
            Completion(
                texts[r.id],
                tuple(r.generated),
                reasons[r.id],
                Usage.of(r),
                (r.first_token_at or r.arrived_at) - r.arrived_at,
                None if r.params.logprobs is None else tuple(logprobs[r.id]),
                None if r.prompt_logprobs is None else tuple(r.prompt_logprobs),
            )
            for r in requests
        ]


def load_for(config: EngineConfig, model: str, adapter: str) -> LoadedModel:
    """Loads the model of an engine, with its adapter.

    Raises:
      ValueError: see ``load_model``; or an adapter is named, and documents are not encoded alone.
    """
    if config.document_context == "prefix":
        if adapter not in ("auto", "none"):
            raise ValueError(
                f"adapter {adapter!r} is for documents encoded alone, and document_context is "
                "'prefix'; set it to 'none' or leave it out"
            )
        adapter = "none"
    return load_model(model, dtype=config.resolve_dtype(), adapter=adapter)


def start_engine(loaded: Any, config: EngineConfig, *, progress: bool = True) -> Engine:
    """Builds an engine, with a progress bar over the batch shapes that are compiled."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, disable=not progress, transient=False) as bar:
        task = bar.add_task("Compiling batch shapes", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return Engine(loaded, config, progress=show)


def keep_compiled(folder: str) -> None:
    """Makes jax keep every compiled program in a folder, so that later starts are quicker."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


__all__ = [
    "LLM",
    "Completion",
    "Document",
    "DocumentContext",
    "DocumentUsage",
    "TokenLogprobs",
    "Usage",
]
