"""Copies of documents into pages of a request, keys turned: Block-Attention's way, for comparison.

Against the copy bandwidth: an array of as many bytes, read and written in one stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lazyattn_jax.bench.kernel_cases import HEADLINE, ITEM_BYTES, KV_HEADS
from lazyattn_jax.bench.kernel_runs import Result, random_normal
from lazyattn_jax.bench.timing import Chain
from lazyattn_jax.kernels.api import copy_pages
from lazyattn_jax.kernels.work import Moves, Turns

COPIES = {"C1": 1, "C2": 12}
"""Requests of each case, with 10 documents of 512 tokens each."""

GOAL = 0.6
"""Of the copy bandwidth, for the kernel."""

_TOKENS = 10 * 512

type _Pool = tuple[jax.Array, jax.Array, jax.Array]


def measure_copies(
    names: Sequence[str] = tuple(COPIES),
    implementations: Sequence[str] = ("mosaic_gpu", "xla"),
    page_sizes: Sequence[int] = (HEADLINE.page_size, 16),
    *,
    pool_tokens: int = 1 << 19,
) -> Iterator[Result]:
    """The copies of some cases, for one layer."""
    for name in names:
        for page_size in page_sizes:
            for implementation in implementations:
                variant = f"{implementation}, pages of {page_size}"
                try:
                    yield _measure(name, implementation, page_size, pool_tokens, variant)
                except Exception as error:  # it does not cost the others
                    yield Result("copy", name, variant, problem=repr(error))


def _measure(
    name: str, implementation: str, page_size: int, pool_tokens: int, variant: str
) -> Result:
    num_pages, head_dim = pool_tokens // page_size, HEADLINE.head_dim
    shape = (num_pages, KV_HEADS, page_size, head_dim)
    moves = make_moves(COPIES[name] * _TOKENS // page_size, num_pages, head_dim)

    def pool() -> _Pool:
        return *(random_normal(seed, shape) for seed in (0, 1)), jnp.int32(0)

    step = partial(copy_step, implementation=implementation)
    if implementation != "xla":
        found, expected = (
            jax.jit(partial(copy_step, implementation=one), donate_argnums=0)(pool(), moves)
            for one in (implementation, "xla")
        )
        # Two roundings of the same float32 number, which may be computed in another order.
        worst = max(float(jnp.abs(x - y).max()) for x, y in zip(found, expected, strict=True))
        if not worst <= 2**-5:
            return Result("copy", name, variant, problem=f"wrong: off by {worst:.3g}")
        del found, expected
    seconds = Chain(step, donate=True).seconds(pool(), moves)
    size = 2 * len(moves.source) * page_size * KV_HEADS * head_dim * ITEM_BYTES
    stream = random_normal(2, (max(size, 1 << 28) // ITEM_BYTES,))
    copied = Chain(copy_stream, donate=True).seconds(stream) * size / stream.nbytes
    return Result(
        "copy",
        name,
        variant,
        seconds=seconds,
        bytes=2 * size,  # read and written
        baseline_seconds=copied,
        value=copied / seconds,
        goal=GOAL if implementation == "mosaic_gpu" else None,
    )


def make_moves(count: int, num_pages: int, head_dim: int, seed: int = 0) -> Moves:
    """Copies of random even pages to random odd ones, a document's keys turned alike."""
    rng = np.random.default_rng(seed)
    source, target = (2 * rng.permutation(num_pages // 2)[:count] + odd for odd in (0, 1))
    angles = rng.uniform(0, 2 * np.pi, (count, head_dim // 2))
    turns = Turns(*(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)))
    turn = np.arange(count) // 8
    source, target, turn = (jnp.asarray(x, jnp.int32) for x in (source, target, turn))
    return Moves(source, target, turn, turns)


def copy_step(carry: _Pool, moves: Moves, *, implementation: str) -> _Pool:
    """Copies other pages at each call: what an earlier one has read is not in a cache."""
    k, v, shift = carry
    source, target = ((pages + shift) % k.shape[0] for pages in moves[:2])
    moves = Moves(source, target, moves.turn, moves.turns)
    k, v = copy_pages(k, v, moves, implementation=implementation)
    return k, v, shift + 2


def copy_stream(x: jax.Array) -> jax.Array:
    """Reads and writes an array."""
    return -lax.optimization_barrier(x)
