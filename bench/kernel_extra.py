"""What surrounds the attention of a step: new keys and values into pages, and plans on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lazyattn_jax.bench.kernel_cases import (
    CASES,
    HEADLINE,
    ITEM_BYTES,
    KV_HEADS,
    Case,
    make_step,
)
from lazyattn_jax.bench.kernel_runs import Result, attention_of, random_normal
from lazyattn_jax.bench.timing import Chain, host_seconds
from lazyattn_jax.cache.pool import LayerKV, Slots, write

WRITES = (64, 8192)
"""Tokens of a decode step, each into a page of its own, and of a prefill step, page by page."""

type _Written = tuple[LayerKV, jax.Array]


def measure_writes(num_pages: int = 1024, implementation: str = "mosaic_gpu") -> Iterator[Result]:
    """New keys and values into a donated pool, against as many bytes into consecutive slots."""
    for tokens in WRITES:
        try:
            yield _measure_write(tokens, num_pages, implementation)
        except Exception as error:  # it does not cost the others
            yield Result("write", "write", f"{tokens} tokens", problem=repr(error))


def _measure_write(tokens: int, num_pages: int, implementation: str) -> Result:
    head_dim, page_size = HEADLINE.head_dim, HEADLINE.page_size
    new = tuple(random_normal(seed, (tokens, KV_HEADS, head_dim)) for seed in (0, 1))
    shape = (num_pages, KV_HEADS, page_size, head_dim)

    def pool() -> _Written:
        return LayerKV(*(random_normal(seed, shape) for seed in (2, 3))), jnp.int32(0)

    slots = make_slots(tokens, num_pages, page_size)
    step = partial(write_step, implementation)
    found = jax.jit(step)(pool(), *new, slots)[0]
    where = np.asarray(slots.page), slice(None), np.asarray(slots.offset)
    if not all(np.array_equal(np.asarray(x)[where], y) for x, y in zip(found, new, strict=True)):
        return Result("write", "write", f"{tokens} tokens", problem="wrong: not what was written")
    seconds = Chain(step, donate=True).seconds(pool(), *new, slots)
    moved = Chain(move_step, donate=True).seconds(pool(), *new)
    return Result(
        "write",
        "write",
        f"{tokens} tokens",
        seconds=seconds,
        bytes=2 * tokens * KV_HEADS * head_dim * ITEM_BYTES,
        baseline_seconds=moved,
        value=seconds / moved,
    )


def make_slots(tokens: int, num_pages: int, page_size: int, seed: int = 0) -> Slots:
    """Slots of random pages: one a page where there are enough pages, else whole pages."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(num_pages)
    if tokens <= num_pages:
        page, offset = ids[:tokens], rng.integers(0, page_size, tokens)
    else:
        page, offset = ids[np.arange(tokens) // page_size], np.arange(tokens) % page_size
    return Slots(jnp.asarray(page, jnp.int32), jnp.asarray(offset, jnp.int32))


def write_step(
    implementation: str, carry: _Written, k: jax.Array, v: jax.Array, slots: Slots
) -> _Written:
    """Writes to other pages at each call, so that no write makes an earlier one superfluous."""
    kv, shift = carry
    page = (slots.page + shift) % kv.k.shape[0]
    places = Slots(page, slots.offset)
    return write(kv, k, v, places, implementation=implementation), shift + 1


def move_step(carry: _Written, k: jax.Array, v: jax.Array) -> _Written:
    """Copies as many bytes to consecutive places of the same arrays."""
    kv, shift = carry

    def moved(pages: jax.Array, new: jax.Array) -> jax.Array:
        new = new.reshape(-1, *pages.shape[1:])
        first = (shift * len(new)) % (len(pages) - len(new) + 1)
        return lax.dynamic_update_slice_in_dim(pages, new, first, 0)

    return LayerKV(moved(kv.k, k), moved(kv.v, v)), shift + 1


def measure_plans() -> Iterator[Result]:
    """How long the host plans the largest shared case, and a prefill step over its documents."""
    decode = next(case for case in CASES if case.name == "S2")
    prefill = Case("S2", decode.requests, decode.held, new=64, documents=1000, zipf=1.0)
    for name, case in (("plan_decode", decode), ("plan_prefill", prefill)):
        step = make_step(case, HEADLINE.page_size)
        plan: Callable[[], object] = partial(attention_of, case, HEADLINE, step)
        variant = f"S2, {step.num_rows} rows, {len(step.references.row)} references"
        try:
            yield Result("plan", name, variant, seconds=host_seconds(plan))
        except Exception as error:  # it does not cost the other
            yield Result("plan", name, variant, problem=repr(error))
