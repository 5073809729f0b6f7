"""A small model with sharp logits, and engines over it that check themselves after every step."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import pytest
from engine_helpers import EngineUnderTest
from flax import nnx

from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.models.checkpoint import LoadedModel, dummy, fingerprint
from lazyattn_jax.models.config import NAMED_SHAPES
from lazyattn_jax.models.tokenizer import dummy_tokenizer


@functools.cache
def small_model() -> LoadedModel:
    """Random weights, scaled up so that what a token attends to decides what comes next."""
    config = NAMED_SHAPES["tiny"]
    model = dummy(config, jnp.float32)
    for path, param in nnx.to_flat_state(nnx.state(model)):
        if path[-1] == "kernel":
            param[...] = param[...] * 8
    tokenizer = dummy_tokenizer(config.vocab_size)
    return LoadedModel(model, config, tokenizer, fingerprint(model, config), "small")


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return small_model()


@functools.cache
def engine_of(**options: object) -> EngineUnderTest:
    defaults = {
        "page_size": 8,
        "kv_pool_bytes": 200 * 8 * 512,  # 200 pages of 8 tokens of 512 bytes
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "max_documents": 8,
        "check_invariants": True,
    }
    # Ways of reusing KV differ in what is computed, not in how: one engine compiles for all.
    programs = None
    if "reuse" in options or options.get("document_context") == "full":
        same = {
            k: v
            for k, v in options.items()
            if k not in ("reuse", "document_context", "share_reads")
        }
        programs = engine_of(**same).programs
    return EngineUnderTest(small_model(), EngineConfig(**(defaults | options)), programs=programs)


@pytest.fixture
def make_engine():
    """Engines are compiled once a session; each test gets them empty and leaves them idle."""
    used = []

    def make(**options: object) -> EngineUnderTest:
        engine = engine_of(**options)
        engine.scheduler.index.clear()
        used.append(engine)
        return engine

    yield make
    for engine in used:
        engine.assert_idle()
