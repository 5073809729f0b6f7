"""The TPU kernels compile, with the real compiler, at the shapes of models."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh

from lazyattn_jax.kernels.model_shapes import (
    MODEL_SHAPES,
    arguments,
    decode_step,
    prefill_step,
)
from lazyattn_jax.kernels.mosaic_tpu.ahead import (
    abstract_device,
    compile_for_tpu,
    is_installed,
    kernels_of,
)
from lazyattn_jax.kernels.mosaic_tpu.decode import lazy_decode
from lazyattn_jax.kernels.mosaic_tpu.plan import plan_decode, plan_prefill
from lazyattn_jax.kernels.mosaic_tpu.prefill import lazy_prefill
from lazyattn_jax.kernels.mosaic_tpu.support import is_fused

pytestmark = [
    pytest.mark.skipif(
        not is_installed(), reason="needs libtpu: pip install 'lazyattn-jax[ahead]'"
    ),
    pytest.mark.usefixtures("compiled_afresh"),
]

ROWS = {"decode": 64, "prefill": 4 * 128}


def compiled(generation, kind, shape, page_size=64, dtype=jnp.bfloat16):
    """A kernel at a model's shape: a step of many requests over documents of 512 tokens."""
    if kind == "decode":
        kernel, step = lazy_decode, decode_step(page_size, requests=64, documents=10)
        work = plan_decode(*step, page_size=page_size)
    else:
        kernel = lazy_prefill
        step = prefill_step(page_size, requests=4, tokens=128, documents=3)
        options = {"num_rows": ROWS[kind], "page_size": page_size, "group": shape.group}
        work = plan_prefill(*step, **options)
    fused = is_fused(shape.head_dim)
    args = arguments(shape, page_size, dtype, ROWS[kind], *step, work, fused=fused)
    return compile_for_tpu(generation, partial(kernel, scale=shape.scale), *args)


@pytest.mark.parametrize("generation", ["v5e", "v6e"])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=lambda shape: shape.name)
def test_kernels_compile(generation, kind, shape):
    program = compiled(generation, kind, shape)
    [kernel] = kernels_of(program)
    print(f"{generation} {kind} {shape.name}: {kernel.vmem / 2**20:.1f} MiB of VMEM")
    assert kernel.name.startswith(f"lazy_{kind}")
    mesh = AbstractMesh((), (), abstract_device=abstract_device(generation))
    with jax.sharding.use_abstract_mesh(mesh):
        capacity = pltpu.get_tpu_info().vmem_capacity_bytes
    assert 0 < kernel.vmem <= capacity


@pytest.mark.parametrize("generation", ["v4", "v5p", "tpu7x"])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_other_generations(generation, kind):
    assert kernels_of(compiled(generation, kind, MODEL_SHAPES[2]))


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_other_pages_and_float32(kind, page_size):
    for shape in MODEL_SHAPES[1:3]:
        assert kernels_of(compiled("v5e", kind, shape, page_size))
        assert kernels_of(compiled("v5e", kind, shape, page_size, jnp.float32))
