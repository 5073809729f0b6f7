"""Writes of new tokens' keys and values to their slots in the pool."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def xla_write_tokens(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"] | None,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
) -> tuple[Float[Array, "P K S H"], Float[Array, "P K S H"] | None]:
    """See ``kernels.api.write_tokens``."""

    def stored(pages: Array, new: Array) -> Array:
        return pages.at[page, :, offset].set(new, mode="drop")

    if v_pages is None:
        return stored(k_pages, jnp.concatenate([k, v], axis=-1)), None
    return stored(k_pages, k), stored(v_pages, v)
