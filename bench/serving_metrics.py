"""What the requests of a load test come to: latencies, throughput, reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Record:
    """What happened to one request; times are in seconds of one clock.

    Attributes:
      arrived: when it was due (open loop) or sent (closed loop).
      times: when something of its output came; the first is the first token's.
      counts: tokens that came each time.
      ended: when its output was complete.
      output_tokens: that were asked for, if so many come in any case; else 0.
      prompt_tokens, document_tokens: of its prompt, and of the documents in it.
      cached_tokens, cached_document_tokens: those of them that did not have to be computed.
      correct: whether an expected answer is in its output; none where none is known.
      error: why it failed.
    """

    arrived: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ended: float | None = None
    output_tokens: int = 0
    prompt_tokens: int = 0
    document_tokens: int = 0
    cached_tokens: int = 0
    cached_document_tokens: int = 0
    correct: bool | None = None
    error: str | None = None

    def note(self, time: float, tokens: int) -> None:
        """Takes note of some tokens of output."""
        self.times.append(time)
        self.counts.append(tokens)

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.times[0] - self.arrived

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first chunk; none if there are no more."""
        later = sum(self.counts) - self.counts[0]
        return (self.times[-1] - self.times[0]) / later if later else None


@dataclass(frozen=True)
class Limits:
    """Latencies in seconds that a request must keep to count for goodput."""

    ttft: float = 2.0
    tpot: float = 0.1


def summarise(
    records: Sequence[Record], begin: float, end: float, limits: Limits
) -> dict[str, Any]:
    """Figures of the window from ``begin`` to ``end``; latencies in milliseconds.

    Each latency is of the requests whose first token, gap or end fell into the window: requests
    still under way at its end do not distort it.
    """
    seconds = end - begin

    def inside(time: float | None) -> bool:
        return time is not None and begin < time <= end

    good = [r for r in records if r.error is None]
    first = [r for r in good if r.times and inside(r.times[0])]
    ended = [r for r in good if r.times and inside(r.ended)]
    tpots = [r.tpot for r in ended if r.tpot is not None]
    gaps = [b - a for r in good for a, b in zip(r.times, r.times[1:], strict=False) if inside(b)]
    tokens = sum(n for r in good for t, n in zip(r.times, r.counts, strict=True) if inside(t))
    kept = [r for r in ended if r.ttft <= limits.ttft and (r.tpot or 0) <= limits.tpot]
    steady = steady_rate(good, begin, end)
    answered = [r.correct for r in ended if r.correct is not None]
    return {
        "seconds": seconds,
        "requests_begun": len(first),
        "requests": len(ended),
        "errors": sum(r.error is not None for r in records),
        "ttft_ms": _spread([r.ttft for r in first]),
        "tpot_ms": _spread(tpots),
        "itl_ms": _spread(gaps),
        "e2e_ms": _spread([r.ended - r.arrived for r in ended if r.ended is not None]),
        "requests_per_second": len(ended) / seconds,
        "output_tokens_per_second": tokens / seconds,
        "prompt_tokens_per_second": sum(r.prompt_tokens for r in first) / seconds,
        "steady_requests_per_second": steady and steady[0],
        "steady_seconds": steady and steady[1],
        "goodput_requests_per_second": len(kept) / seconds,
        "document_hit_rate": _share(first, "cached_document_tokens", "document_tokens"),
        "token_hit_rate": _share(first, "cached_tokens", "prompt_tokens"),
        "correct": sum(answered) / len(answered) if answered else None,
    }


def steady_rate(records: Sequence[Record], begin: float, end: float) -> tuple[float, float] | None:
    """Requests a second while as much came as was begun, and the seconds that this is taken from.

    A server computes prompts for a while, then outputs, so a short window can have many of the ones
    and few of the others, by 20 % and more. Taken is the longest part of it, from a first token in
    its first third to one in its last, at whose ends as many tokens were outstanding, but for those
    of one request. None where there is no such part, or outputs have no known length.
    """
    begun = sorted((r.times[0], r.output_tokens) for r in records if r.times and r.times[0] <= end)
    begun = [(time, tokens) for time, tokens in begun if time > begin]
    if not begun or not all(tokens for _, tokens in begun):
        return None
    times, asked = (np.array(column) for column in zip(*begun, strict=True))
    size = asked.mean()
    chunks = sorted(
        (t, n) for r in records for t, n in zip(r.times, r.counts, strict=True) if begin < t <= end
    )
    came = np.concatenate([[0], np.cumsum([n for _, n in chunks])])
    came = came[np.searchsorted([t for t, _ in chunks], times, side="right")]
    outstanding = np.cumsum(asked) - came
    late = np.flatnonzero(times >= end - (end - begin) / 3)
    best = 0.0, 0.0
    for i in np.flatnonzero(times <= begin + (end - begin) / 3):
        even = late[np.abs(outstanding[late] - outstanding[i]) <= size]
        if len(even) and times[even[-1]] - times[i] > best[1]:
            j = even[-1]
            work = (j - i + (came[j] - came[i]) / size) / 2
            best = float(work / (times[j] - times[i])), float(times[j] - times[i])
    return best if best[1] else None


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; a percentile lies between values, linearly."""
    if not seconds:
        return None
    ms = 1000 * np.asarray(seconds)
    p50, p95, p99 = np.percentile(ms, [50, 95, 99]).tolist()
    return {"mean": float(ms.mean()), "p50": p50, "p95": p95, "p99": p99}


def _share(records: Sequence[Record], part: str, whole: str) -> float | None:
    total = sum(getattr(r, whole) for r in records)
    return sum(getattr(r, part) for r in records) / total if total else None


def throughput(row: dict[str, Any]) -> float:
    """Requests a second of what ``summarise`` gave: the steady rate, if there is one."""
    return float(row["steady_requests_per_second"] or row["requests_per_second"])
