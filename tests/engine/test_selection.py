"""Documents that are chosen: their scores against an oracle, the answers, and who waits."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from engine_helpers import GREEDY, assert_matches_oracle, document, oracle_logits, text

from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import DocumentContext, RequestError
from lazyattn_jax.engine.runs import State
from lazyattn_jax.llm import Usage

DOCUMENTS = [document(1, 5), document(2, 43), document(3, 24), document(4, 17)]
LEAD, TAIL = text(10, 11), text(12, 9)
PROMPT = [LEAD, *DOCUMENTS, TAIL]
GAP = 200


def oracle_scores(loaded, **context):
    """The log-probability of the tail, but for its first token, after each document alone."""
    scores = []
    for each in DOCUMENTS:
        logits = oracle_logits(loaded, [LEAD, each, TAIL], **context)[-len(TAIL) : -1]
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        scores.append(logprobs[np.arange(len(TAIL) - 1), TAIL[1:]].sum())
    return scores


def best(scores, count):
    return sorted(np.argsort(scores)[::-1][:count].tolist())


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("options", [{}, {"repair": 8, "temperature": 0.7}])
def test_the_documents_that_make_the_question_likeliest_are_kept(make_engine, prefix, options):
    engine = make_engine()
    expected = oracle_scores(engine.loaded, prefix=prefix, **options)
    for count in (1, 2, 3):
        context = DocumentContext(prefix, GAP, select=count, **options)
        request = engine.run(PROMPT, context=context)[0]
        usage = Usage.of(request)
        np.testing.assert_allclose([d.score for d in usage.documents], expected, atol=2e-3)
        kept = best(expected, count)
        assert [i for i, d in enumerate(usage.documents) if d.used] == kept
        prompt = [LEAD, *(DOCUMENTS[i] for i in kept), TAIL]
        assert request.prompt_tokens == sum(len(getattr(p, "tokens", p)) for p in prompt)
        assert_matches_oracle(engine, request, prompt, prefix=prefix, **options)


@pytest.mark.parametrize("reuse", ["block", "prefix", "none"])
def test_every_way_to_reuse_can_choose(make_engine, reuse):
    engine = make_engine(reuse=reuse)
    full = {"prefix": "full", "none": "none", "block": "none"}[reuse] == "full"
    request = engine.run(PROMPT, context=DocumentContext(select=2))[0]
    assert request.selection is not None
    kept = [DOCUMENTS[i] for i in request.selection.kept]
    assert len(kept) == 2
    prompt = [LEAD, *((d.tokens if full else d) for d in kept), TAIL]
    assert_matches_oracle(engine, request, prompt)


def test_nothing_is_chosen_where_all_may_stay(make_engine):
    """As many as there are, more, and as many as are distinct."""
    engine = make_engine()
    plain = engine.ask(PROMPT)
    for count in (4, 5):
        request = engine.run(PROMPT, context=DocumentContext(select=count))[0]
        assert request.selection is None
        assert request.generated == plain
    twice = [LEAD, DOCUMENTS[0], DOCUMENTS[0], TAIL]
    request = engine.run(twice, context=DocumentContext(select=1))[0]
    assert request.selection is None
    assert len(request.layout.documents) == 2


def test_equal_documents_are_tried_once(make_engine):
    engine = make_engine()
    prompt = [LEAD, DOCUMENTS[0], DOCUMENTS[1], replace(DOCUMENTS[0], name="again"), TAIL]
    request = engine.run(prompt, context=DocumentContext(select=1))[0]
    assert request.selection is not None
    assert list(request.selection.trials) == [0, 1]
    usage = Usage.of(request)
    assert usage.documents[2].score == usage.documents[0].score
    assert not usage.documents[2].used
    assert [d.cached_tokens for d in usage.documents] == [0, 0, 5]


def test_what_was_tried_is_found_and_counted(make_engine):
    """Every document is encoded once, with or without a choice; the tail is computed for each."""
    engine = make_engine()
    engine.run(PROMPT, encode_only=True)
    request = engine.run(PROMPT, context=DocumentContext(select=2))[0]
    usage = Usage.of(request)
    assert usage.selection_tokens == 4 * len(TAIL)
    assert [d.cached_tokens for d in usage.documents] == [5, 43, 24, 17]
    assert sum(s.num_tokens for s in engine.scheduler.index.segments() if s.is_document) == 89


def test_a_request_without_a_choice_finds_what_was_chosen(make_engine):
    """Documents are encoded behind the same leading text, even if the first one is dropped."""
    engine = make_engine()
    prompt = [text(10, 11), DOCUMENTS[0], text(13, 4), *DOCUMENTS[1:], TAIL]
    engine.run(prompt, encode_only=True)
    for kept in range(4):
        numbers = iter(range(4))
        dropped = [
            replace(p, dropped=next(numbers) != kept) if p in DOCUMENTS else p for p in prompt
        ]
        request = engine.run(dropped)[0]
        assert request.cached_document_tokens == [len(DOCUMENTS[kept].tokens)]


def test_answers_of_one_prompt_share_the_choice(make_engine):
    engine = make_engine()
    context = DocumentContext(select=1)
    params = replace(GREEDY, temperature=1.0, seed=3, n=3)
    requests = []
    for each in params.answers():
        leader = requests[0] if requests else None
        requests.append(engine.add(PROMPT, each, context=context, leader=leader))
    assert engine.num_waiting == 3  # trials are nobody's requests
    assert all(r.selection is requests[0].selection for r in requests)
    engine.drain()
    alone = [engine.run(PROMPT, params=each, context=context)[0] for each in params.answers()]
    assert [r.generated for r in requests] == [r.generated for r in alone]
    assert [r.max_tokens for r in requests] == [12] * 3


def test_a_leader_may_leave_before_the_choice(make_engine):
    engine = make_engine()
    context = DocumentContext(select=1)
    alone = engine.ask(PROMPT, context=context)
    first = engine.add(PROMPT, GREEDY, context=context)
    second = engine.add(PROMPT, GREEDY, context=context, leader=first)
    engine.abort(first.id)
    assert first.state is State.FINISHED
    engine.drain()
    assert second.generated == alone


def test_only_news_of_requests_is_told(make_engine):
    engine = make_engine()
    request = engine.add(PROMPT, GREEDY, context=DocumentContext(select=1))
    told = []
    while engine.has_work:
        told += engine.step()
    assert {o.request for o in told} == {request}
    assert [t for o in told for t in o.token_ids] == request.generated


@pytest.mark.parametrize("steps", range(6))
def test_an_aborted_choice_frees_all(make_engine, steps):
    """At any stage; the fixture checks that nothing is left."""
    engine = make_engine()
    request = engine.add(PROMPT, GREEDY, context=DocumentContext(select=2))
    for _ in range(steps):
        engine.step()
    engine.abort(request.id)
    assert engine.num_waiting == 0
    engine.drain(3)


def test_time_runs_while_documents_are_chosen(make_engine):
    engine = make_engine()
    request = engine.add(PROMPT, GREEDY, context=DocumentContext(select=2), timeout=1e-9)
    outputs = engine.step()
    assert [(o.request, o.finish_reason) for o in outputs] == [(request, "timeout")]
    assert Usage.of(request).documents[0].score is None
    engine.drain(3)


def test_an_unsound_trial_ends_the_request(make_engine, monkeypatch):
    """If one document cannot be scored there is no choice, and the others' requests go on."""
    engine = make_engine()
    other = engine.add([text(1, 9)], GREEDY)
    request = engine.add(PROMPT, GREEDY, context=DocumentContext(select=2))
    accept = Engine._accept

    def spoiled(self, owner, token, logprobs):
        return accept(self, owner, -1 if owner.id == f"{request.id}/2" else token, logprobs)

    monkeypatch.setattr(Engine, "_accept", spoiled)
    told = []
    while engine.has_work:
        told += engine.step()
    reasons = {o.request.id: o.finish_reason for o in told if o.finish_reason}
    assert reasons == {request.id: "error", other.id: "length"}


def test_room_is_needed_for_what_may_be_chosen(make_engine):
    """All documents together do not fit the context; two of them do."""
    engine = make_engine()
    documents = [document(i, 150) for i in range(20, 26)]
    prompt = [LEAD, *documents, TAIL]
    with pytest.raises(RequestError, match=r"has 920 tokens, at most 511 fit"):
        engine.add(prompt, GREEDY)
    with pytest.raises(RequestError, match=r"has 620 tokens, at most 511 fit"):
        engine.add(prompt, GREEDY, context=DocumentContext(select=4))
    request = engine.run(prompt, context=DocumentContext(select=2))[0]
    assert len(request.generated) == 12
    free = engine.add(prompt, SamplingParams(temperature=0), context=DocumentContext(select=2))
    engine.abort(free.id)


def test_the_engine_has_a_default(make_engine):
    engine = make_engine(document_select=1)
    request = engine.run(PROMPT)[0]
    assert request.selection is not None
    assert len(request.layout.documents) == 1
    everything = engine.run(PROMPT, context=DocumentContext())[0]
    assert len(everything.layout.documents) == 4


def test_a_tail_of_one_token_chooses_the_first(make_engine):
    """There is nothing to score: its first token is computed, and cannot be looked back on."""
    engine = make_engine()
    request = engine.run([LEAD, *DOCUMENTS, (7,)], context=DocumentContext(select=2))[0]
    assert request.selection is not None
    assert request.selection.kept == (0, 1)
