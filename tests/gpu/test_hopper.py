"""The Hopper kernels on a GPU, against a float64 oracle."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lazyattn_jax.bench.kernel_copies import make_moves
from lazyattn_jax.bench.kernels import has_hopper
from lazyattn_jax.kernels.copies import xla_copy_pages
from lazyattn_jax.kernels.mosaic_gpu import copies, decode, prefill
from lazyattn_jax.kernels.mosaic_gpu.plan import num_workers, plan_decode, tile_slots
from lazyattn_jax.kernels.mosaic_gpu.prefill_plan import plan_prefill
from lazyattn_jax.kernels.mosaic_gpu.writes import write_tokens

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from attention_cases import error, random_decode, random_prefill

pytestmark = pytest.mark.skipif(not has_hopper(), reason="needs an NVIDIA Hopper GPU")

SHAPES = pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "page_size", "dtype", "bound"),
    [
        (8, 4, 128, 64, jnp.bfloat16, 5e-3),
        (8, 4, 128, 16, jnp.bfloat16, 5e-3),
        (8, 4, 64, 32, jnp.bfloat16, 5e-3),
        (3, 3, 64, 64, jnp.bfloat16, 5e-3),
        (1, 8, 128, 128, jnp.bfloat16, 5e-3),
        (2, 1, 128, 64, jnp.float16, 1e-3),
        (2, 16, 64, 128, jnp.float16, 1e-3),
        (1, 7, 128, 32, jnp.float16, 1e-3),
    ],
)


def run_decode(case, share=True, repeats=1):
    work = plan_decode(
        case.references,
        case.runs,
        num_rows=len(case.q),
        page_size=case.page_size,
        group=case.group,
        tile=tile_slots(case.q.shape[-1]),
        workers=num_workers(case.kv_heads),
        share=share,
    )
    return _run(decode.lazy_decode, case, work, repeats)


def run_prefill(case, most_pieces=1, repeats=1):
    work = plan_prefill(
        case.references,
        case.runs,
        num_rows=len(case.q),
        page_size=case.page_size,
        group=case.group,
        kv_heads=case.kv_heads,
        most_pieces=most_pieces,
    )
    return _run(prefill.lazy_prefill, case, work, repeats)


def _run(kernel, case, work, repeats):
    f = jax.jit(partial(kernel, scale=case.q.shape[-1] ** -0.5))
    args = jax.device_put((case.q, case.k_pages, case.v_pages, case.turns, work))
    return [np.asarray(f(*args), np.float64) for _ in range(repeats)]


@SHAPES
@pytest.mark.parametrize("share", [True, False])
def test_decode(kv_heads, group, head_dim, page_size, dtype, bound, share):
    case = random_decode(
        page_size,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
    )
    (out,) = run_decode(case, share)
    assert error(out, case.oracle()) < bound


@SHAPES
@pytest.mark.parametrize("most_pieces", [1, 6])
def test_prefill(kv_heads, group, head_dim, page_size, dtype, bound, most_pieces):
    case = random_prefill(
        page_size,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
    )
    (out,) = run_prefill(case, most_pieces)
    assert error(out, case.oracle()) < bound


@pytest.mark.parametrize(
    "run", [run_decode, run_prefill, partial(run_prefill, most_pieces=6)], ids=["d", "p", "p6"]
)
def test_repeats_are_equal(run):
    """A result that moves is a race: the kernels' order of summation is fixed."""
    case = (random_decode if run is run_decode else random_prefill)(11, kv_heads=8)
    first, *others = run(case, repeats=100)
    assert error(first, case.oracle()) < 5e-3
    for other in others:
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("tokens", [1, 64, 1030, 8192])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 128), (3, 64)])
def test_written_tokens(tokens, kv_heads, head_dim):
    """In place, as XLA's scatter does it; one token in seven is padding."""
    rng = np.random.default_rng(tokens)
    pages, page_size = 600, 16
    slot = rng.permutation(pages * page_size)[:tokens]
    page, offset = jnp.asarray(slot // page_size).at[5::7].set(pages), jnp.asarray(slot % page_size)
    shapes = [(pages, kv_heads, page_size, head_dim)] * 2 + [(tokens, kv_heads, head_dim)] * 2
    arrays = [
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes)
    ]
    expected = [
        np.asarray(pool.at[page, :, offset].set(new, mode="drop"))
        for pool, new in zip(arrays[:2], arrays[2:], strict=True)
    ]
    found = jax.jit(write_tokens, donate_argnums=(0, 1))(*arrays, page, offset)
    assert arrays[0].is_deleted()
    for after, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(after), right)


@SHAPES
def test_copies(kv_heads, group, head_dim, page_size, dtype, bound):
    """Against XLA's copy of the same pages; nothing else changes."""
    del group, bound
    shape = (400, kv_heads, page_size, head_dim)
    pages = [jax.random.normal(jax.random.key(seed), shape, dtype) for seed in (0, 1)]
    moves = make_moves(150, 400, head_dim)
    moves = moves._replace(target=moves.target.at[7].set(400))  # padding
    for got, expected in zip(
        jax.jit(copies.copy_pages)(*pages, moves), xla_copy_pages(*pages, moves), strict=True
    ):
        # Two float32 sums of two products, rounded once each: one unit in the last place.
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (got, expected)), rtol=2**-7, atol=1e-5
        )
