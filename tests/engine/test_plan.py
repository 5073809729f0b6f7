"""Plans made with what is known from earlier steps are those of a planner that knows nothing."""

from __future__ import annotations

import gc
import random
import weakref
from array import array
from collections import Counter
from copy import copy
from dataclasses import replace

import jax
import numpy as np
import pytest

from lazyattn_jax.engine.limits import Limits, dense_lists, work_lists
from lazyattn_jax.engine.plan import Planner
from lazyattn_jax.engine.runs import Chunk, EncodeJob, Placement, TokenRun
from lazyattn_jax.kernels.work import WorkLists
from lazyattn_jax.models.rope import RopeConfig

LIMITS = Limits(
    page_size=4,
    num_pages=5000,
    max_model_len=200,
    max_num_seqs=6,
    max_num_batched_tokens=128,
    max_documents=5,
)
DOCUMENTS = [(array("i", range(10 * i, 10 * i + n)), 4 * n - 1) for i, n in enumerate((1, 2, 9))]

DELTAS = (0, -7, 30, 900)


def new_planner(lists: WorkLists | None = None) -> Planner:
    frequencies = RopeConfig(theta=1e4).inverse_frequencies(16)
    return Planner(LIMITS, lists or dense_lists(LIMITS), frequencies, rope_factor=1.5)


def attended(plan) -> list[Counter]:
    """For every row how often it sees which slot of which page, turned by which delta."""
    frequencies = RopeConfig(theta=1e4).inverse_frequencies(16)
    delta_of = {}
    for delta in DELTAS:
        angles = delta * frequencies
        rows = np.cos(angles), -np.sin(angles)
        error = sum(abs(x - row).max(1) for x, row in zip(plan.turns, rows, strict=True))
        delta_of.update(dict.fromkeys(np.flatnonzero(error < 1e-6).tolist(), delta))
    seen = [Counter() for _ in range(plan.bucket)]
    for work in plan.works:
        for i in range(work.num_items):
            if hasattr(work, "causal"):
                ends = work.causal[i] + 1 + np.arange(work.num_rows[i])
                users = [(work.row[i] + r, work.turn[i], end) for r, end in enumerate(ends)]
            else:
                used = work.rows[i] < plan.bucket
                pairs = zip(work.rows[i, used], work.turns[i, used], strict=True)
                users = [(row, turn, work.kv_len[i]) for row, turn in pairs]
            for row, turn, end in users:
                for slot in range(min(work.kv_len[i], end)):
                    page = int(work.pages[i, slot // LIMITS.page_size])
                    seen[row][page, slot % LIMITS.page_size, delta_of[int(turn)]] += 1
    return seen


def wanted(chunks: list[Chunk]) -> list[Counter]:
    """The same, by what placements mean."""
    size = LIMITS.page_size
    rows = []
    for chunk in chunks:
        for at in range(chunk.start, chunk.start + chunk.count):
            seen = Counter((chunk.run.pages[i // size], i % size, 0) for i in range(at + 1))
            for p in chunk.run.context:
                if p.insert_at <= at:
                    seen.update(
                        (p.pages[i // size], i % size, p.delta) for i in range(p.num_tokens)
                    )
            rows.append(seen)
    return rows


def assert_same(plan, other) -> None:
    """Nothing differs but turns that mean nothing, which are zeros in a first plan."""
    used = (other.turns.cos != 0).any(1) | (other.turns.sin != 0).any(1)
    plan, other = (x._replace(turns=[rows[used] for rows in x.turns]) for x in (plan, other))
    assert jax.tree.structure(plan) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(plan), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def unplanned(run: TokenRun) -> TokenRun:
    """The same run, of which no planner knows anything."""
    other = copy(run)
    other.planned = None
    return other


class Traffic:
    """Requests that come, generate and go, with pages that nobody else has."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.free = list(range(100, LIMITS.num_pages))
        self.runs: list[TokenRun] = []

    def grow(self, run: TokenRun) -> None:
        while len(run.pages) * LIMITS.page_size < len(run.tokens):
            page = self.free.pop()
            run.pages.append(page)
            run.private.add(page)

    def join(self) -> None:
        rng = self.rng
        length, at = rng.randrange(1, 20), rng.randrange(1000)
        run = TokenRun(rng.choices(range(50), k=length), range(at, at + length))
        run.context = tuple(
            Placement(tuple(pages), tokens, rng.choice(DELTAS), rng.randrange(length))
            for pages, tokens in rng.choices(DOCUMENTS, k=rng.randrange(4))
        )
        self.grow(run)
        self.runs.insert(rng.randrange(len(self.runs) + 1), run)

    def restart(self) -> None:
        """As after preemption: the same tokens and documents, in a run of its own."""
        at = self.rng.randrange(len(self.runs))
        old = self.runs[at]
        self.runs[at] = run = TokenRun(old.tokens, old.positions)
        run.context = tuple(old.context)
        self.grow(run)

    def last_tokens(self) -> list[Chunk]:
        return [Chunk(run, len(run.tokens) - 1, 1, EncodeJob(b"", run)) for run in self.runs]

    def chunks(self) -> list[Chunk]:
        """The ends of none to all of the runs, to be computed again."""
        some = self.rng.sample(self.runs, self.rng.randrange(len(self.runs) + 1))
        chunks = []
        for run in some:
            count = self.rng.randrange(1, min(20, len(run.tokens)) + 1)
            chunks.append(Chunk(run, len(run.tokens) - count, count, EncodeJob(b"", run)))
        return chunks

    def change(self) -> bool:
        """Most of the time nothing but a token more each; tells whether the batch changed."""
        runs, chance = self.runs, self.rng.random()
        if not runs or (chance < 0.1 and len(runs) < LIMITS.max_num_seqs):
            self.join()
        elif chance < 0.2 and len(runs) > 1:
            del runs[self.rng.randrange(len(runs))]
        elif chance < 0.25:
            self.rng.shuffle(runs)
        elif chance < 0.3:
            self.restart()
        elif chance < 0.35:
            run = self.rng.choice(runs)
            run.context = run.context[1:]
        else:
            return False
        return True


@pytest.mark.parametrize("seed", range(8))
def test_what_is_known_changes_no_plan(seed):
    traffic, planner, turns = Traffic(seed), new_planner(), None
    unchanged = 0
    for _ in range(150):
        changed = traffic.change()
        for run in traffic.runs:
            run.append_pending()
            run.fill(traffic.rng.randrange(50))
            traffic.grow(run)
        plan = planner.decode(traffic.runs)
        assert_same(plan, new_planner().decode([unplanned(run) for run in traffic.runs]))
        assert attended(plan)[: len(traffic.runs)] == wanted(traffic.last_tokens())
        if not changed and turns is not None and len(turns.cos) == len(plan.turns.cos):
            assert plan.turns is turns, "the batch is the same; its turns were made anew"
            unchanged += 1
        turns = plan.turns
        if chunks := traffic.chunks():
            plan = planner.prefill(chunks)
            unknown = [replace(chunk, run=unplanned(chunk.run)) for chunk in chunks]
            assert_same(plan, new_planner().prefill(unknown))
            want = wanted(chunks)
            assert attended(plan)[: len(want)] == want
    assert unchanged > 50


@pytest.mark.parametrize("seed", range(4))
def test_what_is_known_changes_no_hopper_lists(seed):
    """Decode steps of an unchanged batch keep the order of its runs, and which are shared."""
    # Tiles of 8 slots, so that these documents are worth sharing.
    sizes = {"group": 4, "kv_heads": 2, "head_dim": 1024, "num_cores": 4}
    lists = work_lists(LIMITS, "mosaic_gpu", **sizes)
    traffic, planner, shared = Traffic(seed), new_planner(lists), 0
    for _ in range(100):
        traffic.change()
        for _ in range(traffic.rng.choice([1, 1, 9])):  # within a tile and beyond it
            for run in traffic.runs:
                run.append_pending()
                run.fill(traffic.rng.randrange(50))
                traffic.grow(run)
        plan = planner.decode(traffic.runs)
        assert_same(plan, new_planner(lists).decode([unplanned(run) for run in traffic.runs]))
        shared += int((plan.works[0].entries[:, 4] > 1).any())
    assert shared > 10


def test_a_planner_does_not_keep_runs():
    traffic, planner = Traffic(0), new_planner()
    traffic.join()
    planner.decode(traffic.runs)
    run = weakref.ref(traffic.runs.pop())
    gc.collect()
    assert run() is None


def test_turns_of_an_unchanged_batch_cannot_be_written_to():
    """They are handed out again, and jax need not copy them."""
    planner, run = new_planner(), with_documents(3, delta=7)
    turns = planner.decode([run]).turns
    assert planner.decode([run]).turns is turns
    for angles in turns:
        with pytest.raises(ValueError, match="read-only"):
            angles[:] = 0


def with_documents(count: int, delta: int = 0) -> TokenRun:
    run = TokenRun([1], [0])
    run.pages.append(4000)
    run.private.add(4000)
    run.context = tuple(Placement((i,), 4, delta * i) for i in range(1, count + 1))
    return run


def test_the_smallest_batch_shape_that_holds_everything():
    """One row takes a larger shape than its own when it attends to more than that holds."""
    capacities = [LIMITS.decode_items(bucket) for bucket in LIMITS.decode_buckets]
    for bucket, below, capacity in zip(
        LIMITS.decode_buckets, [0, *capacities], capacities, strict=False
    ):
        for items in (below + 1, capacity):
            plan = new_planner().decode([with_documents(items - 1)])
            assert (plan.bucket, plan.works[0].num_items) == (bucket, items)
            assert len(plan.turns.cos) == LIMITS.turns(False, bucket)
    with pytest.raises(RuntimeError, match=f"{capacities[-1] + 1} references fit no batch shape"):
        new_planner().decode([with_documents(capacities[-1])])


def test_a_batch_that_grows_into_another_shape():
    """The same documents, and a text that grows until the first shape does not hold its items."""
    planner, traffic, buckets = new_planner(), Traffic(0), set()
    run = with_documents(LIMITS.decode_items(1) - 1)
    for _ in range(140):
        run.append_pending()
        run.fill(1)
        traffic.grow(run)
        plan = planner.decode([run])
        assert_same(plan, new_planner().decode([unplanned(run)]))
        buckets.add(plan.bucket)
    assert buckets == set(LIMITS.decode_buckets[:2])


def test_a_batch_shape_must_hold_the_turns():
    planner = new_planner()
    one, four, six = (LIMITS.turns(False, bucket) for bucket in LIMITS.decode_buckets)
    assert one < four < six < LIMITS.decode_items(4)
    for turned, bucket in ((one - 1, 1), (one, 4), (four - 1, 4), (four, 6)):  # and the identity
        assert planner.decode([with_documents(turned, delta=7)]).bucket == bucket
    with pytest.raises(RuntimeError, match="fit no batch shape"):
        planner.decode([with_documents(six, delta=7)])
