"""What the Hopper kernels take."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def check_supported(dtype: Any, head_dim: int, page_size: int, group: int) -> None:
    """Raises ``NotImplementedError`` with the reason for what the kernel does not take."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"dtype {jnp.dtype(dtype).name}; takes bfloat16 and float16")
    if head_dim not in (64, 128):
        raise NotImplementedError(f"head_dim {head_dim}; takes 64 and 128")
    if page_size not in (16, 32, 64, 128):
        raise NotImplementedError(f"page size {page_size}; takes 16, 32, 64 and 128")
    if group > 16:
        raise NotImplementedError(f"{group} query heads a KV head; takes up to 16")


def check_device(device: jax.Device) -> None:
    """Raises ``NotImplementedError`` for a device that the kernels do not run on."""
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability != "9.0":
        kind = device.device_kind
        version = "" if capability is None else f", compute capability {capability}"
        raise NotImplementedError(f"device {kind}{version}; runs on NVIDIA Hopper GPUs (9.0)")


def check_work(
    first_part: jax.Array, num_rows: int, tiles: jax.Array, page_size: int, boxes: int
) -> None:
    """Raises ``ValueError`` for a work list made for other queries or another page size."""
    if first_part.shape[0] != num_rows + 1:
        raise ValueError(f"the work list has {first_part.shape[0] - 1} query rows, q {num_rows}")
    if tiles.shape[1] != boxes:
        raise ValueError(
            f"the work list has {tiles.shape[1]} boxes a tile, pages of {page_size} slots need "
            f"{boxes}"
        )
