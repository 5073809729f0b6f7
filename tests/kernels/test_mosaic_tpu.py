"""The TPU kernels in TPU interpret mode, which looks for races, against a float64 oracle.

Memory that nothing was written to is NaN there, and a read past the end of an array raises.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    DECODE,
    PREFILL,
    decode_case,
    error,
    prefill_case,
    random_decode,
    random_prefill,
)
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lazyattn_jax.kernels.mosaic_tpu import decode, prefill, reader, stream
from lazyattn_jax.kernels.mosaic_tpu.attention import lazy_attention
from lazyattn_jax.kernels.mosaic_tpu.plan import (
    DECODE_OTHERS,
    DECODE_TILE,
    PREFILL_OTHERS,
    PREFILL_TILE,
    plan_decode,
    plan_prefill,
)
from lazyattn_jax.kernels.mosaic_tpu.stream import records
from lazyattn_jax.kernels.work import Turns

INTERPRET = pltpu.InterpretParams(detect_races=True)


def races_found() -> bool:
    return interpreter.races is not None and interpreter.races.races_found


@pytest.fixture(autouse=True)
def no_races():
    """Fails the test if the interpreter tells of a race in any kernel that ran."""
    yield
    found = races_found()
    pltpu.reset_tpu_interpret_mode_state()
    assert not found


def decode_work(case, **options):
    return plan_decode(case.references, case.runs, page_size=case.page_size, **options)


def prefill_work(case, **options):
    return plan_prefill(
        case.references,
        case.runs,
        num_rows=len(case.q),
        page_size=case.page_size,
        group=case.group,
        **options,
    )


def pages_of(case):
    """The arrays of pages as the kernels want them."""
    if case.q.shape[-1] == 64:
        return np.concatenate([case.k_pages, case.v_pages], -1), None
    return case.k_pages, case.v_pages


def check(kernel, case, work, bound=5e-3, interpret=INTERPRET) -> None:
    scale = case.q.shape[-1] ** -0.5
    out = kernel(case.q, *pages_of(case), case.turns, work, scale=scale, interpret=interpret)
    assert (out.shape, out.dtype) == (case.q.shape, case.q.dtype)
    out, expected = np.asarray(out, np.float64), case.oracle()
    seen = expected.any((1, 2))
    np.testing.assert_array_equal(out[~seen], 0)
    # Row by row, so that no row hides behind others.
    for row in np.flatnonzero(seen):
        assert error(out[row], expected[row]) < 2 * bound, row
    if seen.any():
        assert error(out, expected) < bound


check_decode = partial(check, decode.lazy_decode)
check_prefill = partial(check, prefill.lazy_prefill)

# Products of float32 are made of six of bfloat16, which leaves an error of about 2 ** -21.
TIGHT = {"bound": 2e-6}


@pytest.mark.parametrize("options", DECODE.values(), ids=DECODE.keys())
def test_decode(options):
    case = decode_case(0, **options)
    check_decode(case, decode_work(case))


@pytest.mark.parametrize("name", ["shared", "ragged", "two rows twice", "empty run", "heads"])
def test_decode_float32(name):
    case = decode_case(1, **DECODE[name], dtype=jnp.float32, largest_delta=1000)
    check_decode(case, decode_work(case), **TIGHT)


def test_decode_reads_a_shared_run_once():
    case = decode_case(0, **DECODE["shared"])
    together, apart = (decode_work(case, share=share) for share in (True, False))
    read = [
        sum((r.pages >= 0).sum() for r in records(work.stream, DECODE_OTHERS, DECODE_TILE // 64))
        for work in (together, apart)
    ]
    assert read == [5 + 2 + 1, 3 * 5 + 2 + 1]
    check_decode(case, apart)


@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (128, 256)])
def test_random_decode(head_dim, page_size):
    case = random_decode(5, head_dim=head_dim, page_size=page_size, kv_heads=2)
    check_decode(case, decode_work(case))


def test_decode_goes_on_in_the_next_chunks_of_a_long_work_list(monkeypatch):
    """Through all the rings more than once; chunks are small, so that few entries take several."""
    monkeypatch.setattr(stream, "CHUNK", 256)
    monkeypatch.setattr(reader, "CHUNK", 256)
    rng = np.random.default_rng(0)
    holds = [sorted(rng.choice(14, 12, replace=False).tolist()) for _ in range(10)]
    lengths = [1 + 20 * i for i in range(14)]
    case = decode_case(6, holds, lengths, head_dim=64, page_size=256, group=1)
    work = decode_work(case, share=False)
    assert work.stream.shape == ((7 + 2) * 256,)
    check_decode(case, work)


@pytest.mark.parametrize("options", PREFILL.values(), ids=PREFILL.keys())
def test_prefill(options):
    case = prefill_case(0, **options)
    check_prefill(case, prefill_work(case))


@pytest.mark.parametrize("name", ["encoded over tiles", "question", "inserted late", "requests"])
def test_prefill_float32(name):
    case = prefill_case(1, **PREFILL[name], dtype=jnp.float32, largest_delta=1000)
    check_prefill(case, prefill_work(case), **TIGHT)


@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (128, 256)])
def test_random_prefill(head_dim, page_size):
    case = random_prefill(5, head_dim=head_dim, page_size=page_size, kv_heads=2)
    check_prefill(case, prefill_work(case))


def test_prefill_over_windows_and_tiles():
    """Whole tiles that all rows of a block see, runs that begin in the middle of a window."""
    requests = [(150, 700, [(1100, 0), (520, 100)]), (90, 0, [(600, 3)])]
    case = prefill_case(2, requests, padding=30)
    work = prefill_work(case)
    assert np.diff(work.first_tile).tolist() == [2 + 3 + 2, 2 + 3 + 2 + 1 + 2, 0]
    check_prefill(case, work)


SHORT = [100, 128, 40, 1, 64, 90, 200, 17, 129]


def test_decode_over_short_documents():
    """Two to a tile, also in one tile of an odd number; some of them are shared."""
    case = decode_case(4, [[*range(9)], [2, 3], [3, 9, 10, 11]], [*SHORT, 300, 50, 60])
    work = decode_work(case)
    found = list(records(work.stream, DECODE_OTHERS, DECODE_TILE // 64))
    assert [len(r.turns) for r in found if r.others[1] == DECODE_TILE // 2] == [2, 2, 2]
    check_decode(case, work)


@pytest.mark.parametrize("page_size", [16, 128])
def test_prefill_over_short_documents(page_size):
    """Two or four to a tile, seen by rows that begin and end within blocks."""
    documents = [(length, 0) for length in SHORT]
    requests = [(30, 0, documents), (70, 20, [*documents[:6], (100, 10)]), (20, 0, [])]
    case = prefill_case(4, requests, page_size=page_size)
    work = prefill_work(case)
    found = list(records(work.stream, PREFILL_OTHERS, PREFILL_TILE // page_size))
    pieces = [PREFILL_TILE // r.others[1] for r in found]
    assert (pieces.count(2), pieces.count(4)) == (1, 4)
    check_prefill(case, work)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_heads_are_divided_between_cores(kind, monkeypatch):
    """Two cores that take two heads each, one at a time."""
    monkeypatch.setattr(decode, "heads_at_once", lambda heads, bytes_of, interpret: (1, 0))
    monkeypatch.setattr(prefill, "heads_at_once", lambda heads, bytes_of, interpret: (1, 0))
    interpret = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    if kind == "decode":
        case = decode_case(3, [[0, 1], [0], [2]], [300, 30, 50], kv_heads=4, group=2)
        check_decode(case, decode_work(case), interpret=interpret)
    else:
        case = prefill_case(3, [(140, 10, [(600, 0)])], kv_heads=4, group=8)
        assert len(prefill_work(case).first_tile) > 2
        check_prefill(case, prefill_work(case), interpret=interpret)


def test_races_are_seen():
    def body(x_ref, out_ref, buffer, semaphore):
        copy = pltpu.make_async_copy(x_ref, buffer, semaphore)
        copy.start()
        out_ref[...] = buffer[...]
        copy.wait()

    x = jnp.ones((8, 128), jnp.float32)
    pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA(())],
        interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"),
    )(x).block_until_ready()
    assert races_found()
    pltpu.reset_tpu_interpret_mode_state()


def test_pages_past_the_pool_are_seen():
    case = decode_case(0, [[0]], [40])
    case.runs.pages[case.runs.start[0]] = len(case.k_pages)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"[Oo]ut-of-bounds"):
        check_decode(case, decode_work(case))


def small(kind, **options):
    """A kernel and its arguments."""
    if kind == "decode":
        case = decode_case(0, [[0], [0]], [40], **options)
        kernel, make = decode.lazy_decode, decode_work
    else:
        case = prefill_case(0, [(8, 0, [])], **options)
        kernel, make = prefill.lazy_prefill, prefill_work
    return partial(kernel, scale=1.0), case, make


KINDS = pytest.mark.parametrize("kind", ["decode", "prefill"])


@KINDS
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head_dim": 32}, "head_dim 32"),
        ({"head_dim": 64}, "keys and values in arrays of their own at head_dim 64"),
        ({"head_dim": 256}, "head_dim 256"),
        ({"dtype": jnp.float16}, "float16"),
        ({"page_size": 8}, "page size 8"),
        ({"page_size": 512}, "page size 512"),
        ({"group": 17}, "17 query heads"),
    ],
)
def test_what_is_not_taken(kind, options, reason):
    kernel, case, _ = small(kind, **options)
    _, fits, make = small(kind)
    with pytest.raises(NotImplementedError, match=reason):
        kernel(case.q, case.k_pages, case.v_pages, case.turns, make(fits))


@KINDS
def test_fused_pages_are_taken_at_half_a_row_only(kind):
    kernel, case, make = small(kind)
    fused = np.concatenate([case.k_pages, case.v_pages], -1)
    with pytest.raises(NotImplementedError, match="fused pages at head_dim 128"):
        kernel(case.q, fused, None, case.turns, make(case))


def test_more_rows_than_fit_are_refused():
    """The running results of 20,000 rows take more than a core has, even of one head."""
    case = decode_case(0, [[0]], [40])
    q = np.zeros((20_000, 4, 128), case.q.dtype)
    with pytest.raises(NotImplementedError, match=r"takes \d+\.\d MiB .* \(max_num_seqs\)"):
        decode.lazy_decode(
            q, *pages_of(case), case.turns, decode_work(case), scale=1.0, interpret=INTERPRET
        )


@KINDS
@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"v_pages": (1, 1, 64, 128)}, (r"\(3, 1, 64, 128\)", r"\(1, 1, 64, 128\)")),
        ({"q": (8, 4, 64)}, (r"\(8, 4, 64\)", "128")),
        ({"q": (8, 4)}, (r"\(8, 4\)", r"\[T, N, 128\]")),
        ({"k_pages": (3, 3, 64, 128), "v_pages": (3, 3, 64, 128)}, ("4 query heads", "3 KV heads")),
        ({"turns": 32}, ("32 angles", "needs 64")),
        ({"dtype": jnp.float32}, ("float32", "bfloat16")),
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


def test_a_work_list_of_other_rows():
    kernel, case, make = small("prefill")
    q = jnp.zeros((129, 4, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="1 windows of 128 query rows, q has 129 rows"):
        kernel(q, case.k_pages, case.v_pages, case.turns, make(case))


def test_lists_of_others_are_refused():
    case = decode_case(0, [[0]], [40])
    with pytest.raises(NotImplementedError, match="work lists int; takes those that TpuLists"):
        lazy_attention(case.q, *pages_of(case), case.turns, (1,), block_rows=1, scale=1.0)
