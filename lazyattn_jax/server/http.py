"""HTTP matters: request bodies, clients that leave, event streams, request ids."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lazyattn_jax.server.errors import ApiError
from lazyattn_jax.server.jobs import Job
from lazyattn_jax.server.logs import fields
from lazyattn_jax.server.replies import error_line

log = logging.getLogger(__name__)

_FAILED = "the server failed on this request; its log says why"
_ID_LENGTH = 128
_GUARDED = ("/v1", "/tokenize", "/detokenize")


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request.

    Raises:
      ApiError: it has more than ``limit`` bytes.
      ClientDisconnect: the client has gone.
    """
    announced = request.headers.get("content-length", "")
    total = int(announced) if announced.isdecimal() else 0
    body = bytearray()
    received = 0
    # A client that is still sending does not read an answer, and gets a reset connection instead;
    # so what is not much too long is taken in and thrown away.
    if total <= 2 * limit:
        async for chunk in request.stream():
            received += len(chunk)
            if received <= limit:
                body += chunk
            elif received > 2 * limit:
                break
    total = max(total, received)
    if total > limit:
        raise ApiError(
            413,
            f"the body has {total} bytes, at most {limit} are allowed (--max-body-bytes)",
            code="body_too_large",
        )
    return bytes(body)


async def while_connected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Does ``work`` for a client whose body has been read; cancels it when the client leaves.

    Raises:
      ClientDisconnect: the client has gone.
      Exception: what ``work`` raises.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from a job. When the client leaves, the job is ended.

    The response begins with the first event, so what fails before that is an ordinary error.

    Args:
      lines: the events, ready to send.
      job: what they come from.
      finished: called after the last one.
    """

    def __init__(
        self, lines: AsyncGenerator[bytes], job: Job, finished: Callable[[], None]
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._lines = lines
        self._job = job
        self._finished = finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        with self._job:
            async with aclosing(self._lines):
                first = await while_connected(receive, self._first())
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                try:
                    await while_connected(receive, self._send_all(first, send))
                except ClientDisconnect:
                    name = scope["state"]["request_id"]
                    extra = fields(request_id=name, path=scope["path"])
                    log.info("%s the client has gone", name, extra=extra)
                else:
                    self._finished()

    async def _first(self) -> bytes:
        return await anext(self._lines)

    async def _send_all(self, first: bytes, send: Send) -> None:
        await send(_piece(first))
        try:
            async for line in self._lines:
                await send(_piece(line))
        except ApiError as error:
            await send(_piece(error_line(error.body)))
        except Exception:
            log.exception("a stream failed")
            await send(_piece(error_line(ApiError(500, _FAILED).body)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _piece(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


class RequestIds:
    """Gives every request an id, its own ``x-request-id`` if it has one, and echoes it.

    Also answers requests on which the server fails. Starlette would pass the exception on to
    uvicorn, which then closes the connection under the client's next request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        # It goes into a header and into the log, so only harmless characters may stay.
        request_id = re.sub(r"[^\w.:@/+=-]", "", given, flags=re.ASCII)[:_ID_LENGTH]
        request_id = request_id or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if started:
                raise
            log.exception("%s failed", request_id, extra=fields(request_id=request_id))
            answer = JSONResponse(ApiError(500, _FAILED).body, 500)
            await answer(scope, receive, send_with_id)


class ApiKeys:
    """Lets requests that use the model pass only with a key, where there are any.

    Open are the page, /health and /metrics.

    Args:
      app: what they are let through to.
      keys: each of them opens.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or refuses it."""
        guarded = scope["type"] == "http" and scope["path"].startswith(_GUARDED)
        if not guarded or not self._keys or self._opens(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "the API key is missing or wrong; send 'Authorization: Bearer KEY' (--api-key)",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        name = scope["state"]["request_id"]
        log.info("%s 401 no valid API key", name, extra=fields(request_id=name, status=401))
        await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)

    def _opens(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode()
        # All are compared, each in constant time: how long it takes says nothing.
        matches = [secrets.compare_digest(key, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)
