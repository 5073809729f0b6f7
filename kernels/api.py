"""Attention over the pool, and writes to it: pick an implementation and run it.

An implementation raises ``NotImplementedError`` with the reason for inputs it cannot take.
``"auto"`` then tries the next one; a named implementation never falls back.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Literal

import jax
from jaxtyping import Array, Float, Int

from lazyattn_jax.kernels import reference, xla
from lazyattn_jax.kernels.copies import xla_copy_pages
from lazyattn_jax.kernels.mosaic_gpu import attention as mosaic_gpu
from lazyattn_jax.kernels.mosaic_gpu import copies as gpu_copies
from lazyattn_jax.kernels.mosaic_gpu import support as gpu
from lazyattn_jax.kernels.mosaic_gpu import writes as gpu_writes
from lazyattn_jax.kernels.mosaic_tpu import attention as mosaic_tpu
from lazyattn_jax.kernels.mosaic_tpu import support as tpu
from lazyattn_jax.kernels.mosaic_tpu import writes as tpu_writes
from lazyattn_jax.kernels.work import Moves, Turns, Works
from lazyattn_jax.kernels.writes import xla_write_tokens

Implementation = Literal["auto", "mosaic_gpu", "mosaic_tpu", "xla", "reference"]

# Under jit an implementation is traced once for all the layers that call it.
_IMPLEMENTATIONS = MappingProxyType(
    {
        name: jax.jit(attention, static_argnames=("block_rows", "scale"))
        for name, attention in {
            "mosaic_gpu": mosaic_gpu.lazy_attention,
            "mosaic_tpu": mosaic_tpu.lazy_attention,
            "xla": xla.lazy_attention,
            "reference": reference.lazy_attention,
        }.items()
    }
)
_mosaic_gpu_copy, _xla_copy = jax.jit(gpu_copies.copy_pages), jax.jit(xla_copy_pages)
_WRITES = MappingProxyType(
    {"mosaic_gpu": gpu_writes.write_tokens, "mosaic_tpu": tpu_writes.write_tokens}
)
_KERNELS = MappingProxyType({"mosaic_gpu": gpu, "mosaic_tpu": tpu})
"""What the kernels of a kind of device take."""

_AUTO_ORDER = (*_KERNELS, "xla")


def choose(
    implementation: str,
    *,
    dtype: Any,
    head_dim: int,
    page_size: int,
    group: int,
    device: jax.Device,
) -> str:
    """The implementation that will run on a device, so that its work lists can be made.

    Args:
      implementation: ``"auto"`` or the name of one, which is never replaced by another.
      dtype: of queries and pages.
      head_dim: elements of a head.
      page_size: slots of a page.
      group: query heads a KV head.
      device: where the steps run.

    Raises:
      NotImplementedError: the named implementation cannot run there, with the reason.
      ValueError: an unknown implementation.
    """
    if implementation not in ("auto", *_IMPLEMENTATIONS):
        raise ValueError(_unknown(implementation))
    for kernel, support in _KERNELS.items():
        if implementation not in ("auto", kernel):
            continue
        try:
            support.check_device(device)
            support.check_supported(dtype, head_dim, page_size, group)
        except NotImplementedError as reason:
            if implementation == kernel:
                message = f"attention {kernel} cannot be used: {reason}"
                raise NotImplementedError(message) from None
        else:
            return kernel
    return "xla" if implementation == "auto" else implementation


def wants_fused_pages(implementation: str, head_dim: int) -> bool:
    """Whether an implementation takes keys and values side by side in one array of pages."""
    return implementation == "mosaic_tpu" and tpu.is_fused(head_dim)


def _unknown(implementation: str) -> str:
    return (
        f"unknown attention implementation {implementation!r}; "
        f"choose auto or one of {', '.join(_IMPLEMENTATIONS)}"
    )


def _run(
    implementation: str,
    call: Callable[[Callable[..., Float[Array, "T N H"]]], Float[Array, "T N H"]],
) -> Float[Array, "T N H"]:
    if implementation != "auto":
        if implementation not in _IMPLEMENTATIONS:
            raise ValueError(_unknown(implementation))
        return call(_IMPLEMENTATIONS[implementation])
    reasons = []
    for name in _AUTO_ORDER:
        try:
            return call(_IMPLEMENTATIONS[name])
        except NotImplementedError as reason:
            reasons.append(f"{name}: {reason}")
    raise NotImplementedError(
        "no attention implementation takes these inputs; " + "; ".join(reasons)
    )


def lazy_prefill(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"] | None,
    turns: Turns,
    work: Any,
    *,
    block_rows: int,
    scale: float,
    implementation: str = "auto",
) -> Float[Array, "T N H"]:
    """Attention of ragged runs of consecutive tokens over the pool.

    Args:
      q: queries, rotated at their positions in the request; float32, bfloat16 or float16.
      k_pages: keys rotated at the positions they were encoded at; same dtype as q. With fused
        pages ``[P K S 2H]``: each slot's key and then its value.
      v_pages: values; none with fused pages. See ``wants_fused_pages``.
      turns: the rotations of the step.
      work: the work list: what the implementation's ``WorkLists`` made.
      block_rows: the most rows of an item of ``PrefillWork``.
      scale: factor on the scores, usually ``head_dim ** -0.5``.
      implementation: ``"auto"`` or the name of one.

    Returns:
      The attention output in q's dtype; rows without any item are zeros.

    Raises:
      ValueError: shapes or dtypes that disagree, or an unknown implementation.
      NotImplementedError: the chosen implementation cannot take these inputs.

    Source: LazyAttention, arXiv 2606.04302.
    """
    return _run(
        implementation,
        lambda f: f(q, k_pages, v_pages, turns, (work,), block_rows=block_rows, scale=scale),
    )


def lazy_decode(
    q: Float[Array, "B N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"] | None,
    turns: Turns,
    works: Works,
    *,
    scale: float,
    implementation: str = "auto",
) -> Float[Array, "B N H"]:
    """Attention of one token per request over the pool.

    Rows of different requests that hold the same run of pages may share an item, each with its own
    turn, so that the run is read once for all of them. For the arguments, the result and the errors
    see ``lazy_prefill``.
    """
    return _run(
        implementation,
        lambda f: f(q, k_pages, v_pages, turns, works, block_rows=1, scale=scale),
    )


def write_tokens(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"] | None,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
    *,
    implementation: str,
) -> tuple[Float[Array, "P K S H"], Float[Array, "P K S H"] | None]:
    """Stores ``k[t]`` and ``v[t]`` in slot ``offset[t]`` of page ``page[t]``.

    In place when the pool is donated.

    Args:
      k_pages: as ``lazy_prefill``.
      v_pages: as ``lazy_prefill``.
      k: new keys, rotated where they stand.
      v: new values.
      page: pages; one past the pool is nowhere (padding). No slot may be named twice.
      offset: slots of the pages.
      implementation: of the attention, as ``choose`` returns it.
    """
    write = _WRITES.get(implementation, xla_write_tokens)
    return write(k_pages, v_pages, k, v, page, offset)


def copy_pages(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"] | None,
    moves: Moves,
    *,
    implementation: str,
) -> tuple[Float[Array, "P K S H"], Float[Array, "P K S H"] | None]:
    """Copies pages within the pool, with their keys turned; in place when the pool is donated.

    Args:
      k_pages: as ``lazy_prefill``.
      v_pages: as ``lazy_prefill``.
      moves: which pages, and by how much keys are turned.
      implementation: of the attention, as ``choose`` returns it; all but ``mosaic_gpu`` copy
        through XLA.

    Source: Block-Attention, arXiv 2409.15355.
    """
    copy = _mosaic_gpu_copy if implementation == "mosaic_gpu" else _xla_copy
    return copy(k_pages, v_pages, moves)
