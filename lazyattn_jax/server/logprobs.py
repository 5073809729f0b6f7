"""Log-probabilities as OpenAI's interface shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lazyattn_jax.engine.runs import TokenLogprobs
from lazyattn_jax.models.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The ``logprobs`` of a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.show(token)
        # A token may be a part of a character, which no text can say.
        content = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": content}

    content = [
        entry(t.token, t.logprob) | {"top_logprobs": [entry(*best) for best in t.best]}
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], offset: int = 0
) -> dict[str, Any]:
    """The ``logprobs`` of a plain completion's choice.

    Args:
      tokenizer: of the model.
      tokens: of the choice, or of a piece of it.
      offset: characters that the tokens before these have.
    """
    texts = [tokenizer.show(t.token) for t in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(t.logprob) for t in tokens],
        "top_logprobs": [
            {tokenizer.show(token): _finite(value) for token, value in reversed(t.best)}
            for t in tokens
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token of the prompt an object by token id, or null."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "decoded_token": tokenizer.show(token)}

    return [
        None
        if t is None
        else {str(token): entry(token, value) for token, value in (*t.best, (t.token, t.logprob))}
        for t in tokens
    ]


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
