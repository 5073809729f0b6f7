"""What the kernel benchmark measures: cases, the variants of each, their sizes and their goals.

Pure host code: every count here can be checked by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lazyattn_jax.kernels.work import References, Runs

HEADS, KV_HEADS = 32, 8
GROUP = HEADS // KV_HEADS
ITEM_BYTES = 2
"""Bytes of a bfloat16."""

MAX_ROTATION = 1.03
"""Goal: time with rotation, of that without."""

MAX_SHARING = 1.02
"""Goal: time through the plan that shares, of that without, where nothing can be shared."""


@dataclass(frozen=True)
class Case:
    """One step: ``requests`` that hold ``held`` documents of ``tokens`` tokens each.

    With ``new`` of 0 it is a decode step. Otherwise every request adds ``new`` tokens, which see
    its documents and, causally, one another. Each request has documents of its own, or, where
    ``documents`` is given, distinct ones of so many, drawn with probability ~ ``1 / rank**zipf``.

    ``goal`` is the least fraction of the read ceiling (decode) or the most of cuDNN's time.
    """

    name: str
    requests: int
    held: int
    tokens: int = 512
    new: int = 0
    documents: int = 0
    zipf: float = 0.0
    goal: float | None = None


@dataclass(frozen=True)
class Variant:
    """What a case is measured with."""

    head_dim: int = 128
    page_size: int = 64
    rotate: bool = True
    share: bool = True

    @property
    def label(self) -> str:
        """What differs from the default, in words."""
        words = []
        if self.head_dim != 128:
            words.append(f"head_dim {self.head_dim}")
        if self.page_size != 64:
            words.append(f"pages of {self.page_size}")
        if not self.rotate:
            words.append("no rotation")
        if not self.share:
            words.append("unshared plan")
        return ", ".join(words)


HEADLINE = Variant()

CASES = (
    Case("D1", 64, 10, goal=0.93),
    Case("D2", 8, 10, goal=0.80),
    Case("D3", 1, 64, goal=0.75),
    Case("D4", 16, 64, goal=0.93),
    Case("S1", 64, 10, documents=200, zipf=1.0, goal=0.70),
    Case("S2", 256, 10, documents=1000, zipf=1.0, goal=0.78),
    Case("S3", 256, 5, documents=100, zipf=1.5, goal=0.55),
    Case("D1-100", 64, 50, tokens=100),
    Case("P1", 8, 10, new=64, goal=0.6),
    Case("P2", 1, 10, new=64, goal=0.3),
    Case("P3", 1, 64, new=128, goal=0.4),
    Case("P4", 8, 10, new=512, goal=0.9),
    Case("E1", 16, 0, new=512, goal=1.0),
    Case("E2", 1, 0, new=8192, goal=1.1),
    Case("P1-100", 8, 50, tokens=100, new=64),
)


def variants(case: Case, quick: bool = False) -> list[Variant]:
    """What to measure of a case, the headline first; variants of the same data stand together.

    Cases without a goal are there for the page sizes only: ``quick`` leaves them out.
    """
    if quick:
        return [] if case.goal is None else [HEADLINE]
    found = [HEADLINE]
    if case.name in ("D1", "D2", "D3", "D4"):
        found.append(replace(HEADLINE, rotate=False))
    if case.name == "D1":
        found.append(replace(HEADLINE, share=False))
    if case.name in ("D1", "P1"):
        found.append(replace(HEADLINE, head_dim=64))
    if case.name in ("D1", "P1") or case.goal is None:
        found += [replace(HEADLINE, page_size=size) for size in (16, 32, 128)]
    return found


def goal(case: Case, variant: Variant) -> float | None:
    """Fraction of the read ceiling, or of cuDNN's time; half the head may be 0.05 worse."""
    if case.goal is None or variant == HEADLINE:
        return case.goal
    if variant == replace(HEADLINE, head_dim=64):
        return round(case.goal + (0.05 if case.new else -0.05), 2)
    return None


@dataclass(frozen=True)
class Step:
    """What one step attends to, in random pages of a pool and with random deltas."""

    num_rows: int
    page_size: int
    num_pages: int
    references: References
    runs: Runs
    deltas: np.ndarray


def make_step(case: Case, page_size: int, seed: int = 0) -> Step:
    """The step of a case: runs of documents, then each request's own run of new tokens."""
    rng = np.random.default_rng(seed)
    document = _held_documents(case, rng)
    num_documents = int(document.max()) + 1 if len(document) else 0
    request = np.repeat(np.arange(case.requests), case.held)
    each = max(1, case.new)
    row, run, causal = request * each, document, np.full(len(request), case.tokens)
    turn = 1 + np.arange(len(request))
    length = np.full(num_documents, case.tokens)
    if case.new:
        own = np.arange(case.requests)
        row, run = np.append(row, own * each), np.append(run, num_documents + own)
        causal, turn = np.append(causal, 0 * own), np.append(turn, 0 * own)
        length = np.append(length, np.full(case.requests, case.new))
    pages = -(-length // page_size)
    num_pages = int(pages.sum())
    return Step(
        case.requests * each,
        page_size,
        num_pages,
        References(row, np.full(len(row), each), run, turn, causal),
        Runs(rng.permutation(num_pages), np.cumsum(pages) - pages, length),
        np.append(0, rng.integers(1, 100_000, len(request))),
    )


def _held_documents(case: Case, rng: np.random.Generator) -> np.ndarray:
    """The document of each (request, place), as consecutive numbers."""
    count = case.requests * case.held
    if not case.documents:
        return rng.permutation(count)
    weight = 1.0 / np.arange(1, case.documents + 1) ** case.zipf
    held = [
        rng.choice(case.documents, case.held, replace=False, p=weight / weight.sum())
        for _ in range(case.requests)
    ]
    return np.unique(np.concatenate(held), return_inverse=True)[1]


def distinct_bytes(step: Step, head_dim: int) -> int:
    """K and V bytes of valid slots that a step has to read, each once."""
    tokens = int(step.runs.length[np.unique(step.references.run)].sum())
    return 2 * tokens * KV_HEADS * head_dim * ITEM_BYTES


def flops(step: Step, head_dim: int) -> int:
    """Operations of the two matrix products over the (query, slot) pairs that are visible."""
    pairs = 0
    for num_rows, run, causal in zip(
        step.references.num_rows, step.references.run, step.references.causal, strict=True
    ):
        seen = causal + 1 + np.arange(num_rows)
        pairs += int(np.minimum(seen, step.runs.length[run]).sum())
    return 4 * HEADS * head_dim * pairs
