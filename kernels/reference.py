"""The oracle: attention over the pool written for obviousness, not for speed or memory.

Everything an item could attend to is gathered at once, and one softmax per query row runs over all
of its items together. Other implementations are checked against this one; this one is checked
against plain rotated attention that knows no pages (``tests/kernels``).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float
from lazyattn_jax.kernels.rotary import rotate
from lazyattn_jax.kernels.shapes import check_shapes, expand
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
    group, page_size = check_shapes(q, k_pages, v_pages, turns)
    num_rows, num_heads, head_dim = q.shape
    scores, values, rows = [], [], []
    for work in works:
        item = expand(work, block_rows, num_rows)
        num_items, width = item.rows.shape
        # [I C K S H] -> [I K n H], n counting the slots of the run
        k, v = (
            pages[item.pages].swapaxes(1, 2).reshape(num_items, -1, page_size * item.pages.shape[1],
                                                     head_dim).astype(jnp.float32)
            for pages in (k_pages, v_pages)
        )  # fmt: skip
        qt = rotate(
            q.at[item.rows].get(mode="fill", fill_value=0).astype(jnp.float32),
            turns.cos[item.turns],
            turns.sin[item.turns],
        ).reshape(num_items, width, -1, group, head_dim)
        s = jnp.einsum("irkgh,iknh->irkgn", qt, k, precision=lax.Precision.HIGHEST) * scale
        seen = jnp.arange(k.shape[2]) < item.visible[..., None]  # [I R n]
        s = jnp.where(seen[:, :, None, None], s, -jnp.inf)
        v = jnp.where(seen.any(1)[:, None, :, None], v, 0)  # what lies past the run may be NaN
        scores.append(s.reshape(num_items * width, num_heads, -1))
        values.append(jnp.repeat(v, width, axis=0))
        rows.append(item.rows.reshape(-1))

    row = jnp.concatenate(rows)
    top = jax.ops.segment_max(jnp.concatenate([s.max(-1) for s in scores]), row, num_rows)
    top = jnp.where(jnp.isfinite(top), top, 0)
    total = jnp.zeros((num_rows, num_heads), jnp.float32)
    out = jnp.zeros((num_rows, num_heads, head_dim), jnp.float32)
    for s, v, r in zip(scores, values, rows, strict=True):
        p = jnp.exp(s - top.at[r].get(mode="fill", fill_value=0)[..., None])
        pg = p.reshape(p.shape[0], -1, group, p.shape[-1])
        o = jnp.einsum("rkgn,rknh->rkgh", pg, v, precision=lax.Precision.HIGHEST)
        total = total.at[r].add(p.sum(-1), mode="drop")
        out = out.at[r].add(o.reshape(-1, num_heads, head_dim), mode="drop")
    return (out / jnp.where(total > 0, total, 1)[..., None]).astype(q.dtype)
