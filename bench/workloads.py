"""What is asked of a server: questions over documents, drawn from a seed.

Contents are token ids where the model runs in this process, so that lengths are exact, else words.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lazyattn_jax.questions import read_json_lines

type Content = tuple[int, ...] | str
"""Token ids, or text."""

type Maker[T] = Callable[[np.random.Generator, int], T]
"""Makes random content of so many tokens (or words)."""

type ContentMaker = Maker[Content]

NAMES = ("zipf", "permute", "unique", "jsonl")

_WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home water
room mother area money story fact month lot right study book eye job word
""".split()  # noqa: SIM905 (a list of strings would be a page long)


@dataclass(frozen=True)
class Query:
    """One request: documents between a system text and a question."""

    system: Content
    documents: tuple[Content, ...]
    question: Content
    output_tokens: int
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Workload:
    """What requests are made of.

    Attributes:
      name: ``zipf`` draws the documents of a request from ``pool`` with probability proportional to
        ``1 / rank**alpha``, distinct and in random order; ``permute`` puts the same documents in
        another order each time; ``unique`` has new documents in each request; ``jsonl`` reads
        ``file``.
      pool: documents to draw from; of rank 1 to ``pool``.
      documents: of one request.
      alpha: exponent of the Zipf law; 0 is uniform.
      document_tokens, system_tokens, question_tokens, output_tokens: lengths.
      file: of objects with ``question``, ``documents`` and maybe ``answers``, one a line.
      seed: of everything random.
    """

    name: str = "zipf"
    pool: int = 1000
    documents: int = 10
    alpha: float = 1.0
    document_tokens: int = 512
    system_tokens: int = 32
    question_tokens: int = 64
    output_tokens: int = 128
    file: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"workload is {self.name!r}, must be one of {', '.join(NAMES)}")
        if self.name == "zipf" and self.documents > self.pool:
            raise ValueError(
                f"documents is {self.documents} a request, the pool has {self.pool} (distinct ones)"
            )
        if (self.file is None) == (self.name == "jsonl"):
            raise ValueError("workload 'jsonl' needs a file, and no other takes one")
        for name in ("documents", "document_tokens", "question_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if not self.alpha >= 0:
            raise ValueError(f"alpha is {self.alpha}, must be 0 or more")

    def queries(self, make: ContentMaker) -> Iterator[Query]:
        """Requests without end, the same for the same seed."""
        if self.name == "jsonl":
            assert self.file is not None
            return itertools.cycle(read_jsonl(Path(self.file), self.output_tokens))
        return self._random(make)

    def usual[T](self, make: Maker[T]) -> tuple[T, Iterator[T]]:
        """The system text, and the documents that come again, those asked for most often first."""
        count = {"zipf": self.pool, "permute": self.documents}.get(self.name, 0)
        return self._system(make), (self._document(make, i) for i in range(count))

    def _random(self, make: ContentMaker) -> Iterator[Query]:
        known: dict[int, Content] = {}

        def document(number: int) -> Content:
            if self.name == "unique":
                return self._document(make, number)
            if number not in known:
                known[number] = self._document(make, number)
            return known[number]

        system = self._system(make)
        rng = self._rng(0)
        for i in itertools.count():
            question = make(self._rng(3, i), self.question_tokens)
            numbers = self._draw(rng, i)
            yield Query(system, tuple(map(document, numbers)), question, self.output_tokens)

    def _system[T](self, make: Maker[T]) -> T:
        return make(self._rng(1), self.system_tokens)

    def _document[T](self, make: Maker[T], number: int) -> T:
        return make(self._rng(2, number), self.document_tokens)

    def _draw(self, rng: np.random.Generator, i: int) -> list[int]:
        if self.name == "zipf":
            return draw_distinct(rng, self.pool, self.documents, self.alpha)
        first = i * self.documents if self.name == "unique" else 0
        return (first + rng.permutation(self.documents)).tolist()

    def _rng(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *purpose))


def draw_distinct(rng: np.random.Generator, pool: int, count: int, alpha: float) -> list[int]:
    """Distinct numbers below ``pool``, in random order.

    One after another is drawn with probability proportional to ``1 / (number + 1)**alpha`` among
    those that are left.
    """
    # Gumbel's trick: the largest of log(weight) + Gumbel noise are such a draw, all at once.
    keys = rng.gumbel(size=pool) - alpha * np.log(np.arange(1, pool + 1))
    return rng.permutation(np.argpartition(-keys, count - 1)[:count]).tolist()


def token_maker(vocab_size: int) -> Maker[tuple[int, ...]]:
    """Random token ids, without the ends of the vocabulary, where control tokens are."""
    low, high = vocab_size // 4, 3 * vocab_size // 4
    return lambda rng, count: tuple(rng.integers(low, high, count).tolist())


def make_words(rng: np.random.Generator, count: int) -> str:
    """Random words that are one token each for most tokenizers."""
    return " ".join(_WORDS[i] for i in rng.integers(0, len(_WORDS), count))


def read_jsonl(path: Path, output_tokens: int) -> list[Query]:
    """Questions with documents, one JSON object a line, plain or gzip.

    A document is a string or has a ``text`` and maybe a ``title``.

    Raises:
      ValueError: a line that is not such an object; the message names it.
    """
    queries = []
    for where, entry in read_json_lines(path):
        try:
            documents = tuple(_text_of(d) for d in entry["documents"])
            answers = tuple(map(str, entry.get("answers", ())))
            queries.append(Query("", documents, str(entry["question"]), output_tokens, answers))
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{where} is no object with 'question' and 'documents': {error!r}"
            ) from None
    if not queries:
        raise ValueError(f"{path} has no questions")
    return queries


def _text_of(document: Any) -> str:
    if isinstance(document, str):
        return document
    title = f"{document['title']}\n" if document.get("title") else ""
    return title + document["text"]
