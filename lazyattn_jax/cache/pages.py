"""Allocation of pool pages: a free list that notices misuse."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Hands out page ids ``0 .. num_pages - 1``. Pages are equal, so any free one will do."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # low ids first, for readable traces
        self._allocated = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that ``allocate`` can still hand out."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Takes ``count`` pages, or none at all when fewer are free."""
        if count > len(self._free):
            return None
        if not count:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self._allocated[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back.

        Raises:
          RuntimeError: a page is free already; the pool would hand it out twice.
        """
        for page in pages:
            if not self._allocated[page]:
                raise RuntimeError(f"page {page} is freed twice")
            self._allocated[page] = 0
            self._free.append(page)

    def free_pages(self) -> list[int]:
        """The free page ids, for integrity checks."""
        return list(self._free)
