"""The Hopper kernels compile for an H200 at the shapes of real models, and spill no registers."""

from __future__ import annotations

import os
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from lazyattn_jax.cache.pool import LayerKV, put_pages, take_pages
from lazyattn_jax.engine.step import copy
from lazyattn_jax.kernels.model_shapes import LLAMA_3_1_8B, MODEL_SHAPES
from lazyattn_jax.kernels.mosaic_gpu.ahead import compile_for_h200, usage_on_h200
from lazyattn_jax.kernels.mosaic_gpu.copies import copy_pages
from lazyattn_jax.kernels.mosaic_gpu.decode import lazy_decode
from lazyattn_jax.kernels.mosaic_gpu.model_shapes import (
    copy_arguments,
    decode_arguments,
    prefill_arguments,
)
from lazyattn_jax.kernels.mosaic_gpu.prefill import lazy_prefill
from lazyattn_jax.kernels.mosaic_gpu.writes import write_tokens

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the compiler is for Linux only"),
    pytest.mark.usefixtures("compiled_afresh"),
]

EVERY_SHAPE = [(shape, page_size) for shape in MODEL_SHAPES for page_size in (16, 64)]
EVERY_PAGE_SIZE = [(LLAMA_3_1_8B, page_size) for page_size in (32, 128)]


def named(cases: list) -> list:
    return [
        pytest.param(*case, id="-".join(str(getattr(x, "name", x)) for x in case)) for case in cases
    ]


def check(kernel, shape, arguments: tuple, kernels: int) -> None:
    usages = usage_on_h200(partial(kernel, scale=shape.scale), *arguments)
    for usage in usages:
        print(usage)
    assert len(usages) == kernels
    for usage in usages:
        assert usage.registers > 0
        assert usage[2:] == (0, 0, 0), usage


@pytest.mark.parametrize(("shape", "page_size"), named(EVERY_SHAPE + EVERY_PAGE_SIZE))
def test_decode(shape, page_size):
    check(lazy_decode, shape, decode_arguments(shape, page_size), kernels=2)


@pytest.mark.parametrize(("shape", "page_size"), named(EVERY_SHAPE))
def test_prefill(shape, page_size):
    check(lazy_prefill, shape, prefill_arguments(shape, page_size), kernels=1)


@pytest.mark.parametrize(("shape", "page_size"), named(EVERY_SHAPE + EVERY_PAGE_SIZE))
def test_split_prefill(shape, page_size):
    arguments = prefill_arguments(shape, page_size, most_pieces=6)
    check(lazy_prefill, shape, arguments, kernels=2)


@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=lambda shape: shape.name)
def test_writes(shape, tokens):
    page = jax.ShapeDtypeStruct((1024, shape.kv_heads, 16, shape.head_dim), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((tokens, shape.kv_heads, shape.head_dim), jnp.bfloat16)
    place = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    (usage,) = usage_on_h200(write_tokens, page, page, new, new, place, place)
    assert usage.registers > 0
    assert usage[2:] == (0, 0, 0), usage


@pytest.mark.parametrize(("shape", "page_size"), named(EVERY_SHAPE + EVERY_PAGE_SIZE))
def test_copy(shape, page_size):
    """Also of heads and pages whose rows divide by 16 only."""
    (usage,) = usage_on_h200(copy_pages, *copy_arguments(shape, page_size))
    assert 0 < usage.registers <= 128, usage  # at least four blocks a core
    assert usage[2:] == (0, 0, 0), usage


def test_copies_are_made_in_place():
    """Through the engine's program for all layers: had the pool to be copied, none would fit."""
    pages, _, moves = copy_arguments(LLAMA_3_1_8B, 64)
    pool = [LayerKV(pages, pages) for _ in range(2)]
    program = compile_for_h200(partial(copy, implementation="mosaic_gpu"), pool, moves, donate=(0,))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == 4 * 500 * 8 * 64 * 128 * 2
    assert memory.temp_size_in_bytes < 1 << 20


def test_documents_come_back_in_place():
    """The same of documents that the host's memory kept; taking them takes no scratch either."""
    pages = jax.ShapeDtypeStruct((500, 8, 16, 128), jnp.bfloat16)
    pool = [LayerKV(pages, pages) for _ in range(2)]
    some = jax.ShapeDtypeStruct((16,), jnp.int32)
    taken = jax.eval_shape(take_pages, pool, some)
    assert taken.shape == (4, 16, 8, 16, 128)
    taking = compile_for_h200(take_pages, pool, some).memory_analysis()
    putting = compile_for_h200(put_pages, pool, some, taken, donate=(0,)).memory_analysis()
    assert putting.alias_size_in_bytes == 4 * 500 * 8 * 16 * 128 * 2
    assert taking.temp_size_in_bytes == putting.temp_size_in_bytes == 0


def test_float16():
    arguments = prefill_arguments(LLAMA_3_1_8B, 64, dtype=jnp.float16)
    check(lazy_prefill, LLAMA_3_1_8B, arguments, kernels=1)


def scaled(x: jax.Array, factor: float, kernel_name: str) -> jax.Array:
    """A kernel that holds all of ``x`` in the registers of one warpgroup."""

    def body(x_ref, out_ref):
        x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        out_ref[...] = x * factor + jax.lax.broadcast_in_dim(x.max(axis=1), x.shape, [0])

    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), kernel_name=kernel_name
    )(x)


def test_spills_are_seen():
    few, many = (jax.ShapeDtypeStruct((64, n), jnp.float32) for n in (16, 1024))
    (usage,) = usage_on_h200(partial(scaled, factor=2.0, kernel_name="few"), few)
    assert usage.kernel.startswith("few")
    assert usage.registers < 100
    assert usage[2:] == (0, 0, 0)
    (usage,) = usage_on_h200(partial(scaled, factor=2.0, kernel_name="many"), many)
    assert usage.kernel.startswith("many")
    assert usage.registers >= 128
    assert min(usage[2:]) > 0


def test_every_kernel_is_reported(capfd):
    """Also those that were compiled before, and equal ones; nothing of it reaches the output."""

    def program(x):
        return scaled(scaled(scaled(x, 2.0, "one"), 2.0, "one"), 3.0, "other")

    x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    compile_for_h200(program, x)
    for _ in range(2):
        names = [usage.kernel.split("_")[0] for usage in usage_on_h200(program, x)]
        assert sorted(names) == ["one", "one", "other"]
    assert usage_on_h200(jnp.sin, x) == []
    assert capfd.readouterr() == ("", "")
    assert "MOSAIC_GPU_DUMP_PTXAS" not in os.environ


def test_output_is_not_lost_in_an_error(capfd):
    def broken(x):
        print("before it breaks")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        usage_on_h200(broken, jax.ShapeDtypeStruct((1,), jnp.float32))
    print("afterwards")
    out, err = capfd.readouterr()
    assert "before it breaks" in out + err
    assert "afterwards" in out
