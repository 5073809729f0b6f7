"""Lazy prefill on a TPU: attention of ragged runs of tokens over the pool, rotated in the kernel.

A core goes through the windows of a step, and through the tiles of each window. Where a run begins
the rows that see it are turned for it; then blocks of rows attend to one tile after the other, and
blocks that see nothing of a tile are left out. Queries and results of windows come and go beside
that.
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
    PREFILL_OTHERS,
    PREFILL_PIECES,
    PREFILL_TILE,
    TpuPrefillWork,
    block_rows,
    window_rows,
)
from lazyattn_jax.kernels.mosaic_tpu.reader import Reader, Sizes
from lazyattn_jax.kernels.mosaic_tpu.softmax import LOWEST, attend
from lazyattn_jax.kernels.mosaic_tpu.support import check_arrays, heads_at_once
from lazyattn_jax.kernels.work import Turns

WIDTHS = (128, 256, PREFILL_TILE)
"""Slots of what is left of a run: the least that suffices is attended to."""

PIECES = (2, PREFILL_PIECES)
"""Into how many pieces a tile of several runs is cut."""

_MARGIN = 2 * 2**20
"""Bytes of a core's memory for what the compiler puts there."""


@dataclass(frozen=True)
class _Shape:
    """Static sizes of one kernel."""

    head_dim: int
    group: int
    reader: Sizes

    @property
    def window(self) -> tuple[int, ...]:
        """Shape of a window's queries."""
        return (self.reader.heads, self.group, window_rows(self.group), LANES)

    @property
    def scratch(self) -> list[Any]:
        return [
            *self.reader.scratch(),
            pltpu.VMEM(self.window, self.reader.dtype),  # queries, rolled
            pltpu.VMEM(self.window, self.reader.dtype),  # queries, turned
            pltpu.VMEM((PREFILL_TILE, LANES), self.reader.dtype),  # keys of a head, turned
            pltpu.VMEM((3, *self.window), jnp.float32),  # softmax
        ]

    @property
    def bytes(self) -> int:
        """Bytes of a core's memory."""
        item = jnp.dtype(self.reader.dtype).itemsize
        elements = self.reader.heads * self.group * window_rows(self.group) * LANES
        window = elements * (6 * item + 3 * 4)
        keys = PREFILL_TILE * LANES * item
        return self.reader.depth * self.reader.tile_bytes + window + keys + _MARGIN


def kernel_shape(
    q: Any, k_pages: Any, v_pages: Any | None, *, interpret: bool = False
) -> tuple[_Shape, int]:
    """Sizes of the kernel for arguments of ``lazy_prefill``, and its bytes of a core's memory.

    Raises:
      NotImplementedError: it does not fit.
    """
    _, num_heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    group, pools = num_heads // kv_heads, 1 if v_pages is None else 2

    def shape_of(heads: int) -> _Shape:
        words = PREFILL_PIECES, 0, PREFILL_OTHERS, (5, 2)
        sizes = Sizes(page_size, PREFILL_TILE, *words, heads, pools, q.dtype)
        return _Shape(head_dim, group, sizes)

    heads, vmem = heads_at_once(kv_heads, lambda n: shape_of(n).bytes, interpret)
    return shape_of(heads), vmem


def lazy_prefill(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"] | None,
    turns: Turns,
    work: TpuPrefillWork,
    *,
    scale: float,
    interpret: Any = False,
) -> Float[Array, "T N H"]:
    """Attention of ragged runs of consecutive tokens over the pool; see ``kernels.api``.

    For the arguments and the errors see ``decode.lazy_decode``; the work list is that of
    ``plan.plan_prefill``.
    """
    group = check_arrays(q, k_pages, v_pages, turns)
    num_rows, _, head_dim = q.shape
    kv_heads = k_pages.shape[1]
    pools = (k_pages,) if v_pages is None else (k_pages, v_pages)
    size, windows = window_rows(group), work.first_tile.shape[0] - 1
    if windows != -(-num_rows // size):
        raise ValueError(
            f"the work list has {windows} windows of {size} query rows, q has {num_rows} rows"
        )

    shape, vmem = kernel_shape(q, k_pages, v_pages, interpret=bool(interpret))
    heads = shape.reader.heads
    queries = jnp.pad(padded_queries(q), ((0, windows * size - num_rows), (0, 0), (0, 0)))
    queries = queries.reshape(-1, kv_heads, group, LANES).transpose(1, 2, 0, 3)
    block = pl.BlockSpec(shape.window, lambda h, w, *_: (h, 0, w, 0))
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(_kernel, shape),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(kv_heads // heads, windows),
            in_specs=[block, in_memory, in_memory, *[in_memory for _ in pools]],
            out_specs=block,
            scratch_shapes=shape.scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=vmem,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="lazy_prefill",
    )(work.first_tile, queries, work.stream, angle_rows(turns, scale), *pools)
    return out[..., LANES - head_dim :].transpose(2, 0, 1, 3)[:num_rows].reshape(q.shape)


def _kernel(shape, first_ref, q_ref, stream_ref, angles_ref, *refs):
    sizes, group, size = shape.reader, shape.group, block_rows(shape.group)
    pools, out_ref = refs[: sizes.pools], refs[sizes.pools]
    *scratch, across, queries, turned_keys, softmax = refs[sizes.pools + 1 :]
    window, windows = pl.program_id(1), pl.num_programs(1)
    head_block = pl.ds(pl.program_id(0) * sizes.heads, sizes.heads)
    reader = Reader(sizes, head_block, stream_ref, angles_ref, pools, *scratch)

    @pl.when(window == 0)
    def _():
        reader.start()

    @pl.loop(0, sizes.heads)
    def _(k):
        zeros = jnp.zeros(shape.window[1:], jnp.float32)
        for i, start in enumerate((zeros + LOWEST, zeros, zeros)):
            softmax[i, k] = start
        across[k] = rolled(q_ref[k]).astype(across.dtype)

    def rows_of(block):
        return pl.ds(pl.multiple_of(block * size, size), size)

    def load(ref, k, block):
        return ref[k, :, rows_of(block)].reshape(group * size, LANES)

    def store(ref, k, block, x):
        ref[k, :, rows_of(block)] = x.reshape(group, size, LANES).astype(ref.dtype)

    def attend_to(q, keys, values, k, block, visible, rows=None):
        before = [load(softmax.at[i], k, block) for i in range(3)]
        after = attend([load(q, k, block)], keys, values, before, visible)
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            store(softmax.at[i], k, block, new if rows is None else jnp.where(rows, new, old))

    def work(tile):
        slots, first, end = (reader.word(tile.others + i) for i in (1, 3, 4))
        low, high = lax.div(first, size), lax.div(end + size - 1, size)
        angles = reader.angle_ring.at[tile.stage]

        def all_heads(begin, body):
            count = high - begin  # of blocks: a window has two

            @pl.loop(0, sizes.heads * count)
            def _(i):
                body(i >> (count - 1), begin + (i & (count - 1)))

        @pl.loop(0, jnp.where(slots == PREFILL_TILE, tile.turns, 0))
        def _(i):
            cos, sin = factors(angles[i], shape.head_dim)

            def turn(k, block):
                q, other = (load(x, k, block).astype(jnp.float32) for x in (q_ref, across))
                store(queries, k, block, q * cos + other * sin)

            all_heads(low, turn)

        # Slots that are attended to, and how many of them row 0 would see, less one.
        seen, here = (reader.word(tile.others + 5 + i) for i in range(2))
        # Blocks whose last row sees none of the tile are left out.
        begin = jnp.maximum(low, lax.div(jnp.maximum(-here, 0), size))

        def rows_of_block(block):
            return lax.broadcasted_iota(jnp.int32, (group, size, LANES), 1) + block * size

        def plain(k, block):
            keys, values = reader.keys_and_values(tile, k, PREFILL_TILE)
            attend_to(queries, keys, values, k, block, None)

        def own_rows(block):
            """Other rows of the block are left as they are."""
            row = rows_of_block(block).reshape(group * size, LANES)
            return (row >= first) & (row < end)

        def document(slots, k, block):
            """What every row sees all of."""
            keys, values = reader.keys_and_values(tile, k, slots)
            attend_to(queries, keys, values, k, block, [seen], own_rows(block))

        def causal(slots, k, block):
            row = rows_of_block(block)
            visible = jnp.where((row >= first) & (row < end), jnp.minimum(seen, here + row + 1), 0)
            visible = visible.reshape(group * size, LANES)
            keys, values = reader.keys_and_values(tile, k, slots)
            attend_to(queries, keys, values, k, block, [visible])

        def documents(pieces):
            """Several documents: it takes less to turn their keys, each by its own angles."""
            visible = [reader.word(tile.others + 5 + 2 * i) for i in range(pieces)]
            turns = [factors(angles[i], shape.head_dim) for i in range(pieces)]
            each = PREFILL_TILE // pieces

            @pl.loop(0, sizes.heads)
            def _(k):
                keys, values = reader.keys_and_values(tile, k, PREFILL_TILE)
                for i, (cos, sin) in enumerate(turns):
                    part = pl.ds(i * each, each)
                    own = keys[i * each : (i + 1) * each].astype(jnp.float32)
                    turned = own * cos + rolled(own) * rolled(sin)
                    turned_keys[part] = turned.astype(turned_keys.dtype)

                @pl.loop(low, high)
                def _(block):
                    attend_to(q_ref, turned_keys[...], values, k, block, visible, own_rows(block))

        is_one, sees_all = slots == PREFILL_TILE, here + first >= seen - 1
        is_whole = (lax.rem(first, size) == 0) & (lax.rem(end, size) == 0)
        is_plain = is_one & is_whole & sees_all & (seen == PREFILL_TILE)
        pl.when(is_plain)(lambda: all_heads(low, plain))
        for less, most in zip((0, *WIDTHS), WIDTHS, strict=False):
            fits = is_one & ~is_plain & (seen > less) & (seen <= most)
            body = functools.partial(document, most)
            pl.when(fits & sees_all)(functools.partial(all_heads, low, body))
            body = functools.partial(causal, most)
            pl.when(fits & ~sees_all)(functools.partial(all_heads, begin, body))
        for pieces in PIECES:
            pl.when(slots == PREFILL_TILE // pieces)(functools.partial(documents, pieces))

    reader.tiles(first_ref[window + 1] - first_ref[window], work)

    @pl.when(window == windows - 1)
    def _():
        reader.stop()

    @pl.loop(0, sizes.heads)
    def _(k):
        top, total, out = (softmax[i, k] for i in range(3))
        # A row that sees nothing has weights of masked scores only.
        out_ref[k] = jnp.where(top > LOWEST / 2, out / total, 0.0).astype(out_ref.dtype)
