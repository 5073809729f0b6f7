"""Writes of new tokens' keys and values to their slots in a pool on a TPU."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def write_tokens(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"] | None,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
) -> tuple[Float[Array, "P K S H"], Float[Array, "P K S H"] | None]:
    """See ``kernels.api.write_tokens``.

    Indexed by its leading axes a pool stays as it lies; otherwise the TPU compiler transposes all
    of it, there and back, to write many tokens.
    """
    head = jnp.arange(k_pages.shape[1])

    def stored(pages: Array, new: Array) -> Array:
        return pages.at[page[:, None], head, offset[:, None]].set(new, mode="drop")

    if v_pages is None:
        return stored(k_pages, jnp.concatenate([k, v], axis=-1)), None
    return stored(k_pages, k), stored(v_pages, v)
