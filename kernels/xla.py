"""The portable path: plain XLA, one loop over the real work items, online softmax in between.

The loop's trip count is the number of real items, so cost follows the tokens attended to: neither
the capacity of the work lists, nor the size of the pool, nor the longest possible prompt enters.
Pages are read by one dynamic slice each; XLA's CPU backend turns those into block copies, about
twice as fast as a gather over the pool.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from lazyattn_jax.kernels.rotary import rotate
from lazyattn_jax.kernels.shapes import check_dense, check_shapes
from lazyattn_jax.kernels.work import DecodeWork, PrefillWork, Turns

_LOWEST = -1e30  # finite, so that exp(_LOWEST - _LOWEST) is 1 and not NaN


class _Softmax(NamedTuple):
    """Running softmax of every row: weighted values, their weights' sum, the largest score."""

    out: Float[Array, "K rows G H"]
    total: Float[Array, "K rows G"]
    top: Float[Array, "K rows G"]


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
    """Attention of every query row over all its items; see ``reference.lazy_attention``."""
    check_dense(works)
    group = check_shapes(q, k_pages, v_pages, turns)
    num_rows, num_heads, head_dim = q.shape
    kv_heads = num_heads // group
    # Items of unused rows read and write past the last row, so pad by one block.
    heads_first = q.reshape(num_rows, kv_heads, group, head_dim).swapaxes(0, 1)
    padded = jnp.pad(heads_first, ((0, 0), (0, block_rows), (0, 0), (0, 0)))
    stats = jnp.zeros(padded.shape[:-1], jnp.float32)
    state = _Softmax(jnp.zeros(padded.shape, jnp.float32), stats, stats + _LOWEST)
    for work in works:
        if isinstance(work, PrefillWork):
            state = _prefill_items(padded, k_pages, v_pages, turns, work, state, block_rows, scale)
        else:
            state = _decode_items(padded, k_pages, v_pages, turns, work, state, scale)
    out = state.out / jnp.where(state.total > 0, state.total, 1)[..., None]
    return out[:, :num_rows].swapaxes(0, 1).reshape(q.shape).astype(q.dtype)


def _prefill_items(
    q: Float[Array, "K rows G H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    turns: Turns,
    work: PrefillWork,
    state: _Softmax,
    block_rows: int,
    scale: float,
) -> _Softmax:
    def body(i: Int[Array, ""], state: _Softmax) -> _Softmax:
        row, turn = work.row[i], work.turn[i]

        def block(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, row, block_rows, axis=1)

        r = jnp.arange(block_rows)
        visible = jnp.minimum(work.kv_len[i], work.causal[i] + r + 1)
        visible = jnp.where(r < work.num_rows[i], visible, 0)
        qt = rotate(block(q), turns.cos[turn][None, None], turns.sin[turn][None, None])
        k, v = _read_run(k_pages, v_pages, work.pages[i], work.kv_len[i])
        new = _attend(qt, k, v, visible, _Softmax(*map(block, state)), scale)
        return _Softmax(
            *(
                lax.dynamic_update_slice_in_dim(x, n, row, 1)
                for x, n in zip(state, new, strict=True)
            )
        )

    return lax.fori_loop(0, work.num_items, body, state)


def _decode_items(
    q: Float[Array, "K rows G H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    turns: Turns,
    work: DecodeWork,
    state: _Softmax,
    scale: float,
) -> _Softmax:
    def body(i: Int[Array, ""], state: _Softmax) -> _Softmax:
        rows, turn = work.rows[i], work.turns[i]
        qt = rotate(q[:, rows], turns.cos[turn][None], turns.sin[turn][None])
        k, v = _read_run(k_pages, v_pages, work.pages[i], work.kv_len[i])
        visible = jnp.broadcast_to(work.kv_len[i], rows.shape)
        new = _attend(qt, k, v, visible, _Softmax(*(x[:, rows] for x in state)), scale)
        return _Softmax(*(x.at[:, rows].set(n) for x, n in zip(state, new, strict=True)))

    return lax.fori_loop(0, work.num_items, body, state)


def _read_run(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    pages: Int[Array, "C"],
    kv_len: Int[Array, ""],
) -> tuple[Float[Array, "K n H"], Float[Array, "K n H"]]:
    k, v = (
        jnp.concatenate(
            [lax.dynamic_index_in_dim(x, p, keepdims=False) for p in pages],
            axis=1,
        )
        for x in (k_pages, v_pages)
    )
    # A weight of 0 does not silence a NaN left in a slot past the run.
    valid = jnp.arange(v.shape[1]) < kv_len
    return k, jnp.where(valid[None, :, None], v, 0)


def _attend(
    q: Float[Array, "K R G H"],
    k: Float[Array, "K n H"],
    v: Float[Array, "K n H"],
    visible: Int[Array, "R"],
    state: _Softmax,
    scale: float,
) -> _Softmax:
    """One more run in the softmax of some rows (online softmax, arXiv 1805.02867)."""
    # bfloat16 products are exact in float32; float32 inputs must not fall to TF32.
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    kv_heads, rows, group, head_dim = q.shape

    def matmul(eq: str, a: Array, b: Array) -> Array:
        return jnp.einsum(eq, a, b, precision=precision, preferred_element_type=jnp.float32)

    s = matmul("Kmh,Knh->Kmn", q.reshape(kv_heads, rows * group, head_dim), k) * scale
    s = s.reshape(kv_heads, rows, group, -1)
    seen = jnp.arange(k.shape[1])[None, :] < visible[:, None]
    s = jnp.where(seen[None, :, None, :], s, -jnp.inf)
    top = jnp.maximum(state.top, s.max(-1))
    p = jnp.exp(s - top[..., None])
    keep = jnp.exp(state.top - top)
    o = matmul("Kmn,Knh->Kmh", p.reshape(kv_heads, rows * group, -1).astype(v.dtype), v)
    return _Softmax(
        state.out * keep[..., None] + o.reshape(q.shape),
        state.total * keep + p.sum(-1),
        top,
    )
