"""What the runs of a step attend to besides themselves, as arrays. Pure host code (numpy).

A run's context does not change while tokens are generated, so everything about it, the rotations
by its deltas included, is worked out once and kept for as long as the run lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_

import numpy as np
from jaxtyping import Float, Int

from lazyattn_jax.engine.runs import Placement, TokenRun
from lazyattn_jax.kernels.work import References, Runs, Turns
from lazyattn_jax.models.rope import Rotations

_MOST_PARTS = 16
"""Parts after which the rest of a batch is put together context by context."""


@dataclass(eq=False, repr=False, slots=True)
class _Part:
    """Arrays of the contexts of one or several runs.

    ``counts`` are their placements, run by run. Rows of ``table``, a column for each placement: the
    page that marks it, its pages, its tokens, where it is inserted, and whether it is turned.
    ``pages`` are as ``Runs.filled`` says. ``turns`` are cosines and sines of those that are turned.
    """

    counts: Int[np.ndarray, "r"]
    table: Int[np.ndarray, "5 n"]
    pages: Int[np.ndarray, "p"]
    turns: Float[np.ndarray, "2 u H//2"]


@dataclass(eq=False, repr=False, slots=True)
class _Context(_Part):
    """The context of one run, and who made it of what."""

    owner: ContextTables
    placements: tuple[Placement, ...]


class BatchContext:
    """The contexts of the runs of one step, run by run.

    It is put together of fewer parts, and thus faster, if most of the runs were in a batch
    ``before`` whose turns have been asked for. ``marks`` is scratch, see ``_same``.

    Entry ``i`` says that run ``row[i]`` of the step sees run ``run[i]`` from its token
    ``insert_at[i]`` on, turned by entry ``turn[i]``. Runs are numbered as references do: first
    those of the step, then those of ``runs``.
    """

    def __init__(
        self,
        contexts: Sequence[_Context],
        before: BatchContext | None,
        marks: Int[np.ndarray, "P"],
        *,
        share: bool,
    ) -> None:
        self.contexts = contexts
        self._turns: dict[int, Turns] = {}
        parts = _parts(contexts, before) if before is not None else contexts
        self._turn_rows = [p.turns for p in parts]
        self._counts = np.concatenate([p.counts for p in parts])
        self._placement_at = _ends(self._counts)
        self.row = np.repeat(np.arange(len(contexts)), self._counts)
        self._table = np.concatenate([p.table for p in parts], axis=1)
        mark, num_pages, self._length, self.insert_at, turned = self._table
        self._page_at, self._turn_at = _ends(num_pages), _ends(turned)
        self.num_turns = 1 + int(self._turn_at[-1])
        self.turn = self._turn_at[1:] * turned
        if not share:
            mark = np.arange(len(mark))
            marks = np.zeros(len(mark), np.int32)
        number, kept = _same(mark, marks)
        self.run = number + len(contexts)
        pages = np.concatenate([p.pages for p in parts])
        self.runs = Runs(pages, self._page_at[kept], self._length[kept], filled=0)

    def part(self, first: int, end: int) -> _Part:
        """Arrays of the contexts ``first .. end - 1``; turns have been asked for before."""
        a, b = self._placement_at[first], self._placement_at[end]
        (turn_rows,) = self._turn_rows
        return _Part(
            self._counts[first:end],
            self._table[:, a:b],
            self.runs.pages[self._page_at[a] : self._page_at[b]],
            turn_rows[:, self._turn_at[a] : self._turn_at[b]],
        )

    def decode_references(self) -> References:
        """Of a step in which every run computes its last token: run ``r`` is row ``r``."""
        own = np.arange(len(self.contexts))
        row, run = np.concatenate([own, self.row]), np.concatenate([own, self.run])
        turn = np.concatenate([np.zeros_like(own), self.turn])
        return References(row, np.ones_like(row), run, turn, causal=np.zeros_like(row))

    def prefill_references(
        self,
        first_row: Int[np.ndarray, "n"],
        start: Int[np.ndarray, "n"],
        count: Int[np.ndarray, "n"],
    ) -> References:
        """Of a step in which run ``r`` computes ``count[r]`` tokens from token ``start[r]`` on.

        These are rows ``first_row[r] .. first_row[r] + count[r] - 1``.
        """
        skipped = np.maximum(self.insert_at - start[self.row], 0)
        seen = count[self.row] - skipped
        some = seen > 0
        columns = first_row[self.row] + skipped, seen, self.run, self.turn, self._length
        own = np.arange(len(self.contexts))
        own_columns = first_row, count, own, np.zeros_like(own), start
        return References(
            *(np.concatenate([a, b[some]]) for a, b in zip(own_columns, columns, strict=True))
        )

    def turns(self, capacity: int) -> Turns:
        """The identity and all turns, padded; made once, so they cannot be written to."""
        if capacity not in self._turns:
            table = np.empty((2, capacity, self.contexts[0].turns.shape[2]), np.float32)
            table[:, 0] = [[1], [0]]
            rows = table[:, 1 : self.num_turns]
            np.concatenate(self._turn_rows, axis=1, out=rows)
            table[:, self.num_turns :] = 0
            self._turn_rows = [rows]  # so that the table of the batch before does not live on
            table.flags.writeable = False
            self._turns[capacity] = Turns(*table)
        return self._turns[capacity]


class ContextTables:
    """Makes the contexts of runs, and keeps them with the runs.

    Args:
      rotations: of the model.
      num_pages: pages of the pool.
      pages_together: of the ``WorkLists``.
      share: make placements of the same pages one run.
    """

    def __init__(
        self, rotations: Rotations, num_pages: int, *, pages_together: int = 1, share: bool = True
    ) -> None:
        self._share = share
        self._rotations = rotations
        self._pages_together = pages_together
        self._marks = np.zeros(num_pages, np.int32)  # scratch of _same

    def of(self, runs: Sequence[TokenRun], before: BatchContext | None = None) -> BatchContext:
        """The contexts of some runs together; see ``BatchContext`` for the batch ``before``."""
        contexts = [run.planned for run in runs]
        new = [
            run
            for run, context in zip(runs, contexts, strict=True)
            if context is None or context.placements is not run.context or context.owner is not self
        ]
        if new:
            self._add(new)
            contexts = [run.planned for run in runs]
        return BatchContext(contexts, before, self._marks, share=self._share)

    def _add(self, runs: Sequence[TokenRun]) -> None:
        placements = list(chain.from_iterable([run.context for run in runs]))
        delta = np.array([p.delta for p in placements], np.int64)
        temperature = np.array([p.temperature for p in placements], np.float32)
        tempered = temperature != 1
        turned = (delta != 0) | tempered
        turns = np.stack(self._rotations.rows(-delta[turned]))
        if tempered.any():
            # A query divided by it has its scores divided: kernels need not know of it.
            turns /= temperature[turned, None]
        page_lists = [_filled(p.pages, self._pages_together) for p in placements]
        columns = (
            [p.mark for p in placements],
            list(map(len, page_lists)),
            [p.num_tokens for p in placements],
            [p.insert_at for p in placements],
            turned,
        )
        table = np.array(columns, np.int64)
        pages = np.fromiter(chain.from_iterable(page_lists), np.int32)
        page_at, turn_at = _ends(table[1]).tolist(), _ends(turned).tolist()
        end = 0
        for run in runs:
            begin, end = end, end + len(run.context)
            # Copies: views would keep the arrays of all runs for as long as one of them lives.
            run.planned = _Context(
                np.array([end - begin]),
                table[:, begin:end].copy(),
                pages[page_at[begin] : page_at[end]].copy(),
                turns[:, turn_at[begin] : turn_at[end]].copy(),
                self,
                run.context,
            )


def _parts(contexts: Sequence[_Context], before: BatchContext) -> Sequence[_Part]:
    """Arrays of a batch's contexts: together, where they stood side by side in the batch before."""
    parts: list[_Part] = []
    begin = at = 0
    while begin < len(contexts) and len(parts) < _MOST_PARTS:
        try:
            at = before.contexts.index(contexts[begin], at)
        except ValueError:
            parts.append(contexts[begin])
            begin += 1
        else:
            same = map(is_, contexts[begin:], before.contexts[at:])
            count = [*same, False].index(False)
            parts.append(before.part(at, at + count))
            begin, at = begin + count, at + count
    return [*parts, *contexts[begin:]]


def _ends(counts: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n+1"]:
    """Where each ends if so many of each follow one another; the first begins at 0."""
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


def _filled(pages: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """Pages with the last one again up to a multiple."""
    missing = -len(pages) % multiple
    return pages + pages[-1:] * missing if missing else pages


def _same(
    mark: Int[np.ndarray, "n"], scratch: Int[np.ndarray, "P"]
) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "S"]]:
    """Numbers placements by their marks: the number of each, and which come first with theirs.

    ``scratch`` has an entry for every page of the pool, in whatever state: no sorting needed.
    """
    index = np.arange(len(mark), dtype=np.int32)
    scratch[mark[::-1]] = index[::-1]  # of equal pages the last one written, the first, stays
    first = scratch[mark]
    comes_first = first == index
    return (np.cumsum(comes_first) - 1)[first], np.flatnonzero(comes_first)
