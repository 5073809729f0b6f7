"""Documents and leading texts that are being encoded, each once for all requests that need it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from lazyattn_jax.cache.segments import Segment, SegmentIndex
from lazyattn_jax.engine.request import Layout, PlacedDocument
from lazyattn_jax.engine.runs import EncodeJob, Placement, Request, TokenRun


class EncodeJobs(Mapping[bytes, EncodeJob]):
    """The encode jobs under way by their keys. Each has somebody who waits for it.

    Args:
      index: where what has been encoded goes.
      items_for: work items of attention over so many pages.
      page_size: tokens of a page.
    """

    def __init__(
        self, index: SegmentIndex, items_for: Callable[[int], int], page_size: int
    ) -> None:
        self._index = index
        self._items_for = items_for
        self._page_size = page_size
        self._jobs: dict[bytes, EncodeJob] = {}
        self._stored: list[EncodeJob] = []

    def __getitem__(self, key: bytes) -> EncodeJob:
        return self._jobs[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def add_leading(self, layout: Layout, found: list[Segment], new_pages: Sequence[int]) -> None:
        """Begins to compute the leading text of a prompt.

        Args:
          layout: of the prompt.
          found: its first pages, pinned, which the job unpins in the end.
          new_pages: for the rest.
        """
        assert layout.prefix_key is not None
        run = TokenRun(layout.leading, range(len(layout.leading)), adapted=layout.adapted)
        run.start_with(found, new_pages)
        job = EncodeJob(layout.prefix_key, run, page_keys=layout.leading_keys)
        job.pinned = found
        self._jobs[job.key] = job

    def add_document(self, layout: Layout, document: PlacedDocument, pages: Sequence[int]) -> None:
        """Begins to encode a document of a prompt into pages; a stored one is brought back."""
        start, tokens = document.encoded_at, document.piece.tokens
        run = TokenRun(tokens, range(start, start + len(tokens)), adapted=layout.adapted)
        run.start_with((), pages)
        prefix = layout.leading_keys if document.after_prefix else ()
        stored = self._index.store.find(document.key)
        job = EncodeJob(document.key, run, prefix_keys=prefix, stored=stored)
        self._jobs[job.key] = job
        if stored is not None:
            self._stored.append(job)

    def take_stored(self) -> list[EncodeJob]:
        """Jobs begun since the last call that are to be brought back."""
        taken, self._stored = self._stored, []
        return taken

    def can_run(self, job: EncodeJob) -> bool:
        """Whether a job can be computed now; holds the leading text for it when it can."""
        if job.stored is not None:
            return False
        if job.prefix_keys and not job.run.context:
            if not all(key in self._index for key in job.prefix_keys):
                return False
            job.pinned = self._index.pin_chain(job.prefix_keys)
            job.run.see((Placement.of_leading(job.pinned),), self._items_for)
        return True

    def finish(self, job: EncodeJob) -> list[Request]:
        """Publishes what has been computed and pins it for those who wait, who are returned."""
        run, size, index = job.run, self._page_size, self._index
        if job.page_keys:
            found = len(job.pinned)
            for i, key in enumerate(job.page_keys[found:], found):
                tokens = min(size, len(run.tokens) - i * size)
                publish(index, run, key, [run.pages[i]], tokens, is_document=False)
        else:
            publish(index, run, job.key, run.pages, len(run.tokens), is_document=True)
        for request in job.waiters:
            request.pending.remove(job)
            if job.page_keys:
                request.leading_pins = index.pin_chain(job.page_keys)
            else:
                request.document_pins += index.pin_chain([job.key])
        self._drop(job)
        return job.waiters

    def leave(self, request: Request) -> None:
        """A request waits no longer; jobs that nobody waits for are given up."""
        for job in request.pending:
            job.waiters.remove(request)
            if not job.waiters:
                self._drop(job)

    def _drop(self, job: EncodeJob) -> None:
        del self._jobs[job.key]
        self._index.unpin(*job.pinned[::-1])
        self._index.free(job.run.private)


def publish(
    index: SegmentIndex,
    run: TokenRun,
    key: bytes,
    pages: Sequence[int],
    tokens: int,
    *,
    is_document: bool,
) -> None:
    """Moves private pages of a run into the index, unless they are there already."""
    if index.publish(key, pages, tokens, is_document=is_document) is not None:
        run.private.difference_update(pages)
