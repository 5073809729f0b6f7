"""Lazy decode on Hopper: attention of one token per request over the pool, rotated in the kernel.

Grid: KV heads x workers, two blocks of one warpgroup on every core. A block walks its entries (see
``plan.py``): it rotates the entry's rows once, then attends to one tile of slots after the other.
Pages arrive by TMA in rings of K and V tiles that run on across entries, so that memory stays busy
while a block rotates, writes out or waits for its tables; the other block of the core computes
meanwhile.
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

from lazyattn_jax.kernels.mosaic_gpu import plan as columns
from lazyattn_jax.kernels.mosaic_gpu.merge import HEADS, merge
from lazyattn_jax.kernels.mosaic_gpu.plan import PACKED as M
from lazyattn_jax.kernels.mosaic_gpu.plan import (
    ROWS,
    STAGES,
    HopperDecodeWork,
    rows_per_entry,
    tile_slots,
)
from lazyattn_jax.kernels.mosaic_gpu.support import check_supported, check_work
from lazyattn_jax.kernels.shapes import check_shapes
from lazyattn_jax.kernels.work import Turns

_AHEAD = 2
"""Query rows of the next entry that are fetched along with a tile of this one."""

_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclass(frozen=True)
class _Shape:
    """Static sizes of one kernel; ``interpret`` is what interpret mode needs."""

    group: int
    head_dim: int
    page_size: int
    rotate: bool
    interpret: bool

    @property
    def rows(self) -> int:
        """The most query rows of an entry."""
        return rows_per_entry(self.group)

    @property
    def tile(self) -> int:
        """Slots of a tile."""
        return tile_slots(self.head_dim)

    @property
    def queries_in_smem(self) -> bool:
        """Whether rotated queries are kept in shared memory rather than in registers.

        With halves of 32 columns in registers, every tile of an entry but the first came out wrong
        on an H200 (jax 0.11.2, CUDA 13); in shared memory the same halves are right.
        """
        return self.interpret or self.head_dim == 64

    @property
    def boxes(self) -> int:
        """TMA boxes of a tile."""
        return max(1, self.tile // self.page_size)

    @property
    def parts(self) -> int:
        """Boxes of a page."""
        return max(1, self.page_size // self.tile)

    @property
    def box(self) -> int:
        """Slots of a box."""
        return min(self.tile, self.page_size)


def lazy_decode(
    q: Float[Array, "B N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    turns: Turns,
    work: HopperDecodeWork,
    *,
    scale: float,
    rotate: bool = True,
    interpret: Any = None,
) -> Float[Array, "B N H"]:
    """Attention of one token per request over the pool; see ``kernels.api.lazy_decode``.

    Scratch for partial results: ``F * K * H`` times the group rounded up to 8 values of q's dtype,
    and ``E * K * 64`` float32, for the ``F`` partial results and ``E`` entries that the work list
    has room for.

    Args:
      q: queries, rotated at their positions in the request; bfloat16 or float16.
      k_pages: keys rotated at the positions they were encoded at; same dtype.
      v_pages: values.
      turns: the rotations of the step.
      work: the work list, see ``plan.plan_decode``.
      scale: factor on the scores.
      rotate: False leaves the turns out, to measure what they cost.
      interpret: ``plgpu.InterpretGPUParams`` to run on a CPU.

    Raises:
      NotImplementedError: dtype, head_dim, page size or group size the kernel does not take.
      ValueError: shapes or dtypes that disagree.
    """
    group = check_shapes(q, k_pages, v_pages, turns)
    num_rows, _, head_dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    check_supported(q.dtype, head_dim, page_size, group)
    shape = _Shape(group, head_dim, page_size, rotate, interpret is not None)
    check_work(work.first_part, num_rows, work.tiles, page_size, shape.boxes)
    # One row of angles a query head of the group, so that one copy brings those of a row.
    angles = jnp.concatenate([turns.cos, turns.sin], -1).astype(jnp.float16)
    angles = jnp.broadcast_to(angles[:, None], (angles.shape[0], group, head_dim))
    num_results = (work.part_at.shape[0] * -(-group // 8) + 1) * 8
    kernel = plgpu.kernel(
        functools.partial(_block, shape, scale * math.log2(math.e)),
        out_type=(
            jax.ShapeDtypeStruct((kv_heads, num_results, head_dim), q.dtype),
            jax.ShapeDtypeStruct((work.entries.shape[0], kv_heads, M + HEADS), jnp.float32),
        ),
        scratch_types=_scratch(shape, q.dtype),
        grid=(work.workers.shape[0] - 1, kv_heads),
        grid_names=("worker", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    tables = (work.workers, work.starts, work.entries, work.references, work.tiles)
    out, lse = kernel(q, angles, k_pages, v_pages, *tables)
    return merge(out, lse, work.first_part, work.part_at, group=group, interpret=interpret)


def _scratch(shape: _Shape, dtype: jnp.dtype) -> dict[str, Any]:
    head_dim = shape.head_dim
    # Half a head is one swizzle row, so that the halves of K can be multiplied on their own.
    half = head_dim // 2
    halves = (plgpu.TilingTransform((8, half)), plgpu.SwizzleTransform(2 * half))
    whole = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    filled = plgpu.Barrier(num_arrivals=shape.boxes, num_barriers=STAGES)
    scratch = {
        "k_ring": plgpu.SMEM((STAGES, shape.tile, head_dim), dtype, transforms=halves),
        "v_ring": plgpu.SMEM((STAGES, shape.tile, head_dim), dtype, transforms=whole),
        "rows": plgpu.SMEM((M, head_dim), dtype),
        "angles": plgpu.SMEM((M, head_dim), jnp.float16),
        "results": plgpu.SMEM((M, head_dim), dtype),
        "k_full": filled,
        "v_full": filled,
        "fetched": plgpu.Barrier(num_arrivals=2 if shape.rotate else 1, num_barriers=shape.rows),
    }
    if shape.queries_in_smem:
        scratch["operands"] = plgpu.SMEM((2, M, half), dtype, transforms=halves)
    if shape.interpret:
        scratch["weights"] = plgpu.SMEM((M, shape.tile), dtype, transforms=whole)
    return scratch


def _block(
    shape: _Shape,
    scale: float,
    q_ref,
    angles_ref,
    k_ref,
    v_ref,
    workers_ref,
    starts_ref,
    entries_ref,
    references_ref,
    tiles_ref,
    out_ref,
    lse_ref,
    *,
    k_ring,
    v_ring,
    rows,
    angles,
    results,
    k_full,
    v_full,
    fetched,
    operands=None,
    weights=None,
):
    worker, head = lax.axis_index("worker"), lax.axis_index("head")
    group, head_dim, half = shape.group, shape.head_dim, shape.head_dim // 2
    heads = pl.ds(head * group, group)
    begin, first = (workers_ref[worker, c] for c in range(2))
    end, stop = (workers_ref[worker + 1, c] for c in range(2))

    def scalars_of(entry):
        return tuple(entries_ref[entry, c] for c in range(columns.COLUMNS))

    def fetch_row(r, row, turn):
        at = pl.ds(r * group if isinstance(r, int) else pl.multiple_of(r * group, group), group)
        plgpu.copy_gmem_to_smem(q_ref.at[row, heads], rows.at[at], fetched.at[r])
        if shape.rotate:
            plgpu.copy_gmem_to_smem(angles_ref.at[turn], angles.at[at], fetched.at[r])

    def fetch_tile(pages_ref, boxes, ring, full, stage):
        for b, box in enumerate(boxes):
            page, part = lax.div(box, shape.parts), lax.rem(box, shape.parts)
            plgpu.copy_gmem_to_smem(
                pages_ref.at[page, head, pl.ds(part * shape.box, shape.box)],
                ring.at[stage, pl.ds(b * shape.box, shape.box)],
                full.at[stage],
            )

    def boxes_of(tile):
        tile = jnp.minimum(tile, stop - 1)
        return tuple(tiles_ref[tile, b] for b in range(shape.boxes))

    def attend(tile, valid, q_halves, rows_ahead, carry):
        """One tile in the softmax of the rows (online softmax, arXiv 1805.02867)."""
        acc, m, total, stage, *boxes = carry
        soon = boxes_of(tile + 1 + STAGES)
        ahead = rows_ahead()
        plgpu.barrier_wait(k_full.at[stage])

        def scores(acc_ref):
            for i, q_half in enumerate(q_halves):
                k_half = k_ring.at[stage, :, pl.ds(i * half, half)]
                plgpu.wgmma(acc_ref, q_half, k_half.transpose((1, 0)))
            return acc_ref[...]

        s = pl.run_scoped(scores, plgpu.ACC((M, shape.tile), jnp.float32))
        plgpu.commit_smem()  # every warp has read the tile

        @pl.when(tile + STAGES < stop)
        def _():
            fetch_tile(k_ref, boxes, k_ring, k_full, stage)

        ahead()
        column = plgpu.broadcasted_iota(jnp.int32, (M, shape.tile), 1, layout=_WGMMA)
        s = jnp.where(column < valid, s, -jnp.inf)
        top = jnp.maximum(m, s.max(axis=1))
        keep = jnp.exp2(m - top)
        p = jnp.exp2(s - lax.broadcast_in_dim(top, s.shape, [0]))
        total = total * keep + p.sum(axis=1)
        p = p.astype(rows.dtype)
        if shape.interpret:  # takes a left operand from shared memory only
            weights[...] = p
            plgpu.commit_smem()
            p = weights
        plgpu.barrier_wait(v_full.at[stage])
        v_tile = v_ring.at[stage]

        @pl.when(valid < shape.tile)
        def _():
            # A weight of 0 does not silence a NaN left in a slot past the run.
            v = plgpu.load(v_tile, layout=_WGMMA)
            slot = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=_WGMMA)
            v_tile[...] = jnp.where(slot < valid, v, jnp.zeros_like(v))
            plgpu.commit_smem()

        def values(acc_ref):
            plgpu.wgmma(acc_ref, p, v_tile)
            return acc_ref[...]

        out = pl.run_scoped(values, plgpu.ACC((M, head_dim), jnp.float32))
        plgpu.commit_smem()

        @pl.when(tile + STAGES < stop)
        def _():
            fetch_tile(v_ref, boxes, v_ring, v_full, stage)

        acc = acc * lax.broadcast_in_dim(keep, acc.shape, [0]) + out
        return acc, top, total, jnp.where(stage == STAGES - 1, 0, stage + 1), *soon

    def walk(entry, carry):
        scalars, place, (acc, m, total) = carry
        first_tile, num_tiles, last_valid = scalars[:3]
        num_rows, flush, fresh, dest = scalars[4:]
        following = scalars_of(jnp.minimum(entry + 1, end - 1))

        @pl.loop(0, num_rows)
        def _(r):
            plgpu.barrier_wait(fetched.at[r])

        q_halves = _rotated(shape, scale, rows, angles)
        if shape.queries_in_smem:
            for i, x in enumerate(q_halves):
                operands[i] = x
            q_halves = tuple(operands.at[i] for i in range(2))
        plgpu.commit_smem()

        next_reference = following[3]
        next_rows = jnp.where(entry + 1 < end, following[4], 0)

        def rows_ahead(i):
            """Looks up some rows of the next entry; what is returned fetches them."""
            some = [i * _AHEAD + j for j in range(_AHEAD)]
            found = [next_reference + jnp.minimum(r, ROWS - 1) for r in some]
            ids = [tuple(references_ref[at, c] for c in range(2)) for at in found]

            def fetch():
                for r, (row, turn) in zip(some, ids, strict=True):
                    pl.when(r < next_rows)(functools.partial(fetch_row, r, row, turn))

            return fetch

        # Rows that an earlier entry did not use may hold NaN, so choose rather than multiply.
        acc = jnp.where(jnp.full_like(acc, fresh, jnp.int32) == 1, 0.0, acc)
        anew = jnp.full_like(m, fresh, jnp.int32) == 1
        m = jnp.where(anew, -jnp.inf, m)
        total = jnp.where(anew, 0.0, total)

        def body(i, carry):
            valid = jnp.where(i == num_tiles - 1, last_valid, shape.tile)
            ahead = functools.partial(rows_ahead, i)
            return attend(first_tile + i, valid, q_halves, ahead, carry)

        acc, m, total, *place = lax.fori_loop(0, num_tiles, body, (acc, m, total, *place))

        @pl.loop(num_tiles, lax.div(next_rows + _AHEAD - 1, _AHEAD))
        def _(i):
            rows_ahead(i)()

        @pl.when(flush == 1)
        def _():
            lse_ref[entry, head, pl.ds(0, M)] = m + jnp.log2(total)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            results[...] = (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(rows.dtype)
            plgpu.commit_smem()
            for i in range(-(-shape.rows * group // 8)):

                @pl.when(i * 8 < num_rows * group)
                def _(i=i):
                    there = pl.ds(pl.multiple_of(dest + i * 8, 8), 8)
                    plgpu.copy_smem_to_gmem(results.at[pl.ds(i * 8, 8)], out_ref.at[head, there])

        return following, tuple(place), (acc, m, total)

    @pl.when(end > begin)
    def _():
        # All at once, rather than entries, references and tiles one after the other.
        num_rows, *start = (starts_ref[worker, c] for c in range(starts_ref.shape[1]))
        ids, pages = start[: 2 * ROWS], start[2 * ROWS :]
        boxes = [tuple(pages[i * shape.boxes : (i + 1) * shape.boxes]) for i in range(STAGES + 1)]
        for i in range(STAGES):

            @pl.when(first + i < stop)
            def _(i=i):
                fetch_tile(k_ref, boxes[i], k_ring, k_full, i)
                fetch_tile(v_ref, boxes[i], v_ring, v_full, i)

        for r in range(shape.rows):
            row, turn = ids[2 * r : 2 * r + 2]
            pl.when(r < num_rows)(functools.partial(fetch_row, r, row, turn))

        scalars = scalars_of(begin)
        zeros = plgpu.layout_cast(jnp.zeros((M, head_dim), jnp.float32), _WGMMA)
        row = plgpu.layout_cast(jnp.zeros((M,), jnp.float32), _ROW)
        place = (jnp.int32(0), *boxes[-1])
        lax.fori_loop(begin, end, walk, (scalars, place, (zeros, row, row)))
        plgpu.wait_smem_to_gmem(0)


def _rotated(shape: _Shape, scale: float, rows, angles):
    """The rows turned by their angles and scaled, as two halves of the head (kernels/rotary.py)."""
    half = shape.head_dim // 2

    def load(ref):
        # The whole buffer, then halves of the registers: a half of a buffer whose rows are copied
        # one by one would be read with the wrong swizzle (jax 0.11.2).
        x = plgpu.load(ref, layout=_WGMMA, optimized=False)
        return (x[:, :half].astype(jnp.float32), x[:, half:].astype(jnp.float32))

    x1, x2 = (x * scale for x in load(rows))
    if shape.rotate:
        cos, sin = load(angles)
        x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    return x1.astype(rows.dtype), x2.astype(rows.dtype)
