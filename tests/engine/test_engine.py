"""The engine's output is that of the plain computation, whatever was reused, shared or evicted."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from engine_helpers import GREEDY, ONE_SHAPE, assert_matches_oracle, document, oracle_logits, text

from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import DocumentPiece, RequestError
from lazyattn_jax.engine.runs import State
from lazyattn_jax.engine.sampler import SamplingRows, sample

SYSTEM, QUESTION, OTHER = text(1, 13), text(2, 9), text(3, 21)
A, B, C = document(10, 17), document(11, 30), document(12, 8)
PROMPT = [SYSTEM, A, B, C, QUESTION]

CONTEXTS = pytest.mark.parametrize(
    "context",
    [
        {"document_context": "none"},
        {"document_context": "prefix", "document_gap": 0},
        {"document_context": "prefix", "document_gap": 200},
    ],
    ids=["none", "prefix", "prefix-gap"],
)


def as_oracle(context):
    return {
        "prefix": context["document_context"] == "prefix",
        "gap": context.get("document_gap", 0),
    }


@CONTEXTS
@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        [SYSTEM, C, A, QUESTION],
        [A, QUESTION],  # no leading text
        [SYSTEM, A, OTHER, B, QUESTION],  # text between documents
        [SYSTEM, OTHER, C, text(4, 1)],
        [SYSTEM, A, B, A, QUESTION],  # one document twice
        [text(5, 150)],  # no documents, several prefill steps
        [SYSTEM, document(13, 140), QUESTION],  # a document longer than a prefill step
        [text(6, 140), A, QUESTION],  # leading text longer than a prefill step
        [text(7, 16), A, text(8, 16)],  # texts that end where a page ends
    ],
    ids=lambda p: "-".join(
        str(len(x.tokens) if isinstance(x, DocumentPiece) else len(x)) for x in p
    ),
)
def test_miss_and_hit_match_the_oracle(make_engine, context, prompt):
    engine = make_engine(**context)
    for _ in ("miss", "hit"):
        (request,) = engine.run(prompt)
        assert_matches_oracle(engine, request, prompt, **as_oracle(context))
    assert request.cached_tokens > 0


@CONTEXTS
@pytest.mark.parametrize("size", [1, 7, 8, 9])  # page_size is 8
def test_documents_around_the_page_size(make_engine, context, size):
    engine = make_engine(**context)
    prompt = [SYSTEM, document(20, size), document(21, size), QUESTION]
    for _ in range(2):
        (request,) = engine.run(prompt)
        assert_matches_oracle(engine, request, prompt, **as_oracle(context))
    assert request.cached_document_tokens == [size, size]


@CONTEXTS
def test_whatever_was_cached_before(make_engine, context):
    """Every permutation of every subset of the documents being there already."""
    engine = make_engine(**context)
    expected = engine.ask(PROMPT)
    for count in range(4):
        for cached in itertools.permutations((A, B, C), count):
            engine.scheduler.index.clear()
            if cached:
                engine.run([SYSTEM, *cached], encode_only=True)
            (request,) = engine.run(PROMPT)
            assert request.generated == expected
            reused = [len(d.tokens) if d in cached else 0 for d in (A, B, C)]
            assert request.cached_document_tokens == reused


@CONTEXTS
def test_alone_and_in_a_batch_of_others(make_engine, context):
    engine = make_engine(**context)
    orders = [[SYSTEM, *order, QUESTION] for order in itertools.permutations((A, B, C))]
    prompts = [*orders, [text(5, 70)], [SYSTEM, C, OTHER]]
    alone = []
    for prompt in prompts:
        engine.scheduler.index.clear()
        alone.append(engine.ask(prompt))
    assert len({tuple(tokens) for tokens in alone}) > 4, "the prompts must differ in their answers"
    engine.scheduler.index.clear()
    for _ in ("cold", "warm"):
        assert [r.generated for r in engine.run(*prompts)] == alone


def test_documents_wanted_by_several_requests_are_encoded_once(make_engine):
    engine = make_engine()
    first, second = engine.run([SYSTEM, A, B, QUESTION], [SYSTEM, B, A, OTHER])
    assert first.cached_tokens == 0
    assert second.cached_tokens == len(A.tokens) + len(B.tokens)  # under way counts as cached
    documents = [s for s in engine.scheduler.index.segments() if s.is_document]
    assert len(documents) == 2


def test_a_single_document_that_stands_first_is_ordinary_attention(make_engine):
    """With context `none`: same logits as the same tokens as plain text."""
    engine = make_engine(document_context="none")
    plain, lazy = engine.run([A.tokens + QUESTION]), engine.run([A, QUESTION])
    assert lazy[0].generated == plain[0].generated
    logits = [np.stack(engine.logits[r.id]) for r in (plain[0], lazy[0])]
    np.testing.assert_allclose(*logits, atol=2e-4, rtol=0)


def test_a_single_document_after_leading_text_is_ordinary_attention(make_engine):
    """With context `prefix` and no gap: same logits as the same tokens as plain text."""
    engine = make_engine(document_context="prefix", document_gap=0)
    plain, lazy = engine.run([SYSTEM + B.tokens + QUESTION]), engine.run([SYSTEM, B, QUESTION])
    assert lazy[0].generated == plain[0].generated
    logits = [np.stack(engine.logits[r.id]) for r in (plain[0], lazy[0])]
    np.testing.assert_allclose(*logits, atol=2e-4, rtol=0)


def test_the_document_mask_and_the_gap_matter(make_engine, loaded):
    """Guards the tests above: another mask or gap would not have passed them."""
    logits = [
        oracle_logits(loaded, PROMPT, prefix=prefix, gap=gap)[-1]
        for prefix, gap in ((False, 0), (True, 0), (True, 200))
    ]
    for a, b in itertools.combinations(logits, 2):
        assert np.abs(a - b).max() > 0.01


def test_reference_attention_gives_the_same(make_engine):
    lazy, oracle = make_engine(), make_engine(attention="reference")
    assert lazy.ask(PROMPT) == oracle.ask(PROMPT)


def test_same_tokens_with_other_boundaries_are_other_segments(make_engine):
    engine = make_engine()
    joined = DocumentPiece(A.tokens + B.tokens)
    shifted = (DocumentPiece(A.tokens[:-1]), DocumentPiece(A.tokens[-1:] + B.tokens))
    engine.run([SYSTEM, A, B, QUESTION])
    for documents in ([joined], shifted):
        prompt = [SYSTEM, *documents, QUESTION]
        (request,) = engine.run(prompt)
        assert request.cached_document_tokens == [0] * len(documents)
        assert request.cached_tokens == len(SYSTEM)
        assert_matches_oracle(engine, request, prompt)


def test_a_salt_separates(make_engine):
    engine = make_engine()
    (first,) = engine.run(PROMPT, cache_salt="one")
    (second,) = engine.run(PROMPT, cache_salt="two")
    (third,) = engine.run(PROMPT, cache_salt="one")
    assert [r.cached_tokens for r in (first, second)] == [0, 0]
    assert third.cached_tokens == third.prompt_tokens - len(QUESTION) + 8  # one full page of it
    assert first.generated == second.generated == third.generated


def test_a_system_text_and_a_history_are_reused(make_engine):
    """A second turn finds all full pages of the first, documents and answer included."""
    engine = make_engine()
    (first,) = engine.run(PROMPT)
    follow_up = [SYSTEM, A, B, C, QUESTION + tuple(first.generated) + text(9, 10)]
    (second,) = engine.run(follow_up)
    history = (len(QUESTION) + len(first.generated) - 1) // 8 * 8  # the last token has no KV
    assert second.cached_tokens == len(SYSTEM) + 17 + 30 + 8 + history
    assert_matches_oracle(engine, second, follow_up)
    (other,) = engine.run([SYSTEM, OTHER])  # the leading text serves prompts without documents too
    assert other.cached_tokens == 8
    assert_matches_oracle(engine, other, [SYSTEM, OTHER])


def test_a_prefix_longer_by_one_page_of_text_keeps_its_documents_apart(make_engine):
    """With context `prefix` a document's KV depends on the leading text, so its key does."""
    engine = make_engine()
    engine.run(PROMPT)
    (request,) = engine.run([SYSTEM + text(4, 1), A, QUESTION])
    assert request.cached_document_tokens == [0]
    engine = make_engine(document_context="none")
    engine.run(PROMPT)
    (request,) = engine.run([SYSTEM + text(4, 1), A, QUESTION])
    assert request.cached_document_tokens == [17]


def test_a_document_evicted_between_two_requests_comes_back(make_engine):
    engine = make_engine(kv_pool_bytes=40 * 8 * 512, max_model_len=320)
    before = engine.ask([SYSTEM, A, QUESTION])
    for seed in range(30, 36):
        engine.ask([document(seed, 100), QUESTION])
    assert engine.scheduler.index.num_evicted > 0
    (request,) = engine.run([SYSTEM, A, QUESTION])
    assert request.cached_document_tokens == [0]
    assert request.generated == before


def test_least_recently_used_goes_first(make_engine):
    engine = make_engine(kv_pool_bytes=40 * 8 * 512, max_model_len=320, document_context="none")
    engine.run([document(30, 64), document(31, 64), QUESTION])  # 8 pages each
    engine.run([document(30, 64), QUESTION])  # now 31 is the older one
    engine.run([document(32, 128), document(33, 64), QUESTION])  # needs 24 + 3 pages: 31 must go
    (request,) = engine.run([document(30, 64), QUESTION])
    assert request.cached_document_tokens == [64]


@pytest.mark.parametrize("steps", range(12))
def test_cancelled_at_any_stage(make_engine, steps):
    """While waiting, while its documents are encoded, in prefill, in decode; alone and shared."""
    engine = make_engine()
    long = document(40, 150)
    doomed = engine.add([SYSTEM, long, QUESTION], GREEDY)
    for _ in range(steps):
        engine.step()
    other = engine.add([SYSTEM, long, OTHER], GREEDY)
    if steps:
        engine.step()
    engine.abort(doomed.id)
    engine.scheduler.check_integrity()
    engine.drain()
    assert doomed.state is State.FINISHED
    assert_matches_oracle(engine, other, [SYSTEM, long, OTHER])


def test_cancelled_with_nobody_else_waiting_drops_the_encoding(make_engine):
    engine = make_engine()
    request = engine.add([SYSTEM, document(40, 150), QUESTION], GREEDY)
    engine.step()
    engine.step()
    assert len(engine.scheduler.jobs) == 1
    engine.abort(request.id)
    assert not engine.scheduler.jobs
    engine.scheduler.check_integrity()
    assert engine.scheduler.index.num_available == engine.limits.num_pages
    engine.abort(request.id)  # once more is harmless
    engine.drain()  # the steps that have been started


def test_preemption_changes_nothing(make_engine):
    """Three requests that together outgrow the pool; each is as if alone."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[SYSTEM, document(50 + i, 40), text(60 + i, 20)] for i in range(3)]
    roomy = make_engine()
    alone = [roomy.ask(prompt, params=params) for prompt in prompts]
    engine = make_engine(kv_pool_bytes=36 * 8 * 512, max_model_len=160, **ONE_SHAPE)
    requests = engine.run(*prompts, params=params)
    assert engine.scheduler.num_preemptions > 0
    assert any(request.num_preemptions for request in requests)
    assert [r.generated for r in requests] == alone
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
    alone = [roomy.ask(prompt, params=sampled) for prompt in prompts]
    assert [r.generated for r in engine.run(*prompts, params=sampled)] == alone


def test_more_requests_than_seats(make_engine):
    engine = make_engine()
    prompts = [[SYSTEM, A, text(70 + i, 5 + i)] for i in range(11)]
    for request, prompt in zip(engine.run(*prompts), prompts, strict=True):
        assert_matches_oracle(engine, request, prompt)


def test_a_hit_takes_no_page_for_documents_and_moves_no_kv(make_engine):
    engine = make_engine()
    engine.run(PROMPT)
    segments = engine.scheduler.index.segments()
    pages = sorted(page for s in segments for page in s.pages)
    before = engine.pages_of(pages)
    taken = []
    allocate = engine.scheduler.index.allocate
    engine.scheduler.index.allocate = lambda n: taken.append(n) or allocate(n)
    try:
        (request,) = engine.run([SYSTEM, C, A, B, QUESTION])
    finally:
        del engine.scheduler.index.allocate
    assert request.cached_document_tokens == [8, 17, 30]
    assert sum(taken) == engine.limits.pages_for(len(QUESTION) + 11)  # its own text and answer
    for a, b in zip(before, engine.pages_of(pages), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_writes_the_slots_of_its_tokens_and_no_other(make_engine):
    """Padding rows are stored nowhere, wherever in the pool the free pages are."""
    engine = make_engine()
    pool = engine._runner._pool
    engine._runner._pool = jax.tree.map(lambda x: x + 7, pool)
    before = engine.pages_of(range(engine.limits.num_pages))
    (request,) = engine.run([SYSTEM, A, QUESTION])
    computed = request.prompt_tokens + request.num_generated - 1  # the last token has no KV
    for old, new in zip(before, engine.pages_of(range(engine.limits.num_pages)), strict=True):
        assert (old != new).any(axis=(1, 3)).sum() == computed


def test_a_published_page_cannot_be_written(make_engine):
    engine = make_engine()
    request = engine.add(PROMPT, GREEDY)
    while request.num_generated < 9:
        engine.step()
    published = request.run.pages[0]
    assert published not in request.run.private
    request.run.computed = len(request.run.tokens) - 1
    run = request.run
    run.tokens, run.positions = run.tokens[:3], run.positions[:3]
    with pytest.raises(RuntimeError, match=f"write page {published}, which is published"):
        engine._runner.decode([request])
    engine.abort(request.id)
    engine.drain()


def test_the_same_seed_gives_the_same_tokens_in_any_company(make_engine):
    engine = make_engine()
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    alone = engine.ask(PROMPT, params=params)
    company = [engine.add([text(80 + i, 9)], SamplingParams(max_tokens=12)) for i in range(3)]
    request = engine.add(PROMPT, params)
    engine.drain()
    assert request.generated == alone
    assert all(r.num_generated for r in company)
    other = SamplingParams(temperature=1.0, seed=8, max_tokens=12, ignore_eos=True)
    assert engine.ask(PROMPT, params=other) != alone


def test_every_token_has_random_numbers_of_its_own(make_engine):
    """Tokens are those that the sampler draws from the logits with the request's seed and step."""
    engine = make_engine()
    params = SamplingParams(temperature=1.5, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
    (request,) = engine.run(PROMPT, params=params)
    for step, (token, logits) in enumerate(
        zip(request.generated, engine.logits[request.id], strict=True)
    ):
        rows = SamplingRows(
            *(np.array([x], t) for x, t in ((1.5, "f4"), (0, "i4"), (0.9, "f4"), (0.0, "f4"))),
            np.array([[0, 7]], np.uint32),
            np.array([step], np.int32),
        )
        assert int(sample(logits[None], rows)[0]) == token


def test_an_end_token_ends_the_output(make_engine, loaded):
    engine = make_engine()
    tokens = engine.ask(PROMPT)
    engine._end_tokens = frozenset(tokens[4:5])
    try:
        (request,) = engine.run(PROMPT, params=SamplingParams(temperature=0, max_tokens=12))
        (ignoring,) = engine.run(PROMPT)
    finally:
        engine._end_tokens = frozenset(loaded.config.eos_token_ids)
    assert request.generated == tokens[: tokens.index(tokens[4]) + 1]
    assert ignoring.generated == tokens


@pytest.mark.parametrize(("listed", "expected"), [((7, 9), {7, 9}), ((), {0})])
def test_end_tokens_are_the_models_or_else_the_tokenizers(loaded, listed, expected):
    config = dataclasses.replace(loaded.config, eos_token_ids=listed)
    options = EngineConfig(
        kv_pool_bytes=1 << 16, max_num_seqs=4, max_num_batched_tokens=64, **ONE_SHAPE
    )
    engine = Engine(dataclasses.replace(loaded, config=config), options)
    assert engine._end_tokens == expected


def test_max_tokens_defaults_to_what_fits(make_engine):
    engine = make_engine(kv_pool_bytes=12 * 8 * 512, max_model_len=80, **ONE_SHAPE)
    request = engine.add([A, text(2, 10)], SamplingParams(temperature=0, ignore_eos=True))
    engine.drain()
    assert request.num_generated == 80 - 17 - 10  # the context, 3 + 9 pages, is the tighter limit
    request = engine.add(
        [DocumentPiece(text(1, 1)), DocumentPiece(text(2, 1)), text(3, 10)],
        SamplingParams(temperature=0, ignore_eos=True),
    )
    engine.drain()
    assert request.num_generated == 80 - 12
    prompt = [*(DocumentPiece(text(i, 1)) for i in range(8)), text(3, 10)]
    request = engine.add(prompt, SamplingParams(temperature=0, ignore_eos=True))
    engine.drain()
    assert request.num_generated == 4 * 8 - 10  # 8 of 12 pages hold one token each


@pytest.mark.parametrize(
    ("prompt", "params", "param", "message"),
    [
        ([], {}, "prompt", "empty"),
        ([()], {}, "prompt", "empty"),
        ([SYSTEM, A], {}, "prompt", "ends with a document"),
        ([SYSTEM, DocumentPiece((), "blank"), QUESTION], {}, "documents", "'blank' is empty"),
        ([(1, 2, 512)], {}, "prompt", "512.*vocabulary of 512"),
        ([(1, -1)], {}, "prompt", "-1.*vocabulary of 512"),
        ([DocumentPiece((1, 1 << 70, 2)), (1,)], {}, "prompt", f"{1 << 70}.*vocabulary of 512"),
        ([A, text(1, 495)], {}, "prompt", "512 tokens, at most 511.*context of 512"),
        ([text(1, 500)], {"max_tokens": 13}, "max_tokens", "13.*500 tokens leaves 12.*512"),
        ([*[C] * 9, QUESTION], {}, "documents", "9 documents, at most 8.*max_documents"),
    ],
)
def test_bad_prompts_are_refused_with_value_and_limit(make_engine, prompt, params, param, message):
    engine = make_engine()
    running = engine.add(PROMPT, GREEDY)
    engine.step()
    with pytest.raises(RequestError, match=message) as error:
        engine.add(prompt, SamplingParams(**params))
    assert error.value.param == param
    engine.drain()
    assert_matches_oracle(engine, running, PROMPT)


def test_a_prompt_larger_than_the_pool_is_refused(make_engine):
    engine = make_engine(kv_pool_bytes=12 * 8 * 512, max_model_len=96, **ONE_SHAPE)
    prompt = [*(DocumentPiece(text(i, 9)) for i in range(6)), QUESTION]  # 2 pages each
    with pytest.raises(RequestError, match=r"takes 15 pages, the whole pool has 12.*kv_pool_bytes"):
        engine.add(prompt, GREEDY)
    with pytest.raises(RequestError, match="the whole pool has 12"):
        engine.add([*(DocumentPiece(text(i, 1)) for i in range(8)), text(9, 40)], GREEDY)
    documents = [DocumentPiece(text(i, 9)) for i in range(7)]
    with pytest.raises(RequestError, match=r"takes 14 pages, the whole pool has 12"):
        engine.add(documents, GREEDY, encode_only=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1.*0 to 2"),
        ({"temperature": 2.1}, "temperature is 2.1.*0 to 2"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"max_tokens": 0}, "max_tokens is 0.*at least 1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"stop": ("",)}, "empty"),
        ({"stop": ("x",) * 17}, "17 stop strings, at most 16"),
    ],
)
def test_sampling_parameters_out_of_range(values, message):
    with pytest.raises(RequestError, match=message) as error:
        SamplingParams(**values)
    assert error.value.param == next(iter(values))
