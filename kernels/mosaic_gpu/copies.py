"""Copies pages of keys, turned, and of values within the pool.

A block moves some rows of a page at a time through registers: each thread reads 16 bytes (8 where
heads have 64 elements) of both halves of a row of keys, which are turned together, and of a row of
values. Many blocks a core keep enough reads under way to fill the memory's bandwidth.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from lazyattn_jax.kernels.work import Moves

_LANES = 8
"""Threads that take one half of a row."""

_WARP_ROWS = 4
_ROWS_AT_ONCE = (64, 32, 16)


def copy_pages(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    moves: Moves,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """See ``kernels.api.copy_pages``; in place where the pool is donated.

    Args:
      k_pages: bfloat16 or float16, as ``support.check_supported`` allows.
      v_pages: the same.
      moves: which pages.
      interpret: ``plgpu.InterpretGPUParams`` to run on a CPU.
    """
    num_pages, kv_heads, page_size, head_dim = k_pages.shape
    page_rows = kv_heads * page_size
    rows = next(size for size in _ROWS_AT_ONCE if page_rows % size == 0)
    flat = num_pages, page_rows, head_dim
    kernel = plgpu.kernel(
        functools.partial(_block, num_pages, rows, head_dim // 2),
        grid=(moves.source.shape[0], page_rows // rows),
        grid_names=("move", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    k, v = (jax.new_ref(pages.reshape(flat)) for pages in (k_pages, v_pages))
    kernel(k, v, *moves[:3], *moves.turns)
    k, v = (jax.freeze(ref).reshape(k_pages.shape) for ref in (k, v))
    return k, v


def _block(num_pages, rows, half, k_ref, v_ref, source_ref, target_ref, turn_ref, cos_ref, sin_ref):
    move = lax.axis_index("move")
    some = pl.ds(lax.axis_index("part") * rows, rows)
    source, target, turn = source_ref[move], target_ref[move], turn_ref[move]
    layout = plgpu.Layout.TILED(
        Tiling(((4 * _WARP_ROWS, half), (_WARP_ROWS, half // _LANES))),
        warp_dims=(-4,),
        lane_dims=(-2, -3),
        vector_dim=-1,
    )
    of_columns = layout.reduce(0)
    halves = pl.ds(0, half), pl.ds(half, half)

    @pl.when(target < num_pages)  # else it is padding
    def _():
        k1, k2, v1, v2 = (
            plgpu.load(ref.at[source, some, columns], layout=layout, optimized=False)
            for ref in (k_ref, v_ref)
            for columns in halves
        )
        cos, sin = (
            lax.broadcast_in_dim(
                plgpu.load(ref.at[turn], layout=of_columns, optimized=False), (rows, half), [1]
            )
            for ref in (cos_ref, sin_ref)
        )
        x1, x2 = k1.astype(jnp.float32), k2.astype(jnp.float32)
        turned = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        for ref, values in ((k_ref, turned), (v_ref, (v1, v2))):
            for columns, value in zip(halves, values, strict=True):
                ref[target, some, columns] = value.astype(ref.dtype)
