"""The sizes an engine is built for: one place that decides every static shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lazyattn_jax.engine.request import Layout
from lazyattn_jax.kernels.dense import BLOCK_ROWS, DenseLists, item_pages
from lazyattn_jax.kernels.mosaic_gpu.lists import HopperLists
from lazyattn_jax.kernels.mosaic_tpu.lists import TpuLists
from lazyattn_jax.kernels.work import WorkLists

_FULL_ROWS = 512
"""Rows of a step from which on its time grows with them, not with the weights that are read."""


@dataclass(frozen=True)
class Limits:
    """How much fits: in a request, in a step, in the pool. Tokens and pages are counts.

    A work item is up to ``BLOCK_ROWS`` rows of one request times up to ``item_pages`` pages of one
    run; steps are scheduled so that their items fit. Buckets are the batch shapes that are compiled
    at start-up: by default those of prefill steps grow by a factor of ``prefill_growth``, those of
    decode steps by 4; given ones replace them. With ``copies_documents`` a request takes pages for
    copies of its documents too. ``host_pages`` of evicted documents are kept in the host's memory.
    """

    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_documents: int
    copies_documents: bool = False
    host_pages: int = 0
    prefill_growth: int = 8
    given_prefill_buckets: tuple[int, ...] = ()
    given_decode_buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "host_pages" else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise ValueError(f"{name} is {value}, must be at least {least}")
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size is {self.page_size}, must be a power of two")
        _check_buckets("prefill_buckets", self.given_prefill_buckets, self.max_prefill, BLOCK_ROWS)
        _check_buckets("decode_buckets", self.given_decode_buckets, self.max_num_seqs, 1)

    def pages_for(self, tokens: int) -> int:
        """Pages that a run of tokens takes."""
        return -(-tokens // self.page_size)

    def copied_pages(self, layout: Layout) -> int:
        """Pages that copies of a request's documents take."""
        if not self.copies_documents or not layout.stream:
            return 0
        return sum(self.pages_for(d.reused) for d in layout.reused)

    @cached_property
    def _item_pages(self) -> int:
        return item_pages(self.page_size)

    def items_for(self, pages: int) -> int:
        """Work items that one row block takes over a run of pages."""
        return -(-pages // self._item_pages)

    @cached_property
    def max_runs(self) -> int:
        """The most runs that one request can attend to: documents, leading text, its own stream."""
        return self.max_documents + 2

    @cached_property
    def max_items(self) -> int:
        """The most work items that one row block of one request can take."""
        pages = self.pages_for(self.max_model_len) + self.max_runs
        return self.items_for(pages) + self.max_runs

    @property
    def max_kept_pages(self) -> int:
        """Pages of documents that may be kept: half the pool, and what the longest request leaves.

        So whatever is kept, every request that fits the pool can run, if need be alone.
        """
        return max(0, min(self.num_pages // 2, self.num_pages - self.most_pages))

    @property
    def most_pages(self) -> int:
        """Pages that a request of the longest context may take."""
        pages = self.pages_for(self.max_model_len) + self.max_runs  # each partly filled
        return 2 * pages if self.copies_documents else pages

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Tokens of a prefill step, smallest first."""
        return self.given_prefill_buckets or _buckets(
            BLOCK_ROWS, self.max_prefill, self.prefill_growth
        )

    @property
    def max_prefill(self) -> int:
        """Tokens of the largest prefill step, padding included."""
        return max(BLOCK_ROWS, self.max_num_batched_tokens)

    def worth_computing(self, tokens: int) -> int:
        """How many of so many tokens to compute in one prefill step.

        Padding takes as long as tokens do. Where it would be more than a quarter of the step, what
        fills the next smaller one is computed, and the rest in the next step, with what has come by
        then. Steps smaller than that take as long whether they are full or not.
        """
        smaller = [b for b in self.prefill_buckets if _FULL_ROWS <= b <= tokens]
        padded = next(b for b in self.prefill_buckets if b >= tokens)
        return smaller[-1] if smaller and 4 * tokens < 3 * padded else tokens

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Requests of a decode step, smallest first."""
        return self.given_decode_buckets or _buckets(1, self.max_num_seqs, 4)

    @property
    def copy_buckets(self) -> tuple[int, ...]:
        """Pages that are copied at once, smallest first."""
        largest = max(64, min(self.num_pages, 1024))
        return _buckets(64, largest, 4) if self.copies_documents else ()

    @property
    def transfer_buckets(self) -> tuple[int, ...]:
        """Pages that go to the host's memory or come from there at once, smallest first."""
        sizes = {self.pages_for(64), self.pages_for(256)}
        return tuple(sorted(sizes)) if self.host_pages else ()

    @property
    def transferred_pages(self) -> int:
        """Pages that may be on their way to the host's memory, and as many from there."""
        return max(self.num_pages // 16, self.pages_for(256))

    def prefill_items(self, bucket: int) -> int:
        """Work items that a prefill step holds: 128 a row block, or some long ones."""
        blocks = bucket // BLOCK_ROWS
        return min(self.max_items * blocks, self.max_items * 4 + 128 * blocks)

    def prefill_samples(self, bucket: int) -> int:
        """Requests that can end their prompt in one prefill step."""
        return min(self.max_num_seqs, bucket // 16)

    def choices(self, prefill: bool, bucket: int) -> int:
        """Tokens that are chosen in a step."""
        return self.prefill_samples(bucket) if prefill else bucket

    def decode_items(self, bucket: int) -> int:
        """Work items that a decode step holds, of each width: 64 a request, or some long ones."""
        return self.max_items * min(bucket, 4) + 64 * bucket

    def turns(self, prefill: bool, bucket: int) -> int:
        """Entries of ``Turns`` that a step has, the identity included.

        There are 16 for each request, or each row block of a prefill step, or some with many.
        """
        requests = bucket // BLOCK_ROWS if prefill else bucket
        return 1 + self.max_runs * min(requests, 4) + 16 * requests


def dense_lists(limits: Limits) -> DenseLists:
    """Work lists of the XLA path and the reference, with the capacities of every batch shape."""
    return DenseLists(
        limits.page_size,
        {bucket: limits.prefill_items(bucket) for bucket in limits.prefill_buckets},
        {bucket: limits.decode_items(bucket) for bucket in limits.decode_buckets},
    )


def work_lists(
    limits: Limits, implementation: str, *, group: int, kv_heads: int, head_dim: int, num_cores: int
) -> WorkLists:
    """Makes work lists with the capacities of every batch shape.

    Args:
      limits: of the engine.
      implementation: of the attention, as ``kernels.api.choose`` returns it.
      group: query heads a KV head.
      kv_heads: KV heads.
      head_dim: size of a head.
      num_cores: cores of the device, where the implementation asks for them.
    """
    dense = dense_lists(limits)
    if implementation == "mosaic_tpu":
        return TpuLists(limits.page_size, group, dense.prefill_items, dense.decode_items)
    if implementation == "mosaic_gpu":
        sizes = limits.page_size, group, kv_heads, head_dim, num_cores
        return HopperLists(*sizes, dense.prefill_items, dense.decode_items)
    return dense


def _check_buckets(name: str, sizes: tuple[int, ...], largest: int, least: int) -> None:
    if sizes and (list(sizes) != sorted(set(sizes)) or sizes[0] < least or sizes[-1] != largest):
        raise ValueError(
            f"{name} are {', '.join(map(str, sizes))}; they must rise from at least {least} to "
            f"{largest}, what the largest step has"
        )


def _buckets(first: int, last: int, factor: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] * factor < last:
        sizes.append(sizes[-1] * factor)
    return (*sizes, last) if sizes[-1] < last else tuple(sizes)
