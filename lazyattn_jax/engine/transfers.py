"""Documents on their way between the pool and the host's memory, beside the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Array

from lazyattn_jax.engine.runner import Runner
from lazyattn_jax.engine.runs import EncodeJob
from lazyattn_jax.engine.scheduler import Scheduler


class _Transfer(NamedTuple):
    num_pages: int
    parts: list[Array]

    @property
    def has_arrived(self) -> bool:
        return all(part.is_ready() for part in self.parts)


class Transfers:
    """Stores documents that are evicted, and brings back those that are needed again.

    Pages on their way have a copy of their own on the device, so there are at most so many at a
    time in each direction: what is evicted beyond that is not stored, what is needed comes later.

    Args:
      scheduler: knows what has been evicted, and what is to come back.
      runner: moves it.
      most_pages: on their way at a time, in each direction.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, most_pages: int) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._most_pages = most_pages
        self._leaving: deque[_Transfer] = deque()
        self._due: deque[EncodeJob] = deque()  # to be sent for
        self._coming: deque[tuple[EncodeJob, _Transfer]] = deque()

    def store_evicted(self) -> None:
        """Starts to store what has been evicted; before anything writes to its pages."""
        store = self._scheduler.index.store
        while self._leaving and self._leaving[0].has_arrived:
            self._leaving.popleft()
        for segment in store.take_leaving():
            size = self._runner.moved_pages(len(segment.pages))
            if _under_way(self._leaving) + size <= self._most_pages:
                kv = self._runner.store(segment.pages)
                self._leaving.append(_Transfer(size, kv))
                store.put(segment.key, size, kv)

    def bring_back(self, *, wait: bool = False) -> int:
        """Writes documents that have arrived to their pages, for those who need them.

        Args:
          wait: for one at least, since there is nothing else to do. It is the device that waits.

        Returns:
          Tokens that were brought back.
        """
        self._due += self._scheduler.jobs.take_stored()
        self._send_for()
        tokens = 0
        while self._coming and (wait or self._coming[0][1].has_arrived):
            wait = False
            job, transfer = self._coming.popleft()
            if self._is_needed(job):
                self._runner.bring_back(transfer.parts, job.run.pages)
                self._scheduler.finish_stored(job)
                tokens += len(job.run.tokens)
            self._send_for()
        return tokens

    def _send_for(self) -> None:
        while self._due:
            job = self._due[0]
            size = self._runner.moved_pages(len(job.run.pages))
            under_way = _under_way([transfer for _, transfer in self._coming])
            if under_way and under_way + size > self._most_pages:
                return
            self._due.popleft()
            if self._is_needed(job):
                self._coming.append((job, _Transfer(size, self._runner.send_for(job.stored))))

    def _is_needed(self, job: EncodeJob) -> bool:
        """Whether somebody waits for it still; otherwise its pages may be somebody else's."""
        return self._scheduler.jobs.get(job.key) is job


def _under_way(transfers: Sequence[_Transfer] | deque[_Transfer]) -> int:
    return sum(transfer.num_pages for transfer in transfers)
