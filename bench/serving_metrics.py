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
      prompt_tokens, document_tokens: of its prompt, and of the documents in it.
      cached_tokens, cached_document_tokens: those of them that did not have to be computed.
      correct: whether an expected answer is in its output; none where none is known.
      error: why it failed.
    """

    arrived: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ended: float | None = None
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
    middle = (begin + end) / 2
    halves = [0, 0]
    for time, count in ((t, n) for r in good for t, n in zip(r.times, r.counts, strict=True)):
        if inside(time):
            halves[time > middle] += count
    kept = [r for r in ended if r.ttft <= limits.ttft and (r.tpot or 0) <= limits.tpot]
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
        "output_tokens_per_second": sum(halves) / seconds,
        "output_tokens_per_second_in_halves": [2 * tokens / seconds for tokens in halves],
        "prompt_tokens_per_second": sum(r.prompt_tokens for r in first) / seconds,
        "goodput_requests_per_second": len(kept) / seconds,
        "document_hit_rate": _share(first, "cached_document_tokens", "document_tokens"),
        "token_hit_rate": _share(first, "cached_tokens", "prompt_tokens"),
        "correct": sum(answered) / len(answered) if answered else None,
    }


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
