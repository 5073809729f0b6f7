"""What the runs of a step attend to besides themselves, as arrays. Pure host code (numpy).

A run's context does not change while tokens are generated, so everything about it, the rotations
by its deltas included, is worked out once and kept for as long as the run lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from struct import pack
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from lazyattn_jax.engine.runs import Placement, TokenRun
from lazyattn_jax.kernels.work import References, Runs, Turns
from lazyattn_jax.models.rope import Rotations


class _Context(NamedTuple):
    """The context of one run; small arrays as bytes, since those of a batch are joined faster so.

    Columns of ``table`` (int64 ``[n, 5]``), a row for each placement: the page that marks it, its
    pages, its tokens, where it is inserted, and whether it is turned. ``pages`` (int32) are as
    ``Runs.filled`` says. ``turns`` are cosines and sines of those that are turned.
    """

    owner: ContextTables
    placements: tuple[Placement, ...]
    table: bytes
    pages: bytes
    turns: Float[np.ndarray, "u 2 H//2"]


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
        counts = [len(c.placements) for c in contexts]
        self.row = np.repeat(np.arange(len(contexts)), counts)
        table = np.frombuffer(b"".join([c.table for c in contexts]), np.int64).reshape(-1, 5)
        mark, num_pages, self._length, self.insert_at, turned = table.T
        turn = np.cumsum(turned)
        self.num_turns = 1 + int(turn[-1]) if len(turn) else 1
        self.turn = turn * turned
        if not share:
            mark = np.arange(len(mark))
            marks = np.zeros(len(mark), np.int64)
        number, kept = _same(mark, marks)
        self.run = number + len(contexts)
        start = np.cumsum(num_pages) - num_pages
        pages = np.frombuffer(b"".join([c.pages for c in contexts]), np.int32)
        self.runs = Runs(pages, start[kept], self._length[kept], filled=0)

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
            rows = table.transpose(1, 0, 2)[1 : self.num_turns]
            np.concatenate([c.turns for c in self._contexts], out=rows)
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
        self._marks = np.zeros(num_pages, np.int64)  # scratch of _same

    def of(self, runs: Sequence[TokenRun]) -> BatchContext:
        """The contexts of some runs together."""
        contexts = [run.planned for run in runs]
        new = [
            run
            for run, context in zip(runs, contexts, strict=True)
            if context is None
            or context.placements is not run.context
            or context.owner is not self
        ]
        if new:
            self._add(new)
            contexts = [run.planned for run in runs]
        return BatchContext(contexts, self._marks, share=self._share)

    def _add(self, runs: Sequence[TokenRun]) -> None:
        placements = list(chain.from_iterable([run.context for run in runs]))
        delta = np.array([p.delta for p in placements], np.int64)
        temperature = np.array([p.temperature for p in placements], np.float32)
        turned = (delta != 0) | (temperature != 1)
        turns = np.stack(self._rotations.rows(-delta[turned]), axis=1)
        # A query divided by the temperature has its scores divided: kernels need not know of it.
        turns /= temperature[turned, None, None]
        pages = [_filled(p.pages, self._pages_together) for p in placements]
        columns = (
            [p.mark for p in placements],
            [len(p) // 4 for p in pages],
            [p.num_tokens for p in placements],
            [p.insert_at for p in placements],
            turned,
        )
        table = np.array(columns, np.int64).T.tobytes()
        row = len(table) // max(1, len(placements))
        turn_at = np.append(0, np.cumsum(turned)).tolist()
        end = 0
        for run in runs:
            begin, end = end, end + len(run.context)
            run.planned = _Context(
                self,
                run.context,
                table[row * begin : row * end],
                b"".join(pages[begin:end]),
                # A copy: a view would keep the turns of all runs for as long as one of them lives.
                turns[turn_at[begin] : turn_at[end]].copy(),
            )


def _filled(pages: tuple[int, ...], multiple: int) -> bytes:
    """Pages as int32, with the last one again up to a multiple."""
    pages += pages[-1:] * (-len(pages) % multiple)
    return pack(f"{len(pages)}i", *pages)


def _same(
    mark: Int[np.ndarray, "n"], scratch: Int[np.ndarray, "P"]
) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "S"]]:
    """Numbers placements by their marks: the number of each, and which come first with theirs.

    ``scratch`` has an entry for every page of the pool, in whatever state: no sorting needed.
    """
    index = np.arange(len(mark))
    scratch[mark[::-1]] = index[::-1]  # of equal pages the last one written, the first, stays
    first = scratch[mark]
    comes_first = first == index
    return (np.cumsum(comes_first) - 1)[first], np.flatnonzero(comes_first)
