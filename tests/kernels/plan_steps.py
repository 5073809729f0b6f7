"""Steps for tests of work lists, and what they mean slot by slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from lazyattn_jax.kernels.work import References, Runs

TURNS = 3


@dataclass(frozen=True)
class Step:
    """What rows attend to, where the runs are, and the shape of the attention."""

    references: References
    runs: Runs
    num_rows: int
    page_size: int
    group: int

    @property
    def pool(self) -> tuple[int, int]:
        """Pages of the pool, slots of a page."""
        return int(self.runs.pages.max()) + 1, self.page_size

    def slots(self, run: int) -> np.ndarray:
        """The slots of the pool that hold a run."""
        n, first = int(self.runs.length[run]), int(self.runs.start[run])
        slot = np.arange(n)
        return self.runs.pages[first + slot // self.page_size] * self.page_size + (
            slot % self.page_size
        )

    def named(self) -> np.ndarray:
        """How often each row sees each slot of the pool with each turn, by what references mean."""
        seen = np.zeros((TURNS, self.num_rows, np.prod(self.pool)), np.int16)
        for row, num_rows, run, turn, causal in zip(*self.references, strict=True):
            slots = self.slots(run)
            for r in range(num_rows):
                seen[turn, row + r, slots[: causal + r + 1]] += 1
        return seen

    def valid(self) -> np.ndarray:
        """Whether a slot of the pool holds something."""
        held = np.zeros(np.prod(self.pool), bool)
        for run in range(len(self.runs.length)):
            held[self.slots(run)] = True
        return held


def stored(lengths: list[int], page_size: int, seed: int) -> Runs:
    """Runs of pages in no order, in a table that has others before, between and after them."""
    length = np.array(lengths, int)
    counts = -(-length // page_size)
    start = 2 + np.cumsum(counts + 1) - (counts + 1)
    pages = np.random.default_rng(seed).permutation(int(counts.sum()) + len(counts) + 4)
    return Runs(pages, start, length)


def step_of(rows: list[tuple[int, int, int, int]], lengths: list[int], **options) -> Step:
    """References are (row, rows, run, causal); they come in any order and share turns."""
    seed = options.pop("seed")
    rng = np.random.default_rng(seed)
    table = rng.permutation(np.array(rows, int).reshape(-1, 4))
    row, num_rows, run, causal = table.T
    turn = rng.integers(0, TURNS, len(table))
    runs = stored(lengths, options["page_size"], seed)
    return Step(References(row, num_rows, run, turn, causal), runs, **options)


SHAPE = {"page_size": 64, "group": 4, "seed": 0}
SHAPES = {
    "page_size": st.sampled_from([16, 32, 64, 128]),
    "group": st.sampled_from([1, 2, 3, 4, 7, 8, 16]),
    "seed": st.integers(0, 2**32 - 1),
}


@st.composite
def prefill_steps(draw: st.DrawFn) -> Step:
    """Documents being encoded, chunks, questions over documents, and rows that see nothing."""
    options = {name: draw(strategy) for name, strategy in SHAPES.items()}
    rows, lengths, row = [], [], 0
    for _ in range(draw(st.integers(0, 4))):
        new, before = draw(st.integers(1, 90)), draw(st.sampled_from([0, 0, 1, 127, 128, 200]))
        rows.append((row, new, len(lengths), before))
        lengths.append(before + new)
        for _ in range(draw(st.integers(0, 3))):
            skip = draw(st.integers(0, new - 1))
            length = draw(st.sampled_from([0, 1, 16, 127, 128, 129, 300]))
            rows.append((row + skip, new - skip, len(lengths), length))
            lengths.append(length)
        row += new + draw(st.sampled_from([0, 0, 0, 5]))
    return step_of(rows, lengths, num_rows=row + draw(st.integers(0, 3)) + (row == 0), **options)


@st.composite
def decode_steps(draw: st.DrawFn) -> Step:
    """Rows that hold some of the same runs, some of them twice, and rows that hold none."""
    options = {name: draw(strategy) for name, strategy in SHAPES.items()}
    sizes = st.sampled_from([0, 1, 15, 16, 63, 64, 65, 130, 400])
    lengths = draw(st.lists(sizes, min_size=1, max_size=6))
    held = st.lists(st.integers(0, len(lengths) - 1), max_size=5)
    many = draw(st.sampled_from([1, 3, 24]))
    holds = draw(st.lists(held, min_size=1, max_size=5)) * many
    return decode_step(holds, lengths, **options)


def decode_step(holds: list[list[int]], lengths: list[int], **options) -> Step:
    rows = [(b, 1, run, lengths[run]) for b, held in enumerate(holds) for run in held]
    return step_of(rows, lengths, num_rows=len(holds), **options)
