"""The fields of requests that say how tokens are chosen."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator
from pydantic_core import PydanticCustomError

from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import RequestError


def _stop(value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value or []
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    return tuple(strings)


def _token_ids(value: Any) -> Any:
    tokens = value or []
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise PydanticCustomError("token_ids", "must be a list of token ids")
    return tuple(tokens)


def _biases(value: Any) -> Any:
    """JSON's keys are strings, so token ids come as those."""
    biases = value or {}
    if not isinstance(biases, dict) or not all(
        isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) < 10
        for token in biases
    ):
        raise PydanticCustomError("logit_bias", "must be an object with token ids as its keys")
    if not all(type(bias) in (int, float) for bias in biases.values()):
        raise PydanticCustomError("logit_bias", "must have numbers as its values")
    return {int(token): bias for token, bias in biases.items()}


class SamplingFields(BaseModel):
    """How the tokens of a request are chosen. Null is the same as absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases)] = {}
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop)] = ()
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_token_ids)] = ()
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    stream: bool | None = None
    timeout: float | None = None

    @property
    def choices(self) -> int:
        """How many answers each prompt gets."""
        return 1 if self.n is None else self.n

    @property
    def asked_limit(self) -> int | None:
        """Tokens to generate at most; ``max_completion_tokens`` is the newer name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit(self) -> int | None:
        """The same with this endpoint's default; none for as many as fit."""
        return self.asked_limit

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives to each token; none where no log-probabilities are wanted."""
        raise NotImplementedError

    def sampling(self) -> SamplingParams:
        """How the answers are sampled.

        Raises:
          RequestError: a value out of range.
        """
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs", "prompt_logprobs cannot be had with stream true")
        given = {name: value for name in _PASSED_ON if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given,
            top_k=0 if self.top_k in (None, -1) else self.top_k,  # -1: vLLM's clients' off
            max_tokens=self.limit,
            logprobs=self.wanted_logprobs,
        )


_PASSED_ON = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "n",
    "prompt_logprobs",
    "seed",
)
