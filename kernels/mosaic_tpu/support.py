"""What the TPU kernels take."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from lazyattn_jax.kernels.mosaic_tpu.layout import LANES
from lazyattn_jax.kernels.shapes import check_shapes
from lazyattn_jax.kernels.work import Turns


def check_supported(dtype: Any, head_dim: int, page_size: int, group: int) -> None:
    """Raises ``NotImplementedError`` with the reason for what the kernels do not take."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"dtype {jnp.dtype(dtype).name}; takes bfloat16 and float32")
    if head_dim not in (64, 128):
        raise NotImplementedError(f"head_dim {head_dim}; takes 64 and 128")
    if page_size not in (16, 32, 64, 128, 256):
        raise NotImplementedError(f"page size {page_size}; takes 16, 32, 64, 128 and 256")
    if group > 16:
        raise NotImplementedError(f"{group} query heads a KV head; takes up to 16")


def check_device(device: jax.Device) -> None:
    """Raises ``NotImplementedError`` for a device that the kernels do not run on."""
    kind = device.device_kind
    if device.platform != "tpu" or kind in ("TPU v2", "TPU v3"):
        raise NotImplementedError(f"device {kind}; runs on TPU v4 and later")


def is_fused(head_dim: int) -> bool:
    """Whether the kernels take keys and values side by side in one array of pages."""
    return 2 * head_dim == LANES


def check_arrays(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array | None, turns: Turns) -> int:
    """Checks that arrays agree and are what the kernels take; returns query heads a KV head.

    Raises:
      NotImplementedError: dtype, head_dim, page size, group size or kind of pages.
      ValueError: shapes or dtypes that disagree.
    """
    head_dim, (num_pages, kv_heads, page_size, width) = q.shape[-1], k_pages.shape
    if v_pages is None:
        if width % 2:
            raise ValueError(f"fused pages are {k_pages.shape}, rows of them must be even")
        width //= 2
        half = jax.ShapeDtypeStruct((num_pages, kv_heads, page_size, width), k_pages.dtype)
        group = check_shapes(q, half, half, turns)
    else:
        group = check_shapes(q, k_pages, v_pages, turns)
    check_supported(q.dtype, head_dim, page_size, group)
    if is_fused(head_dim) != (v_pages is None):
        kind = "fused pages" if v_pages is None else "keys and values in arrays of their own"
        raise NotImplementedError(f"{kind} at head_dim {head_dim}; fused are taken at 64 only")
    return group


def heads_at_once(kv_heads: int, bytes_of: Any, interpret: bool) -> tuple[int, int]:
    """KV heads that a core attends with at once, and bytes of its memory that this takes.

    As many as there is room for, so that a page comes in one piece; no more than leave some to
    every core.

    Args:
      kv_heads: KV heads of the pages.
      bytes_of: what so many heads take.
      interpret: no TPU is there that could be asked for its size.

    Raises:
      NotImplementedError: not even one head fits.
    """
    cores, capacity = 1, 128 * 2**20
    if not interpret:
        info = pltpu.get_tpu_info()
        cores, capacity = info.num_cores, info.vmem_capacity_bytes
    room = capacity * 7 // 8
    most = max(1, kv_heads // cores)
    for heads in range(most, 0, -1):
        if kv_heads % heads == 0 and bytes_of(heads) <= room:
            return heads, bytes_of(heads)
    raise NotImplementedError(
        f"a step that takes {bytes_of(1) / 2**20:.1f} MiB of a core's memory a KV head; "
        f"{room / 2**20:.1f} MiB are there. Fewer requests at a time take less (max_num_seqs)"
    )
