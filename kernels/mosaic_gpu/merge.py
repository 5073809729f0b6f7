"""Puts the partial results of query rows together, by their log-sum-exps.

A block takes a query row and four heads of a KV head at a time, a warp each, and reads only the
parts that the row has: no buffer is padded to the most parts that a row could have.
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
from jaxtyping import Array, Float, Int

HEADS = 4
"""Heads that are merged at once, one a warp."""

_LOWEST = -1e30
"""Stands for minus infinity where a difference of two is taken."""


def merge(
    parts: Float[Array, "K R H"],
    lse: Float[Array, "E K W"],
    first_part: Int[Array, "B+1"],
    part_at: Int[Array, "F 2"],
    *,
    group: int,
    interpret: Any = None,
) -> Float[Array, "B N H"]:
    """Weighted means of partial results.

    A part is the result of one query row over some of what it attends to. It takes consecutive rows
    of ``parts``, one for each head of the group, and as many values of ``lse``. Up to ``HEADS - 1``
    rows and values after these are read as well (and not used): both arrays must have them.

    Args:
      parts: normalised partial results.
      lse: log2 of the sums of exponentials.
      first_part: query row ``b`` has the parts ``first_part[b] .. first_part[b + 1] - 1``.
      part_at: where a part's results start, among the ``R`` rows, and where its log-sum-exps do:
        ``e * PACKED + w``, where ``PACKED`` is ``W`` rounded down to a multiple of 64.
      group: query heads a KV head.
      interpret: ``plgpu.InterpretGPUParams`` to run on a CPU.

    Returns:
      The merged results in the parts' dtype; rows without any part are zeros.
    """
    kv_heads, _, head_dim = parts.shape
    num_rows = first_part.shape[0] - 1
    chunks = -(-group // HEADS)
    # Many rows fill the chip, and a block of two chunks hides more latency; few rows have many
    # parts each.
    together = 2 if num_rows >= 64 and kv_heads * chunks % 2 == 0 else 1
    at_once = 8 if num_rows >= 64 else 16
    kernel = plgpu.kernel(
        functools.partial(_block, head_dim, chunks, together, at_once, lse.shape[2] // 64 * 64),
        out_type=jax.ShapeDtypeStruct((num_rows, kv_heads, chunks * HEADS, head_dim), parts.dtype),
        grid=(num_rows, kv_heads * chunks // together),
        grid_names=("row", "chunk"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    out = kernel(parts, lse, first_part, part_at)
    return out[:, :, :group].reshape(num_rows, kv_heads * group, head_dim)


def _block(
    head_dim, chunks, together, at_once, width, parts_ref, lse_ref, first_ref, at_ref, out_ref
):
    row, first_chunk = lax.axis_index("row"), lax.axis_index("chunk") * together
    begin, end = first_ref[row], first_ref[row + 1]
    layout = plgpu.Layout.TILED(
        Tiling(((HEADS, head_dim), (head_dim // 32,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )
    of_heads = layout.reduce(1)
    places = [
        (lax.div(chunk, chunks), lax.rem(chunk, chunks) * HEADS)
        for chunk in (first_chunk + c for c in range(together))
    ]

    def spread(x):
        return lax.broadcast_in_dim(x, (HEADS, head_dim), [0])

    def some(i, carry):
        found = []
        for j in range(at_once):
            part = jnp.minimum(begin + i * at_once + j, end - 1)
            at, lse_at = at_ref[part, 0], at_ref[part, 1]
            entry, offset = lax.div(lse_at, width), lax.rem(lse_at, width)
            for kv_head, head in places:
                x = parts_ref.at[kv_head, pl.ds(at + head, HEADS)]
                lse = lse_ref.at[entry, kv_head, pl.ds(offset + head, HEADS)]
                found.append(
                    (
                        plgpu.load(x, layout=layout, optimized=False),
                        plgpu.load(lse, layout=of_heads, optimized=False),
                    )
                )
        # Past the row's last part that one is read again, with a weight of nothing.
        caps = [jnp.where(begin + i * at_once + j < end, -_LOWEST, _LOWEST) for j in range(at_once)]
        new = []
        for c, (acc, top, total) in enumerate(carry):
            values, given = zip(*found[c::together], strict=True)
            lses = [
                jnp.minimum(x, jnp.full((HEADS,), cap)) for x, cap in zip(given, caps, strict=True)
            ]
            above = functools.reduce(jnp.maximum, lses, top)
            keep = jnp.exp2(top - above)
            acc, total = acc * spread(keep), total * keep
            for value, lse in zip(values, lses, strict=True):
                weight = jnp.exp2(lse - above)
                acc = acc + value.astype(jnp.float32) * spread(weight)
                total = total + weight
            new.append((acc, above, total))
        return tuple(new)

    zeros = plgpu.layout_cast(jnp.zeros((HEADS, head_dim), jnp.float32), layout)
    row_zeros = plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), of_heads)
    start = (zeros, row_zeros + _LOWEST, row_zeros)
    count = lax.div(end - begin + at_once - 1, at_once)
    results = lax.fori_loop(0, count, some, (start,) * together)
    for (kv_head, head), (acc, _, total) in zip(places, results, strict=True):
        share = 1.0 / jnp.maximum(total, 1e-30)
        out = (acc * spread(share)).astype(out_ref.dtype)
        out_ref[row, kv_head, pl.ds(head, HEADS)] = out
