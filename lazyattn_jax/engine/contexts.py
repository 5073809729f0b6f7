"""What the runs of a step attend to besides themselves, as arrays. Pure host code (numpy).

A run's context does not change while tokens are generated, so everything about it, the rotations
by its deltas included, is worked out once and kept for as long as the run lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Bool, Float, Int

from lazyattn_jax.engine.runs import Placement, TokenRun
from lazyattn_jax.kernels.work import References, Runs, Turns
from lazyattn_jax.models.rope import Rotations


class _Context(NamedTuple):
    """The context of one run.

    Columns of ``table``: where the placement is inserted, its first entry in ``pages``, its tokens,
    the page that marks it, and its turn: 0 if it need not be turned, else its entry in ``cos`` and
    ``sin`` plus 1.
    """

    placements: tuple[Placement, ...]
    table: Int[np.ndarray, "n 5"]
    pages: Int[np.ndarray, "p"]
    cos: Float[np.ndarray, "u H//2"]
    sin: Float[np.ndarray, "u H//2"]


class BatchContext:
    """The contexts of the runs of one step, run by run.

    Entry ``i`` says that run ``row[i]`` of the step sees run ``run[i]`` of ``runs`` from its token
    ``insert_at[i]`` on, turned by entry ``turn[i]``.
    """

    def __init__(
        self,
        contexts: Sequence[_Context],
        marks: Int[np.ndarray, "P"],
        *,
        share: bool,
    ) -> None:
        self._contexts = contexts
        self._turns: dict[int, Turns] = {}
        self.row = np.repeat(np.arange(len(contexts)), _lengths(c.table for c in contexts))
        table = np.concatenate([c.table for c in contexts])
        self.insert_at, start, length, mark, turn = table.T
        turned = _lengths(c.cos for c in contexts)
        self.num_turns = 1 + int(turned.sum())
        self.turn = np.where(turn, turn + _starts(turned)[self.row], 0)
        start = start + _starts(_lengths(c.pages for c in contexts))[self.row]
        if not share:
            mark = np.arange(len(mark))
            marks = np.zeros(len(mark), np.int64)
        self.run, kept = _same(mark, marks)
        pages = np.concatenate([c.pages for c in contexts])
        self.runs = Runs(pages, start[kept], length[kept])

    @cached_property
    def decode_references(self) -> References:
        """Of a step in which every run computes its last token, which is row ``row``."""
        one = np.ones_like(self.row)
        return References(self.row, one, self.run, self.turn, self.runs.length[self.run])

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
        num_rows = count[self.row] - skipped
        references = References(
            first_row[self.row] + skipped,
            num_rows,
            self.run,
            self.turn,
            self.runs.length[self.run],
        )
        return References(*(column[num_rows > 0] for column in references))

    def turns(self, capacity: int) -> Turns:
        """The turns, padded with zeros; made once, so they cannot be written to."""
        if capacity not in self._turns:
            half = self._contexts[0].cos.shape[1]
            turns = Turns(*(np.zeros((capacity, half), np.float32) for _ in range(2)))
            turns.cos[0] = 1
            used = slice(1, self.num_turns)
            np.concatenate([c.cos for c in self._contexts], out=turns.cos[used])
            np.concatenate([c.sin for c in self._contexts], out=turns.sin[used])
            for rows in turns:
                rows.flags.writeable = False
            self._turns[capacity] = turns
        return self._turns[capacity]


class ContextTables:
    """Makes and keeps the contexts of runs.

    Args:
      rotations: of the model.
      num_pages: pages of the pool.
      share: make placements of the same pages one run.
    """

    def __init__(self, rotations: Rotations, num_pages: int, *, share: bool = True) -> None:
        self._share = share
        self._rotations = rotations
        self._known: WeakKeyDictionary[TokenRun, _Context] = WeakKeyDictionary()
        self._marks = np.zeros(num_pages, np.int64)  # scratch of _same

    def of(self, runs: Sequence[TokenRun]) -> BatchContext:
        """The contexts of some runs together."""
        known = self._known
        new = [
            run
            for run, context in [(run, known.get(run)) for run in runs]
            if context is None or context.placements is not run.context
        ]
        if new:
            self._add(new)
        return BatchContext([known[run] for run in runs], self._marks, share=self._share)

    def _add(self, runs: Sequence[TokenRun]) -> None:
        placements = [placement for run in runs for placement in run.context]
        delta, insert_at, length, mark = (
            np.fromiter(map(attrgetter(name), placements), np.int64)
            for name in ("delta", "insert_at", "num_tokens", "mark")
        )
        temperature = np.fromiter((p.temperature for p in placements), np.float32)
        page_lists = [placement.pages for placement in placements]
        num_pages = _lengths(page_lists)
        pages = np.fromiter(chain.from_iterable(page_lists), np.int32)
        turned = (delta != 0) | (temperature != 1)
        # A query divided by the temperature has its scores divided: kernels need not know of it.
        cos, sin = (x / temperature[turned, None] for x in self._rotations.rows(-delta[turned]))
        # Where the pages and turns of each placement begin, and what each run has of all three.
        page_at, turn_at = (np.cumsum(np.append(0, counts)) for counts in (num_pages, turned))
        at = np.cumsum([0, *(len(run.context) for run in runs)])
        first = np.repeat(at[:-1], np.diff(at))
        columns = (
            insert_at,
            page_at[:-1] - page_at[first],
            length,
            mark,
            np.where(turned, turn_at[1:] - turn_at[first], 0),
        )
        table = np.stack(columns, axis=1)
        bounds = (pairwise(x.tolist()) for x in (at, page_at[at], turn_at[at]))
        for run, (a, b), (c, d), (e, f) in zip(runs, *bounds, strict=True):
            # Copies: a view would keep the arrays of the whole batch for as long as one run lives.
            parts = table[a:b].copy(), pages[c:d].copy(), cos[e:f].copy(), sin[e:f].copy()
            self._known[run] = _Context(run.context, *parts)


def _same(
    mark: Int[np.ndarray, "n"], scratch: Int[np.ndarray, "P"]
) -> tuple[Int[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
    """Numbers placements by their marks: the number of each, and which come first with theirs.

    ``scratch`` has an entry for every page of the pool, in whatever state: no sorting needed.
    """
    index = np.arange(len(mark))
    scratch[mark[::-1]] = index[::-1]  # of equal pages the last one written, the first, stays
    first = scratch[mark]
    comes_first = first == index
    return (np.cumsum(comes_first) - 1)[first], comes_first


def _lengths(items: Iterable[Sized]) -> Int[np.ndarray, "n"]:
    return np.fromiter(map(len, items), np.int64)


def _starts(counts: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    return np.cumsum(counts) - counts
