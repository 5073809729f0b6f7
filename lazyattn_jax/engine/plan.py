"""Turns the runs of a step into work lists. Pure host code (numpy).

The lists have the capacities of ``Limits`` so that shapes never change; the kernels only look at
the first ``num_items`` entries. Unused entries are zeros (rows: past the last row).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int

from lazyattn_jax.engine.limits import BLOCK_ROWS, DECODE_WIDTHS, Limits
from lazyattn_jax.engine.runs import Chunk, TokenRun
from lazyattn_jax.kernels.work import DecodeWork, PrefillWork, Turns
from lazyattn_jax.models.rope import rotation_rows


class StepPlan(NamedTuple):
    """One step's tokens, where their KV goes, how they are rotated, and what they attend to.

    ``bucket`` is the padded number of tokens. Padding tokens are stored nowhere: their page is one
    past the pool.
    """

    bucket: int
    tokens: Int[np.ndarray, "T"]
    cos: Float[np.ndarray, "T H//2"]
    sin: Float[np.ndarray, "T H//2"]
    page: Int[np.ndarray, "T"]
    offset: Int[np.ndarray, "T"]
    turns: Turns
    works: tuple[PrefillWork | DecodeWork, ...]


class Planner:
    """Makes work lists for one model and one set of limits.

    Args:
      limits: capacities and page size.
      inverse_frequencies: RoPE frequencies in radians per position.
      rope_factor: factor on rotated queries and keys (YaRN); turns are pure rotations without it.
    """

    def __init__(
        self,
        limits: Limits,
        inverse_frequencies: Float64[np.ndarray, "H//2"],
        rope_factor: float = 1.0,
    ) -> None:
        self.limits = limits
        self._frequencies = inverse_frequencies
        self._rope_factor = rope_factor

    def prefill(self, chunks: Sequence[Chunk]) -> StepPlan:
        """Work lists for chunks whose pages have been taken."""
        turns = _TurnTable()
        rows: list[tuple[int, int, int, int, int]] = []  # row, num_rows, turn, kv_len, causal
        pages: list[Sequence[int]] = []

        def add(row: int, count: int, turn: int, run: Sequence[int], kv: int, causal: int) -> None:
            step = self.limits.run_pages
            size = self.limits.page_size
            for first in range(0, self.limits.pages_for(kv), step):
                seen = first * size
                rows.append((row, count, turn, min(kv - seen, step * size), causal - seen))
                pages.append(run[first : first + step])

        first_row = 0
        for chunk in chunks:
            run = chunk.run
            for at in range(chunk.start, chunk.start + chunk.count, BLOCK_ROWS):
                end = min(at + BLOCK_ROWS, chunk.start + chunk.count)
                row = first_row + at - chunk.start
                add(row, end - at, 0, run.pages, end, at)
                for placement in run.context:
                    skip = max(0, placement.insert_at - at)
                    if skip < end - at:
                        turn, length = turns.of(placement.delta), placement.num_tokens
                        add(row + skip, end - at - skip, turn, placement.pages, length, length)
            first_row += chunk.count

        samples = sum(chunk.samples for chunk in chunks)
        limits = self.limits
        bucket = next(
            b
            for b in limits.prefill_buckets
            if b >= first_row
            and limits.prefill_items(b) >= len(rows)
            and limits.prefill_samples(b) >= samples
        )
        capacity = limits.prefill_items(bucket)
        columns = (_padded(column, capacity) for column in np.asarray(rows, np.int32).T)
        table = _page_table(pages, capacity, limits.run_pages)
        first, count, turn_ids, kv_len, causal = columns
        items = PrefillWork(first, count, turn_ids, table, kv_len, causal, np.int32(len(rows)))
        spans = [(c.run, c.start, c.count) for c in chunks]
        return self._step(bucket, spans, turns, capacity, (items,))

    def decode(self, runs: Sequence[TokenRun]) -> StepPlan:
        """Work lists for the last token of each run; runs of pages held by several are shared."""
        turns = _TurnTable()
        own: list[tuple[int, int, Sequence[int], int]] = []
        users: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        lengths: dict[tuple[int, ...], int] = {}
        for row, run in enumerate(runs):
            own.append((row, 0, run.pages, len(run.tokens)))
            for placement in run.context:
                users.setdefault(placement.pages, []).append((row, turns.of(placement.delta)))
                lengths[placement.pages] = placement.num_tokens

        narrow, wide = DECODE_WIDTHS
        groups: dict[int, list[tuple[Sequence[tuple[int, int]], Sequence[int], int]]]
        groups = {narrow: [([(row, turn)], pages, kv) for row, turn, pages, kv in own], wide: []}
        for segment, holders in users.items():
            for first in range(0, len(holders), wide):
                some = holders[first : first + wide]
                # A row may hold one document twice; the rows of an item must differ.
                once: dict[int, int] = {}
                again = []
                for row, turn in some:
                    if row in once:
                        again.append((row, turn))
                    else:
                        once[row] = turn
                shared = list(once.items())
                if len(shared) > 1:
                    groups[wide].append((shared, segment, lengths[segment]))
                else:
                    again += shared
                groups[narrow] += [([holder], segment, lengths[segment]) for holder in again]

        items = {width: self._split(group) for width, group in groups.items()}
        limits = self.limits
        most = max(len(turns.deltas), *(len(i) for i in items.values()))
        bucket = next(
            b for b in limits.decode_buckets if b >= len(runs) and limits.decode_items(b) >= most
        )
        capacity = limits.decode_items(bucket)
        works = tuple(
            self._decode_items(items[width], width, bucket, capacity) for width in DECODE_WIDTHS
        )
        spans = [(run, len(run.tokens) - 1, 1) for run in runs]
        return self._step(bucket, spans, turns, capacity, works)

    def empty_works(self, prefill: bool, bucket: int) -> tuple[PrefillWork | DecodeWork, ...]:
        """Work lists of a batch shape without any item."""
        if prefill:
            capacity = self.limits.prefill_items(bucket)
            column = np.zeros(capacity, np.int32)
            table = _page_table([], capacity, self.limits.run_pages)
            return (PrefillWork(column, column, column, table, column, column, np.int32(0)),)
        capacity = self.limits.decode_items(bucket)
        return tuple(self._decode_items([], w, bucket, capacity) for w in DECODE_WIDTHS)

    def _split(
        self, group: Sequence[tuple[Sequence[tuple[int, int]], Sequence[int], int]]
    ) -> list[tuple[Sequence[tuple[int, int]], Sequence[int], int]]:
        step, size = self.limits.run_pages, self.limits.page_size
        return [
            (users, pages[first : first + step], min(kv - first * size, step * size))
            for users, pages, kv in group
            for first in range(0, self.limits.pages_for(kv), step)
        ]

    def _decode_items(
        self,
        items: Sequence[tuple[Sequence[tuple[int, int]], Sequence[int], int]],
        width: int,
        num_rows: int,
        capacity: int,
    ) -> DecodeWork:
        rows = np.full((capacity, width), num_rows, np.int32)
        turns = np.zeros((capacity, width), np.int32)
        for i, (users, _, _) in enumerate(items):
            rows[i, : len(users)], turns[i, : len(users)] = zip(*users, strict=True)
        return DecodeWork(
            rows,
            turns,
            _page_table([pages for _, pages, _ in items], capacity, self.limits.run_pages),
            _padded([kv for _, _, kv in items], capacity),
            np.int32(len(items)),
        )

    def _step(
        self,
        bucket: int,
        spans: Sequence[tuple[TokenRun, int, int]],
        table: _TurnTable,
        capacity: int,
        works: tuple[PrefillWork | DecodeWork, ...],
    ) -> StepPlan:
        size = self.limits.page_size
        tokens, positions, page, offset = [], [], [], []
        for run, start, count in spans:
            tokens += run.tokens[start : start + count]
            positions += run.positions[start : start + count]
            for slot in range(start, start + count):
                target = run.pages[slot // size]
                if target not in run.private:
                    raise RuntimeError(f"a step would write page {target}, which is published")
                page.append(target)
                offset.append(slot % size)
        cos, sin = rotation_rows(
            self._frequencies, _padded(positions, bucket), factor=self._rope_factor
        )
        turns = Turns(
            *(
                _padded_rows(rows, capacity)
                for rows in rotation_rows(self._frequencies, -np.asarray(table.deltas))
            )
        )
        return StepPlan(
            bucket,
            _padded(tokens, bucket),
            cos,
            sin,
            _padded(page, bucket, self.limits.num_pages),
            _padded(offset, bucket),
            turns,
            works,
        )


class _TurnTable:
    """The distinct deltas of a step; entry 0 is delta 0."""

    def __init__(self) -> None:
        self._entries = {0: 0}

    def of(self, delta: int) -> int:
        return self._entries.setdefault(delta, len(self._entries))

    @property
    def deltas(self) -> list[int]:
        return list(self._entries)


def _padded(values: Sequence[int] | np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


def _padded_rows(rows: np.ndarray, size: int) -> np.ndarray:
    return np.pad(rows, ((0, size - len(rows)), (0, 0)))


def _page_table(runs: Sequence[Sequence[int]], capacity: int, width: int) -> np.ndarray:
    table = np.zeros((capacity, width), np.int32)
    for i, pages in enumerate(runs):
        table[i, : len(pages)] = pages
    return table
