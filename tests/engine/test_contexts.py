"""The contexts of a batch, put together of those of the batch before and of new ones."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np

from lazyattn_jax.engine.contexts import BatchContext, ContextTables
from lazyattn_jax.engine.runs import Placement, TokenRun
from lazyattn_jax.models.rope import RopeConfig, Rotations

CAPACITY = 400


def new_tables(**options) -> ContextTables:
    return ContextTables(Rotations(RopeConfig(theta=1e4).inverse_frequencies(16)), 500, **options)


def new_run(rng: random.Random) -> TokenRun:
    run = TokenRun([1], [0])
    run.context = tuple(
        Placement(
            tuple(range(10 * first, 10 * first + rng.randrange(1, 7))),
            3,
            rng.choice((0, 5, -900)),
            rng.randrange(9),
            rng.choice((1.0, 1.0, 0.5)),
        )
        for first in rng.choices(range(30), k=rng.randrange(5))
    )
    return run


def assert_same(context: BatchContext, other: BatchContext) -> None:
    arrays, others = (
        (*c.decode_references(), c.insert_at, *c.runs, c.num_turns, *c.turns(CAPACITY))
        for c in (context, other)
    )
    for a, b in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_batch_that_changes():
    """Some go and some come, anywhere, or all are put in another order."""
    rng, tables = random.Random(0), new_tables(pages_together=4)
    runs, before = [new_run(rng) for _ in range(40)], None
    for step in range(60):
        if step % 10 == 9:
            rng.shuffle(runs)
        for _ in range(rng.choice((0, 1, 3, 12))):
            del runs[rng.randrange(len(runs))]
            runs.insert(rng.choice((len(runs), rng.randrange(len(runs)))), new_run(rng))
        context = tables.of(runs, before)
        assert_same(context, tables.of(runs))
        before = context


def test_turns_for_two_batch_shapes():
    rng, tables = random.Random(0), new_tables()
    context = tables.of([new_run(rng) for _ in range(9)])
    small, large = context.turns(context.num_turns), context.turns(CAPACITY)
    for a, b in zip(small, large, strict=True):
        np.testing.assert_array_equal(a, b[: len(a)])
        assert not b[len(a) :].any()


def test_pages_are_listed_together():
    """Each placement's last page again, up to a multiple."""
    run = TokenRun([1], [0])
    run.context = tuple(Placement(pages, 1) for pages in ((3, 4, 5), (6, 7, 8, 9), (20,)))
    runs = new_tables(pages_together=4).of([run]).runs
    assert runs.pages.tolist() == [3, 4, 5, 5, 6, 7, 8, 9, 20, 20, 20, 20]
    assert runs.start.tolist() == [0, 4, 8]
    assert runs.filled == 0


def test_the_batch_before_does_not_live_on():
    """Not even its turns, although the next batch was put together of them."""
    rng, tables = random.Random(0), new_tables()
    runs = [new_run(rng) for _ in range(5)]
    before = tables.of(runs)
    old = weakref.ref(before.turns(CAPACITY).cos.base)
    context = tables.of(runs[1:], before)
    context.turns(CAPACITY)
    del before
    gc.collect()
    assert old() is None
