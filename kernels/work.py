"""The work lists that attention over the pool is driven by.

A work item is some query rows times a run of pages of one segment. The lists are made on the host
once a step (``engine/plan.py``), are the same for every layer, and have fixed capacities so that
shapes do not change; ``num_items`` says how many items are real. Host and device use the same
types, so this module does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class Turns(NamedTuple):
    """Rotations that take a query from its request position to a segment's own positions.

    Entry 0 is the identity. An entry for delta ``d`` holds the angles of ``-d``, computed in
    float64 on the host: ``cos(d * f)`` and ``-sin(d * f)`` for the inverse frequencies ``f``.
    """

    cos: Float[Array, "U H//2"]
    sin: Float[Array, "U H//2"]


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
