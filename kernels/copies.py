"""Copies of pages within the pool, with their keys turned: what Block-Attention does for a request.

Attention over the pool needs none of this; it is here so that both can be compared.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from lazyattn_jax.kernels.rotary import rotate
from lazyattn_jax.kernels.work import Moves


def xla_copy_pages(
    k_pages: Float[Array, "P K S H"], v_pages: Float[Array, "P K S H"] | None, moves: Moves
) -> tuple[Float[Array, "P K S H"], Float[Array, "P K S H"] | None]:
    """See ``kernels.api.copy_pages``."""
    kv_heads = k_pages.shape[1]

    def stored(pages: Array, new: Array) -> Array:
        return pages.at[moves.target].set(new, mode="drop")

    def turned(k: Float[Array, "n K S H"]) -> Float[Array, "n K S H"]:
        cos, sin = (jnp.repeat(rows[moves.turn][:, None], kv_heads, 1) for rows in moves.turns)
        return rotate(k, cos, sin)

    if v_pages is None:
        k, v = jnp.split(k_pages[moves.source], 2, axis=-1)
        return stored(k_pages, jnp.concatenate([turned(k), v], axis=-1)), None
    k, v = k_pages[moves.source], v_pages[moves.source]
    return stored(k_pages, turned(k)), stored(v_pages, v)
