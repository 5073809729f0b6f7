"""Writes the keys and values of a step's new tokens to their slots in the pool.

A block brings some tokens into shared memory in one copy each of keys and values, and sends each
token's heads to its slot by a copy of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

_BUFFER_BYTES = 1 << 15
"""Bytes of keys, and as many of values, that a block moves: three blocks fit on a core."""


def write_tokens(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """Stores ``k[t]`` and ``v[t]`` in slot ``offset[t]`` of page ``page[t]``.

    Args:
      k_pages: keys; written in place where the pool is donated.
      v_pages: values.
      k: new keys, in the pool's dtype.
      v: new values.
      page: pages; one past the pool is nowhere (padding). No slot may be named twice.
      offset: slots of the pages.
      interpret: ``plgpu.InterpretGPUParams`` to run on a CPU.
    """
    num_tokens, kv_heads, head_dim = k.shape
    # Fewer tokens a block where there would be less than two blocks a core.
    most = _BUFFER_BYTES // (kv_heads * head_dim * k.dtype.itemsize)
    some = max(1, min(most, num_tokens // 256))
    buffer = plgpu.SMEM((some, kv_heads, head_dim), k.dtype)
    kernel = plgpu.kernel(
        functools.partial(_block, k_pages.shape[0], num_tokens, some),
        grid=(-(-num_tokens // some),),
        grid_names=("block",),
        scratch_types={
            "k_new": buffer,
            "v_new": buffer,
            "filled": plgpu.Barrier(num_arrivals=2),
        },
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        interpret=interpret,
    )
    pools = jax.new_ref(k_pages), jax.new_ref(v_pages)
    kernel(*pools, k, v, page.astype(jnp.int32), offset.astype(jnp.int32))
    k_pages, v_pages = (jax.freeze(pool) for pool in pools)
    return k_pages, v_pages


def _block(
    num_pages,
    num_tokens,
    some,
    k_pages,
    v_pages,
    k_ref,
    v_ref,
    page_ref,
    offset_ref,
    *,
    k_new,
    v_new,
    filled,
):
    # The last block ends with the tokens, and leaves those alone that are another's.
    own = lax.axis_index("block") * some
    first = jnp.minimum(own, num_tokens - some)
    for ref, new in ((k_ref, k_new), (v_ref, v_new)):
        plgpu.copy_gmem_to_smem(ref.at[pl.ds(first, some)], new, filled)
    places = [(page_ref[first + t], offset_ref[first + t]) for t in range(some)]
    plgpu.barrier_wait(filled)
    for t, (page, offset) in enumerate(places):

        @pl.when((page < num_pages) & (first + t >= own))
        def _(t=t, page=page, offset=offset):
            for new, pages in ((k_new, k_pages), (v_new, v_pages)):
                plgpu.copy_smem_to_gmem(new.at[t], pages.at[page, :, offset])

    plgpu.wait_smem_to_gmem(0)
