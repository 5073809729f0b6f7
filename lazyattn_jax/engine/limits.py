"""The sizes an engine is built for: one place that decides every static shape."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_ROWS = 64
"""Query rows of one prefill work item."""

RUN_PAGES_TOKENS = 128
"""Slots of one work item: long enough to keep the loop short, short enough not to waste."""

DECODE_WIDTHS = (1, 8)
"""Rows of one decode work item: alone, and shared between requests."""


@dataclass(frozen=True)
class Limits:
    """How much fits: in a request, in a step, in the pool. Tokens and pages are counts.

    ``run_pages`` is the number of pages of one work item. Buckets are the batch shapes that are
    compiled at start-up.
    """

    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_documents: int

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size is {self.page_size}, must be a power of two")

    @property
    def run_pages(self) -> int:
        """Pages of one work item."""
        return max(1, RUN_PAGES_TOKENS // self.page_size)

    def pages_for(self, tokens: int) -> int:
        """Pages that a run of tokens takes."""
        return -(-tokens // self.page_size)

    def items_for(self, pages: int) -> int:
        """Work items that one row block takes over a run of pages."""
        return -(-pages // self.run_pages)

    @property
    def max_items(self) -> int:
        """The most work items that one row block of one request can take."""
        runs = self.max_documents + 2  # and leading text, and stream
        return self.items_for(self.pages_for(self.max_model_len) + runs) + runs

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Tokens of a prefill step, smallest first."""
        return _buckets(BLOCK_ROWS, max(BLOCK_ROWS, self.max_num_batched_tokens), 8)

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Requests of a decode step, smallest first."""
        return _buckets(1, self.max_num_seqs, 4)

    def prefill_items(self, bucket: int) -> int:
        """Work items that a prefill step holds."""
        return self.max_items * (bucket // BLOCK_ROWS)

    def prefill_samples(self, bucket: int) -> int:
        """Requests that can end their prompt in one prefill step."""
        return min(self.max_num_seqs, bucket // 16)

    def decode_items(self, bucket: int) -> int:
        """Work items that a decode step holds, of each width."""
        return self.max_items * min(bucket, 4) + 16 * bucket


def _buckets(first: int, last: int, factor: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] * factor < last:
        sizes.append(sizes[-1] * factor)
    return (*sizes, last) if sizes[-1] < last else tuple(sizes)
