"""The static schedule of a compiled TPU kernel: how many bundles its loops take.

A core issues one bundle of instructions a cycle, in the order that the compiler chose, unless it
has to wait. So bundles times the trip counts of the loops that they are in are the cycles of a
kernel that never waits for memory. Trip counts depend on a work list, and are not in the schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) *([A-Z]{2})? *:", re.MULTILINE)
_BRANCH = re.compile(r"sbr\.rel [^;}]*target = \$region(\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")


@dataclass
class Part:
    """A loop of a schedule, or bundles that a branch may skip, or all of it.

    Attributes:
      is_loop: whether it is a loop.
      bundles: its own, without those of inner parts.
      fills_scalars: whether it brings numbers into scalar memory.
      inner: parts in it, in the order of the schedule.
    """

    is_loop: bool
    bundles: int = 0
    fills_scalars: bool = False
    inner: list[Part] = field(default_factory=list)

    @property
    def loops(self) -> list[Part]:
        """Loops that are in no further loop."""
        return [loop for part in self.inner for loop in ([part] if part.is_loop else part.loops)]


class Loop(NamedTuple):
    """How often a loop of a kernel runs: begun so many times, and so many trips in all of them."""

    name: str
    begun: int
    trips: int
    inner: tuple[Loop, ...] = ()


def parse(text: str, delay_slots: int) -> Part:
    """Reads a schedule as libtpu writes it (``final_bundles``).

    Args:
      text: of the file.
      delay_slots: the most bundles after a branch that run whether or not it is taken.

    Raises:
      ValueError: no schedule.
    """
    starts = list(_BUNDLE.finditer(text))
    if not starts:
        raise ValueError("no bundles in the schedule")
    ends = [*(start.start() for start in starts[1:]), len(text)]
    bundles = [text[a.end() : b] for a, b in zip(starts, ends, strict=True)]
    region = {int(n): i for i, bundle in enumerate(bundles) for n in _REGION.findall(bundle)}
    begins = {i for i, start in enumerate(starts) if start[1]} | set(region.values())
    spans = []
    for at, bundle in enumerate(bundles):
        for name in _BRANCH.findall(bundle):
            # Where a region starts nowhere the kernel ends.
            to = region.get(int(name), len(bundles))
            slots = range(at + 1, at + delay_slots + 1)
            after = next((slot for slot in slots if slot in begins), slots.stop)
            if to <= at:
                spans.append((to, after, True))
            elif to > after:
                spans.append((after, to, False))
    fills = [i for i, bundle in enumerate(bundles) if "_to_smem" in bundle]
    return _nest(spans, fills, len(bundles))


def cycles(schedule: Part, loops: Sequence[Loop]) -> int:
    """Cycles of a kernel that never waits.

    Code that a branch may skip counts as often as the loops in it are begun. If there are none it
    counts always, unless it brings numbers into scalar memory: a work list comes in large pieces.

    Args:
      schedule: of the kernel.
      loops: its loops, in the order of the schedule.

    Raises:
      ValueError: the schedule has other loops.
    """
    _check(schedule, loops, "the kernel")
    return _cycles(schedule, 1, iter(loops))


def _check(part: Part, loops: Sequence[Loop], name: str) -> None:
    found = part.loops
    if len(found) != len(loops):
        names = ", ".join(loop.name for loop in loops) or "none"
        raise ValueError(
            f"{name} has {len(found)} loops in the schedule, expected {len(loops)}: {names}"
        )
    for inner, loop in zip(found, loops, strict=True):
        _check(inner, loop.inner, loop.name)


def _cycles(part: Part, times: int, loops: Iterator[Loop]) -> int:
    total = part.bundles * times
    for inner in part.inner:
        if inner.is_loop:
            loop = next(loops)
            total += _cycles(inner, loop.trips, iter(loop.inner))
        else:
            held = list(islice(loops, len(inner.loops)))
            otherwise = 0 if inner.fills_scalars else times
            begun = max((loop.begun for loop in held), default=otherwise)
            total += _cycles(inner, min(begun, times), iter(held))
    return total


def _nest(spans: list[tuple[int, int, bool]], fills: list[int], end: int) -> Part:
    whole = Part(False, end)
    stack = [(whole, end)]
    # Outer spans first; of equal ones the branch around a loop.
    for first, last, is_loop in sorted(spans, key=lambda span: (span[0], -span[1], span[2])):
        while first >= stack[-1][1]:
            stack.pop()
        outer, limit = stack[-1]
        size = min(last, limit) - first  # a branch out of a loop skips the rest of the loop
        outer.bundles -= size
        part = Part(is_loop, size, any(first <= at < first + size for at in fills))
        outer.inner.append(part)
        stack.append((part, first + size))
    return whole
