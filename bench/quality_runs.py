"""Questions through the engine: in every mode the same tokens, with other things in sight."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lazyattn_jax.bench.question_sets import QuestionSet
from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import DocumentContext, Prompt, RequestError, as_text
from lazyattn_jax.engine.runs import Request
from lazyattn_jax.llm import Usage
from lazyattn_jax.models.tokenizer import Tokenizer
from lazyattn_jax.prompt import chat_prompt, text_prompt

FULL = "full"
FULL_ADAPTER = "full:adapter"
SYSTEM = "You answer questions using the documents. Answer with a short phrase."
INSTRUCTION = "Answer with a few words from the documents."

_OPTIONS: dict[str, Callable[[str], Any]] = {
    "gap": int,
    "repair": int,
    "temperature": float,
    "select": int,
}
"""Options of a mode, which are fields of ``DocumentContext``, and how they are read."""

# The adapter is for requests with documents. Repaired from beginning to end, these are text like
# any other: full attention.
_ALL_REPAIRED = DocumentContext(False, repair=1 << 30)


@dataclass(frozen=True)
class Mode:
    """A way to treat documents: encoded apart, or with no ``context`` as text: full attention."""

    name: str
    context: DocumentContext | None

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Reads ``full``, or ``prefix`` or ``none`` with options, such as ``prefix:gap=600``.

        ``full:adapter`` is full attention with the model's adapter, ``none:stock`` without it.

        Raises:
          argparse.ArgumentTypeError: something else.
        """
        if text == FULL_ADAPTER:
            return cls(text, _ALL_REPAIRED)
        kind, *options = text.split(":")
        if kind not in (FULL, "prefix", "none"):
            raise argparse.ArgumentTypeError(f"mode {text!r} is not full, prefix or none")
        fields: dict[str, Any] = {}
        for option in options:
            name, _, value = option.partition("=")
            if kind == "none" and option == "stock":
                fields["adapter"] = False
                continue
            if kind == FULL or name not in _OPTIONS:
                raise argparse.ArgumentTypeError(
                    f"mode {text!r} has the option {option!r}; prefix and none have "
                    f"{', '.join(_OPTIONS)}, none has stock, full has adapter"
                )
            try:
                fields[name] = _OPTIONS[name](value)
            except ValueError:
                raise argparse.ArgumentTypeError(
                    f"mode {text!r}: {name} is {value!r}, must be a number"
                ) from None
        try:
            context = DocumentContext(kind == "prefix", **fields)
        except RequestError as error:
            raise argparse.ArgumentTypeError(f"mode {text!r}: {error}") from None
        return cls(text, None if kind == FULL else context)


@dataclass(frozen=True)
class Ask:
    """One question in one mode, with its documents in one of several orders."""

    question: int
    order: int
    mode: Mode
    prompt: Prompt


def question_prompt(tokenizer: Tokenizer, asked: QuestionSet) -> Prompt:
    """The prompt of a question; a model without a chat template gets it as plain text."""
    text = f"{asked.question} {INSTRUCTION}"
    if tokenizer.chat_template is None:
        return text_prompt(tokenizer, text, asked.documents)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return chat_prompt(tokenizer, messages, asked.documents)


def asks(
    tokenizer: Tokenizer, orders: Sequence[Sequence[QuestionSet]], modes: Sequence[Mode]
) -> list[Ask]:
    """Every question in every mode and order."""
    return [
        Ask(i, order, mode, prompt)
        for order, questions in enumerate(orders)
        for i, question in enumerate(questions)
        for prompt in [question_prompt(tokenizer, question)]
        for mode in modes
    ]


def answer(engine: Engine, asked: Sequence[Ask], *, max_tokens: int, title: str) -> list[str]:
    """The greedy answers, all computed as one batch.

    Args:
      engine: that computes them.
      asked: questions in modes.
      max_tokens: of an answer.
      title: of the progress bar.

    Raises:
      RequestError: a prompt does not fit.
    """
    requests = [_add(engine, a.prompt, a.mode, max_tokens) for a in asked]
    texts = {request.id: "" for request in requests}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(title, total=len(requests))
        while engine.has_work:
            for output in engine.step():
                texts[output.request.id] += output.text
                progress.advance(task, output.finish_reason is not None)
    return list(texts.values())


@dataclass(frozen=True)
class Cost:
    """What a question costs in one mode once its documents are in the pool.

    ``computed_tokens`` are computed for the request, also to choose documents; ``prompt_tokens``
    are what it is answered over. Both are means.
    ``first_token_ms`` is the median time to the first token of a request that is alone.
    """

    prompt_tokens: float
    computed_tokens: float
    first_token_ms: float


def cost(engine: Engine, prompts: Sequence[Prompt], mode: Mode) -> Cost:
    """Asks questions one at a time, each with its documents encoded before."""
    salt = f"cost of {mode.name}"  # nothing that was asked before is found in the pool
    requests = []
    for prompt in prompts:
        if mode.context is not None:
            engine.add(
                prompt, SamplingParams(), cache_salt=salt, context=mode.context, encode_only=True
            )
            _drain(engine)
        requests.append(_add(engine, prompt, mode, 1, salt))
        _drain(engine)
    usages = [Usage.of(r) for r in requests]
    seconds = [(r.first_token_at or math.nan) - r.arrived_at for r in requests]
    return Cost(
        statistics.mean(r.prompt_tokens for r in requests),
        statistics.mean(u.prompt_tokens - u.cached_tokens + u.selection_tokens for u in usages),
        1000 * statistics.median(seconds),
    )


def token_losses(engine: Engine, texts: Sequence[str]) -> list[list[float]]:
    """Negative log-likelihoods, in nats, of every token of each text but the first one."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    encode = engine.loaded.tokenizer.encode
    requests = [engine.add([encode(text)], params) for text in texts]
    _drain(engine)
    return [[-p.logprob for p in r.prompt_logprobs or () if p is not None] for r in requests]


def _add(engine: Engine, prompt: Prompt, mode: Mode, max_tokens: int, salt: str = "") -> Request:
    if mode.context is None:
        prompt = as_text(prompt)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return engine.add(prompt, params, cache_salt=salt, context=mode.context)


def _drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
