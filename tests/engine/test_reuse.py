"""Ways of reusing KV: what each attends to, holds and counts."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from engine_helpers import GREEDY, ONE_SHAPE, assert_matches_oracle, document, text

from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.engine.limits import Limits
from lazyattn_jax.engine.request import DocumentContext, RequestError, as_text

SYSTEM, QUESTION = text(1, 13), text(2, 9)
A, B, C = document(10, 17), document(11, 30), document(12, 8)
PROMPT = [SYSTEM, A, B, C, QUESTION]
SMALL = {"kv_pool_bytes": 33 * 8 * 512, "max_model_len": 200, **ONE_SHAPE}
REORDERED = [SYSTEM, C, B, A, QUESTION]


def logits_of(engine, request):
    return np.stack(engine.logits[request.id])


@pytest.mark.parametrize("context", ["prefix", "none"])
def test_block_gives_the_logits_of_lazy(make_engine, context):
    """Turning keys or queries differs by rounding only: see the oracle's bound for float32."""
    lazy, block = (make_engine(reuse=mode, document_context=context) for mode in ("lazy", "block"))
    twice = [SYSTEM, A, text(3, 21), B, A, QUESTION]
    for prompt in (PROMPT, REORDERED, twice, [text(5, 70)]):
        (ours,), (theirs,) = lazy.run(prompt), block.run(prompt)
        assert ours.generated == theirs.generated
        assert ours.cached_document_tokens == theirs.cached_document_tokens
        np.testing.assert_allclose(
            logits_of(lazy, ours), logits_of(block, theirs), atol=2e-4, rtol=0
        )
        assert_matches_oracle(
            block, theirs, prompt, prefix=context == "prefix", gap=200 if context == "prefix" else 0
        )


@pytest.mark.parametrize("options", [{"repair": 8}, {"repair": 16, "temperature": 0.7}])
def test_block_copies_what_is_not_repaired(make_engine, options):
    lazy, block = (make_engine(reuse=mode) for mode in ("lazy", "block"))
    context = DocumentContext(**options)
    for prompt in (PROMPT, REORDERED):
        (ours,), (theirs,) = (engine.run(prompt, context=context) for engine in (lazy, block))
        assert ours.generated == theirs.generated
        assert ours.cached_document_tokens == theirs.cached_document_tokens
        assert len(theirs.copy_pages) == sum(
            block.limits.pages_for(d.reused) for d in theirs.layout.documents
        )
        assert_matches_oracle(block, theirs, prompt, **options)


def test_block_copies_and_lets_the_cached_documents_go(make_engine):
    engine = make_engine(reuse="block")
    engine.run(PROMPT)
    before = engine.scheduler.index.num_available
    request = engine.add(REORDERED, GREEDY)
    while request.num_generated < 2:
        engine.step()
    pages = [engine.limits.pages_for(len(d.tokens)) for d in (C, B, A)]
    held = before - engine.scheduler.index.num_available
    # Its copies, its leading text (2 pages), the question and what it has generated.
    assert held == sum(pages) + 2 + len(request.run.pages)
    placed = request.run.context[1:]
    assert [len(p.pages) for p in placed] == pages
    assert [p.delta for p in placed] == [0, 0, 0]
    cached = {p for s in engine.scheduler.index.segments() if s.is_document for p in s.pages}
    assert not cached.intersection(*[p.pages for p in placed])
    assert cached.isdisjoint(itertools.chain(*(p.pages for p in placed)))
    engine.drain()


def test_block_under_memory_pressure(make_engine):
    """Preempted and readmitted, with documents evicted in between: the same output."""
    params = dataclasses.replace(GREEDY, max_tokens=60)
    orders = [[SYSTEM, *order, QUESTION] for order in ((A, B, C), (C, B, A), (B, A, C))]
    roomy = make_engine()
    expected = [roomy.run(prompt, params=params)[0].generated for prompt in orders]
    # Two requests take 2 + 2 * (8 + 9) pages in the end, of which 8 are of copies.
    tight = make_engine(reuse="block", **SMALL)
    assert [r.generated for r in tight.run(*orders, params=params)] == expected
    assert tight.scheduler.num_preemptions > 0


def test_reads_that_are_not_shared_give_the_same(make_engine):
    orders = [[SYSTEM, *order, QUESTION] for order in ((A, B, C), (C, B, A), (B, A, C))]
    shared = [r.generated for r in make_engine(reuse="lazy").run(*orders)]
    engine = make_engine(reuse="lazy", share_reads=False)
    plans = []
    plan = engine._runner._planner.decode
    engine._runner._planner.decode = lambda runs: plans.append(plan(runs)) or plans[-1]
    assert [r.generated for r in engine.run(*orders)] == shared
    rows = [(work.rows[: work.num_items] < 4).sum(1) for p in plans for work in p.works]
    assert {int(n) for some in rows for n in some} == {1}


def test_prefix_is_full_attention_with_equal_beginnings_reused(make_engine):
    engine, plain = make_engine(reuse="prefix"), make_engine()
    (expected,) = plain.run([sum(as_text(PROMPT), ())])
    for cached in (0, 76 // 8 * 8):  # the whole pages of 13 + 17 + 30 + 8 + 9 tokens but the last
        (request,) = engine.run(PROMPT)
        assert request.generated == expected.generated
        assert request.cached_tokens == cached
    (request,) = engine.run([SYSTEM, A, C, B, QUESTION])
    assert request.cached_tokens == 30 // 8 * 8
    with pytest.raises(RequestError, match=r"reuse is 'prefix'.*computed ahead"):
        engine.add(PROMPT, GREEDY, encode_only=True)


@pytest.mark.parametrize("context", ["prefix", "full"])
def test_none_finds_nothing(make_engine, context):
    engine = make_engine(reuse="none", document_context=context)
    other = make_engine() if context == "prefix" else make_engine(reuse="prefix")
    expected = other.ask(PROMPT)
    for _ in range(2):
        (request,) = engine.run(PROMPT)
        assert request.cached_tokens == 0
        assert request.generated == expected
    with pytest.raises(RequestError, match=r"reuse is 'none'.*computed ahead"):
        engine.add(PROMPT, GREEDY, encode_only=True)


def test_a_request_that_fits_only_without_copies_is_refused(make_engine):
    prompt = [SYSTEM, document(30, 120), QUESTION]  # 2 + 15 pages, 15 of copies, 3 and more
    make_engine(**SMALL).ask(prompt)
    engine = make_engine(reuse="block", **SMALL)
    with pytest.raises(RequestError, match="takes 35 pages, the whole pool has 33"):
        engine.add(prompt, GREEDY)


def test_options_that_contradict_each_other():
    with pytest.raises(ValueError, match="reuse is 'some', must be one of lazy, block, prefix"):
        EngineConfig(reuse="some")
    with pytest.raises(ValueError, match="document_context is 'full', reuse 'lazy' needs"):
        EngineConfig(document_context="full")


def test_buckets_that_do_not_reach_the_largest_step():
    options = {"page_size": 8, "num_pages": 8, "max_model_len": 64, "max_documents": 1}
    options |= {"max_num_seqs": 6, "max_num_batched_tokens": 256}
    given = Limits(**options, given_prefill_buckets=(64, 128, 256), given_decode_buckets=(2, 6))
    assert given.prefill_buckets == (64, 128, 256)
    assert given.decode_buckets == (2, 6)
    for wrong in ((2, 4), (4, 2, 6), (0, 6)):
        with pytest.raises(ValueError, match="must rise from at least 1 to 6"):
            Limits(**options, given_decode_buckets=wrong)
    with pytest.raises(ValueError, match=r"prefill_buckets are 32, 256; .* at least 64 to 256"):
        Limits(**options, given_prefill_buckets=(32, 256))
