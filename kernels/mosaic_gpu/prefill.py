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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from lazyattn_jax.kernels.mosaic_gpu import prefill_plan as columns
from lazyattn_jax.kernels.mosaic_gpu.merge import HEADS, merge
from lazyattn_jax.kernels.mosaic_gpu.prefill_compute import compute
from lazyattn_jax.kernels.mosaic_gpu.prefill_memory import bring
from lazyattn_jax.kernels.mosaic_gpu.prefill_plan import (
    PACKED,
    TILE,
    HopperPrefillWork,
    padded_group,
)
from lazyattn_jax.kernels.mosaic_gpu.prefill_shape import M, Shape
from lazyattn_jax.kernels.mosaic_gpu.support import check_supported, check_work
from lazyattn_jax.kernels.shapes import check_shapes
from lazyattn_jax.kernels.work import Turns


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
      turns: the rotations of the step.
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
    check_work(work.first_part, num_rows, work.tiles, page_size, TILE // page_size)
    padded = padded_group(group)
    if padded != group:
        q = q.reshape(num_rows, kv_heads, group, head_dim)
        q = jnp.pad(q, ((0, 0), (0, 0), (0, padded - group), (0, 0)))
        q = q.reshape(num_rows, kv_heads * padded, head_dim)
    shape = Shape(
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
        out = out.reshape(kv_heads, -1, head_dim)
        out = merge(out, lse, work.first_part, work.part_at, group=padded, interpret=interpret)
    if padded != group:
        out = out.reshape(num_rows, kv_heads, padded, head_dim)[:, :, :group]
    return out.reshape(num_rows, num_heads, head_dim)


def _partial_results(
    shape: Shape,
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    turns: Turns,
    work: HopperPrefillWork,
    scale: float,
    interpret: Any,
) -> tuple[Array, Float[Array, "I K W"]]:
    """Results of query rows, [T N H], or, where items are split, of items, [K I*128+8 H]."""
    num_items = work.items.shape[0] if shape.split else 1
    results = q.shape
    if shape.split:
        # Merging reads a little past the last part.
        tokens = num_items * PACKED // shape.group + max(1, 8 // shape.group)
        results = (shape.kv_heads, tokens, shape.group, shape.head_dim)
    angles = jnp.stack([turns.cos, turns.sin], 1)  # [U 2 H/2]
    kernel = plgpu.kernel(
        functools.partial(_block, shape, scale * math.log2(math.e)),
        out_type=(
            jax.ShapeDtypeStruct(results, q.dtype),
            jax.ShapeDtypeStruct((num_items, shape.kv_heads, PACKED + HEADS), jnp.float32),
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


def _scratch(shape: Shape, dtype: jnp.dtype) -> dict[str, Any]:
    head_dim, half = shape.head_dim, shape.head_dim // 2
    tiled = (plgpu.TilingTransform((8, half)), plgpu.SwizzleTransform(2 * half))
    # Tiles of a token's rows, so that each token's can be written out on their own.
    by_token = (plgpu.TilingTransform((1, min(8, shape.group), 64)), plgpu.SwizzleTransform(128))
    ring = plgpu.SMEM((shape.stages, TILE, head_dim), dtype, transforms=tiled)
    per_stage = {"num_barriers": shape.stages}
    scratch = {
        "k_ring": ring,
        "v_ring": ring,
        "queries": plgpu.SMEM((2, shape.tokens, shape.group, head_dim), dtype),
        "turned": plgpu.SMEM((2, 2, M, half), dtype, transforms=tiled),
        "results": plgpu.SMEM((2, shape.tokens, shape.group, head_dim), dtype, transforms=by_token),
        "angles": plgpu.SMEM((2, 2, half), jnp.float32),
        "scalars": plgpu.SMEM((2, columns.SCALARS), jnp.int32),
        "k_full": plgpu.Barrier(num_arrivals=shape.boxes, **per_stage),
        "v_full": plgpu.Barrier(num_arrivals=shape.boxes, **per_stage),
        "k_free": plgpu.Barrier(num_arrivals=2, **per_stage),
        "v_free": plgpu.Barrier(num_arrivals=2, **per_stage),
        "entry_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "entry_free": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        # One object: the addresses of two would be spilled with small pages.
        "query_barriers": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "schedule": plgpu.Barrier(num_arrivals=2),
        "silenced": plgpu.Barrier(num_arrivals=2),
    }
    if shape.interpret:
        tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        scratch["weights"] = plgpu.SMEM((2, M, TILE), dtype, transforms=tiled)
    return scratch


def _block(
    shape: Shape,
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
        compute(shape, scale, group, num_entries, out_ref, lse_ref, **scratch)

    @pl.when(group == 2)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        tables = (num_items_ref, items_ref, entries_ref, tiles_ref)
        bring(shape, q_ref, angles_ref, k_ref, v_ref, *tables, **scratch)
