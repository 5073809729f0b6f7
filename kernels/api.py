"""Attention over the pool: pick an implementation and run it.

An implementation raises ``NotImplementedError`` with the reason for inputs it cannot take.
``"auto"`` then tries the next one; a named implementation never falls back.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Literal

import jax
from jaxtyping import Array, Float

from lazyattn_jax.kernels import reference, xla
from lazyattn_jax.kernels.work import DecodeWork, PrefillWork, Turns

Implementation = Literal["auto", "xla", "reference"]

# Under jit an implementation is traced once for all the layers that call it.
_IMPLEMENTATIONS = MappingProxyType(
    {
        name: jax.jit(attention, static_argnames=("block_rows", "scale"))
        for name, attention in {
            "xla": xla.lazy_attention,
            "reference": reference.lazy_attention,
        }.items()
    }
)
_AUTO_ORDER = ("xla",)


def _run(
    implementation: str,
    call: Callable[[Callable[..., Float[Array, "T N H"]]], Float[Array, "T N H"]],
) -> Float[Array, "T N H"]:
    if implementation != "auto":
        if implementation not in _IMPLEMENTATIONS:
            raise ValueError(
                f"unknown attention implementation {implementation!r}; "
                f"choose auto or one of {', '.join(_IMPLEMENTATIONS)}"
            )
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
    v_pages: Float[Array, "P K S H"],
    turns: Turns,
    work: PrefillWork,
    *,
    block_rows: int,
    scale: float,
    implementation: str = "auto",
) -> Float[Array, "T N H"]:
    """Attention of ragged runs of consecutive tokens over the pool.

    Args:
      q: queries, rotated at their positions in the request; float32, bfloat16 or float16.
      k_pages: keys rotated at the positions they were encoded at; same dtype as q.
      v_pages: values.
      turns: one rotation per distinct delta of the step.
      work: the work list; within an item rows are consecutive and share one turn.
      block_rows: the most rows of an item.
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
    v_pages: Float[Array, "P K S H"],
    turns: Turns,
    works: tuple[DecodeWork, ...],
    *,
    scale: float,
    implementation: str = "auto",
) -> Float[Array, "B N H"]:
    """Attention of one token per request over the pool.

    Rows of different requests that hold the same run of pages may share an item, each with its own
    turn, so that the run is read once for all of them. ``works`` are lists of different widths
    (rows an item), so that runs held by one request do not pay for empty rows. For the other
    arguments, the result and the errors see ``lazy_prefill``.
    """
    return _run(
        implementation,
        lambda f: f(q, k_pages, v_pages, turns, works, block_rows=1, scale=scale),
    )
