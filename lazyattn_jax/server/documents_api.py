"""The endpoints of /v1/documents and /v1/pool."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.request import RequestError
from lazyattn_jax.prompt import Document, chat_prompt, text_prompt
from lazyattn_jax.server.async_engine import AsyncEngine
from lazyattn_jax.server.context import ContextFields
from lazyattn_jax.server.documents import Documents, salt_root
from lazyattn_jax.server.errors import ApiError
from lazyattn_jax.server.http import read_body, while_connected
from lazyattn_jax.server.jobs import Job, Submission
from lazyattn_jax.server.protocol import parse_body

NO_SYSTEM_TEXT = [{"role": "user", "content": ""}]


class LoadRequest(ContextFields):
    """POST /v1/documents. Null is the same as absent."""

    model_config = ConfigDict(strict=True)
    documents: Any
    messages: Any = None  # prompt.chat_prompt checks them
    cache_salt: str | None = None
    pinned: bool | None = None


class DocumentsApi:
    """The endpoints' methods.

    Args:
      engine: computes the documents.
      documents: what is known of them.
      max_body_bytes: size of a request body.
    """

    def __init__(self, engine: AsyncEngine, documents: Documents, max_body_bytes: int) -> None:
        self._engine = engine
        self._documents = documents
        self._max_body_bytes = max_body_bytes

    async def all(self, request: Request) -> Response:
        """/v1/documents: GET lists the stored documents, POST loads some."""
        if request.method == "POST":
            return await self._load(request)
        return _list(list((await self._cards(request)).values()))

    async def one(self, request: Request) -> Response:
        """/v1/documents/ID: GET and DELETE."""
        name = request.path_params["name"]
        if request.method == "DELETE":
            if not await self._of_salt(
                request, lambda engine, root: self._documents.delete(engine, name, root)
            ):
                raise _no_document(name)
            return JSONResponse({"id": name, "object": "document", "deleted": True})
        cards = await self._cards(request)
        if name not in cards:
            raise _no_document(name)
        return JSONResponse(cards[name])

    async def _load(self, request: Request) -> Response:
        """Stores documents, and computes them ahead of requests."""
        engine = self._engine.ready()
        body = await read_body(request, self._max_body_bytes)
        try:
            parsed = await asyncio.to_thread(parse_body, LoadRequest, body)
            root = salt_root(engine, parsed.cache_salt)
            documents = self._documents.resolve(parsed.documents, root)
            if not documents:
                raise RequestError("documents", "no documents are given")
            await self._engine.call(lambda _: self._documents.check_room(documents, root))
            submissions = await asyncio.to_thread(_submissions, engine, documents, parsed)
            job = await self._engine.submit(f"documents-{uuid.uuid4().hex}", submissions)
        except RequestError as error:
            raise ApiError(400, str(error), param=error.param or None) from None
        with job:
            await self._engine.call(lambda _: self._documents.store(documents, root))
            await while_connected(request.receive, _finished(job))
        cards = await self._engine.call(lambda e: self._documents.cards(e, root))
        ids = list(dict.fromkeys(d.content_id for d in documents))
        # One that was deleted meanwhile is not there.
        return _list([cards[content_id] for content_id in ids if content_id in cards])

    async def pool(self, request: Request) -> Response:
        """GET /v1/pool: what is in the pool now, and who uses it."""
        return JSONResponse(await self._of_salt(request, self._documents.pool))

    async def _cards(self, request: Request) -> dict[str, dict[str, Any]]:
        return await self._of_salt(request, self._documents.cards)

    async def _of_salt[T](self, request: Request, work: Callable[[Engine, bytes], T]) -> T:
        salt = request.query_params.get("cache_salt")
        return await self._engine.call(lambda engine: work(engine, salt_root(engine, salt)))


def _submissions(
    engine: Engine, documents: list[Document], request: LoadRequest
) -> list[Submission]:
    """A request for each document: together they may be more than a context holds."""
    context, tokenizer = request.context(engine.context), engine.loaded.tokenizer
    salt, keep = request.cache_salt or "", bool(request.pinned)
    prompts = (
        text_prompt(tokenizer, "", [document], salt=salt)
        if request.messages is None and tokenizer.chat_template is None
        else chat_prompt(tokenizer, request.messages or NO_SYSTEM_TEXT, [document], salt=salt)
        for document in documents
    )
    return [
        Submission(p, cache_salt=salt, context=context, encode_only=True, keep=keep)
        for p in prompts
    ]


async def _finished(job: Job) -> None:
    async for _ in job:
        pass


def _list(cards: list[dict[str, Any]]) -> Response:
    return JSONResponse({"object": "list", "data": cards})


def _no_document(name: str) -> ApiError:
    message = f"no document is stored under id {name!r}"
    return ApiError(404, message, param="id", code="document_not_found")
