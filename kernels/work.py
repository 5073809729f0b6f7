"""What a step attends to, and the work lists that attention over the pool is driven by.

``References`` to ``Runs`` say what a step attends to, whatever computes it. An implementation has
work lists of its own, which ``WorkLists`` makes of them on the host once a step; they are the same
for every layer and have fixed capacities so that shapes do not change. Those of ``dense.py``,
``PrefillWork`` and ``DecodeWork``, are lists of work items: some query rows times a few pages of
one run; ``num_items`` says how many items are real. Host and device use the same types, so this
module does not import jax.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

type Works = tuple[Any, ...]
"""Work lists of one step: named tuples of arrays that one implementation understands."""


class Runs(NamedTuple):
    """Runs of consecutive slots in pages of the pool, on the host.

    Run ``s`` is ``pages[start[s] : start[s] + ceil(length[s] / page_size)]``, of which the first
    ``length[s]`` slots count. ``pages`` may hold more than the runs use. Those of the runs from
    number ``filled`` on are listed for ``WorkLists.pages_together``: they start at a multiple of it
    and go on, with the last page again, up to one.
    """

    pages: Int[np.ndarray, "n"]
    start: Int[np.ndarray, "S"]
    length: Int[np.ndarray, "S"]
    filled: int = sys.maxsize


class References(NamedTuple):
    """Which query rows of a step attend to which run, on the host.

    Rows ``row[i] .. row[i] + num_rows[i] - 1``, consecutive tokens of one request, attend to run
    ``run[i]``, turned by entry ``turn[i]`` of the step's ``Turns``. Row ``row[i] + r`` sees slots
    ``0 .. min(length, causal[i] + r + 1) - 1`` of it: all, where ``causal[i]`` is at least the
    run's length. In a decode step every ``num_rows`` is 1, rows see all of their runs, and
    ``causal`` is not looked at.
    """

    row: Int[np.ndarray, "n"]
    num_rows: Int[np.ndarray, "n"]
    run: Int[np.ndarray, "n"]
    turn: Int[np.ndarray, "n"]
    causal: Int[np.ndarray, "n"]


def check_references(
    references: References, runs: Runs, *, num_rows: int, num_pages: int, page_size: int
) -> None:
    """Checks that nothing outside the pool, the runs or the step is named.

    A kernel trusts its work lists: a wrong page id would read another request's keys. This finds
    what a planner got wrong before it gets there.

    Raises:
      ValueError: naming the first wrong value and its limit.
    """
    used = -(-runs.length // page_size)
    for run, (first, count) in enumerate(zip(runs.start.tolist(), used.tolist(), strict=True)):
        if first < 0 or count < 0 or first + count > len(runs.pages):
            raise ValueError(
                f"run {run} of {runs.length[run]} slots takes pages {first} to {first + count} of "
                f"a list of {len(runs.pages)}"
            )
        pages = runs.pages[first : first + count]
        wrong = pages[(pages < 0) | (pages >= num_pages)]
        if len(wrong):
            raise ValueError(f"run {run} has page {wrong[0]}, the pool has {num_pages}")
    last = references.row + references.num_rows
    for name, values, limit in (
        ("row", references.row, num_rows),
        ("last row", last, num_rows + 1),
        ("run", references.run, len(runs.length)),
    ):
        wrong = values[(values < 0) | (values >= limit)]
        if len(wrong):
            raise ValueError(f"a reference has {name} {wrong[0]}, must be below {limit}")


class DoesNotFit(ValueError):
    """A step needs more room in a work list than its batch shape has."""


class WorkLists(Protocol):
    """Makes the work lists of one implementation of the attention.

    A bucket is a batch shape: the padded number of query rows of a prefill or of a decode step.
    ``pages_together`` says how many pages of a run decode steps list at once: lists are made faster
    of ``Runs.filled`` runs.
    """

    @property
    def pages_together(self) -> int:
        """How many pages of a run a decode step lists at once; see ``Runs.filled``."""
        return 1

    def prefill(self, references: References, runs: Runs, bucket: int) -> Works | None:
        """Lists of a prefill step; none if they do not fit the batch shape."""

    def arrange(self, references: References, runs: Runs) -> Any:
        """What lists of decode steps are made of, as long as references and runs stay the same.

        Runs that one row holds may be longer later on, but not empty now.
        """
        return references

    def decode(self, arranged: Any, runs: Runs, bucket: int) -> Works | None:
        """Lists of a decode step of what was arranged; none if they do not fit the batch shape."""

    def empty(self, prefill: bool, bucket: int) -> Works:
        """Lists of the shapes of that batch shape, with nothing to do."""
        nothing = np.zeros(0, np.int64)
        references, runs = References(*[nothing] * 5), Runs(nothing, nothing, nothing)
        if prefill:
            works = self.prefill(references, runs, bucket)
        else:
            works = self.decode(self.arrange(references, runs), runs, bucket)
        assert works is not None
        return works


class Turns(NamedTuple):
    """Rotations that take a query from its request position to a segment's own positions.

    Entry 0 is the identity. An entry for delta ``d`` holds the angles of ``-d``, computed in
    float64 on the host: ``cos(d * f)`` and ``-sin(d * f)`` for the inverse frequencies ``f``. An
    entry may be times a factor, which scales the scores of the queries that it turns.
    """

    cos: Float[Array, "U H//2"]
    sin: Float[Array, "U H//2"]


class Moves(NamedTuple):
    """Pages to copy: ``source[i]`` to ``target[i]``, keys turned by entry ``turn[i]`` of ``turns``.

    No page is a source and a target too. A target past the pool marks padding.
    """

    source: Int[Array, "n"]
    target: Int[Array, "n"]
    turn: Int[Array, "n"]
    turns: Turns


class PrefillWork(NamedTuple):
    """Items of consecutive query rows of one request.

    Row ``row[i] + r`` (for ``r < num_rows[i]``) attends to slots
    ``0 .. min(kv_len[i], causal[i] + r + 1) - 1`` of the run ``pages[i]``. ``num_rows`` is at most
    ``block_rows`` and the query array must hold ``block_rows`` rows past every item's first row.
    """

    row: Int[Array, "I"]
    num_rows: Int[Array, "I"]
    turn: Int[Array, "I"]
    pages: Int[Array, "I C"]
    kv_len: Int[Array, "I"]
    causal: Int[Array, "I"]
    num_items: Int[Array, ""]


class DecodeWork(NamedTuple):
    """Items of rows of different requests that attend to the same run, each with its own turn.

    ``rows[i, r]`` is a query row, or the number of query rows for an unused entry. Every row sees
    all ``kv_len[i]`` slots of the run ``pages[i]``.
    """

    rows: Int[Array, "I R"]
    turns: Int[Array, "I R"]
    pages: Int[Array, "I C"]
    kv_len: Int[Array, "I"]
    num_items: Int[Array, ""]
