"""Questions from JSON lines, and the samples that training draws from them. Host code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int

from lazyattn_jax.engine.request import DocumentPiece
from lazyattn_jax.models.tokenizer import Tokenizer
from lazyattn_jax.prompt import Document, chat_prompt
from lazyattn_jax.questions import QuestionLine, read_questions

_MOST_JOINED = 5
_GAP = "____"
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_NAME = re.compile(r"(?<=\w )(?:[A-Z][\w'-]+|\d[\d.,]*\b)(?: (?:[A-Z][\w'-]+|\d[\d.,]*\b))*")
_LEAST_WORDS = 8  # of a sentence that is worth asking for
_KEPT_WORDS = 0.7


@dataclass(frozen=True)
class Question:
    """A question, its answer, and the passage that holds it, or all of its documents."""

    text: str
    answer: str
    documents: tuple[Document, ...]


class Questions:
    """The questions of one file.

    Args:
      path: JSON lines, see ``questions.read_questions``.

    Raises:
      ValueError: the file cannot be read, or a line is not such an object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all = [_longest_found(line) for line in read_questions(path)]

    @cached_property
    def passages(self) -> list[Document]:
        """The distinct passages of all questions: what distractors are drawn from."""
        return list(dict.fromkeys(d for q in self.all for d in q.documents))


@dataclass(frozen=True)
class Recipe:
    """How samples are made of questions.

    ``documents`` is the least and the most of a sample. ``untitled`` is the share of samples whose
    documents have no titles, ``joined`` the share whose documents are several passages each,
    ``cloze`` the share that ask for a name or number left out of a sentence of the passage instead.
    ``ask`` is the user's message, with ``{question}`` in it.
    """

    documents: tuple[int, int] = (3, 10)
    untitled: float = 0.15
    joined: float = 0.1
    cloze: float = 0.0
    system: str = "You answer questions using the documents. Answer with a short phrase."
    ask: str = "{question} Answer with a few words from the documents."

    def __post_init__(self) -> None:
        least, most = self.documents
        if not 1 <= least <= most:
            raise ValueError(f"documents is {least} to {most}, must be 1 or more, in this order")
        for name in ("untitled", "joined", "cloze"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be between 0 and 1")
        if "{question}" not in self.ask:
            raise ValueError(f"ask is {self.ask!r}, must have '{{question}}' in it")

    def messages(self, question: str) -> list[dict[str, str]]:
        """The conversation that is to be answered."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        ask = self.ask.replace("{question}", question)
        return [*system, {"role": "user", "content": ask}]


@dataclass(frozen=True)
class Sample:
    """A prompt and its answer as tokens.

    ``document`` numbers the document that each token is in, -1 for text; the answer, its end token
    included, is the last ``num_answer`` tokens.
    """

    tokens: Int[np.ndarray, "n"]
    document: Int[np.ndarray, "n"]
    num_answer: int


def draw(
    questions: Questions, number: int, recipe: Recipe, rng: np.random.Generator
) -> list[Document]:
    """The documents of one question, with distractors, in the order that they stand in."""
    own = questions.all[number].documents
    if len(own) > 1:
        return [own[i] for i in rng.permutation(len(own))]
    count = int(rng.integers(recipe.documents[0], recipe.documents[1] + 1))
    joined = rng.random() < recipe.joined
    sizes = rng.integers(2, _MOST_JOINED + 1, count) if joined else np.ones(count, int)
    passages = questions.passages
    # One more than needed: the question's own passage may be among them.
    drawn = rng.choice(len(passages), min(int(sizes.sum()), len(passages)), replace=False)
    others = [passages[i] for i in drawn if passages[i] != own[0]]
    others = others[: int(sizes.sum()) - 1]
    others.insert(int(rng.integers(len(others) + 1)), own[0])
    ends = np.cumsum(sizes)
    groups = [others[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    documents = [group[0] if len(group) == 1 else _join(group) for group in groups if group]
    if rng.random() < recipe.untitled:
        documents = [Document(d.text) for d in documents]
    return documents


def cloze(passage: Document, rng: np.random.Generator) -> tuple[str, str] | None:
    """A sentence of a passage with a gap, some of its words left out, and what fills the gap.

    None if no sentence of the passage has a name or number in it.
    """
    found = [
        (sentence, name)
        for sentence in _SENTENCE.split(passage.text)
        if len(sentence.split()) >= _LEAST_WORDS
        for name in _NAME.finditer(sentence)
    ]
    if not found:
        return None
    sentence, name = found[int(rng.integers(len(found)))]
    before, after = sentence[: name.start()].split(), sentence[name.end() :].split()
    words = [w for w in before if rng.random() < _KEPT_WORDS]
    words += [_GAP, *(w for w in after if rng.random() < _KEPT_WORDS)]
    return " ".join(words), name[0].rstrip(".,")


def make_sample(
    tokenizer: Tokenizer,
    recipe: Recipe,
    question: Question,
    documents: Sequence[Document],
    end: int,
    length: int,
) -> Sample | None:
    """A sample of at most ``length`` tokens: documents without the answer are left out to fit.

    None if it does not fit even so.
    """
    prompt = chat_prompt(tokenizer, recipe.messages(question.text), documents)
    answer = [*tokenizer.encode(question.answer), end]
    pieces = [tuple(p.tokens if isinstance(p, DocumentPiece) else p) for p in prompt]
    is_document = [isinstance(p, DocumentPiece) for p in prompt]
    needed = [not is_document[i] for i in range(len(pieces))]
    places = [i for i, d in enumerate(is_document) if d]
    if len(places) != len(documents):
        raise ValueError("the chat template leaves documents out")
    for place, document in zip(places, documents, strict=True):
        needed[place] = _holds_answer(document, question)
    excess = sum(map(len, pieces)) + len(answer) - length
    for i in reversed(range(len(pieces))):
        if excess > 0 and not needed[i]:
            excess -= len(pieces[i])
            pieces[i] = ()
    if excess > 0:
        return None
    pieces.append(tuple(answer))
    owners = [i if d else -1 for i, d in enumerate([*is_document, False])]
    sizes = [len(p) for p in pieces]
    return Sample(
        np.concatenate([np.asarray(p, np.int32) for p in pieces]),
        np.repeat(np.asarray(owners, np.int32), sizes),
        len(answer),
    )


def _holds_answer(document: Document, question: Question) -> bool:
    if len(question.documents) == 1:
        return question.documents[0].text in document.text
    return question.answer.lower() in document.text.lower()


def _join(passages: Sequence[Document]) -> Document:
    return Document("\n".join(p.text for p in passages))


def _longest_found(line: QuestionLine) -> Question:
    """Of several right answers the longest that stands in the documents says most."""
    whole = "\n".join(d.text for d in line.documents).lower()
    found = [a for a in line.answers if a.lower() in whole]
    return Question(line.question, max(found or line.answers, key=len), line.documents)
