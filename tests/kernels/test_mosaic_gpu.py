"""The Hopper kernels in GPU interpret mode, which looks for races, against a float64 oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import DECODE, PREFILL, decode_case, error, prefill_case
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from lazyattn_jax.kernels.copies import xla_copy_pages
from lazyattn_jax.kernels.mosaic_gpu.copies import copy_pages
from lazyattn_jax.kernels.mosaic_gpu.decode import lazy_decode
from lazyattn_jax.kernels.mosaic_gpu.plan import plan_decode, tile_slots
from lazyattn_jax.kernels.mosaic_gpu.prefill import lazy_prefill
from lazyattn_jax.kernels.mosaic_gpu.prefill_plan import plan_prefill
from lazyattn_jax.kernels.mosaic_gpu.writes import write_tokens
from lazyattn_jax.kernels.work import Moves, Turns

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
RACE = "RACE DETECTED"


@pytest.fixture(autouse=True)
def no_races(capsys):
    """Fails the test if the interpreter tells of a race in any kernel that ran."""
    yield
    reset_gpu_interpret_mode_state()
    assert RACE not in capsys.readouterr().out


def decode_work(case, workers=2, **options):
    return plan_decode(
        case.references,
        case.runs,
        num_rows=len(case.q),
        page_size=case.page_size,
        group=case.group,
        tile=tile_slots(case.q.shape[-1]),
        workers=workers,
        **options,
    )


def prefill_work(case, workers=2, **options):
    return plan_prefill(
        case.references,
        case.runs,
        num_rows=len(case.q),
        page_size=case.page_size,
        group=case.group,
        kv_heads=case.kv_heads,
        workers=workers,
        **options,
    )


def check(kernel, case, work, bound=5e-3, **options) -> None:
    out = kernel(
        case.q,
        case.k_pages,
        case.v_pages,
        case.turns,
        work,
        scale=case.q.shape[-1] ** -0.5,
        interpret=INTERPRET,
        **options,
    )
    assert (out.shape, out.dtype) == (case.q.shape, case.q.dtype)
    out, expected = np.asarray(out, np.float64), case.oracle()
    seen = expected.any((1, 2))
    np.testing.assert_array_equal(out[~seen], 0)
    # Row by row, so that no row hides behind others.
    for row in np.flatnonzero(seen):
        assert error(out[row], expected[row]) < 2 * bound, row
    if seen.any():
        assert error(out, expected) < bound


@pytest.mark.parametrize("options", DECODE.values(), ids=DECODE.keys())
def test_decode(options):
    case = decode_case(0, **options)
    check(lazy_decode, case, decode_work(case))


def test_decode_reads_a_shared_run_once():
    case = decode_case(0, **DECODE["shared"])
    together, apart = (decode_work(case, share=share) for share in (True, False))
    assert (len(together.tiles), len(apart.tiles)) == (5 + 2 + 1, 3 * 5 + 2 + 1)
    check(lazy_decode, case, apart)


@pytest.mark.parametrize(("holds", "workers"), [([[0]], 8), ([[0], [0], [0]], 3)])
def test_workers_cut_a_long_run(holds, workers):
    """With 8 workers and 7 tiles, one has nothing to do."""
    case = decode_case(1, holds, [860], group=4, head_dim=64, page_size=32)
    work = decode_work(case, workers)
    parts = np.diff(work.first_part)
    assert parts.tolist() == [min(workers, 7)] * len(holds)
    check(lazy_decode, case, work)


def test_one_worker_goes_on_in_a_softmax():
    case = decode_case(2, [[0, 1, 2], [3]], [70, 64, 10, 30], group=4, head_dim=64)
    work = decode_work(case, workers=1)
    assert np.diff(work.first_part).tolist() == [1, 1]
    check(lazy_decode, case, work)


def test_decode_float16():
    case = decode_case(3, [[0, 1], [0]], [200, 30], group=4, dtype=jnp.float16)
    check(lazy_decode, case, decode_work(case), bound=1e-3)


@pytest.mark.parametrize("options", PREFILL.values(), ids=PREFILL.keys())
def test_prefill(options):
    case = prefill_case(0, **options)
    check(lazy_prefill, case, prefill_work(case))


def test_blocks_of_padding_follow_one_another():
    """The warpgroups take turns at tiles, and such blocks have none."""
    case = prefill_case(0, [(3, 0, [(20, 0)])], padding=150, group=4, head_dim=64)
    work = prefill_work(case, workers=1)
    assert np.count_nonzero(work.entries[:, 1] == 0) > 2
    check(lazy_prefill, case, work)


SPLIT = {
    "question": {
        "requests": [(10, 30, [(200, 0), (300, 0)])],
        "group": 4,
        "head_dim": 64,
        "page_size": 32,
    },
    "three heads": {
        "requests": [(3, 0, [(390, 0)])],
        "padding": 4,
        "group": 3,
        "page_size": 16,
        "kv_heads": 1,
    },
    "some": {
        "requests": [(1, 0, []), (17, 0, [(270, 9), (0, 0)])],
        "padding": 2,
        "group": 8,
        "head_dim": 64,
    },
    "causal": {"requests": [(30, 300, [])], "group": 1, "head_dim": 128, "page_size": 128},
}


@pytest.mark.parametrize("options", SPLIT.values(), ids=SPLIT.keys())
def test_split_prefill(options):
    case = prefill_case(1, **options)
    whole, work = prefill_work(case), prefill_work(case, workers=9, most_pieces=4)
    assert work.num_items[0] > whole.num_items[0]
    assert np.diff(work.first_part).max() > 1
    check(lazy_prefill, case, work)


def test_prefill_float16():
    case = prefill_case(2, [(20, 30, [(140, 4)])], group=4, dtype=jnp.float16)
    check(lazy_prefill, case, prefill_work(case), bound=1e-3)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_turns_can_be_left_out(kind):
    if kind == "decode":
        case = decode_case(4, [[0, 1], [0]], [70, 30], head_dim=64)
        kernel, work = lazy_decode, decode_work(case)
    else:
        case = prefill_case(4, [(8, 0, [(30, 0)])], head_dim=64)
        kernel, work = lazy_prefill, prefill_work(case)
    case.deltas[:] = 0
    check(kernel, case, work, rotate=False)


def test_races_are_seen(capsys):
    def body(x_ref, out_ref, buffer, barrier):
        plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
        out_ref[...] = buffer[...]
        plgpu.barrier_wait(barrier)

    x = jnp.ones((8, 128), jnp.float32)
    plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=(plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()),
        interpret=INTERPRET,
    )(x)
    assert RACE in capsys.readouterr().out


def small(kind, **options):
    """A kernel and its arguments."""
    if kind == "decode":
        case = decode_case(0, [[0], [0]], [40], **options)
        kernel, make = lazy_decode, decode_work
    else:
        case = prefill_case(0, [(8, 0, [])], **options)
        kernel, make = lazy_prefill, prefill_work
    return partial(kernel, scale=1.0), case, make


KINDS = pytest.mark.parametrize("kind", ["decode", "prefill"])


@KINDS
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head_dim": 32}, "head_dim 32"),
        ({"head_dim": 256}, "head_dim 256"),
        ({"dtype": jnp.float32}, "float32"),
        ({"page_size": 8}, "page size 8"),
        ({"page_size": 256}, "page size 256"),
        ({"group": 17}, "17 query heads"),
    ],
)
def test_what_is_not_taken(kind, options, reason):
    kernel, case, _ = small(kind, **options)
    _, fits, make = small(kind)
    with pytest.raises(NotImplementedError, match=reason):
        kernel(case.q, case.k_pages, case.v_pages, case.turns, make(fits))


@KINDS
@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"v_pages": (1, 1, 64, 128)}, (r"\(3, 1, 64, 128\)", r"\(1, 1, 64, 128\)")),
        ({"q": (8, 4, 64)}, (r"\(8, 4, 64\)", "128")),
        ({"q": (8, 4)}, (r"\(8, 4\)", r"\[T, N, 128\]")),
        ({"k_pages": (3, 3, 64, 128), "v_pages": (3, 3, 64, 128)}, ("4 query heads", "3 KV heads")),
        ({"q": (9, 4, 128)}, ("work list has [28] query rows", "q 9")),
        ({"turns": 32}, ("32 angles", "needs 64")),
        ({"dtype": jnp.float16}, ("float16", "bfloat16")),
        ({"k_pages": (3, 1, 16, 128), "v_pages": (3, 1, 16, 128)}, ("has [12] ", "needs? [48]")),
    ],
)
def test_shapes_that_disagree(kind, change, both):
    kernel, case, make = small(kind)
    shapes = {"q": case.q.shape, "k_pages": case.k_pages.shape, "v_pages": case.v_pages.shape}
    arrays = {
        name: jnp.zeros(change.get(name, shape), jnp.bfloat16) for name, shape in shapes.items()
    }
    angles = jnp.zeros((3, change.get("turns", 64)), jnp.float32)
    q = arrays.pop("q").astype(change.get("dtype", jnp.bfloat16))
    with pytest.raises(ValueError, match=both[0]) as raised:
        kernel(q, **arrays, turns=Turns(angles, angles), work=make(case))
    assert raised.match(both[1])


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "page_size", "head_dim"),
    [(1, 1, 16, 128), (20, 2, 16, 64), (1030, 3, 16, 64)],  # the last: 4 tokens a block, and a rest
)
def test_written_tokens(tokens, kv_heads, page_size, head_dim):
    """Every token stands in its slot, padding nowhere, and nothing else has changed."""
    rng = np.random.default_rng(tokens)
    pages = 1 + 2 * tokens // page_size
    slot = rng.permutation(pages * page_size)[:tokens]
    page, offset = slot // page_size, slot % page_size
    page[5::7] = pages
    pools = [rng.normal(size=(pages, kv_heads, page_size, head_dim)) for _ in range(2)]
    new = [rng.normal(size=(tokens, kv_heads, head_dim)) for _ in range(2)]
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (*pools, *new)]
    found = write_tokens(*arrays, jnp.asarray(page), jnp.asarray(offset), interpret=INTERPRET)
    for before, values, after in zip(arrays[:2], arrays[2:], found, strict=True):
        expected = np.array(before)
        for t in np.flatnonzero(page < pages):
            expected[page[t], :, offset[t]] = values[t]
        np.testing.assert_array_equal(np.asarray(after), expected)


@pytest.mark.parametrize(
    ("kv_heads", "page_size", "head_dim"), [(2, 64, 128), (3, 16, 64), (2, 16, 128), (1, 16, 64)]
)
def test_copies(kv_heads, page_size, head_dim):
    """Against XLA's copy, which is tested against an oracle; padding writes nothing."""
    rng = np.random.default_rng(0)
    num_pages, count = 9, 3
    shape = (num_pages, kv_heads, page_size, head_dim)
    k, v = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(2))
    ids = rng.permutation(num_pages)
    source, target = ids[:count], np.append(ids[count : 2 * count - 1], num_pages)
    angles = rng.uniform(0, 6, (2, head_dim // 2))
    turns = Turns(*(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)))
    lists = (jnp.asarray(x, jnp.int32) for x in (source, target, [1, 0, 1]))
    moves = Moves(*lists, turns)
    for got, expected, before in zip(
        copy_pages(k, v, moves, interpret=INTERPRET),
        xla_copy_pages(k, v, moves),
        (k, v),
        strict=True,
    ):
        # The same float32 sum of two products, each rounded once to bfloat16.
        np.testing.assert_allclose(
            got.astype(jnp.float32), expected.astype(jnp.float32), rtol=2**-7, atol=1e-5
        )
        others = np.delete(np.arange(num_pages), target[:-1])
        np.testing.assert_array_equal(got[others], before[others])
