"""The oracle: attention over the pool written for obviousness, not for speed or memory.

Everything an item could attend to is gathered at once, and one softmax per query row runs over all
of its items together. Other implementations are checked against this one; this one is checked
against plain rotated attention that knows no pages (``tests/kernels``).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from lazyattn_jax.kernels.rotary import rotate
from lazyattn_jax.kernels.shapes import check_dense, check_shapes, expand
from lazyattn_jax.kernels.work import DecodeWork, PrefillWork, Turns


def lazy_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    turns: Turns,
    works: tuple[PrefillWork | DecodeWork, ...],
    *,
    block_rows: int,
    scale: float,
) -> Float[Array, "T N H"]:
    """Attention of every query row over all its items. Rows without any item come out as zeros."""
    check_dense(works)
    group = check_shapes(q, k_pages, v_pages, turns)
    num_rows, num_heads, head_dim = q.shape
    parts = []
    top = jnp.full((num_rows, num_heads), -jnp.inf)
    for work in works:
        item = expand(work, block_rows, num_rows)
        k, v = (_run(pages, item.pages) for pages in (k_pages, v_pages))
        qt = rotate(
            q.at[item.rows].get(mode="fill", fill_value=0).astype(jnp.float32),
            turns.cos[item.turns],
            turns.sin[item.turns],
        ).reshape(*item.rows.shape, -1, group, head_dim)
        s = jnp.einsum("irkgh,iknh->irkgn", qt, k, precision=lax.Precision.HIGHEST) * scale
        seen = jnp.arange(k.shape[2])[None, None] < item.visible[..., None]  # [I R n]
        s = jnp.where(seen[:, :, None, None], s, -jnp.inf)
        v = jnp.where(seen.any(1)[:, None, :, None], v, 0)  # what lies past the run may be NaN
        top = top.at[item.rows].max(s.max(-1).reshape(*item.rows.shape, num_heads), mode="drop")
        parts.append((item.rows, s, v))

    top = jnp.where(jnp.isfinite(top), top, 0)
    total = jnp.zeros((num_rows, num_heads), jnp.float32)
    out = jnp.zeros((num_rows, num_heads, head_dim), jnp.float32)
    for rows, s, v in parts:
        highest = top.at[rows].get(mode="fill", fill_value=0).reshape(*s.shape[:-1], 1)
        p = jnp.exp(s - highest)
        o = jnp.einsum("irkgn,iknh->irkgh", p, v, precision=lax.Precision.HIGHEST)
        total = total.at[rows].add(p.sum(-1).reshape(*rows.shape, num_heads), mode="drop")
        out = out.at[rows].add(o.reshape(*rows.shape, num_heads, head_dim), mode="drop")
    return (out / jnp.where(total > 0, total, 1)[..., None]).astype(q.dtype)


def _run(pages: Float[Array, "P K S H"], ids: Int[Array, "I C"]) -> Float[Array, "I K n H"]:
    """Every item's run in float32, ``n`` counting its slots."""
    _, kv_heads, page_size, head_dim = pages.shape
    run = pages[ids].swapaxes(1, 2).astype(jnp.float32)  # [I K C S H]
    return run.reshape(ids.shape[0], kv_heads, ids.shape[1] * page_size, head_dim)
