"""A small model with sharp logits, and engines over it that check themselves after every step."""

from __future__ import annotations

import functools

import pytest
from engine_helpers import EngineUnderTest
from small_models import small_model

from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.engine.runner import Programs
from lazyattn_jax.models.checkpoint import LoadedModel


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return small_model()


# Options that say what is computed, not how.
SAME_PROGRAMS = (
    "document_context",
    "document_gap",
    "document_select",
    "eviction",
    "reuse",
    "share_reads",
)


@functools.cache
def programs_of(**options: object) -> Programs:
    """Where engines that differ only in those options keep what they compile."""
    return {}


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
    programs = programs_of(**{k: v for k, v in options.items() if k not in SAME_PROGRAMS})
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
