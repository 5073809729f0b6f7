"""What models other than Llama add, through the engine: documents, hits, and sliding windows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from engine_helpers import EngineUnderTest, assert_matches_oracle, document, text
from flax import nnx
from small_models import loaded_as, sharpen

from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.models.checkpoint import LoadedModel, dummy
from lazyattn_jax.models.config import NAMED_SHAPES


def model_of(**changes: object) -> LoadedModel:
    """Random weights as for the other engine tests; biases are not 0 and norms not 1."""
    config = dataclasses.replace(NAMED_SHAPES["tiny"], **changes)
    model = dummy(config, jnp.float32)
    sharpen(model)
    for i, (path, param) in enumerate(nnx.to_flat_state(nnx.state(model))):
        if path[-1] not in ("kernel", "embedding"):
            param[...] = param[...] + 0.3 * jax.random.normal(jax.random.key(i), param.shape)
    return loaded_as(model, config)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 512},
        {"model_type": "qwen2", "attention_bias": True, "num_kv_heads": 1},
        {"model_type": "qwen3", "head_dim": 32},
    ],
    ids=lambda changes: changes["model_type"],
)
def test_documents_in_any_order(changes):
    """Computed, then found in the other order: both times what the oracle computes."""
    config = EngineConfig(
        page_size=8, kv_pool_bytes=1 << 19, max_num_seqs=1, max_num_batched_tokens=64,
        max_model_len=512, max_documents=8, check_invariants=True,
    )  # fmt: skip
    engine = EngineUnderTest(model_of(**changes), config)
    first, second = document(2, 40), document(3, 23)
    for documents, cached in (((first, second), [0, 0]), ((second, first), [23, 40])):
        prompt = [text(1, 9), *documents, text(4, 7)]
        request = engine.run(prompt)[0]
        assert request.cached_document_tokens == cached
        assert_matches_oracle(engine, request, prompt)
    engine.assert_idle()


def test_a_sliding_window_bounds_the_context():
    config = dataclasses.replace(NAMED_SHAPES["tiny"], model_type="mistral", sliding_window=512)
    assert EngineConfig().resolve_limits(config, jnp.float32).max_model_len == 512
    within = EngineConfig(max_model_len=512).resolve_limits(config, jnp.float32)
    assert within.max_model_len == 512
    message = r"max_model_len is 513, .* only the last 512 tokens .* can be at most 512"
    with pytest.raises(ValueError, match=message):
        EngineConfig(max_model_len=513).resolve_limits(config, jnp.float32)
    wide = dataclasses.replace(config, sliding_window=4096)
    assert EngineConfig().resolve_limits(wide, jnp.float32).max_model_len == 2048
    with pytest.raises(ValueError, match=r"is 2049, the model is made for at most 2048"):
        EngineConfig(max_model_len=2049).resolve_limits(wide, jnp.float32)
