"""Lazy prefill on Hopper: ragged runs of consecutive tokens over the pool, rotated in the kernel.

One block a core, three warpgroups: one brings tiles of K and V, queries, turns and the scalars of
the work list by TMA, two compute, 64 rows each. Rows pack the query heads of one KV head. A block
walks its share of (item, KV head) pairs (see ``prefill_plan.py``); for each run of an item it turns
the queries once, into shared memory. The computing warpgroups take turns at the tensor cores, so
that the softmax of one runs under the matrix products of the other (FlashAttention-3,
arXiv 2407.08608).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from lazyattn_jax.kernels.mosaic_gpu import prefill_plan as columns
from lazyattn_jax.kernels.mosaic_gpu.merge import merge, padded_heads
from lazyattn_jax.kernels.mosaic_gpu.prefill_plan import (
    TILE,
    HopperPrefillWork,
    padded_group,
    rows_per_block,
)
from lazyattn_jax.kernels.mosaic_gpu.support import check_supported
from lazyattn_jax.kernels.shapes import check_shapes
from lazyattn_jax.kernels.work import Turns

M = 64
"""Rows of a warpgroup."""

_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)
_COLUMN = plgpu.Layout.WGMMA.reduce(0)
_AT_ONCE = 2
"""Page ids that the memory warpgroup, which has few registers, reads at once."""

_LOWEST = -1e30
"""Stands for minus infinity where a difference of two is taken."""


@dataclass(frozen=True)
class _Shape:
    """Static sizes of one kernel; ``interpret`` is what interpret mode needs."""

    group: int  # a power of two
    head_dim: int
    page_size: int
    kv_heads: int
    stages: int
    split: bool
    rotate: bool
    interpret: bool

    @property
    def tokens(self) -> int:
        """Tokens of a warpgroup."""
        return M // self.group

    @property
    def boxes(self) -> int:
        """TMA boxes of a tile: its pages."""
        return TILE // self.page_size


def lazy_prefill(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    turns: Turns,
    work: HopperPrefillWork,
    *,
    scale: float,
    rotate: bool = True,
    interpret: Any = None,
) -> Float[Array, "T N H"]:
    """Attention of ragged runs of consecutive tokens; see ``kernels.api.lazy_prefill``.

    Scratch for partial results, where the work list cuts blocks into pieces: ``I * 128 * K * H``
    values of q's dtype and ``I * K * 128`` float32 for the ``I`` items it has room for.

    Args:
      q: queries, rotated at their positions in the request; bfloat16 or float16.
      k_pages: keys rotated at the positions they were encoded at; same dtype.
      v_pages: values.
      turns: one rotation per distinct delta of the step.
      work: the work list, see ``prefill_plan.plan_prefill``.
      scale: factor on the scores.
      rotate: False leaves the turns out, to measure what they cost.
      interpret: ``plgpu.InterpretGPUParams`` to run on a CPU.

    Raises:
      NotImplementedError: dtype, head_dim, page size or group size the kernel does not take.
      ValueError: shapes or dtypes that disagree.
    """
    group = check_shapes(q, k_pages, v_pages, turns)
    num_rows, num_heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    check_supported(q.dtype, head_dim, page_size, group)
    if work.first_part.shape[0] != num_rows + 1:
        raise ValueError(
            f"the work list has {work.first_part.shape[0] - 1} query rows, q {num_rows}"
        )
    if work.tiles.shape[1] != TILE // page_size:
        raise ValueError(
            f"the work list has {work.tiles.shape[1]} pages a tile, pages of {page_size} slots "
            f"need {TILE // page_size}"
        )
    padded = padded_group(group)
    if padded != group:
        q = q.reshape(num_rows, kv_heads, group, head_dim)
        q = jnp.pad(q, ((0, 0), (0, 0), (0, padded - group), (0, 0)))
        q = q.reshape(num_rows, kv_heads * padded, head_dim)
    shape = _Shape(
        padded,
        head_dim,
        page_size,
        kv_heads,
        2 if head_dim == 128 else 4,
        work.part_at.shape[0] > 0,
        rotate,
        interpret is not None,
    )
    out, lse = _partial_results(shape, q, k_pages, v_pages, turns, work, scale, interpret)
    if shape.split:
        out = merge(
            out,
            lse,
            work.first_part,
            work.part_at,
            num_heads=kv_heads * padded,
            width=rows_per_block(group),
            part_at=work.part_at,
            interpret=interpret,
        )
    if padded != group:
        out = out.reshape(num_rows, kv_heads, padded, head_dim)[:, :, :group]
    return out.reshape(num_rows, num_heads, head_dim)


def _partial_results(
    shape: _Shape,
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    turns: Turns,
    work: HopperPrefillWork,
    scale: float,
    interpret: Any,
) -> tuple[Float[Array, "R N H"], Float[Array, "I K 128"]]:
    """Results of query rows or, where items are split, of the rows of items."""
    rows, num_heads, head_dim = q.shape
    num_items = work.items.shape[0]
    if shape.split:
        rows = num_items * rows_per_block(shape.group)
        num_heads = padded_heads(num_heads, head_dim)
    angles = jnp.stack([turns.cos, turns.sin], 1)  # [U 2 H/2]
    kernel = plgpu.kernel(
        functools.partial(_block, shape, scale * math.log2(math.e)),
        out_type=(
            jax.ShapeDtypeStruct((rows, num_heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct(
                (num_items if shape.split else 1, shape.kv_heads, 2 * M), jnp.float32
            ),
        ),
        scratch_types=_scratch(shape, q.dtype),
        grid=(work.worker_entries.shape[0],),
        grid_names=("worker",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    tables = (work.num_items, work.worker_entries, work.items, work.entries, work.tiles)
    return kernel(q, angles, k_pages, v_pages, *tables)


def _scratch(shape: _Shape, dtype: jnp.dtype) -> dict[str, Any]:
    head_dim, half = shape.head_dim, shape.head_dim // 2
    tiled = (plgpu.TilingTransform((8, half)), plgpu.SwizzleTransform(2 * half))
    # Tiles of a token's rows, so that each token's can be written out on their own.
    by_token = (plgpu.TilingTransform((min(8, shape.group), 64)), plgpu.SwizzleTransform(128))
    ring = plgpu.SMEM((shape.stages, TILE, head_dim), dtype, transforms=tiled)
    per_stage = {"num_barriers": shape.stages}
    scratch = {
        "k_ring": ring,
        "v_ring": ring,
        "queries": plgpu.SMEM((2, shape.tokens, shape.group, head_dim), dtype),
        "turned": plgpu.SMEM((2, 2, M, half), dtype, transforms=tiled),
        "results": plgpu.SMEM((2, M, head_dim), dtype, transforms=by_token),
        "angles": plgpu.SMEM((2, 2, half), jnp.float32),
        "scalars": plgpu.SMEM((2, columns.SCALARS), jnp.int32),
        "k_full": plgpu.Barrier(num_arrivals=shape.boxes, **per_stage),
        "v_full": plgpu.Barrier(num_arrivals=shape.boxes, **per_stage),
        "k_free": plgpu.Barrier(num_arrivals=2, **per_stage),
        "v_free": plgpu.Barrier(num_arrivals=2, **per_stage),
        "entry_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "entry_free": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "queries_full": plgpu.Barrier(num_arrivals=2),
        "queries_free": plgpu.Barrier(num_arrivals=2),
        "schedule": plgpu.Barrier(num_arrivals=2),
        "silenced": plgpu.Barrier(num_arrivals=2),
    }
    if shape.interpret:
        tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        scratch["weights"] = plgpu.SMEM((2, M, TILE), dtype, transforms=tiled)
    return scratch


def _block(
    shape: _Shape,
    scale: float,
    q_ref,
    angles_ref,
    k_ref,
    v_ref,
    num_items_ref,
    worker_entries_ref,
    items_ref,
    entries_ref,
    tiles_ref,
    out_ref,
    lse_ref,
    **scratch,
):
    group = lax.axis_index("warpgroup")

    @pl.when(group < 2)
    def _():
        plgpu.set_max_registers(240, action="increase")
        num_entries = worker_entries_ref[lax.axis_index("worker")]
        _compute(shape, scale, group, num_entries, out_ref, lse_ref, **scratch)

    @pl.when(group == 2)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        tables = (num_items_ref, items_ref, entries_ref, tiles_ref)
        _bring(shape, q_ref, angles_ref, k_ref, v_ref, *tables, **scratch)


def _bring(
    shape: _Shape,
    q_ref,
    angles_ref,
    k_ref,
    v_ref,
    num_items_ref,
    items_ref,
    entries_ref,
    tiles_ref,
    *,
    k_ring,
    v_ring,
    queries,
    angles,
    scalars,
    k_full,
    v_full,
    k_free,
    v_free,
    entry_full,
    entry_free,
    queries_full,
    queries_free,
    **_unused,
):
    """The memory warpgroup: everything that the block's entries need, in order."""
    worker, workers = lax.axis_index("worker"), lax.axis_size("worker")
    pairs = num_items_ref[0] * shape.kv_heads
    rounds = lax.div(pairs + workers - 1, workers)

    some = min(_AT_ONCE, shape.boxes)

    def pages_of(tile, first):
        """Some page ids of a tile: all would not fit into the registers where pages are small."""
        return [tiles_ref[tile, first + b] for b in range(some)]

    def fetch_pages(pages_ref, head, pages, ring, stage, full, first=0):
        for b, page in enumerate(pages):
            at = (first + b) * shape.page_size
            at = at if isinstance(at, int) else pl.multiple_of(at, shape.page_size)
            plgpu.copy_gmem_to_smem(
                pages_ref.at[page, head],
                ring.at[stage, pl.ds(at, shape.page_size)],
                full.at[stage],
            )

    def fetch_tile(pages_ref, head, tile, pages, ring, stage, full):
        fetch_pages(pages_ref, head, pages, ring, stage, full)
        if shape.boxes > some:

            @pl.loop(1, shape.boxes // some)
            def _(i):
                more = pages_of(tile, i * some)
                fetch_pages(pages_ref, head, more, ring, stage, full, i * some)

    def one_item(i, carry):
        # Every other round runs backwards, so that long and short items even out.
        place = jnp.where(lax.rem(i, 2) == 0, worker, workers - 1 - worker)
        pair = i * workers + place

        def go(items_done, entries_done, tiles_done):
            item, head = lax.div(pair, shape.kv_heads), lax.rem(pair, shape.kv_heads)
            row, num_rows, dest, first_entry, num_entries = (items_ref[item, c] for c in range(5))

            @pl.when(items_done > 0)
            def _():
                plgpu.barrier_wait(queries_free)

            for w in range(2):
                plgpu.copy_gmem_to_smem(
                    q_ref.at[
                        pl.ds(row + w * shape.tokens, shape.tokens),
                        pl.ds(head * shape.group, shape.group),
                    ],
                    queries.at[w],
                    queries_full,
                )

            def one_entry(e, carry):
                entries_done, tiles_done = carry
                entry = first_entry + e
                first_tile, num_tiles, num_plain, limit, causal, skip, turn = (
                    entries_ref[entry, c] for c in range(7)
                )
                slot = lax.rem(entries_done, 2)

                @pl.when(entries_done >= 2)
                def _():
                    plgpu.barrier_wait(entry_free.at[slot])

                is_first = (e == 0).astype(jnp.int32)
                is_last = (e == num_entries - 1).astype(jnp.int32)
                values = (num_plain, is_first, is_last, num_tiles, limit, causal, skip)
                for c, value in enumerate((*values, dest, num_rows, item, head)):
                    scalars[slot, c] = value
                plgpu.copy_gmem_to_smem(angles_ref.at[turn], angles.at[slot], entry_full.at[slot])
                plgpu.barrier_arrive(entry_full.at[slot])

                def one_tile(t, tiles_done):
                    # Looked up before the wait, which hides the latency.
                    tile = first_tile + t
                    pages = pages_of(tile, 0)
                    stage = lax.rem(tiles_done, shape.stages)

                    @pl.when(tiles_done >= shape.stages)
                    def _():
                        plgpu.barrier_wait(k_free.at[stage])

                    fetch_tile(k_ref, head, tile, pages, k_ring, stage, k_full)

                    @pl.when(tiles_done >= shape.stages)
                    def _():
                        plgpu.barrier_wait(v_free.at[stage])

                    fetch_tile(v_ref, head, tile, pages, v_ring, stage, v_full)
                    return tiles_done + 1

                tiles_done = lax.fori_loop(0, num_tiles, one_tile, tiles_done)
                return entries_done + 1, tiles_done

            entries_done, tiles_done = lax.fori_loop(
                0, num_entries, one_entry, (entries_done, tiles_done)
            )
            return items_done + 1, entries_done, tiles_done

        return lax.cond(pair < pairs, go, lambda *carry: carry, *carry)

    zero = jnp.int32(0)
    items, entries, tiles = lax.fori_loop(0, rounds, one_item, (zero, zero, zero))

    @pl.when(items > 0)
    def _():
        plgpu.barrier_wait(queries_free)

    for back in range(2):

        @pl.when(entries > back)
        def _(back=back):
            plgpu.barrier_wait(entry_free.at[lax.rem(entries - 1 - back, 2)])

    for back in range(shape.stages):

        @pl.when(tiles > back)
        def _(back=back):
            stage = lax.rem(tiles - 1 - back, shape.stages)
            plgpu.barrier_wait(k_free.at[stage])
            plgpu.barrier_wait(v_free.at[stage])


def _compute(
    shape: _Shape,
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
    queries_full,
    queries_free,
    schedule,
    silenced,
    weights=None,
):
    """A computing warpgroup: its 64 rows of every entry of the block."""
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
            plgpu.barrier_wait(queries_full)

        _turn(shape, scale, queries.at[me], angles.at[slot], turned)

        @pl.when(scalars[slot, 2] == 1)
        def _():
            plgpu.barrier_arrive(queries_free)

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


def _turn(shape: _Shape, scale: float, queries, angles, turned):
    """Turns the queries of a warpgroup and scales them, as two halves (kernels/rotary.py)."""
    half = shape.head_dim // 2
    if shape.interpret:  # knows no reshaped references
        x = queries[...].reshape(M, shape.head_dim)
    else:
        x = plgpu.load(queries.reshape(M, shape.head_dim), layout=_WGMMA, optimized=False)
    x1, x2 = (x[:, i * half : (i + 1) * half].astype(jnp.float32) * scale for i in range(2))
    if shape.rotate:
        cos, sin = (
            lax.broadcast_in_dim(plgpu.load(angles.at[i], layout=_COLUMN), x1.shape, [1])
            for i in range(2)
        )
        x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    for i, part in enumerate((x1, x2)):
        turned[i] = part.astype(turned.dtype)
    plgpu.commit_smem()


def _silence(shape: _Shape, me, v_tile, valid, silenced):
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


def _write(shape: _Shape, me, acc, m, total, results, out_ref, lse_ref, dest, num_rows, item, head):
    """Writes out the rows of a warpgroup."""
    if shape.split:
        lse_ref[item, head, pl.ds(me * M, M)] = m + jnp.log2(total)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    share = 1.0 / jnp.maximum(total, 1e-30)
    out = (acc * lax.broadcast_in_dim(share, acc.shape, [0])).astype(results.dtype)
    results[...] = out
    plgpu.commit_smem()
    heads = pl.ds(head * shape.group, shape.group)
    first, count = dest + me * shape.tokens, num_rows - me * shape.tokens

    @pl.loop(0, jnp.minimum(count, shape.tokens))
    def _(token):
        mine = pl.ds(pl.multiple_of(token * shape.group, shape.group), shape.group)
        plgpu.copy_smem_to_gmem(results.at[mine], out_ref.at[first + token, heads])
