"""Turns the runs of a step into arrays: its tokens, and what they attend to. Host code (numpy).

What a step attends to is made as references to runs of pages; the attention's ``WorkLists`` makes
its work lists of them. While a batch is the same from one decode step to the next, only what its
runs themselves have grown by is made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from lazyattn_jax.engine.contexts import BatchContext, ContextTables
from lazyattn_jax.engine.limits import Limits
from lazyattn_jax.engine.rows import Rows
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
        rows = Rows.of_chunks(chunks, self.limits.page_size)
        context = self._contexts.of(rows.runs)
        references = context.prefill_references(rows.first_row, rows.start, rows.num_rows)
        samples = sum(chunk.samples for chunk in chunks)
        limits = self.limits
        buckets = [b for b in limits.prefill_buckets if limits.prefill_samples(b) >= samples]
        batch, runs = _Batch(context, references, references), rows.stored_and(context.runs)
        return self._step(True, buckets, rows, batch, runs)

    def decode(self, runs: Sequence[TokenRun]) -> StepPlan:
        """Plan of the last token of each run. Errors as ``prefill``."""
        rows = Rows.of_last_tokens(runs, self.limits.page_size)
        placements = [run.context for run in runs]
        before, batch = self._decoded or (None, None)
        if batch is not None and before == placements:
            all_runs = rows.stored_and(batch.context.runs)
        else:
            context = self._contexts.of(runs, batch and batch.context)
            references, all_runs = context.decode_references(), rows.stored_and(context.runs)
            batch = _Batch(context, references, self._lists.arrange(references, all_runs))
        plan = self._step(False, self.limits.decode_buckets, rows, batch, all_runs)
        self._decoded = placements, batch
        return plan

    def _step(
        self, prefill: bool, buckets: Sequence[int], rows: Rows, batch: _Batch, runs: Runs
    ) -> StepPlan:
        size = len(rows.tokens)
        context, references, arranged = batch
        if self._check:
            check_references(
                references,
                runs,
                num_rows=size,
                num_pages=self.limits.num_pages,
                page_size=self.limits.page_size,
            )
        make = self._lists.prefill if prefill else self._lists.decode
        for bucket in buckets:
            capacity = self.limits.turns(prefill, bucket)
            if bucket < size or capacity < context.num_turns:
                continue
            if (works := make(arranged, runs, bucket)) is not None:
                break
        else:
            raise RuntimeError(
                f"{size} tokens with {len(references.row)} references fit no batch shape; "
                f"they are {', '.join(map(str, buckets))} tokens"
            )
        cos, sin = self._rotations.rows(rows.positions, self._rope_factor)
        return StepPlan(
            bucket,
            _padded(rows.tokens, bucket),
            _padded(cos, bucket),
            _padded(sin, bucket),
            _padded(rows.page, bucket, self.limits.num_pages),
            _padded(rows.offset, bucket),
            context.turns(capacity),
            works,
            _padded(rows.adapted(), bucket) if self._adapter else None,
        )


class _Batch(NamedTuple):
    """What a step attends to, and what its work lists are made of.

    Nothing of it changes from one decode step to the next while the contexts of the runs are the
    same. ``arranged`` is what ``WorkLists.arrange`` gives; of a prefill step it is ``references``.
    """

    context: BatchContext
    references: References
    arranged: Any


def _padded(values: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    if len(values) == size:
        return values
    out = np.full((size, *values.shape[1:]), fill, values.dtype)
    out[: len(values)] = values
    return out
