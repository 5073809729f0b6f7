"""The device arrays that hold all KV.

One K and one V array per layer, ``[pages, kv_heads, page_size, head_dim]``: a page of one head is
contiguous, so a kernel reads it in one piece, and no layer's array is ever a slice of a larger one
(slicing a stack copies it).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lazyattn_jax.models.config import LlamaConfig


class LayerKV(NamedTuple):
    """One layer's share of the pool."""

    k: Float[Array, "P K S H"]
    v: Float[Array, "P K S H"]


class Slots(NamedTuple):
    """Where a step's new tokens are stored; a page id past the pool means nowhere (padding)."""

    page: Int[Array, "T"]
    offset: Int[Array, "T"]


def bytes_per_token(config: LlamaConfig, dtype: jnp.dtype) -> int:
    """KV bytes of one token over all layers."""
    size = jnp.dtype(dtype).itemsize
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * size


def make_pool(
    config: LlamaConfig, num_pages: int, page_size: int, dtype: jnp.dtype
) -> list[LayerKV]:
    """Allocates the pool on the default device."""
    shape = (num_pages, config.num_kv_heads, page_size, config.head_dim)
    make = jax.jit(lambda: jnp.zeros(shape, dtype))
    return [LayerKV(make(), make()) for _ in range(config.num_layers)]


def write(kv: LayerKV, k: Float[Array, "T K H"], v: Float[Array, "T K H"], slots: Slots) -> LayerKV:
    """Stores new keys (rotated where they stand) and values; in place when the pool is donated."""
    return LayerKV(
        kv.k.at[slots.page, :, slots.offset].set(k, mode="drop"),
        kv.v.at[slots.page, :, slots.offset].set(v, mode="drop"),
    )
