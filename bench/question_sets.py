"""Questions with the documents they are asked over, from files of JSON lines."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazyattn_jax.engine.request import RequestError
from lazyattn_jax.prompt import Document

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class QuestionSet:
    """A question, the answers that count as right, and the documents to find one in."""

    question: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...]

    def shuffled(self, rng: random.Random) -> QuestionSet:
        """The same with its documents in another order."""
        documents = rng.sample(self.documents, len(self.documents))
        return QuestionSet(self.question, self.answers, tuple(documents))


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, plain or compressed with gzip.

    Raises:
      ValueError: the file cannot be read, or a line is no JSON object.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if content.startswith(_GZIP) else content).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            if not isinstance(value, dict):
                raise ValueError(f"{path}, line {number} is no JSON object")
            yield value


def question_sets(path: Path, count: int, *, seed: int, limit: int | None) -> list[QuestionSet]:
    """Question sets of a file, in its order.

    A line has ``question``, ``answers``, and either ``title`` and ``text``, the passage that holds
    the answer, or ``documents``. To a passage come those of other questions, drawn from the whole
    file whatever the limit; of documents the first ones are taken. They stand in an order that is
    drawn too. Everything drawn for a question depends on the seed and its line alone.

    Args:
      path: of the file.
      count: documents a question.
      seed: of everything that is drawn.
      limit: only so many questions from the start.

    Raises:
      ValueError: a line lacks a field, or there are fewer passages than documents wanted.
    """
    if count < 1:
        raise ValueError(f"documents is {count}, must be at least 1")
    lines = [
        _read(line, f"{path}, question {i}") for i, line in enumerate(read_json_lines(path), 1)
    ]
    passages = list(dict.fromkeys(s.documents[0] for s, has_own in lines if not has_own))
    if any(not has_own for _, has_own in lines) and count > len(passages):
        raise ValueError(f"{path} has {len(passages)} passages, fewer than {count} documents")
    sets = []
    for i, (line, has_own) in enumerate(lines[:limit]):
        rng = random.Random(f"documents {seed} {i}")
        documents = line.documents[:count]
        if not has_own:
            # One more than needed, since the question's own passage may be among them.
            drawn = rng.sample(passages, min(count, len(passages)))
            documents += tuple(d for d in drawn if d != documents[0])[: count - 1]
        sets.append(QuestionSet(line.question, line.answers, documents).shuffled(rng))
    if not sets:
        raise ValueError(f"{path} has no questions")
    return sets


def reordered(sets: Sequence[QuestionSet], order: int, *, seed: int) -> list[QuestionSet]:
    """The same questions over the same documents in another order; order 0 is that they are in."""
    if order == 0:
        return list(sets)
    return [s.shuffled(random.Random(f"order {seed} {order} {i}")) for i, s in enumerate(sets)]


def _read(line: Mapping[str, Any], where: str) -> tuple[QuestionSet, bool]:
    """A line as a question with its own documents, and whether it came with several."""
    question, answers = line.get("question"), line.get("answers")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where} has no 'question'")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise ValueError(f"{where} has no 'answers', a list of strings")
    own = line.get("documents")
    if own is not None and (not isinstance(own, list) or not own):
        raise ValueError(f"{where}: 'documents' is no list with documents")
    try:
        documents = tuple(Document.parse(d) for d in ([line] if own is None else own))
    except RequestError as error:
        raise ValueError(f"{where}: {error}") from None
    return QuestionSet(question, tuple(answers), documents), own is not None
