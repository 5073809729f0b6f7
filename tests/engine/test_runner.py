"""The compiled steps: the pool is updated in place, and nothing in them grows with it."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from lazyattn_jax.engine.limits import Limits
from lazyattn_jax.engine.runner import Runner


def memory(loaded, num_pages: int, prefill: bool):
    limits = Limits(
        page_size=16,
        num_pages=num_pages,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_documents=8,
    )
    runner = Runner(loaded, limits)
    compiled = runner._lower(*(("prefill", 64) if prefill else ("decode", 4))).compile()
    pool_bytes = sum(x.nbytes for kv in runner._pool for x in kv)
    return compiled.memory_analysis(), pool_bytes


@pytest.mark.usefixtures("compiled_afresh")
@pytest.mark.parametrize("prefill", [True, False], ids=["prefill", "decode"])
def test_the_pool_is_donated_and_scratch_does_not_depend_on_its_size(loaded, prefill):
    small, _ = memory(loaded, 256, prefill)
    large, pool_bytes = memory(loaded, 8192, prefill)
    assert pool_bytes > 60 << 20
    assert large.alias_size_in_bytes >= pool_bytes  # every pool array is written where it stands
    assert large.temp_size_in_bytes == small.temp_size_in_bytes
    assert large.temp_size_in_bytes < pool_bytes / 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_models_run(dtype):
    """Weights, KV and attention in one dtype under strict promotion; greedy output on a hit too."""
    from engine_helpers import GREEDY, ONE_SHAPE, document, text

    from lazyattn_jax.engine.config import EngineConfig
    from lazyattn_jax.engine.engine import Engine
    from lazyattn_jax.models.load import load_model

    loaded = load_model("dummy:tiny", dtype=jnp.dtype(dtype))
    config = EngineConfig(
        kv_pool_bytes=1 << 19, max_num_seqs=4, max_num_batched_tokens=64, **ONE_SHAPE
    )
    engine = Engine(loaded, config)
    assert all(x.dtype == dtype for kv in engine._runner._pool for x in kv)
    answers = []
    for _ in range(2):
        request = engine.add([text(1, 5), document(2, 20), text(3, 4)], GREEDY)
        while engine.has_work:
            engine.step()
        answers.append(request.generated)
    assert answers[0] == answers[1]
    assert request.cached_document_tokens == [20]


def test_the_gpu_kernels_are_refused_where_they_cannot_run(loaded):
    limits = Limits(
        page_size=16,
        num_pages=64,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_documents=8,
    )
    with pytest.raises(NotImplementedError, match="attention mosaic_gpu cannot be used: device"):
        Runner(loaded, limits, "mosaic_gpu")
