"""The TPU kernels behind the contract of all implementations."""

from __future__ import annotations

from jaxtyping import Array, Float

from lazyattn_jax.kernels.mosaic_tpu.decode import lazy_decode
from lazyattn_jax.kernels.mosaic_tpu.plan import TpuDecodeWork, TpuPrefillWork
from lazyattn_jax.kernels.mosaic_tpu.prefill import lazy_prefill
from lazyattn_jax.kernels.work import Turns, Works


def lazy_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"] | None,
    turns: Turns,
    works: Works,
    *,
    block_rows: int,
    scale: float,
) -> Float[Array, "T N H"]:
    """See ``kernels.api``; the work lists say which kernel runs.

    Raises:
      NotImplementedError: work lists of another implementation, or inputs that the kernels do not
        take.
    """
    del block_rows  # of other lists
    if len(works) == 1 and isinstance(works[0], TpuPrefillWork):
        return lazy_prefill(q, k_pages, v_pages, turns, works[0], scale=scale)
    if len(works) == 1 and isinstance(works[0], TpuDecodeWork):
        return lazy_decode(q, k_pages, v_pages, turns, works[0], scale=scale)
    kinds = ", ".join(type(work).__name__ for work in works)
    raise NotImplementedError(f"work lists {kinds}; takes those that TpuLists makes")
