"""The line in front of the engine: who is admitted next, and what the pool should keep for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from lazyattn_jax.cache.segments import SegmentIndex
from lazyattn_jax.engine.runs import Request


@dataclass(slots=True)
class _Place:
    turn: int
    keys: Sequence[bytes]
    overtaken: int = 0


class Line:
    """Requests that wait to be admitted, in order.

    Whoever needs the fewest tokens encoded goes first, but nobody is overtaken by more than so many
    others; with none it is first come, first served. The index knows what all of them need.

    Args:
      index: of the pool's segments.
      missing: how many tokens have to be encoded for a request.
      max_overtaken: how many may overtake a request.
    """

    def __init__(
        self, index: SegmentIndex, missing: Callable[[Request], int], max_overtaken: int
    ) -> None:
        self._index = index
        self._missing = missing
        self._max_overtaken = max_overtaken
        self._places: OrderedDict[Request, _Place] = OrderedDict()
        self._behind, self._ahead = count(), count(-1, -1)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._places)

    def join(self, request: Request, keys: Sequence[bytes]) -> None:
        """Puts a request, which needs segments of some keys, at the end."""
        self._put(request, _Place(next(self._behind), keys))

    def join_first(self, request: Request, keys: Sequence[bytes]) -> None:
        """Puts a request in front of all others, which do not overtake it."""
        self._put(request, _Place(next(self._ahead), keys, self._max_overtaken))
        self._places.move_to_end(request, last=False)

    def leave(self, request: Request) -> None:
        """Takes a request out of the line."""
        place = self._places.pop(request)
        self._index.unwant(place.keys, place.turn)

    def next(self) -> Request:
        """Who is to be admitted next; there must be someone."""
        for request, place in self._places.items():
            if place.overtaken >= self._max_overtaken:
                return request
        return min(self._places, key=self._missing)  # of equals the first

    def admit(self, request: Request) -> None:
        """Takes a request out of the line, past those before it."""
        for other, place in self._places.items():
            if other is request:
                break
            place.overtaken += 1
        self.leave(request)

    def _put(self, request: Request, place: _Place) -> None:
        self._places[request] = place
        self._index.want(place.keys, place.turn)
