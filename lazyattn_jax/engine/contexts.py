"""What the runs of a step attend to besides themselves, as arrays. Pure host code (numpy).

A run's context does not change while tokens are generated, so everything about it, the rotations
by its deltas included, is worked out once and kept for as long as the run lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple
from weakref import finalize

import numpy as np
from jaxtyping import Bool, Float, Int

from lazyattn_jax.engine.runs import Placement, TokenRun
from lazyattn_jax.kernels.work import References, Runs, Turns
from lazyattn_jax.models.rope import Rotations


class _Context(NamedTuple):
    """The context of one run; small arrays as bytes, since those of a batch are joined faster so.

    ``counts`` (int64 ``[3]``) are its placements, pages and turns. Columns of ``table`` (int64
    ``[n, 5]``): where the placement is inserted, its first entry in ``pages`` (int32), its tokens,
    the page that marks it, and its turn: 0 if it need not be turned, else its entry in ``turns``
    (cosines and sines) plus 1.
    """

    placements: tuple[Placement, ...]
    counts: bytes
    table: bytes
    pages: bytes
    turns: Float[np.ndarray, "2 u H//2"]


class BatchContext:
    """The contexts of the runs of one step, run by run.

    Entry ``i`` says that run ``row[i]`` of the step sees run ``run[i]`` from its token
    ``insert_at[i]`` on, turned by entry ``turn[i]``. Runs are numbered as references do: first
    those of the step, then those of ``runs``.
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
        counts = _joined([c.counts for c in contexts], np.int64, 3)
        before = np.cumsum(counts, axis=0) - counts
        self.row = np.repeat(np.arange(len(contexts)), counts[:, 0])
        table = _joined([c.table for c in contexts], np.int64, 5)
        self.insert_at, start, self._length, mark, turn = table.T
        self.num_turns = 1 + int(counts[:, 2].sum())
        self.turn = np.where(turn, turn + before[self.row, 2], 0)
        start = start + before[self.row, 1]
        if not share:
            mark = np.arange(len(mark))
            marks = np.zeros(len(mark), np.int64)
        run, kept = _same(mark, marks)
        self.run = run + len(contexts)
        pages = np.frombuffer(b"".join([c.pages for c in contexts]), np.int32)
        self.runs = Runs(pages, start[kept], self._length[kept])

    def decode_references(self) -> References:
        """Of a step in which every run computes its last token: run ``r`` is row ``r``."""
        own = np.arange(len(self._contexts))
        row = np.concatenate([own, self.row])
        turn = np.concatenate([np.zeros_like(own), self.turn])
        one, run = np.ones_like(row), np.concatenate([own, self.run])
        return References(row, one, run, turn, causal=np.zeros_like(row))

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
        own = np.arange(len(self._contexts))
        own_columns = first_row, count, own, np.zeros_like(own), start
        return References(
            *(np.concatenate([a, b[some]]) for a, b in zip(own_columns, columns, strict=True))
        )

    def turns(self, capacity: int) -> Turns:
        """The identity and all turns, padded; made once, so they cannot be written to."""
        if capacity not in self._turns:
            table = np.zeros((2, capacity, self._contexts[0].turns.shape[2]), np.float32)
            table[0, 0] = 1
            np.concatenate(
                [c.turns for c in self._contexts], axis=1, out=table[:, 1 : self.num_turns]
            )
            table.flags.writeable = False
            self._turns[capacity] = Turns(*table)
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
        self._known: dict[int, _Context] = {}  # by the id of a run that lives
        self._marks = np.zeros(num_pages, np.int64)  # scratch of _same

    def of(self, runs: Sequence[TokenRun]) -> BatchContext:
        """The contexts of some runs together."""
        known = self._known
        found = [known.get(id(run)) for run in runs]
        new = [
            run
            for run, context in zip(runs, found, strict=True)
            if context is None or context.placements is not run.context
        ]
        if new:
            self._add(new)
        contexts = [known[id(run)] for run in runs]
        return BatchContext(contexts, self._marks, share=self._share)

    def _add(self, runs: Sequence[TokenRun]) -> None:
        placements = [placement for run in runs for placement in run.context]
        delta, insert_at, length, mark = (
            np.fromiter(map(attrgetter(name), placements), np.int64)
            for name in ("delta", "insert_at", "num_tokens", "mark")
        )
        temperature = np.fromiter((p.temperature for p in placements), np.float32)
        page_lists = [placement.pages for placement in placements]
        num_pages = np.fromiter(map(len, page_lists), np.int64)
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
        bounds = np.stack([at, page_at[at], turn_at[at]], axis=1)
        counts = np.diff(bounds, axis=0)
        pairs = pairwise(bounds.tolist())
        for run, count, ((a, c, e), (b, d, f)) in zip(runs, counts, pairs, strict=True):
            if id(run) not in self._known:
                finalize(run, self._known.pop, id(run))
            self._known[id(run)] = _Context(
                run.context,
                count.tobytes(),
                table[a:b].tobytes(),
                pages[c:d].tobytes(),
                # A copy: a view would keep the turns of all runs for as long as one of them lives.
                np.stack([cos[e:f], sin[e:f]]),
            )


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


def _joined(parts: Sequence[bytes], dtype: type, columns: int) -> np.ndarray:
    """The rows of all parts; they cannot be written to."""
    return np.frombuffer(b"".join(parts), dtype).reshape(-1, columns)
