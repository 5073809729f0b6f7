"""The kernel that the TPU kernels are compared with: jax's own ragged paged attention.

It attends to one sequence a request, in pages of the request, and turns nothing. Here a request's
sequence is its documents and new tokens in a row: as many slots as the lazy kernels attend to.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from lazyattn_jax.bench.kernel_cases import HEADS, KV_HEADS, Case, Variant
from lazyattn_jax.kernels.mosaic_tpu.schedule import Loop

KERNEL = "ragged_paged_attention_kernel"

SLOTS = (1024, 512)
"""Slots that it attends to at once: fewer bundles a slot, or fewer past the end of a sequence."""

PREFILL_ROWS = (64, 32)
"""Tokens that it attends with at once; the first that compiles. Decode takes one."""


class Anchor(NamedTuple):
    """The call, its arguments, and the trip counts of the kernel's loops."""

    call: Any
    args: tuple[Any, ...]
    loops: tuple[Loop, ...]


def anchors(case: Case, variant: Variant) -> list[Anchor]:
    """The kernel for the shapes of a case, the best choice of block sizes first."""
    large, small = SLOTS
    slots = case.held * case.tokens + case.new
    # The larger size where less than a fifth is added to a sequence.
    sizes = SLOTS if -(-slots // large) * large < 1.2 * slots else (small,)
    return [
        _anchor(case, variant, rows, size)
        for rows in (PREFILL_ROWS if case.new else (1,))
        for size in sizes
    ]


def _anchor(case: Case, variant: Variant, rows: int, size: int) -> Anchor:
    each = max(1, case.new)
    num_rows, requests = case.requests * each, case.requests
    slots = case.held * case.tokens + case.new
    pages = -(-slots // variant.page_size)
    block_pages = min(pages, size // variant.page_size)
    pool = (requests * pages, variant.page_size, 2 * KV_HEADS, variant.head_dim)
    args = (
        jax.ShapeDtypeStruct((num_rows, HEADS, variant.head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct(pool, jnp.bfloat16),
        *(
            jax.ShapeDtypeStruct(shape, jnp.int32)
            for shape in ((requests,), (requests, pages), (requests + 1,), (1,))
        ),
    )
    call = partial(
        ragged_paged_attention,
        sm_scale=variant.head_dim**-0.5,
        num_kv_pages_per_block=block_pages,
        num_queries_per_block=rows,
        vmem_limit_bytes=pltpu.get_tpu_info().vmem_capacity_bytes * 7 // 8,
    )
    # A block of rows goes through all slots of every request that has some of its rows.
    blocks = -(-num_rows // rows)
    held = sum(1 + (b * each + each - 1) // rows - b * each // rows for b in range(requests))
    tiles = -(-slots // (block_pages * variant.page_size))
    inner: tuple[Loop, ...] = (
        Loop("requests", blocks, held, (Loop("tiles", held, held * tiles),)),
    )
    return Anchor(call, args, inner if blocks == 1 else (Loop("blocks", 1, blocks, inner),))
