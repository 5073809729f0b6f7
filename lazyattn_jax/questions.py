"""Questions with answers and documents, from files of JSON lines."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lazyattn_jax.engine.request import RequestError
from lazyattn_jax.prompt import Document, parse_documents

_GZIP = b"\x1f\x8b"


class QuestionLine(NamedTuple):
    """A question, the answers that count as right, and its documents.

    Without documents of its own it has one, the passage that holds the answer.
    """

    question: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...]
    has_own: bool


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, plain or compressed with gzip, and where each stands.

    Raises:
      ValueError: the file cannot be read, or a line is no JSON object.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if content.startswith(_GZIP) else content).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{where} is no JSON object")
        yield where, value


def read_questions(path: Path) -> list[QuestionLine]:
    """The questions of a file.

    A line has ``question``, ``answers``, and either ``title`` and ``text``, the passage that holds
    the answer, or ``documents``.

    Raises:
      ValueError: the file cannot be read or has no questions, or a line is not such an object.
    """
    found = [_parse(line, where) for where, line in read_json_lines(path)]
    if not found:
        raise ValueError(f"{path} has no questions")
    return found


def _parse(line: dict[str, Any], where: str) -> QuestionLine:
    question, answers, own = (line.get(name) for name in ("question", "answers", "documents"))
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where} has no 'question'")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise ValueError(f"{where} has no 'answers', a list of strings")
    try:
        documents = tuple(parse_documents([line] if own is None else own))
    except RequestError as error:
        raise ValueError(f"{where}: {error}") from None
    if not documents:
        raise ValueError(f"{where} has no documents")
    return QuestionLine(question, tuple(answers), documents, own is not None)
