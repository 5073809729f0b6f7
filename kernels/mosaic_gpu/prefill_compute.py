"""The computing warpgroups of the Hopper prefill kernel."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lazyattn_jax.kernels.mosaic_gpu import prefill_plan as columns
from lazyattn_jax.kernels.mosaic_gpu.prefill_plan import TILE
from lazyattn_jax.kernels.mosaic_gpu.prefill_shape import FREE, FULL, M, Shape

_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)
_LOWEST = -1e30
"""Stands for minus infinity where a difference of two is taken."""


def compute(
    shape: Shape,
    scale: float,
    me,
    num_entries,
    out_ref,
    lse_ref,
    *,
    k_ring,
    v_ring,
    queries,
    turned,
    results,
    angles,
    scalars,
    k_full,
    v_full,
    k_free,
    v_free,
    entry_full,
    entry_free,
    query_barriers,
    schedule,
    silenced,
    weights=None,
):
    """One warpgroup's 64 rows of every entry of the block."""
    head_dim, half = shape.head_dim, shape.head_dim // 2
    turned, results = turned.at[me], results.at[me]

    def take_turn():
        plgpu.barrier_arrive(schedule)
        plgpu.barrier_wait(schedule)

    def attend(visible, end, i, carry):
        """One tile in the softmax of the rows (online softmax, arXiv 1805.02867)."""
        acc, m, total, tiles_done = carry
        stage = lax.rem(tiles_done, shape.stages)
        plgpu.barrier_wait(k_full.at[stage])
        k_tile, v_tile = k_ring.at[stage], v_ring.at[stage]

        def scores(acc_ref):
            for h in range(2):
                k_half = k_tile.at[:, pl.ds(h * half, half)]
                plgpu.wgmma(acc_ref, turned.at[h], k_half.transpose((1, 0)))
            take_turn()
            return acc_ref[...]

        s = pl.run_scoped(scores, plgpu.ACC((M, TILE), jnp.float32))
        plgpu.barrier_arrive(k_free.at[stage])
        if visible is not None:
            column = plgpu.broadcasted_iota(jnp.int32, (M, TILE), 1, layout=_WGMMA)
            seen = lax.broadcast_in_dim(visible - i * TILE, s.shape, [0])
            s = jnp.where(column < seen, s, -jnp.inf)
        top = jnp.maximum(m, s.max(axis=1))
        keep = jnp.exp2(m - top)
        p = jnp.exp2(s - lax.broadcast_in_dim(top, s.shape, [0]))
        acc = acc * lax.broadcast_in_dim(keep, acc.shape, [0])
        total = total * keep + p.sum(axis=1)
        p = p.astype(turned.dtype)
        acc, total, top, p = lax.optimization_barrier((acc, total, top, p))
        plgpu.barrier_arrive(schedule)
        plgpu.barrier_wait(v_full.at[stage])
        if end is not None:
            _silence(shape, me, v_tile, end - i * TILE, silenced)
        plgpu.barrier_wait(schedule)
        if shape.interpret:
            weights[me] = p
            plgpu.commit_smem()

            def values(acc_ref):
                plgpu.wgmma(acc_ref, weights.at[me], v_tile)
                return acc_ref[...]

            acc = acc + pl.run_scoped(values, plgpu.ACC((M, head_dim), jnp.float32))
        else:

            def more(acc_ref):
                plgpu.wgmma(acc_ref, p, v_tile)

            acc = pl.run_state(more)(plgpu.ACC.init(acc))
        plgpu.barrier_arrive(v_free.at[stage])
        return acc, top, total, tiles_done + 1

    def one_entry(e, carry):
        acc, m, total, tiles_done = carry
        slot = lax.rem(e, 2)
        plgpu.barrier_wait(entry_full.at[slot])
        num_plain, is_first = (scalars[slot, c] for c in range(2))

        @pl.when(is_first == 1)
        def _():
            plgpu.barrier_wait(query_barriers.at[FULL])

        _turn(shape, scale, queries.at[me], angles.at[slot], turned)

        @pl.when(scalars[slot, 2] == 1)
        def _():
            plgpu.barrier_arrive(query_barriers.at[FREE])

        acc = jnp.where(jnp.full_like(acc, is_first, jnp.int32) == 1, 0.0, acc)
        anew = jnp.full_like(m, is_first, jnp.int32) == 1
        m = jnp.where(anew, _LOWEST, m)
        total = jnp.where(anew, 0.0, total)
        plain = functools.partial(attend, None, None)
        carry = lax.fori_loop(0, num_plain, plain, (acc, m, total, tiles_done))

        # Read only now, to keep registers free in the loop above.
        num_tiles, limit, causal, skip = (scalars[slot, c] for c in range(3, 7))
        row = plgpu.broadcasted_iota(jnp.int32, (M,), 0, layout=_ROW)
        token = lax.shift_right_logical(row, int(math.log2(shape.group))) + me * shape.tokens
        visible = jnp.minimum(limit, causal + token - skip + 1)
        visible = jnp.where(token >= skip, visible, 0)
        masked = functools.partial(attend, visible, limit)
        acc, m, total, tiles_done = lax.fori_loop(num_plain, num_tiles, masked, carry)

        @pl.when(num_tiles == 0)
        def _():
            # As for a tile: the other warpgroup may wait for its turn at the tile before.
            take_turn()
            take_turn()

        @pl.when(scalars[slot, 2] == 1)
        def _():
            place = (scalars[slot, c] for c in range(7, columns.SCALARS))
            _write(shape, me, acc, m, total, results, out_ref, lse_ref, *place)

        plgpu.barrier_arrive(entry_free.at[slot])
        return acc, m, total, tiles_done

    zeros = plgpu.layout_cast(jnp.zeros((M, head_dim), jnp.float32), _WGMMA)
    row = plgpu.layout_cast(jnp.zeros((M,), jnp.float32), _ROW)
    pl.when(me == 1)(take_turn)
    lax.fori_loop(0, num_entries, one_entry, (zeros, row, row, jnp.int32(0)))
    pl.when(me == 0)(take_turn)
    plgpu.wait_smem_to_gmem(0)


def _turn(shape: Shape, scale: float, queries, angles, turned):
    """Turns the queries of a warpgroup and scales them, as two halves (kernels/rotary.py).

    Sixteen bytes a thread along the rows: rows of the matrix products' layout would meet in the
    same banks of shared memory.
    """
    half = shape.head_dim // 2
    layout = plgpu.Layout.SMEM_GMEM_COPY((M, half), queries.dtype, 2 * half)
    if shape.interpret:  # knows no reshaped references
        x = queries[...].reshape(M, shape.head_dim)
        x1, x2 = x[:, :half], x[:, half:]
    else:
        rows = queries.reshape(M, shape.head_dim)
        x1, x2 = (
            plgpu.load(rows.at[:, pl.ds(i * half, half)], layout=layout, optimized=False)
            for i in range(2)
        )
    x1, x2 = x1.astype(jnp.float32) * scale, x2.astype(jnp.float32) * scale
    if shape.rotate:
        cos, sin = (
            lax.broadcast_in_dim(
                plgpu.load(angles.at[i], layout=layout.reduce(0), optimized=False), x1.shape, [1]
            )
            for i in range(2)
        )
        x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    for i, part in enumerate((x1, x2)):
        turned[i] = part.astype(turned.dtype)
    plgpu.commit_smem()


def _silence(shape: Shape, me, v_tile, valid, silenced):
    """Zeroes the slots of a tile past the run: a weight of 0 does not silence a NaN."""

    @pl.when(valid < TILE)
    def _():
        half = shape.head_dim // 2

        @pl.loop(0, 2)  # in halves, to need fewer registers
        def _(h):
            mine = v_tile.at[pl.ds(me * M, M), pl.ds(pl.multiple_of(h * half, half), half)]
            v = plgpu.load(mine, layout=_WGMMA)
            slot = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=_WGMMA) + me * M
            mine[...] = jnp.where(slot < valid, v, jnp.zeros_like(v))

        plgpu.commit_smem()
        plgpu.barrier_arrive(silenced)
        plgpu.barrier_wait(silenced)


def _write(shape: Shape, me, acc, m, total, results, out_ref, lse_ref, row, num_rows, item, head):
    """Writes out the rows of a warpgroup."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    share = 1.0 / jnp.maximum(total, 1e-30)
    out = (acc * lax.broadcast_in_dim(share, acc.shape, [0])).astype(results.dtype)
    if shape.interpret:  # knows no reshaped references
        results[...] = out.reshape(results.shape)
    else:
        rows = results.reshape(M, shape.head_dim)
        rows[...] = out
    plgpu.commit_smem()
    if shape.split:
        lse_ref[item, head, pl.ds(me * M, M)] = m + jnp.log2(total)
        first = pl.multiple_of((item * 2 + me) * shape.tokens, shape.tokens)
        plgpu.copy_smem_to_gmem(results, out_ref.at[head, pl.ds(first, shape.tokens)])
        return
    heads = pl.ds(head * shape.group, shape.group)
    first, count = row + me * shape.tokens, num_rows - me * shape.tokens

    @pl.when(count >= shape.tokens)
    def _():
        plgpu.copy_smem_to_gmem(results, out_ref.at[pl.ds(first, shape.tokens), heads])

    @pl.when(count < shape.tokens)
    def _():
        @pl.loop(0, count)
        def _(token):
            there = out_ref.at[pl.ds(first + token, 1), heads]
            plgpu.copy_smem_to_gmem(results.at[pl.ds(token, 1)], there)
