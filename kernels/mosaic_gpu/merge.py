"""Puts the partial results of query rows together, by their log-sum-exps.

One block takes a query row and a few of its heads, and reads only the parts that the row has: no
buffer is padded to the most parts that a row could have.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

_LANES = 128
"""Threads of a block, each of which takes one element of one or two heads."""

_AT_ONCE = 8
"""Parts that are read together, to have that many loads in flight."""

_LOWEST = -1e30
"""Stands for minus infinity where a difference of two is taken."""


def padded_heads(num_heads: int, head_dim: int) -> int:
    """Heads of the array of partial results: whole groups of threads, whatever the head size."""
    heads = _LANES // head_dim
    return -(-num_heads // heads) * heads


def merge(
    parts: Float[Array, "F Np H"],
    lse: Float[Array, "E K R"],
    first_part: Int[Array, "B+1"],
    lse_at: Int[Array, "F"],
    *,
    num_heads: int,
    width: int,
    part_at: Int[Array, "F"] | None = None,
    interpret: Any = None,
) -> Float[Array, "B N H"]:
    """Weighted means of partial results.

    Args:
      parts: normalised partial results; ``Np`` is ``padded_heads``.
      lse: log2 of the sums of exponentials, of the rows of an entry and their heads of a KV head:
        that of row ``r`` and head ``g`` of the group is at ``r * G + g``.
      first_part: query row ``b`` has the parts ``first_part[b] .. first_part[b + 1] - 1``.
      lse_at: where a part's log-sum-exps are: ``entry * width + row of the entry``.
      num_heads: query heads.
      width: see ``lse_at``.
      part_at: where a part's results are in ``parts``; in their own order, if not given.
      interpret: ``plgpu.InterpretGPUParams`` to run on a CPU.

    Returns:
      The merged results in the parts' dtype; rows without any part are zeros.
    """
    _, padded, head_dim = parts.shape
    num_rows, group = first_part.shape[0] - 1, num_heads // lse.shape[1]
    heads = _LANES // head_dim
    chunks = 4 if (padded // heads) % 4 == 0 and num_rows >= 32 else 1
    parts = parts.reshape(parts.shape[0], padded // heads, _LANES)
    kernel = plgpu.kernel(
        functools.partial(_block, heads, group, num_heads, width, chunks, part_at is not None),
        out_type=jax.ShapeDtypeStruct((num_rows, padded // heads, _LANES), parts.dtype),
        grid=(num_rows, padded // heads // chunks),
        grid_names=("row", "chunk"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    tables = (first_part, lse_at) if part_at is None else (first_part, lse_at, part_at)
    out = kernel(parts, lse, *tables)
    return out.reshape(num_rows, padded, head_dim)[:, :num_heads]


def _block(heads, group, num_heads, width, chunks, is_placed, *refs):
    if is_placed:
        parts_ref, lse_ref, first_ref, lse_at_ref, part_at_ref, out_ref = refs
    else:
        parts_ref, lse_ref, first_ref, lse_at_ref, out_ref = refs
    row, first_chunk = lax.axis_index("row"), lax.axis_index("chunk") * chunks
    begin, end = first_ref[row], first_ref[row + 1]
    layout = plgpu.Layout.WG_STRIDED((_LANES,), vec_size=1)
    lane = plgpu.broadcasted_iota(jnp.int32, (_LANES,), 0, layout=layout)

    def of_lanes(scalars):
        """One scalar a head as a vector over the threads."""
        if heads == 1:
            return scalars[0]
        return jnp.where(lane < _LANES // 2, *(jnp.full((_LANES,), x) for x in scalars))

    def read(part, chunk):
        """A part of a chunk of heads: its values, and a log-sum-exp for each head."""
        at = lse_at_ref[part]
        entry, r = lax.div(at, width), lax.rem(at, width)
        found = []
        for h in range(heads):
            head = jnp.minimum(chunk * heads + h, num_heads - 1)
            k, g = lax.div(head, group), lax.rem(head, group)
            found.append(lse_ref[entry, k, r * group + g])
        place = part_at_ref[part] if is_placed else part
        x = plgpu.load(parts_ref.at[place, chunk], layout=layout)
        return x.astype(jnp.float32), found

    def some(i, carry):
        first = begin + i * _AT_ONCE
        new = []
        for c, (acc, tops, sums) in enumerate(carry):
            values, lses = [], []
            for j in range(_AT_ONCE):
                value, lse = read(jnp.minimum(first + j, end - 1), first_chunk + c)
                values.append(value)
                lses.append([jnp.where(first + j < end, x, _LOWEST) for x in lse])
            above = [
                functools.reduce(jnp.maximum, column) for column in zip(tops, *lses, strict=True)
            ]
            keep = [jnp.exp2(t - a) for t, a in zip(tops, above, strict=True)]
            weights = [[jnp.exp2(x - a) for x, a in zip(lse, above, strict=True)] for lse in lses]
            acc = acc * of_lanes(keep)
            for weight, value in zip(weights, values, strict=True):
                acc = acc + value * of_lanes(weight)
            columns = zip(*weights, strict=True)
            sums = [s * k + sum(c) for s, k, c in zip(sums, keep, columns, strict=True)]
            new.append((acc, tuple(above), tuple(sums)))
        return tuple(new)

    zeros = plgpu.layout_cast(jnp.zeros((_LANES,), jnp.float32), layout)
    start = (zeros, (jnp.float32(_LOWEST),) * heads, (jnp.float32(0),) * heads)
    count = lax.div(end - begin + _AT_ONCE - 1, _AT_ONCE)
    for c, (acc, _, sums) in enumerate(lax.fori_loop(0, count, some, (start,) * chunks)):
        share = [1.0 / jnp.maximum(s, 1e-30) for s in sums]
        out_ref[row, first_chunk + c] = (acc * of_lanes(share)).astype(out_ref.dtype)
