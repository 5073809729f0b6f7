"""Turns the runs of a step into arrays: its tokens, and what they attend to. Host code (numpy).

What a step attends to is made as references to runs of pages; the attention's ``WorkLists`` makes
its work lists of them. While a batch is the same from one decode step to the next, only what its
runs themselves have grown by is made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from lazyattn_jax.engine.contexts import BatchContext, ContextTables
from lazyattn_jax.engine.limits import Limits
from lazyattn_jax.engine.runs import Chunk, Placement, TokenRun
from lazyattn_jax.kernels.work import (
    References,
    Runs,
    Turns,
    WorkLists,
    Works,
    check_references,
)
from lazyattn_jax.models.rope import Rotations


class StepPlan(NamedTuple):
    """One step's tokens, where their KV goes, how they are rotated, and what they attend to.

    ``bucket`` is the padded number of tokens. Padding tokens are stored nowhere: their page is one
    past the pool. Steps may share ``turns``, which cannot be written to. ``adapted`` says which
    tokens the model's adapter is for; none if it has no adapter.
    """

    bucket: int
    tokens: Int[np.ndarray, "T"]
    cos: Float[np.ndarray, "T H//2"]
    sin: Float[np.ndarray, "T H//2"]
    page: Int[np.ndarray, "T"]
    offset: Int[np.ndarray, "T"]
    turns: Turns
    works: Works
    adapted: Bool[np.ndarray, "T"] | None


class Planner:
    """Plans the steps of one model under one set of limits.

    Args:
      limits: batch shapes and page size.
      lists: makes the work lists of the attention.
      inverse_frequencies: RoPE frequencies in radians per position.
      rope_factor: factor on rotated queries and keys (YaRN); turns are pure rotations without it.
      share: rows that see the same document do so together, so that it is read once for all.
      adapter: whether the model has an adapter.
      check: check every plan's references before work lists are made of them.
    """

    def __init__(
        self,
        limits: Limits,
        lists: WorkLists,
        inverse_frequencies: Float64[np.ndarray, "H//2"],
        rope_factor: float = 1.0,
        *,
        share: bool = True,
        adapter: bool = False,
        check: bool = False,
    ) -> None:
        self.limits = limits
        self._adapter = adapter
        self._check = check
        self._lists = lists
        self._rotations = Rotations(inverse_frequencies)
        self._rope_factor = rope_factor
        self._contexts = ContextTables(
            self._rotations,
            limits.num_pages,
            pages_together=lists.pages_together,
            share=share,
        )
        self._decoded: tuple[list[tuple[Placement, ...]], _Batch] | None = None

    def prefill(self, chunks: Sequence[Chunk]) -> StepPlan:
        """Plan of chunks whose pages have been taken.

        Raises:
          RuntimeError: a token would be written to a published page, or no batch shape holds all.
        """
        spans = _Spans(*zip(*((c.run, c.start, c.count) for c in chunks), strict=True))
        context = self._contexts.of(spans.runs)
        references = context.prefill_references(spans.first_row, spans.start, spans.count)
        samples = sum(chunk.samples for chunk in chunks)
        limits = self.limits
        buckets = [b for b in limits.prefill_buckets if limits.prefill_samples(b) >= samples]
        batch, runs = _Batch(context, references, references), spans.runs_and(context.runs)
        return self._step(True, buckets, spans, batch, runs)

    def decode(self, runs: Sequence[TokenRun]) -> StepPlan:
        """Plan of the last token of each run. Errors as ``prefill``."""
        spans = _Spans(runs, [len(run.tokens) - 1 for run in runs], [1] * len(runs))
        placements = [run.context for run in runs]
        if self._decoded is None or self._decoded[0] != placements:
            context = self._contexts.of(runs)
            references = context.decode_references()
            arranged = self._lists.arrange(references, spans.runs_and(context.runs))
            self._decoded = placements, _Batch(context, references, arranged)
        batch = self._decoded[1]
        all_runs = spans.runs_and(batch.context.runs)
        return self._step(False, self.limits.decode_buckets, spans, batch, all_runs)

    def _step(
        self, prefill: bool, buckets: Sequence[int], spans: _Spans, batch: _Batch, runs: Runs
    ) -> StepPlan:
        page, offset = spans.slots(self.limits.page_size)
        context, references, arranged = batch
        if self._check:
            check_references(
                references,
                runs,
                num_rows=len(page),
                num_pages=self.limits.num_pages,
                page_size=self.limits.page_size,
            )
        make = self._lists.prefill if prefill else self._lists.decode
        for bucket in buckets:
            capacity = self.limits.turns(prefill, bucket)
            if bucket < len(page) or capacity < context.num_turns:
                continue
            if (works := make(arranged, runs, bucket)) is not None:
                break
        else:
            raise RuntimeError(
                f"{len(page)} tokens with {len(references.row)} references fit no batch shape; "
                f"they are {', '.join(map(str, buckets))} tokens"
            )
        cos, sin = self._rotations.rows(spans.of_tokens("positions"), self._rope_factor)
        return StepPlan(
            bucket,
            _padded(spans.of_tokens("tokens"), bucket),
            _padded(cos, bucket),
            _padded(sin, bucket),
            _padded(page, bucket, self.limits.num_pages),
            _padded(offset, bucket),
            context.turns(capacity),
            works,
            _padded(spans.adapted(), bucket) if self._adapter else None,
        )


class _Batch(NamedTuple):
    """What a step attends to, and what its work lists are made of.

    Nothing of it changes from one decode step to the next while the contexts of the runs are the
    same. ``arranged`` is what ``WorkLists.arrange`` gives; of a prefill step it is ``references``.
    """

    context: BatchContext
    references: References
    arranged: Any


class _Spans:
    """Consecutive tokens of some runs: ``count[r]`` of ``runs[r]`` from its token ``start[r]`` on.

    They are the step's rows from ``first_row[r]`` on. Run ``r`` is stored in ``pages`` from entry
    ``first_page[r]`` on.
    """

    def __init__(
        self, runs: Sequence[TokenRun], start: Sequence[int], count: Sequence[int]
    ) -> None:
        self.runs = runs
        self._spans = list(zip(runs, start, count, strict=True))
        self.start, self.count = np.array(start), np.array(count)
        self.first_row = np.cumsum(self.count) - self.count
        self.pages = np.frombuffer(b"".join([run.pages for run in self.runs]), np.int32)
        num_pages = np.array([len(run.pages) for run in self.runs])
        self.first_page = np.cumsum(num_pages) - num_pages

    def of_tokens(self, name: str) -> Int[np.ndarray, "T"]:
        """The tokens, or positions, row by row."""
        if len(self.runs) == self.count.sum():  # of a decode step, in half the time
            return np.array([getattr(run, name)[start] for run, start, _ in self._spans], np.int32)
        parts = [getattr(run, name)[start : start + count] for run, start, count in self._spans]
        return np.fromiter(chain.from_iterable(parts), np.int32)

    def adapted(self) -> Bool[np.ndarray, "T"]:
        """Which rows the adapter is for."""
        return np.repeat([run.adapted for run in self.runs], self.count)

    def slots(self, page_size: int) -> tuple[Int[np.ndarray, "T"], Int[np.ndarray, "T"]]:
        """Page and offset that each row is stored at.

        Raises:
          RuntimeError: a page is not private to its run.
        """
        run = np.repeat(np.arange(len(self.runs)), self.count)
        place = np.arange(len(run)) - self.first_row[run]
        slot = place + self.start[run]
        page = self.pages[self.first_page[run] + slot // page_size]
        offset = (slot % page_size).astype(np.int32)
        once = (place == 0) | (offset == 0)
        for r, target in zip(run[once].tolist(), page[once].tolist(), strict=True):
            if target not in self.runs[r].private:
                raise RuntimeError(f"a step would write page {target}, which is published")
        return page, offset

    def runs_and(self, others: Runs) -> Runs:
        """The runs as far as the step computes them, and then others."""
        pages, start, length, _ = others
        return Runs(
            np.concatenate([pages, self.pages]),
            np.concatenate([self.first_page + len(pages), start]),
            np.concatenate([self.start + self.count, length]),
            filled=len(self.runs),
        )


def _padded(values: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    out = np.full((size, *values.shape[1:]), fill, values.dtype)
    out[: len(values)] = values
    return out
