"""The device arrays that hold all KV.

One K and one V array per layer, ``[pages, kv_heads, page_size, head_dim]``: a page of one head is
contiguous, so a kernel reads it in one piece, and no layer's array is ever a slice of a larger one
(slicing a stack copies it).

Where rows of a head would be padded in memory, the pool can be fused: one array per layer,
``[pages, kv_heads, page_size, 2 * head_dim]``, that holds each slot's key next to its value.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lazyattn_jax.kernels.api import write_tokens
from lazyattn_jax.models.config import LlamaConfig


class LayerKV(NamedTuple):
    """One layer's share of the pool; fused, ``k`` holds the values too and ``v`` is none."""

    k: Float[Array, "P K S H"]
    v: Float[Array, "P K S H"] | None


class Slots(NamedTuple):
    """Where a step's new tokens are stored; a page id past the pool means nowhere (padding)."""

    page: Int[Array, "T"]
    offset: Int[Array, "T"]


def bytes_per_token(config: LlamaConfig, dtype: jnp.dtype) -> int:
    """KV bytes of one token over all layers."""
    size = jnp.dtype(dtype).itemsize
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * size


def make_pool(
    config: LlamaConfig, num_pages: int, page_size: int, dtype: jnp.dtype, *, fused: bool = False
) -> list[LayerKV]:
    """Allocates the pool on the default device."""
    width = config.head_dim * (2 if fused else 1)
    shape = (num_pages, config.num_kv_heads, page_size, width)
    make = jax.jit(lambda: jnp.zeros(shape, dtype))
    return [LayerKV(make(), None if fused else make()) for _ in range(config.num_layers)]


def write(
    kv: LayerKV,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slots: Slots,
    *,
    implementation: str,
) -> LayerKV:
    """Stores new keys (rotated where they stand) and values; in place when the pool is donated.

    Args:
      kv: the pool of a layer.
      k: new keys.
      v: new values.
      slots: where they are stored.
      implementation: see ``kernels.api.write_tokens``.
    """
    pages = write_tokens(*kv, k, v, slots.page, slots.offset, implementation=implementation)
    return LayerKV(*pages)


def take_pages(pool: list[LayerKV], pages: Int[Array, "n"]) -> Float[Array, "A n K S H"]:
    """Copies of pages, from all arrays of the pool."""
    return jnp.stack([array[pages] for array in jax.tree.leaves(pool)])


def put_pages(
    pool: list[LayerKV], pages: Int[Array, "n"], taken: Float[Array, "A n K S H"]
) -> list[LayerKV]:
    """Writes what ``take_pages`` took to pages, in place when the pool is donated.

    Pages past the pool are written nowhere.
    """
    arrays, tree = jax.tree.flatten(pool)
    put = [a.at[pages].set(t, mode="drop") for a, t in zip(arrays, taken, strict=True)]
    written: list[LayerKV] = jax.tree.unflatten(tree, put)
    return written
