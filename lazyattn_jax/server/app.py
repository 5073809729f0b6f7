"""The HTTP endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from lazyattn_jax.engine.request import Prompt, RequestError
from lazyattn_jax.prompt import Document, chat_prompt, text_prompt
from lazyattn_jax.server.async_engine import AsyncEngine
from lazyattn_jax.server.documents import Documents, salt_root
from lazyattn_jax.server.documents_api import DocumentsApi
from lazyattn_jax.server.errors import ApiError, EngineUnavailable
from lazyattn_jax.server.http import ApiKeys, EventStream, RequestIds, read_body, while_connected
from lazyattn_jax.server.jobs import Submission
from lazyattn_jax.server.logs import fields
from lazyattn_jax.server.metrics import Metrics, engine_state
from lazyattn_jax.server.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    ModelCard,
    parse_request,
    unknown_fields,
)
from lazyattn_jax.server.replies import Replies
from lazyattn_jax.server.tokens_api import TokensApi

log = logging.getLogger(__name__)

MIB = 1 << 20
_STATIC = Path(__file__).parent / "static"
_STOP_SECONDS = 5.0
_MAX_UNKNOWN = 1000  # names of unknown fields to remember


@dataclass(frozen=True)
class ServerConfig:
    """Options of the server.

    Attributes:
      model_name: what requests call the model.
      root: where the model came from.
      max_body_bytes: size of a request body.
      api_keys: requests need one of these, if there are any; but for what ``ApiKeys`` leaves open.
    """

    model_name: str
    root: str
    max_body_bytes: int = 32 * MIB
    api_keys: tuple[str, ...] = ()


def build_app(engine: AsyncEngine, config: ServerConfig) -> Starlette:
    """The application; it starts the engine when it starts and stops it when it stops."""
    documents, metrics = Documents(), Metrics()
    engine.observers += [documents, metrics]
    api = Api(engine, config, documents, metrics)
    documents_api = DocumentsApi(engine, documents, config.max_body_bytes)
    tokens_api = TokensApi(engine, documents, api.check_model, config.max_body_bytes)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop(_STOP_SECONDS)

    app = Starlette(
        routes=[
            Route("/", _page),
            Mount("/static", StaticFiles(directory=_STATIC)),
            Route("/health", api.health),
            Route("/metrics", api.metrics),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/documents", documents_api.all, methods=["GET", "POST"]),
            Route("/v1/documents/{name}", documents_api.one, methods=["GET", "DELETE"]),
            Route("/v1/pool", documents_api.pool),
            Route("/tokenize", tokens_api.tokenize, methods=["POST"]),
            Route("/detokenize", tokens_api.detokenize, methods=["POST"]),
        ],
        middleware=[Middleware(RequestIds), Middleware(ApiKeys, keys=config.api_keys)],
        lifespan=lifespan,
        exception_handlers={
            ApiError: _api_error,
            ClientDisconnect: _client_gone,
            HTTPException: _http_error,
        },
    )
    app.router.redirect_slashes = False  # a POST that is sent elsewhere helps nobody
    return app


async def _page(_: Request) -> Response:
    """GET /: chat with documents, and a picture of the pool. Everything comes from here."""
    return FileResponse(
        _STATIC / "index.html",
        headers={"content-security-policy": "default-src 'self'; img-src 'self' data:"},
    )


class Api:
    """The endpoints' methods."""

    def __init__(
        self, engine: AsyncEngine, config: ServerConfig, documents: Documents, metrics: Metrics
    ) -> None:
        self._engine = engine
        self._documents = documents
        self._metrics = metrics
        self._config = config
        self._created = int(time.time())
        self._unknown: set[str] = set()

    async def health(self, _: Request) -> Response:
        """GET /health: whether requests can be taken."""
        reason = self._engine.unavailable
        if reason is None:
            return JSONResponse({"status": "ok"})
        body = {"status": reason.code}
        if reason.code == "failed":
            body["reason"] = str(reason)
        return JSONResponse(body, 503)

    async def metrics(self, _: Request) -> Response:
        """GET /metrics: for Prometheus; without what the engine would have to say if it is gone."""
        state = None
        with contextlib.suppress(EngineUnavailable):
            state = await self._engine.call(engine_state)
        return Response(self._metrics.text(state), media_type=CONTENT_TYPE_LATEST)

    async def models(self, _: Request) -> Response:
        """GET /v1/models: the one model."""
        return JSONResponse({"object": "list", "data": [self._card().to_dict()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME: the model, if that is its name."""
        card = self._card()
        self.check_model(request.path_params["name"])
        return JSONResponse(card.to_dict())

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(ChatRequest, request)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(CompletionRequest, request)

    async def _generate(
        self, kind: type[ChatRequest | CompletionRequest], request: Request
    ) -> Response:
        started = time.monotonic()
        engine = self._engine.ready()
        body = await read_body(request, self._config.max_body_bytes)
        parsed: ChatRequest | CompletionRequest | None = None
        try:
            # Long prompts take long to read and tokenise; other requests must not wait for that.
            parsed = await asyncio.to_thread(parse_request, kind, body)
            self.check_model(parsed.model)
            self._log_unknown(unknown_fields(parsed))
            root = salt_root(engine, parsed.cache_salt)
            documents = self._documents.resolve(parsed.documents, root)
            tokenizer = engine.loaded.tokenizer
            submissions = await asyncio.to_thread(_submissions, parsed, documents, engine)
            chat = isinstance(parsed, ChatRequest)
            replies = Replies(
                chat=chat,
                model=self._config.model_name,
                n=parsed.choices,
                tokenizer=tokenizer,
            )
            job = await self._engine.submit(replies.id, submissions)
        except RequestError as error:
            raise _bad_request(error, kind, parsed) from None

        def finished() -> None:
            _log_finished(request, replies, time.monotonic() - started)

        if parsed.stream:
            return EventStream(replies.stream(job, parsed.include_usage), job, finished)
        with job:
            answer = await while_connected(request.receive, replies.whole(job))
        finished()
        return Response(answer, media_type="application/json")

    def _card(self) -> ModelCard:
        return ModelCard(
            id=self._config.model_name,
            created=self._created,
            root=self._config.root,
            max_model_len=self._engine.ready().limits.max_model_len,
        )

    def check_model(self, name: str | None) -> None:
        """Checks the name of a model that a request gives, if it gives one.

        Raises:
          ApiError: it is another one.
        """
        if name is not None and name != self._config.model_name:
            raise ApiError(
                404,
                f"model {name!r} does not exist; this server has {self._config.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def _log_unknown(self, names: list[str]) -> None:
        for name in names:
            if name not in self._unknown and len(self._unknown) < _MAX_UNKNOWN:
                self._unknown.add(name)
                log.info("unknown field %.60r is ignored (said once)", name)


def _submissions(
    request: ChatRequest | CompletionRequest, documents: list[Document], engine: Engine
) -> list[Submission]:
    """All that a request asks for: every choice of the first prompt, then of the next.

    Raises:
      RequestError: it cannot be served.
    """
    params = request.sampling().answers()
    context, tokenizer = request.context(engine.context), engine.loaded.tokenizer
    salt, shorten = request.cache_salt or "", request.asked_limit is None
    prompts: list[Prompt]
    if isinstance(request, ChatRequest):
        prompts = [chat_prompt(tokenizer, request.messages, documents, salt=salt)]
    else:
        prompts = [text_prompt(tokenizer, text, documents, salt=salt) for text in request.prompt]
    return [
        Submission(prompt, p, salt, shorten, i > 0, request.timeout, context)
        for prompt in prompts
        for i, p in enumerate(params)
    ]


def _bad_request(
    error: RequestError, kind: type[GenerateRequest], request: GenerateRequest | None
) -> ApiError:
    """The error with the field to blame under the name that the client has for it."""
    param, message = error.param, str(error)
    if param == "prompt" and kind is ChatRequest:
        param = "messages"
    if param == "max_tokens" and request is not None and request.max_completion_tokens is not None:
        param, message = "max_completion_tokens", message.replace(param, "max_completion_tokens")
    return ApiError(400, message, param=param or None)


def _log_finished(request: Request, replies: Replies, seconds: float) -> None:
    usage = replies.usage
    if usage is not None:
        cached = usage.prompt_tokens_details.cached_tokens
        log.info(
            "%s 200 %d prompt tokens (%d cached), %d new, %.2f s",
            request.state.request_id,
            usage.prompt_tokens,
            cached,
            usage.completion_tokens,
            seconds,
            extra=fields(
                request_id=request.state.request_id,
                path=request.url.path,
                status=200,
                response_id=replies.id,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=cached,
                completion_tokens=usage.completion_tokens,
                seconds=round(seconds, 6),
            ),
        )


# What endpoints raise -----------------------------------------------------------------------------


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    name, status = request.state.request_id, error.status
    extra = fields(request_id=name, path=request.url.path, status=status, code=error.code)
    log.info("%s %d %s", name, status, error, extra=extra)
    return JSONResponse(error.body, error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    what = f"{request.method} {request.url.path!r}"
    message = f"{what}: {error.detail}"
    if error.status_code == 404:
        message = f"{what}: there is no such path"
    elif error.status_code == 405:
        message = f"{what}: the method must be {headers.get('Allow', 'another one')}"
    answer = ApiError(error.status_code, message, headers=headers)
    return await _api_error(request, answer)


async def _client_gone(request: Request, _: Exception) -> Response:
    name = request.state.request_id
    log.info("%s the client has gone", name, extra=fields(request_id=name, path=request.url.path))
    return Response(status_code=499)  # nobody gets it
