"""What implementations share: checked shapes, and the dense form of work lists."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from lazyattn_jax.kernels.work import DecodeWork, PrefillWork, Turns, Works


class ExpandedWork(NamedTuple):
    """Either kind of work list as one dense form: which slots of its run each row sees."""

    rows: Int[Array, "I R"]
    turns: Int[Array, "I R"]
    visible: Int[Array, "I R"]
    pages: Int[Array, "I C"]


def expand(work: PrefillWork | DecodeWork, block_rows: int, num_rows: int) -> ExpandedWork:
    """Dense form of a work list over ``num_rows`` query rows; unused rows see no slot."""
    if isinstance(work, PrefillWork):
        r = jnp.arange(block_rows)[None, :]
        used = r < work.num_rows[:, None]
        rows = jnp.where(used, work.row[:, None] + r, num_rows)
        turns = jnp.broadcast_to(work.turn[:, None], rows.shape)
        visible = jnp.minimum(work.kv_len[:, None], work.causal[:, None] + r + 1)
    else:
        rows, turns = work.rows, work.turns
        used = rows < num_rows
        visible = jnp.broadcast_to(work.kv_len[:, None], rows.shape)
    real = jnp.arange(rows.shape[0])[:, None] < work.num_items
    return ExpandedWork(rows, turns, jnp.where(used & real, visible, 0), work.pages)


def check_dense(works: Works) -> None:
    """Raises ``NotImplementedError`` for work lists other than those of ``DenseLists``."""
    kinds = ", ".join(
        type(w).__name__ for w in works if not isinstance(w, PrefillWork | DecodeWork)
    )
    if kinds:
        raise NotImplementedError(f"work lists {kinds}; takes those that DenseLists makes")


def check_shapes(
    q: jax.Array,
    k_pages: jax.Array | jax.ShapeDtypeStruct,
    v_pages: jax.Array | jax.ShapeDtypeStruct | None,
    turns: Turns,
) -> int:
    """Validates what every implementation needs; returns the query heads per KV head.

    Raises:
      NotImplementedError: keys and values side by side in one array of pages.
      ValueError: shapes or dtypes that disagree, naming both.
    """
    if v_pages is None:
        raise NotImplementedError("fused pages; takes keys and values in arrays of their own")
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"K pages are {k_pages.dtype}{k_pages.shape}, V pages {v_pages.dtype}{v_pages.shape}; "
            "they must agree"
        )
    _, kv_heads, _, head_dim = k_pages.shape
    if q.ndim != 3 or q.shape[2] != head_dim:
        raise ValueError(f"q is {q.shape}, expected [T, N, {head_dim}] for pages {k_pages.shape}")
    if q.shape[1] % kv_heads:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {kv_heads} KV heads")
    if q.dtype != k_pages.dtype:
        raise ValueError(f"q is {q.dtype}, the pages are {k_pages.dtype}; they must agree")
    if head_dim % 2 or turns.cos.shape[1] != head_dim // 2:
        raise ValueError(
            f"the turns have {turns.cos.shape[1]} angles, head_dim {head_dim} needs "
            f"{head_dim / 2:g}"
        )
    return q.shape[1] // kv_heads
