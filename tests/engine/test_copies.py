"""Copies of pages: the lists of them, and what they do to the pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lazyattn_jax.engine.copies import make_moves
from lazyattn_jax.engine.runs import PageCopy
from lazyattn_jax.kernels.api import copy_pages
from lazyattn_jax.kernels.rotary import rotate
from lazyattn_jax.models.rope import Rotations

NUM_PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM = 40, 2, 8, 16
FREQUENCIES = 10_000.0 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))


def some_copies(rng):
    pages = rng.permutation(NUM_PAGES).tolist()
    counts, deltas = (1, 3, 1, 7, 6), (0, -5, 1_000_000, 17, 4096)
    copies = []
    for count, delta in zip(counts, deltas, strict=True):
        source, target = pages[:count], pages[count : 2 * count]
        del pages[: 2 * count]
        copies.append(PageCopy(tuple(source), tuple(target), delta))
    return copies, pages


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sizes", [(2, 4), (16, 64)])
def test_copies_are_turned_and_nothing_else_changes(sizes, fused):
    rng = np.random.default_rng(0)
    copies, others = some_copies(rng)
    shape = (NUM_PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    k, v = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    pool = (np.concatenate([k, v], -1), None) if fused else (k, v)
    lists = list(make_moves(copies, sizes, NUM_PAGES, Rotations(FREQUENCIES)))
    assert sum(int((m.target < NUM_PAGES).sum()) for m in lists) == 18
    assert {len(m.source) for m in lists} <= set(sizes)
    for moves in lists:
        pool = copy_pages(
            *map(as_array, pool), jax.tree.map(jnp.asarray, moves), implementation="xla"
        )
    got_k, got_v = np.split(np.asarray(pool[0]), 2, -1) if fused else map(np.asarray, pool)
    for copy in copies:
        angles = copy.delta * FREQUENCIES
        cos, sin = (
            np.float32(np.broadcast_to(f(angles), (KV_HEADS, HEAD_DIM // 2)))
            for f in (np.cos, np.sin)
        )
        for source, target in zip(copy.source, copy.target, strict=True):
            expected = rotate(jnp.asarray(k[source]), jnp.asarray(cos), jnp.asarray(sin))
            np.testing.assert_allclose(got_k[target], expected, atol=1e-6, rtol=0)
            np.testing.assert_array_equal(got_v[target], v[source])
    unchanged = others + [p for c in copies for p in c.source]
    np.testing.assert_array_equal(got_k[unchanged], k[unchanged])
    np.testing.assert_array_equal(got_v[unchanged], v[unchanged])


def as_array(x):
    return None if x is None else jnp.asarray(x)
