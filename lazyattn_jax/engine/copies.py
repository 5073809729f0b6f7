"""Lists of the pages that are copied at once, in a few fixed sizes. Host code (numpy)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lazyattn_jax.engine.runs import PageCopy
from lazyattn_jax.kernels.work import Moves, Turns
from lazyattn_jax.models.rope import Rotations


def empty_moves(size: int, num_pages: int, head_dim: int) -> Moves:
    """A list of ``size`` entries that all copy nothing."""
    zeros = np.zeros(size, np.int32)
    turns = Turns(*(np.zeros((size, head_dim // 2), np.float32) for _ in range(2)))
    return Moves(zeros, np.full(size, num_pages, np.int32), zeros.copy(), turns)


def make_moves(
    copies: Sequence[PageCopy], sizes: Sequence[int], num_pages: int, rotations: Rotations
) -> Iterator[Moves]:
    """Lists of pages to copy, to be worked off in order.

    Args:
      copies: no page is the source of one and the target of another.
      sizes: of the lists, smallest first.
      num_pages: pages of the pool.
      rotations: of the model.
    """
    counts = [len(c.source) for c in copies]
    source, target = (
        np.concatenate([np.array(getattr(c, name), np.int32) for c in copies])
        for name in ("source", "target")
    )
    cos, sin = rotations.rows(np.array([c.delta for c in copies]))
    turn = np.repeat(np.arange(len(copies)), counts)
    for at in range(0, len(source), sizes[-1]):
        some = slice(at, at + sizes[-1])
        used = len(source[some])
        size = next(s for s in sizes if s >= used)
        moves = empty_moves(size, num_pages, 2 * cos.shape[1])
        moves.source[:used], moves.target[:used] = source[some], target[some]
        first = turn[at]
        moves.turn[:used] = turn[some] - first
        rows = slice(first, turn[some][-1] + 1)
        moves.turns.cos[: rows.stop - first] = cos[rows]
        moves.turns.sin[: rows.stop - first] = sin[rows]
        yield moves
