"""The tokens that a step computes, row by row, as arrays. Pure host code (numpy)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import contains
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from lazyattn_jax.engine.runs import Chunk, TokenRun
from lazyattn_jax.kernels.work import Runs


class Rows(NamedTuple):
    """Consecutive tokens of some runs: ``num_rows[r]`` of ``runs[r]`` from token ``start[r]`` on.

    They are the rows from ``first_row[r]`` on; a row is stored at ``offset`` of ``page``. What
    is in the pool of the runs after the step is ``stored``.
    """

    runs: Sequence[TokenRun]
    start: Int[np.ndarray, "n"]
    num_rows: Int[np.ndarray, "n"]
    first_row: Int[np.ndarray, "n"]
    tokens: Int[np.ndarray, "T"]
    positions: Int[np.ndarray, "T"]
    page: Int[np.ndarray, "T"]
    offset: Int[np.ndarray, "T"]
    stored: Runs

    @classmethod
    def of_chunks(cls, chunks: Sequence[Chunk], page_size: int) -> Rows:
        """Rows of a prefill step.

        Raises:
          RuntimeError: a page is not private to its run.
        """
        runs = [c.run for c in chunks]
        start, count = np.array([(c.start, c.count) for c in chunks]).T
        spans = [(c.run, slice(c.start, c.start + c.count)) for c in chunks]
        tokens, positions = (
            np.fromiter(chain.from_iterable(parts), np.int32)
            for parts in ([r.tokens[s] for r, s in spans], [r.positions[s] for r, s in spans])
        )
        stored = _stored(runs, start + count)
        first_row = np.cumsum(count) - count
        run = np.repeat(np.arange(len(runs)), count)
        place = np.arange(len(run)) - first_row[run]
        slot = place + start[run]
        page = stored.pages[stored.start[run] + slot // page_size]
        offset = slot % page_size
        once = (place == 0) | (offset == 0)
        _check_private([runs[r] for r in run[once].tolist()], page[once])
        columns = tokens, positions, page, offset.astype(np.int32)
        return cls(runs, start, count, first_row, *columns, stored)

    @classmethod
    def of_last_tokens(cls, runs: Sequence[TokenRun], page_size: int) -> Rows:
        """Rows of a decode step. Errors as ``of_chunks``."""
        tokens = [run.tokens for run in runs]
        length = np.array(list(map(len, tokens)))
        stored, start, one = _stored(runs, length), length - 1, np.ones_like(length)
        page = stored.pages[stored.start + start // page_size]
        _check_private(runs, page)
        return cls(
            runs,
            start,
            one,
            np.arange(len(runs)),
            np.array([known[-1] for known in tokens], np.int32),
            np.array([run.positions[-1] for run in runs], np.int32),
            page,
            (start % page_size).astype(np.int32),
            stored,
        )

    def adapted(self) -> Bool[np.ndarray, "T"]:
        """Which rows the adapter is for."""
        return np.repeat([run.adapted for run in self.runs], self.num_rows)

    def stored_and(self, others: Runs) -> Runs:
        """The runs themselves, and then others, whose pages are listed as ``Runs.filled`` says."""
        mine = self.stored
        return Runs(
            np.concatenate([others.pages, mine.pages]),
            np.concatenate([mine.start + len(others.pages), others.start]),
            np.concatenate([mine.length, others.length]),
            filled=len(self.runs),
        )


def _stored(runs: Sequence[TokenRun], length: Int[np.ndarray, "n"]) -> Runs:
    pages = [run.pages for run in runs]
    count = np.array(list(map(len, pages)))
    return Runs(np.frombuffer(b"".join(pages), np.int32), np.cumsum(count) - count, length)


def _check_private(runs: Sequence[TokenRun], pages: Int[np.ndarray, "n"]) -> None:
    private = [run.private for run in runs]
    if not all(map(contains, private, pages.tolist())):
        wrong = next(p for own, p in zip(private, pages.tolist(), strict=True) if p not in own)
        raise RuntimeError(f"a step would write page {wrong}, which is published")
