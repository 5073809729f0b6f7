"""``WorkLists`` of the Hopper kernels. Pure host code (numpy)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lazyattn_jax.kernels.dense import BLOCK_ROWS, ITEM_SLOTS
from lazyattn_jax.kernels.mosaic_gpu import plan, prefill_plan
from lazyattn_jax.kernels.mosaic_gpu.plan import (
    Arrangement,
    HopperDecodeWork,
    arrange,
    lay_out,
    num_workers,
    tile_slots,
)
from lazyattn_jax.kernels.mosaic_gpu.prefill_plan import (
    HopperPrefillWork,
    most_pieces,
    plan_prefill,
    rows_per_block,
)
from lazyattn_jax.kernels.work import DoesNotFit, References, Runs, WorkLists


@dataclass(frozen=True)
class HopperLists(WorkLists):
    """``WorkLists`` of ``HopperPrefillWork`` and ``HopperDecodeWork``.

    Attributes:
      page_size: slots of a page.
      group: query heads a KV head.
      kv_heads: KV heads.
      head_dim: size of a head.
      num_cores: cores of the GPU.
      prefill_items: the work a prefill step may hold, by bucket, counted in ``BLOCK_ROWS`` rows
        times ``ITEM_SLOTS`` slots of one run, as the scheduler counts.
      decode_items: the work a decode step may hold, by bucket, in one row times ``ITEM_SLOTS``.
    """

    page_size: int
    group: int
    kv_heads: int
    head_dim: int
    num_cores: int
    prefill_items: Mapping[int, int]
    decode_items: Mapping[int, int]

    def prefill(
        self, references: References, runs: Runs, bucket: int
    ) -> tuple[HopperPrefillWork] | None:
        """One list."""
        try:
            work = plan_prefill(
                references,
                runs,
                num_rows=bucket,
                page_size=self.page_size,
                group=self.group,
                kv_heads=self.kv_heads,
                workers=self.num_cores,
                most_pieces=self._most_pieces(bucket),
                capacity=self._prefill_capacity(bucket),
            )
        except DoesNotFit:
            return None
        return (work,)

    @property
    def pages_together(self) -> int:
        """Pages of a tile of the decode kernel."""
        return max(1, tile_slots(self.head_dim) // self.page_size)

    def arrange(self, references: References, runs: Runs) -> Arrangement:
        """Which runs are shared, and the order of all of them."""
        return arrange(references, runs, group=self.group, tile=tile_slots(self.head_dim))

    def decode(
        self, arranged: Arrangement, runs: Runs, bucket: int
    ) -> tuple[HopperDecodeWork] | None:
        """One list."""
        items, workers = self.decode_items[bucket], num_workers(self.kv_heads, self.num_cores)
        tile = tile_slots(self.head_dim)
        tiles = items * (ITEM_SLOTS // tile)
        try:
            work = lay_out(
                arranged,
                runs,
                num_rows=bucket,
                page_size=self.page_size,
                group=self.group,
                tile=tile,
                workers=workers,
                capacity=plan.Capacity.of(bucket, items, tiles, workers),
            )
        except DoesNotFit:
            return None
        return (work,)

    def _most_pieces(self, bucket: int) -> int:
        return most_pieces(bucket, self.group, self.kv_heads, self.num_cores)

    def _prefill_capacity(self, bucket: int) -> prefill_plan.Capacity:
        """What any step of so many items takes.

        A chunk starts a block of its own, and so does the padding; a chunk has at least one item.
        Both count blocks of a chunk from its first row on, so that those of the scheduler's items
        are whole blocks of the kernel's, or one of those holds several.
        Cutting blocks into pieces adds up to ``ROUNDS`` items and entries for each worker.
        """
        size = rows_per_block(self.group)
        items = self.prefill_items[bucket]
        blocks = bucket // size + 2 * min(bucket, items) + 1
        tiles = max(1, BLOCK_ROWS // size) * items
        entries = tiles + blocks
        pieces = self._most_pieces(bucket)
        cut = 0 if pieces == 1 else prefill_plan.ROUNDS * self.num_cores // self.kv_heads
        parts = 0 if pieces == 1 else (blocks + cut) * size
        return prefill_plan.Capacity(blocks + cut, entries + cut, tiles, parts)
