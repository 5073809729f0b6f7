"""Batches of one fixed shape: several samples a row, with the targets of their answers. Host code.

A batch is drawn from the seed and its number alone, so training that is resumed sees what it would
have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from lazyattn_jax.finetune.data import Question, Questions, Recipe, Sample, cloze, draw, make_sample
from lazyattn_jax.models.tokenizer import Tokenizer

_OPEN_ROWS = 8  # rows that are filled at the same time


class Batch(NamedTuple):
    """Rows of samples, in ``A`` parts whose gradients are added up.

    ``sample`` numbers a row's samples from 0, ``document`` the document that a token is in; both
    are -1 elsewhere. After row ``place`` comes ``target``, which belongs to the row's sample
    ``owner``; weights add up to 1 over the whole batch, and are 0 where there is no target.
    """

    tokens: Int[Array, "A B T"]
    positions: Int[Array, "A B T"]
    sample: Int[Array, "A B T"]
    document: Int[Array, "A B T"]
    place: Int[Array, "A B M"]
    target: Int[Array, "A B M"]
    owner: Int[Array, "A B M"]
    weight: Float[Array, "A B M"]


@dataclass(frozen=True)
class BatchShape:
    """``parts`` x ``rows`` rows of ``length`` tokens and at most ``targets`` targets a row."""

    parts: int = 1
    rows: int = 8
    length: int = 2048
    targets: int = 64

    def __post_init__(self) -> None:
        for name in ("parts", "rows", "length", "targets"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")


@dataclass(eq=False)
class _Row:
    samples: list[Sample] = field(default_factory=list)
    num_tokens: int = 0
    num_targets: int = 0

    def fits(self, sample: Sample, shape: BatchShape) -> bool:
        return (
            self.num_tokens + len(sample.tokens) <= shape.length
            and self.num_targets + sample.num_answer <= shape.targets
        )

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        self.num_tokens += len(sample.tokens)
        self.num_targets += sample.num_answer


class Source:
    """Draws samples of some files and packs them.

    Args:
      files: of questions; of each as many samples an epoch as it has questions.
      tokenizer: of the model.
      recipe: how samples are made.
      shape: of the batches.
      end: the token that ends an answer.
      seed: of everything that is drawn.

    Raises:
      ValueError: a file with fewer passages than a sample may have documents.
    """

    def __init__(
        self,
        files: Sequence[Questions],
        tokenizer: Tokenizer,
        recipe: Recipe,
        shape: BatchShape,
        *,
        end: int,
        seed: int,
    ) -> None:
        for questions in files:
            single = any(len(q.documents) == 1 for q in questions.all)
            if single and len(questions.passages) < recipe.documents[1]:
                raise ValueError(
                    f"{questions.path} has {len(questions.passages)} passages, fewer than the "
                    f"{recipe.documents[1]} documents of a sample"
                )
        self._entries = [(q, i) for q in files for i in range(len(q.all))]
        self._tokenizer, self._recipe, self._shape = tokenizer, recipe, shape
        self._end, self._seed = end, seed

    @property
    def num_questions(self) -> int:
        """Samples of an epoch."""
        return len(self._entries)

    def endless(self, skip: int = 0) -> Iterator[Batch]:
        """Batches without end, after the first ``skip``."""
        return islice(self._batches(s for epoch in count() for s in self.epoch(epoch)), skip, None)

    def some(self, limit: int) -> list[Batch]:
        """Batches of the first ``limit`` samples, the last one filled up with empty rows."""
        return list(self._batches(islice(self.epoch(0), limit)))

    def epoch(self, epoch: int) -> Iterator[Sample]:
        """A sample of every question that fits in a row, in an order of the epoch's own."""
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._entries))
        found = False
        for number in order.tolist():
            questions, i = self._entries[number]
            rng = np.random.default_rng([self._seed, epoch, number])
            question = questions.all[i]
            documents = draw(questions, i, self._recipe, rng)
            gap = cloze(question.documents[0], rng) if rng.random() < self._recipe.cloze else None
            if gap is not None:
                question = Question(*gap, question.documents)
            sample = make_sample(
                self._tokenizer,
                self._recipe,
                question,
                documents,
                self._end,
                self._shape.length,
            )
            if sample is not None and sample.num_answer <= self._shape.targets:
                found = True
                yield sample
        if not found:
            raise ValueError(
                f"no sample fits in {self._shape.length} tokens with {self._shape.targets} of "
                "them of an answer; raise --length or --targets"
            )

    def _batches(self, samples: Iterator[Sample]) -> Iterator[Batch]:
        full: list[_Row] = []
        size = self._shape.parts * self._shape.rows
        for row in _pack(samples, self._shape):
            full.append(row)
            if len(full) == size:
                yield _batch(full, self._shape)
                full = []
        if full:
            yield _batch(full, self._shape)


def _pack(samples: Iterator[Sample], shape: BatchShape) -> Iterator[_Row]:
    """Puts every sample in the fullest open row that it fits in; gives out rows when all are."""
    rows: list[_Row] = []
    for sample in samples:
        fitting = [row for row in rows if row.fits(sample, shape)]
        if not fitting:
            if len(rows) == _OPEN_ROWS:
                fullest = max(rows, key=lambda row: row.num_tokens)
                rows.remove(fullest)
                yield fullest
            rows.append(_Row())
            fitting = rows[-1:]
        max(fitting, key=lambda row: row.num_tokens).add(sample)
    yield from rows


def _batch(rows: Sequence[_Row], shape: BatchShape) -> Batch:
    size = shape.parts * shape.rows
    tokens, positions = np.zeros((2, size, shape.length), np.int32)
    sample, document = np.full((2, size, shape.length), -1, np.int32)
    place, target = np.zeros((2, size, shape.targets), np.int32)
    owner = np.full((size, shape.targets), -1, np.int32)
    for i, row in enumerate(rows):
        at, to = 0, 0
        for j, s in enumerate(row.samples):
            here = slice(at, at + len(s.tokens))
            tokens[i, here], document[i, here] = s.tokens, s.document
            positions[i, here], sample[i, here] = np.arange(len(s.tokens)), j
            there = slice(to, to + s.num_answer)
            target[i, there] = s.tokens[-s.num_answer :]
            place[i, there] = np.arange(here.stop - s.num_answer, here.stop) - 1
            owner[i, there] = j
            at, to = here.stop, there.stop
    weight = (owner >= 0).astype(np.float32)
    weight /= weight.sum()
    arrays = tokens, positions, sample, document, place, target, owner, weight
    return Batch(*(x.reshape(shape.parts, shape.rows, -1) for x in arrays))
