"""How the tokens of a request are chosen, and when it stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property

from lazyattn_jax.engine.request import RequestError

MAX_SEED = 2**63 - 1
MAX_BIASES = 300
MAX_LOGPROBS = 20
MAX_N = 16
MAX_STOP_IDS = 64
MAX_STOP_STRINGS = 16


class Effort(IntEnum):
    """What it takes to choose tokens for a batch; the most that any of its requests needs."""

    GREEDY = 0
    """The most likely ones."""
    DRAWN = 1
    """Draws, from all tokens or those that ``min_p`` leaves."""
    FULL = 2
    """Whatever there is: adjusted logits, and ``top_k`` and ``top_p``, which sort them."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    Logits are changed in this order: ``logit_bias``, the penalties, ``min_tokens``, temperature,
    ``top_k``, ``top_p``, ``min_p``; each as in transformers' logits processors, with presence and
    frequency penalties as OpenAI defines them.

    Attributes:
      temperature: 0 takes the most likely token; at most 2, as in OpenAI's interface.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the fewest most likely tokens whose probabilities sum to at least this.
      min_p: keep tokens at least this times as likely as the most likely one; 0 keeps all.
      repetition_penalty: logits of tokens of the prompt (documents included) and the output are
        divided by this where positive and multiplied where negative; 0.01 to 100, 1 is off.
      presence_penalty: taken from the logits of tokens of the output; -2 to 2.
      frequency_penalty: taken from them once for each time they are there; -2 to 2.
      logit_bias: added to the logits of tokens, by id; -100 to 100, at most 300 tokens.
      n: answers to each prompt, 1 to 16. They share everything but what they generate.
      seed: with a seed the same tokens come out whatever else is in the batch; each of ``n``
        answers has its own, counted up from it.
      max_tokens: tokens to generate at most; by default as many as the context and the pool hold.
      min_tokens: tokens to generate before an end token, a stop token or a stop string ends it.
      stop: strings that end the output; they are not part of it.
      stop_token_ids: tokens that end the output; their text is not part of it.
      ignore_eos: go on after the model's end token.
      logprobs: with each token its log-probability and those of so many most likely ones (0 to
        20), of the model's own distribution, before anything above changes it.
      prompt_logprobs: the same for the prompt's tokens. Documents, the text before the first one
        and a token right after a document have none: their KV is shared, not computed for this
        request. The text after documents is computed again even if it is in the pool.

    Raises:
      RequestError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_range("n", self.n, 1, MAX_N)
        _check_range("temperature", self.temperature, 0, 2)
        if not 0 < self.top_p <= 1:
            raise RequestError("top_p", f"top_p is {self.top_p}, must be above 0 and at most 1")
        if not 0 <= self.top_k < 2**31:
            raise RequestError("top_k", f"top_k is {self.top_k}, must be 0 (off) or more")
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_count("logit_bias", "biased tokens", len(self.logit_bias), MAX_BIASES)
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise RequestError(
                    "logit_bias", f"the bias of token {token} is {bias}, must be -100 to 100"
                )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError("max_tokens", f"max_tokens is {self.max_tokens}, must be at least 1")
        if self.min_tokens < 0:
            raise RequestError("min_tokens", f"min_tokens is {self.min_tokens}, must be 0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens",
                f"min_tokens is {self.min_tokens}, must be at most max_tokens, {self.max_tokens}",
            )
        if self.seed is not None and not -MAX_SEED <= self.seed <= MAX_SEED:
            raise RequestError("seed", f"seed is {self.seed}, must be within {MAX_SEED} of 0")
        _check_count("stop", "stop strings", len(self.stop), MAX_STOP_STRINGS)
        if not all(self.stop):
            raise RequestError("stop", "a stop string is empty")
        _check_count("stop_token_ids", "stop tokens", len(self.stop_token_ids), MAX_STOP_IDS)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 0, MAX_LOGPROBS)

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed before the temperature, by what a seat has to remember."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
        )

    @cached_property
    def effort(self) -> Effort:
        """What it takes to choose this request's tokens."""
        drawn = self.temperature > 0
        filtered = drawn and (self.top_k > 0 or self.top_p < 1)
        if filtered or self.adjusts_logits:
            return Effort.FULL
        return Effort.DRAWN if drawn else Effort.GREEDY

    def answers(self) -> list[SamplingParams]:
        """The parameters of each answer, for a request of its own."""
        if self.n == 1:
            return [self]
        return [
            replace(self, n=1, seed=None if self.seed is None else self.seed + i)
            for i in range(self.n)
        ]

    def check_tokens(self, vocab_size: int) -> None:
        """Checks the token ids.

        Raises:
          RequestError: one is not in the vocabulary.
        """
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(
                        name,
                        f"token id {token} in {name} is not in the vocabulary of {vocab_size} "
                        "tokens",
                    )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise RequestError(name, f"{name} is {value}, must be {low} to {high}")


def _check_count(name: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(name, f"{count} {what}, at most {most} are allowed")
