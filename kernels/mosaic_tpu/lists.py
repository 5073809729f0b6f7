"""``WorkLists`` of the TPU kernels. Pure host code (numpy)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lazyattn_jax.kernels.dense import BLOCK_ROWS
from lazyattn_jax.kernels.mosaic_tpu.plan import (
    TpuDecodeWork,
    TpuPrefillWork,
    decode_words,
    plan_decode,
    plan_prefill,
    prefill_words,
    window_rows,
)
from lazyattn_jax.kernels.work import DoesNotFit, References, Runs, WorkLists


@dataclass(frozen=True)
class TpuLists(WorkLists):
    """``WorkLists`` of ``TpuPrefillWork`` and ``TpuDecodeWork``.

    Attributes:
      page_size: slots of a page.
      group: query heads a KV head.
      prefill_items: the work a prefill step may hold, by bucket, counted in ``BLOCK_ROWS`` rows
        times ``ITEM_SLOTS`` slots of one run, as the scheduler counts.
      decode_items: the work a decode step may hold, by bucket, in one row times ``ITEM_SLOTS``.
    """

    page_size: int
    group: int
    prefill_items: Mapping[int, int]
    decode_items: Mapping[int, int]

    def prefill(
        self, references: References, runs: Runs, bucket: int
    ) -> tuple[TpuPrefillWork] | None:
        """One list."""
        # Rows that the scheduler counts as n blocks overlap so many windows at most.
        windows = 1 + max(1, BLOCK_ROWS // window_rows(self.group))
        words = windows * prefill_words(self.page_size)
        try:
            work = plan_prefill(
                references,
                runs,
                num_rows=bucket,
                page_size=self.page_size,
                group=self.group,
                capacity=self.prefill_items[bucket] * words,
            )
        except DoesNotFit:
            return None
        return (work,)

    def decode(self, arranged: References, runs: Runs, bucket: int) -> tuple[TpuDecodeWork] | None:
        """One list."""
        words = decode_words(self.page_size)
        try:
            work = plan_decode(
                arranged,
                runs,
                page_size=self.page_size,
                capacity=self.decode_items[bucket] * words,
            )
        except DoesNotFit:
            return None
        return (work,)
