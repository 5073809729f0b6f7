"""RoPE on rows of heads, in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def rotate(
    x: Float[Array, "*rows heads H"],
    cos: Float[Array, "*rows H//2"],
    sin: Float[Array, "*rows H//2"],
) -> Float[Array, "*rows heads H"]:
    """Turns every head of a row by the row's angles; computed in float32, returned in x's dtype.

    Element ``i`` is paired with element ``i + H // 2`` (RoFormer, arXiv 2104.09864, eq. 34, with
    the pairs split into halves). Two turns add up: ``rotate(rotate(x, a), b) == rotate(x, a + b)``,
    which is what lets a query be turned back by the delta of a document.
    """
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return turned.astype(x.dtype)
