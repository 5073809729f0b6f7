"""Static sizes of the Hopper prefill kernel."""

from __future__ import annotations

from dataclasses import dataclass

from lazyattn_jax.kernels.mosaic_gpu.prefill_plan import TILE

M = 64
"""Rows of a warpgroup."""

FULL, FREE = 0, 1
"""The query barriers: queries have come, and they have been used up."""


@dataclass(frozen=True)
class Shape:
    """Static sizes of one kernel; ``interpret`` is what interpret mode needs."""

    group: int  # a power of two
    head_dim: int
    page_size: int
    kv_heads: int
    stages: int
    split: bool
    rotate: bool
    interpret: bool

    @property
    def tokens(self) -> int:
        """Tokens of a warpgroup."""
        return M // self.group

    @property
    def boxes(self) -> int:
        """TMA boxes of a tile: its pages."""
        return TILE // self.page_size
