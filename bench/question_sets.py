"""Questions with the documents they are asked over, from files of JSON lines."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lazyattn_jax.prompt import Document
from lazyattn_jax.questions import read_questions


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


def question_sets(path: Path, count: int, *, seed: int, limit: int | None) -> list[QuestionSet]:
    """Question sets of a file, in its order.

    The lines are those of ``questions.read_questions``. To a passage come those of other questions,
    drawn from the whole file whatever the limit; of documents the first ones are taken. They stand
    in an order that is drawn too. Everything drawn for a question depends on the seed and its line
    alone.

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
    lines = read_questions(path)
    passages = list(dict.fromkeys(line.documents[0] for line in lines if not line.has_own))
    if passages and count > len(passages):
        raise ValueError(f"{path} has {len(passages)} passages, fewer than {count} documents")
    sets = []
    for i, line in enumerate(lines[:limit]):
        rng = random.Random(f"documents {seed} {i}")
        documents = line.documents[:count]
        if not line.has_own:
            # One more than needed, since the question's own passage may be among them.
            drawn = rng.sample(passages, min(count, len(passages)))
            documents += tuple(d for d in drawn if d != documents[0])[: count - 1]
        sets.append(QuestionSet(line.question, line.answers, documents).shuffled(rng))
    return sets


def reordered(sets: Sequence[QuestionSet], order: int, *, seed: int) -> list[QuestionSet]:
    """The same questions over the same documents in another order; order 0 is that they are in."""
    if order == 0:
        return list(sets)
    return [s.shuffled(random.Random(f"order {seed} {order} {i}")) for i, s in enumerate(sets)]
