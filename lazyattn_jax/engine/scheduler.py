"""Decides what is computed next, and who holds which pages. Pure host code.

A request moves through WAITING -> ENCODING -> PREFILL -> DECODE -> FINISHED. On admission its
segments are looked up and the hits pinned; every miss becomes an encode job, shared by all requests
that need it; and all pages that its prompt needs are taken at once, so that whatever is admitted
can be computed to the end of its prompt. Only generated tokens take pages later on; when none are
left the youngest request gives its pages back and starts again where it was. So that this is rare,
and documents that others in line need can stay, some of the pool is left when requests are
admitted.

A step counts as computed as soon as it has been started: what is started later finds its KV in the
pool, since the device takes one step after another. Only the tokens it chooses come later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice, takewhile

from lazyattn_jax.cache.eviction import GreedyDual, NewPolicy
from lazyattn_jax.cache.host import HostStore
from lazyattn_jax.cache.pages import PageAllocator
from lazyattn_jax.cache.segments import Segment, SegmentIndex
from lazyattn_jax.engine.batching import decode_batch, prefill_chunks
from lazyattn_jax.engine.encoding import EncodeJobs, publish
from lazyattn_jax.engine.limits import Limits
from lazyattn_jax.engine.line import Line
from lazyattn_jax.engine.runs import (
    Chunk,
    EncodeJob,
    PageCopy,
    Placement,
    Request,
    State,
)

HEADROOM = 0.05  # of the pool, that an admission leaves to requests and documents


class Scheduler:
    """Owns requests, encode jobs, the segment index and page allocation.

    Args:
      limits: of requests, steps and the pool.
      eviction: which segments go first when pages are needed.
      max_overtaken: how many requests may be admitted before one that came earlier.
    """

    def __init__(
        self, limits: Limits, eviction: NewPolicy = GreedyDual, *, max_overtaken: int = 0
    ) -> None:
        self.limits = limits
        store = HostStore(limits.host_pages)
        self.index = SegmentIndex(PageAllocator(limits.num_pages), eviction, store)
        self.waiting = Line(self.index, self._missing, max_overtaken)
        self.active: list[Request] = []  # oldest first
        self.jobs = EncodeJobs(self.index, limits.items_for, limits.page_size)
        self.encoded: list[Request] = []  # had only documents to encode, and they are
        self.num_preemptions = 0
        self._uncopied: dict[Request, list[PageCopy]] = {}
        self._free_seats = list(range(limits.max_num_seqs - 1, -1, -1))
        self._decode_from = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.active)

    def add(self, request: Request, leader: Request | None = None) -> None:
        """Puts a request at the end of the line.

        With a ``leader``, an unfinished request of the same prompt, it gets in line right behind
        that one, once the leader's prompt has been computed and can be shared.
        """
        if leader is None or leader.state is State.FINISHED:
            self.waiting.join(request, self._needed(request))
        else:
            leader.followers.append(request)
            request.leader = leader

    def add_first(self, request: Request) -> None:
        """Puts a request in front of all others."""
        self.waiting.join_first(request, self._needed(request))

    def finish(self, request: Request) -> None:
        """Ends a request at any stage and gives back all it held."""
        if request.state is State.FINISHED:
            return
        if request.leader is not None:
            request.leader.followers.remove(request)
            request.leader = None
        elif request.state is State.WAITING:
            self.waiting.leave(request)
        else:
            self._release(request)
        request.state = State.FINISHED
        self._let_follow(request)

    def _let_follow(self, leader: Request) -> None:
        for follower in leader.followers[::-1]:
            follower.leader = None
            self.add_first(follower)
        leader.followers = []

    # Admission ------------------------------------------------------------------------------------

    def admit(self, seated: Callable[[Request], None] = lambda request: None) -> None:
        """Admits waiting requests one after the other, as long as they fit.

        Args:
          seated: called with each of them once it has a seat.
        """
        while self.waiting and self._free_seats:
            request = self.waiting.next()
            # After a preemption its last tokens may still be on their way.
            if request.run.pending or not self._try_admit(request):
                return
            self.waiting.admit(request)
            request.seat = self._free_seats.pop()
            self.active.append(request)
            seated(request)

    def _needed(self, request: Request) -> list[bytes]:
        """Keys of all segments that a request can use, as far as it is known by now."""
        layout = request.layout
        documents = dict.fromkeys(d.key for d in layout.reused)
        stream = takewhile(self.index.__contains__, self._stream_keys(request))
        return [*layout.leading_keys, *documents, *stream]

    def _missing(self, request: Request) -> int:
        """Tokens of documents that are not stored and that nobody has begun to encode."""
        known = self.index, self.jobs, self.index.store
        return sum(
            len(d.piece.tokens)
            for d in request.layout.reused
            if not any(d.key in where for where in known)
        )

    def _try_admit(self, request: Request) -> bool:
        layout, index = request.layout, self.index
        leading = self.index.pin_chain(layout.leading_keys)
        leading_missing = len(leading) < len(layout.leading_keys)
        distinct = list({d.key: d for d in layout.reused}.values())
        documents = {d.key: index.pin(d.key) for d in distinct}
        stream = self.index.pin_chain(self._stream_keys(request))

        new_leading = leading_missing and layout.prefix_key not in self.jobs
        new_documents = [d for d in distinct if documents[d.key] is None and d.key not in self.jobs]
        pages_for = self.limits.pages_for
        counts = [len(layout.leading_keys) - len(leading) if new_leading else 0]
        counts += [pages_for(len(d.piece.tokens)) for d in new_documents]
        counts += [self.limits.copied_pages(layout)]
        counts += [pages_for(len(request.run.tokens)) - len(stream)]
        # Whoever is alone may have all of it.
        headroom = int(self.limits.num_pages * HEADROOM) if self.active else 0
        fits = sum(counts) + headroom <= index.num_available
        pages = index.allocate(sum(counts)) if fits else None
        if pages is None:
            found = [s for s in documents.values() if s is not None]
            index.unpin(*stream[::-1], *found, *leading[::-1])
            return False

        taken = iter(pages)
        groups = [[next(taken) for _ in range(count)] for count in counts]
        if request.cached_tokens is None:
            computed = {d.key for d in new_documents if d.key not in index.store}
            self._count_cached(request, leading, computed, stream)
        if new_leading:
            self.jobs.add_leading(layout, leading, groups[0])
        elif leading_missing:
            index.unpin(*leading[::-1])  # the job under way holds its own
        else:
            request.leading_pins = leading
        for document, group in zip(new_documents, groups[1:-2], strict=True):
            self.jobs.add_document(layout, document, group)
        if leading_missing:
            assert layout.prefix_key is not None
            self.jobs[layout.prefix_key].wait(request)
        for document in distinct:
            segment = documents[document.key]
            if segment is None:
                self.jobs[document.key].wait(request)
            else:
                request.document_pins.append(segment)
        request.run.start_with(stream, groups[-1])
        request.run.private.update(groups[-2])
        request.copy_pages = groups[-2]
        request.stream_pins = stream
        request.state = State.ENCODING
        self._start_if_ready(request)
        return True

    def _stream_keys(self, request: Request) -> Iterable[bytes]:
        """Keys of the stream pages that may be reused: the last token is always computed.

        Pages whose tokens are on their way have none yet: of a request that was preempted.
        """
        if request.prompt_logprobs is not None:
            return
        run = request.run
        for page in range(min(len(run.tokens) - 1, run.num_known) // self.limits.page_size):
            self._extend_stream_keys(request, page)
            yield request.stream_keys[page]

    def _extend_stream_keys(self, request: Request, page: int) -> None:
        keys = request.stream_keys
        while len(keys) <= page:
            previous = keys[-1] if keys else None
            keys.append(request.layout.stream_key(len(keys), previous, request.run.tokens))

    def _count_cached(
        self,
        request: Request,
        leading: Sequence[Segment],
        computed: set[bytes],
        stream: Sequence[Segment],
    ) -> None:
        seen: set[bytes] = set()
        for i, document in enumerate(request.layout.documents):
            if document.key not in computed or document.key in seen:
                request.cached_document_tokens[i] = document.reused
            seen.add(document.key)
        text = sum(s.num_tokens for s in (*leading, *stream))
        request.cached_tokens = text + sum(request.cached_document_tokens)

    # One step -------------------------------------------------------------------------------------

    def schedule_prefill(self) -> list[Chunk]:
        """Chunks for one prefill step, oldest request first, within the step's capacities."""
        return prefill_chunks(self.active, self.limits, self.jobs.can_run)

    def finish_prefill(self, chunks: Sequence[Chunk]) -> None:
        """Takes note that a step has been started; publishes what is complete."""
        for chunk in chunks:
            chunk.run.computed += chunk.count
            if isinstance(chunk.owner, Request):
                self._publish_full_pages(chunk.owner)
                if chunk.run.remaining == 0:
                    chunk.owner.state = State.DECODE
                    chunk.run.append_pending()
                    self._let_follow(chunk.owner)
            elif chunk.run.remaining == 0:
                self._finish_job(chunk.owner)

    def finish_stored(self, job: EncodeJob) -> None:
        """Takes note that a stored document is being written to its pages."""
        job.run.computed = len(job.run.tokens)
        self._finish_job(job)

    def _finish_job(self, job: EncodeJob) -> None:
        for request in self.jobs.finish(job):
            self._start_if_ready(request)

    def schedule_decode(self) -> list[Request]:
        """Requests for one decode step, each with room for one more token.

        May preempt the youngest requests. When not all fit in a step they take turns.
        """
        ready = [r for r in self.active if _goes_on(r)]
        for request in ready:
            if request.state is State.DECODE and not self._make_room(request):
                self._preempt(request)
        ready = [r for r in ready if r.state is State.DECODE]
        start = self._decode_from % len(ready) if ready else 0
        batch = decode_batch(ready[start:] + ready[:start], self.limits)
        self._decode_from = start + len(batch) if len(batch) < len(ready) else 0
        return batch

    def finish_decode(self, requests: Sequence[Request]) -> None:
        """Takes note that a step with every request's last token has been started."""
        size = self.limits.page_size
        for request in requests:
            run = request.run
            run.computed += 1
            if run.computed % size == 0:
                self._publish_full_pages(request)
            run.append_pending()

    def fill(self, request: Request, token: int) -> None:
        """Takes note of the first pending token of a request."""
        run = request.run
        run.fill(token)
        request.num_generated += 1
        if request.state is State.DECODE and run.num_known % self.limits.page_size == 0:
            self._publish_full_pages(request)

    def spoil(self, owner: EncodeJob | Request, at: int) -> list[Request]:
        """Takes note that a token's KV is unusable: not finite, and not in the pool.

        Ends all requests that see it, and forgets the segments that hold it or what saw it.

        Args:
          owner: of the run.
          at: the token of the run.

        Returns:
          The requests that have been ended.
        """
        page = at // self.limits.page_size
        if isinstance(owner, Request):
            for full in range(page, owner.run.num_known // self.limits.page_size):
                self._extend_stream_keys(owner, full)
            keys, direct = owner.stream_keys[page:], [owner]
        else:
            keys = list(owner.page_keys[page:]) or [owner.key]
            direct = list(owner.waiters)
        lost = set(keys)
        ended = [r for r in direct if r.state is not State.FINISHED]
        ended += [r for r in self.active if r not in ended and lost.intersection(_seen(r))]
        for request in ended:
            self.finish(request)
        for key in keys[::-1]:
            self.index.let_go(key)  # what is unusable is not kept either
            self.index.discard(key)
        return ended

    def _start_if_ready(self, request: Request) -> None:
        if request.pending or request.state is not State.ENCODING:
            return
        for segment in request.pins():
            segment.uses += 1
        layout = request.layout
        if not layout.stream:
            self.encoded.append(request)
            return
        context = []
        if request.leading_pins:
            context.append(Placement.of_leading(request.leading_pins))
        by_key = {segment.key: segment for segment in request.document_pins}
        documents = [
            Placement(
                by_key[d.key].pages[d.repaired // self.limits.page_size :],
                d.reused,
                d.delta,
                d.insert_at,
                d.temperature,
            )
            for d in layout.reused
        ]
        if self.limits.copies_documents:
            documents = self._copied(request, documents)
        request.run.see((*context, *documents), self.limits.items_for)
        request.state = State.PREFILL

    def _copied(self, request: Request, documents: list[Placement]) -> list[Placement]:
        """The request's own copies of its documents, which are still to be made."""
        free = iter(request.copy_pages)
        copies = [PageCopy(d.pages, tuple(islice(free, len(d.pages))), d.delta) for d in documents]
        self._uncopied[request] = copies
        return [replace(d, pages=c.target, delta=0) for d, c in zip(documents, copies, strict=True)]

    def take_copies(self) -> list[PageCopy]:
        """Copies to start before anything else is: their sources are not held any longer."""
        taken, self._uncopied = self._uncopied, {}
        for request in taken:
            self.index.unpin(*request.document_pins[::-1])
            request.document_pins = []
        return list(chain.from_iterable(taken.values()))

    def _publish_full_pages(self, request: Request) -> None:
        run, size = request.run, self.limits.page_size
        full = min(run.computed, run.num_known) // size
        for page in range(len(request.stream_pins), full):
            self._extend_stream_keys(request, page)
            key = request.stream_keys[page]
            publish(self.index, run, key, [run.pages[page]], size, is_document=False)
            # Pinned also when another request's page got in first: then ours stays private, but
            # the chain that ours continues must not lose a link.
            request.stream_pins += self.index.pin_chain([key])

    def _make_room(self, request: Request) -> bool:
        """A slot for the request's next token; preempts younger requests for it if need be."""
        run = request.run
        while len(run.pages) * self.limits.page_size < len(run.tokens):
            page = self.index.allocate(1)
            if page is not None:
                run.pages.extend(page)
                run.private.update(page)
            elif self.active[-1] is request:
                return False
            else:
                self._preempt(self.active[-1])
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.reset()
        request.state = State.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.add_first(request)

    def _release(self, request: Request) -> None:
        self.active.remove(request)
        self._free_seats.append(request.seat)
        request.seat = -1
        self.jobs.leave(request)
        self._uncopied.pop(request, None)
        self.index.unpin(*request.pins())
        self.index.free(request.run.private)
        request.run.private = set()

    def check_integrity(self) -> None:
        """Checks that pages and pins are exactly those of the requests and jobs under way.

        Raises:
          RuntimeError: see ``SegmentIndex.check_integrity``.
        """
        runs = [r.run for r in self.active] + [j.run for j in self.jobs.values()]
        pins = Counter(s.key for r in self.active for s in r.pins())
        pins.update(s.key for j in self.jobs.values() for s in j.pinned)
        self.index.check_integrity([p for run in runs for p in run.private], dict(pins))
        for job in self.jobs.values():
            if not job.waiters:
                raise RuntimeError(f"nobody waits for encode job {job.key.hex()[:12]}")
        seats = sorted(self._free_seats + [r.seat for r in self.active])
        if seats != list(range(self.limits.max_num_seqs)):
            raise RuntimeError(f"the seats taken and free are {seats}")


def _goes_on(request: Request) -> bool:
    """Whether a request has another token to come, as far as the host knows."""
    return request.state is State.DECODE and request.num_sampled < request.max_tokens


def _seen(request: Request) -> list[bytes]:
    """Keys of all that a request sees: of its documents it may have copies only."""
    return [s.key for s in request.pins()] + [d.key for d in request.layout.reused]
