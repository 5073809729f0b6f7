"""The endpoints /tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lazyattn_jax.engine.request import DocumentPiece, Prompt, RequestError
from lazyattn_jax.models.tokenizer import Tokenizer
from lazyattn_jax.prompt import Document, chat_prompt, text_prompt
from lazyattn_jax.server.async_engine import AsyncEngine
from lazyattn_jax.server.documents import Documents, salt_root
from lazyattn_jax.server.errors import ApiError
from lazyattn_jax.server.http import read_body
from lazyattn_jax.server.protocol import check_supported, parse_body


class TokenizeRequest(BaseModel):
    """POST /tokenize: a plain prompt or a conversation. Null is the same as absent."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    prompt: str | None = None
    messages: Any = None  # prompt.chat_prompt checks them
    documents: Any = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    cache_salt: str | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: list[int]


class TokensApi:
    """The endpoints' methods.

    Args:
      engine: has the tokenizer.
      documents: what ``{"id": ...}`` of a document stands for.
      check_model: raises ``ApiError`` for the name of another model.
      max_body_bytes: size of a request body.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        documents: Documents,
        check_model: Callable[[str | None], None],
        max_body_bytes: int,
    ) -> None:
        self._engine = engine
        self._documents = documents
        self._check_model = check_model
        self._max_body_bytes = max_body_bytes

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the tokens that the same prompt would be computed with."""
        engine, parsed = self._engine.ready(), await self._read(TokenizeRequest, request)
        tokenizer = engine.loaded.tokenizer
        try:
            check_supported(parsed.model_extra or {})
            root = salt_root(engine, parsed.cache_salt)
            documents = self._documents.resolve(parsed.documents, root)
            tokens = await asyncio.to_thread(prompt_tokens, parsed, documents, tokenizer)
        except RequestError as error:
            raise _bad_request(error) from None
        names = [tokenizer.name(t) for t in tokens] if parsed.return_token_strs else None
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": engine.limits.max_model_len,
                "tokens": tokens,
                "token_strs": names,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of tokens, control tokens by their names."""
        engine, parsed = self._engine.ready(), await self._read(DetokenizeRequest, request)
        vocab_size = engine.loaded.config.vocab_size
        if unknown := [token for token in parsed.tokens if not 0 <= token < vocab_size]:
            raise ApiError(
                400,
                f"token id {unknown[0]} is not in the vocabulary of {vocab_size} tokens",
                param="tokens",
            )
        text = await asyncio.to_thread(engine.loaded.tokenizer.decode, parsed.tokens, control=True)
        return JSONResponse({"prompt": text})

    async def _read[M: TokenizeRequest | DetokenizeRequest](
        self, kind: type[M], request: Request
    ) -> M:
        body = await read_body(request, self._max_body_bytes)
        try:
            parsed = await asyncio.to_thread(parse_body, kind, body)
        except RequestError as error:
            raise _bad_request(error) from None
        self._check_model(parsed.model)
        return parsed


def prompt_tokens(
    request: TokenizeRequest, documents: list[Document], tokenizer: Tokenizer
) -> list[int]:
    """Token ids of a prompt, documents included, in reading order.

    Raises:
      RequestError: there is no prompt, or the conversation cannot be rendered.
    """
    if (request.prompt is None) == (request.messages is None):
        what = "are both given, must be one of them" if request.prompt is not None else "is missing"
        raise RequestError("prompt", f"prompt or messages {what}")
    salt = request.cache_salt or ""
    if request.prompt is not None:
        # Nothing is put before token ids.
        add = request.add_special_tokens is not False
        prompt = request.prompt if add else tokenizer.encode(request.prompt)
        return _joined(text_prompt(tokenizer, prompt, documents, salt=salt))
    tokens = _joined(chat_prompt(tokenizer, request.messages, documents, salt=salt))
    begin = tokenizer.bos_token_id if request.add_special_tokens and tokenizer.add_bos else None
    # Most templates write it, and twice would be wrong.
    return tokens if begin is None or tokens[:1] == [begin] else [begin, *tokens]


def _joined(prompt: Prompt) -> list[int]:
    return [
        token
        for piece in prompt
        for token in (piece.tokens if isinstance(piece, DocumentPiece) else piece)
    ]


def _bad_request(error: RequestError) -> ApiError:
    return ApiError(400, str(error), param=error.param or None)
