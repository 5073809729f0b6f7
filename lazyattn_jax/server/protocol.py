"""Requests and responses of OpenAI's interface, and what of it this server supports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError, from_json

from lazyattn_jax.engine.params import MAX_LOGPROBS
from lazyattn_jax.engine.request import RequestError
from lazyattn_jax.server.context import ContextFields
from lazyattn_jax.server.sampling import SamplingFields

MAX_PROMPTS = 1024
COMPLETION_TOKENS = 16
"""``max_tokens`` of /v1/completions where a request has none, as in OpenAI's interface."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "echo": (None, False),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "modalities": (None, ["text"]),
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "typical_p": (None, 1),
    "use_beam_search": (None, False),
}
"""Fields that are not supported, with the values that leave the result as it is."""

WITHOUT_EFFECT = (
    "metadata",
    "parallel_tool_calls",
    "priority",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields that never change the result."""

_MUST_BE = {
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "missing": "is missing",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "string_type": "must be a string",
}


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or (value and _is_tokens(value)):
        return [value]
    if not isinstance(value, list) or not all(isinstance(p, str) or _is_tokens(p) for p in value):
        raise PydanticCustomError(
            "prompt", "must be a string, a list of strings, token ids, or a list of their lists"
        )
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise PydanticCustomError(
            "prompt", f"has {len(value)} prompts, must have 1 to {MAX_PROMPTS}"
        )
    return value


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class GenerateRequest(SamplingFields, ContextFields):
    """What completions and chat completions have in common. Null is the same as absent."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    documents: Any = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions."""

    messages: Any  # prompt.chat_prompt checks them
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives to each token."""
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError(
                    "top_logprobs", f"top_logprobs is {self.top_logprobs}, but logprobs is not true"
                )
            return None
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise RequestError(
                "top_logprobs", f"top_logprobs is {self.top_logprobs}, must be 0 to {MAX_LOGPROBS}"
            )
        return self.top_logprobs or 0


class CompletionRequest(GenerateRequest):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    logprobs: int | None = None

    @property
    def limit(self) -> int | None:
        """The same with this endpoint's default."""
        return COMPLETION_TOKENS if self.asked_limit is None else self.asked_limit

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives to each token."""
        return self.logprobs


def parse_request[R: GenerateRequest](kind: type[R], body: bytes) -> R:
    """Reads the body of a request.

    Raises:
      RequestError: not JSON, or a field is missing, of the wrong type, or not supported.
    """
    request = parse_body(kind, body)
    check_supported(request.model_extra or {})
    return request


def parse_body[M: BaseModel](kind: type[M], body: bytes) -> M:
    """Reads a JSON object.

    Raises:
      RequestError: not JSON, or a field is missing or of the wrong type.
    """
    try:
        fields = from_json(body)
    except ValueError as error:
        raise RequestError("", f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError("", f"the body is {shown(fields)}, must be a JSON object")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _request_error(error) from None


def unknown_fields(request: GenerateRequest) -> list[str]:
    """Names of fields that this server knows nothing about."""
    extra = request.model_extra or {}
    return [name for name in extra if name not in NEUTRAL and name not in WITHOUT_EFFECT]


def shown(value: Any) -> str:
    """A value as JSON, cut short, for messages."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def check_supported(extra: Mapping[str, Any]) -> None:
    """Checks the fields of a request that this server does not read.

    Raises:
      RequestError: one has a value that would change the result.
    """
    for name, value in extra.items():
        allowed = NEUTRAL.get(name, (value,))
        # Not just ==: to Python true is 1 and false is 0.
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            choices = " or ".join(shown(a) for a in allowed)
            raise RequestError(
                name, f"{name} is {shown(value)}, which is not supported; use {choices}"
            )


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    must = _MUST_BE.get(first["type"], first["msg"])
    if first["type"] == "missing":
        return RequestError(name, f"{name} {must}")
    if must.startswith("has "):
        return RequestError(name, f"{name} {must}")
    return RequestError(name, f"{name} is {shown(first['input'])}, {must}")


# Responses. Fields without a default are always sent, the others only where they are set. --------


class DocumentTokens(BaseModel):
    """An extension: what one document took, and how much of it was reused.

    Where documents were chosen also whether it was, and the score that decided.
    """

    id: str
    tokens: int
    cached_tokens: int
    used: bool = True
    score: float | None = None


class PromptTokens(BaseModel):
    """What the prompt's tokens are made of."""

    cached_tokens: int
    documents: list[DocumentTokens] = []
    selection_tokens: int = 0


class UsageInfo(BaseModel):
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class ChatMessage(BaseModel):
    """An answer, or with fewer fields a piece of one."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None


class ChatChoice(BaseModel):
    """One answer of a chat; ``delta`` instead of ``message`` in a stream."""

    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class TextChoice(BaseModel):
    """One answer to a plain prompt, or a piece of one."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Response(BaseModel):
    """The answer to a request, or one chunk of its stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: Sequence[ChatChoice | TextChoice]
    usage: UsageInfo | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None

    def to_json(self) -> bytes:
        """The response as JSON, on one line."""
        return self.model_dump_json(exclude_unset=True).encode()


class ModelCard(BaseModel):
    """An entry of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "lazyattn_jax"
    root: str
    max_model_len: int

    def to_dict(self) -> Mapping[str, Any]:
        """All fields."""
        return self.model_dump()
