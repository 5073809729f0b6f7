"""Lazy decode on a TPU: attention of one token per request over the pool, rotated in the kernel.

A core goes through the entries of the work list one after the other. It turns the rows of an entry
where a run begins, each by its own angles, attends to one tile after the other, and adds the result
to the running result of each row. These stay in its memory until the end. KV heads are divided
between cores, and otherwise attended with together, since a page holds those of all heads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from lazyattn_jax.kernels.mosaic_tpu.layout import (
    LANES,
    angle_rows,
    factors,
    padded_queries,
    rolled,
)
from lazyattn_jax.kernels.mosaic_tpu.plan import (
    DECODE_OTHERS,
    DECODE_PIECES,
    DECODE_TILE,
    ROWS,
    TpuDecodeWork,
)
from lazyattn_jax.kernels.mosaic_tpu.reader import Reader, Sizes
from lazyattn_jax.kernels.mosaic_tpu.softmax import LOWEST, attend
from lazyattn_jax.kernels.mosaic_tpu.support import check_arrays, heads_at_once
from lazyattn_jax.kernels.work import Turns

WIDTHS = (1, 4, ROWS)
"""Rows that are attended with at once: an entry takes the least that suffices."""

_MARGIN = 2 * 2**20
"""Bytes of a core's memory for what the compiler puts there."""


@dataclass(frozen=True)
class _Shape:
    """Static sizes of one kernel; ``group`` is that of whole registers."""

    head_dim: int
    group: int
    num_rows: int
    reader: Sizes

    @property
    def scratch(self) -> list[Any]:
        heads, rows, padded = self.reader.heads, ROWS * self.group, self.group
        return [
            *self.reader.scratch(),
            pltpu.SMEM((ROWS,), jnp.int32),  # query rows of an entry
            pltpu.VMEM((heads, rows, LANES), jnp.float32),  # its queries, turned
            pltpu.VMEM((3, heads, rows, LANES), jnp.float32),  # its softmax
            pltpu.VMEM((heads, self.num_rows, padded, LANES), jnp.float32),  # running results
            pltpu.VMEM((self.num_rows, padded, LANES), jnp.float32),  # their log-sum-exps, by head
        ]

    @property
    def bytes(self) -> int:
        """Bytes of a core's memory."""
        heads, item = self.reader.heads, jnp.dtype(self.reader.dtype).itemsize
        row = heads * self.group * LANES
        entry = ROWS * row * (4 + 3 * 4)
        running = self.num_rows * (row * (4 + 4 * item) + self.group * LANES * 4)
        return self.reader.depth * self.reader.tile_bytes + entry + running + _MARGIN


def kernel_shape(
    q: Any, k_pages: Any, v_pages: Any | None, *, interpret: bool = False
) -> tuple[_Shape, int]:
    """Sizes of the kernel for arguments of ``lazy_decode``, and its bytes of a core's memory.

    Raises:
      NotImplementedError: it does not fit.
    """
    num_rows, num_heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    padded = -(-(num_heads // kv_heads) // 8) * 8
    pools = 1 if v_pages is None else 2

    def shape_of(heads: int) -> _Shape:
        words = ROWS, ROWS, DECODE_OTHERS, (5, 1)
        sizes = Sizes(page_size, DECODE_TILE, *words, heads, pools, q.dtype)
        return _Shape(head_dim, padded, num_rows, sizes)

    heads, vmem = heads_at_once(kv_heads, lambda n: shape_of(n).bytes, interpret)
    return shape_of(heads), vmem


def lazy_decode(
    q: Float[Array, "B N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"] | None,
    turns: Turns,
    work: TpuDecodeWork,
    *,
    scale: float,
    interpret: Any = False,
) -> Float[Array, "B N H"]:
    """Attention of one token per request over the pool; see ``kernels.api.lazy_decode``.

    Args:
      q: queries, rotated at their positions in the request; bfloat16 or float32.
      k_pages: keys rotated at the positions they were encoded at; same dtype. At head_dim 64 keys
        and values side by side, ``[P K S 2H]``.
      v_pages: values; none at head_dim 64.
      turns: the rotations of the step.
      work: the work list, see ``plan.plan_decode``.
      scale: factor on the scores.
      interpret: ``pltpu.InterpretParams`` to run on a CPU.

    Raises:
      NotImplementedError: dtype, head_dim, page size, group size or number of rows that the kernel
        does not take.
      ValueError: shapes or dtypes that disagree.
    """
    group = check_arrays(q, k_pages, v_pages, turns)
    num_rows, _, head_dim = q.shape
    kv_heads = k_pages.shape[1]
    pools = (k_pages,) if v_pages is None else (k_pages, v_pages)
    shape, vmem = kernel_shape(q, k_pages, v_pages, interpret=bool(interpret))
    heads, padded = shape.reader.heads, shape.group
    queries = padded_queries(q).reshape(num_rows, kv_heads, group, LANES).swapaxes(0, 1)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, padded - group), (0, 0)))
    block = pl.BlockSpec((heads, num_rows, padded, LANES), lambda h, *_: (h, 0, 0, 0))
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(_kernel, shape),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(kv_heads // heads,),
            in_specs=[block, in_memory, in_memory, *[in_memory for _ in pools]],
            out_specs=block,
            scratch_shapes=shape.scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=vmem, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="lazy_decode",
    )(work.num_entries, queries, work.stream, angle_rows(turns, scale), *pools)
    out = out[:, :, :group, LANES - head_dim :].swapaxes(0, 1)
    return out.reshape(q.shape)


def _kernel(shape, num_ref, q_ref, stream_ref, angles_ref, *refs):
    sizes, group = shape.reader, shape.group
    heads = range(sizes.heads)
    pools, out_ref = refs[: sizes.pools], refs[sizes.pools]
    *scratch, rows, queries, softmax, results, lse = refs[sizes.pools + 1 :]
    head_block = pl.ds(pl.program_id(0) * sizes.heads, sizes.heads)
    reader = Reader(sizes, head_block, stream_ref, angles_ref, pools, *scratch)

    @pl.loop(0, shape.num_rows)
    def _(row):
        results[:, row] = jnp.zeros((sizes.heads, group, LANES), jnp.float32)
        lse[row] = jnp.full((group, LANES), LOWEST, jnp.float32)

    def place_of(row):
        return pl.ds(pl.multiple_of(row * group, group), group)

    def turn(tile, i, row):
        cos, sin = factors(reader.angle_ring[tile.stage, i], shape.head_dim)
        for k in heads:
            q = q_ref[k, row]
            queries[k, place_of(i)] = q.astype(jnp.float32) * cos + rolled(q) * sin

    def attend_with(width, pieces, tiles, count):
        at = pl.ds(0, width * group)
        zeros = jnp.zeros((width * group, LANES), jnp.float32)
        for k in heads:
            for i, start in enumerate((zeros + LOWEST, zeros, zeros)):
                softmax[i, k, at] = start

        def one(tile):
            if pieces > 1:
                # Every piece is of a run that begins here; what a piece that is not used has as its
                # angles does not matter.
                for i in range(pieces):
                    turn(tile, i, rows[0])
            else:

                @pl.loop(0, tile.turns)
                def _(i):
                    turn(tile, i, rows[jnp.minimum(i, count - 1)])

            seen = [reader.word(tile.others + 5 + i) for i in range(pieces)]
            for k in heads:
                keys, values = reader.keys_and_values(tile, k, DECODE_TILE)
                size = width * group
                turned_by = [queries[k, pl.ds(i * size, size)] for i in range(pieces)]
                state = [softmax[i, k, at] for i in range(3)]
                state = attend([q.astype(keys.dtype) for q in turned_by], keys, values, state, seen)
                for i, x in enumerate(state):
                    softmax[i, k, at] = x

        reader.tiles(tiles, one)

    def add(count):
        """Adds the results of an entry to those of its rows, by their log-sum-exps."""
        head = lax.broadcasted_iota(jnp.int32, (group, LANES), 1)

        @pl.loop(0, count)
        def _(r):
            row = rows[r]
            before = lse[row]
            after = before
            for k in heads:
                top, total, out = (softmax[i, k, place_of(r)] for i in range(3))
                mine, theirs = top + jnp.log2(total), before[:, k : k + 1]
                above = jnp.maximum(mine, theirs)
                a, b = jnp.exp2(mine - above), jnp.exp2(theirs - above)
                results[k, row] = (results[k, row] * b + out * (a / total)) / (a + b)
                after = jnp.where(head == k, above + jnp.log2(a + b), after)
            lse[row] = after

    reader.start()

    @pl.loop(0, num_ref[0])
    def _(_entry):
        tile = reader.peek()
        slots, tiles, count = (reader.word(tile.others + i) for i in (1, 3, 4))

        @pl.loop(0, count)
        def _(r):
            rows[r] = reader.word(tile.rows + r)

        is_whole = slots == DECODE_TILE
        for narrower, width in zip((0, *WIDTHS), WIDTHS, strict=False):
            fits = is_whole & (count > narrower) & (count <= width)
            pl.when(fits)(functools.partial(attend_with, width, 1, tiles, count))
        pl.when(~is_whole)(functools.partial(attend_with, 1, DECODE_PIECES, tiles, count))
        add(count)

    reader.stop()

    @pl.loop(0, shape.num_rows)
    def _(row):
        out_ref[:, row] = results[:, row].astype(out_ref.dtype)
