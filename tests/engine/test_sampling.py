"""What sampling parameters do to requests in an engine, against the logits they were given."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import (
    GREEDY,
    EngineUnderTest,
    adjusted_logits,
    assert_matches_oracle,
    document,
    oracle_logits,
    text,
)
from flax import nnx

from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import DocumentPiece, RequestError

SYSTEM, QUESTION = text(1, 13), text(2, 9)
A, B = document(10, 17), document(11, 30)
PROMPT = [SYSTEM, A, B, QUESTION]
PROMPT_TOKENS = SYSTEM + A.tokens + B.tokens + QUESTION


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 12, "ignore_eos": True} | options))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    return exact - np.logaddexp.reduce(exact, axis=-1, keepdims=True)


def assert_logprobs(got, logits: np.ndarray, token: int, count: int) -> None:
    """Within float32 rounding of logits up to 100."""
    exact = log_softmax(logits)
    order = np.argsort(-exact)[:count]
    assert got.token == token
    assert got.logprob == pytest.approx(exact[token], abs=1e-4)
    assert [i for i, _ in got.best] == order.tolist()
    assert [v for _, v in got.best] == pytest.approx(exact[order].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5, "presence_penalty": -1.0},
        {"frequency_penalty": -2.0},
        {"logit_bias": {3: 40.0, 4: 39.0, 77: -100.0}},
    ],
    ids=str,
)
def test_adjusted_tokens_are_the_best_by_the_rules(make_engine, options):
    """Each token is the best of the adjusted logits: on a miss, on a hit, alone and in company."""
    params = greedy(**options)
    values = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    engine = make_engine()
    plain = engine.ask(PROMPT)
    for company in (0, 3):
        others = [engine.add([SYSTEM, text(90 + i, 9)], GREEDY) for i in range(company)]
        (request,) = engine.run(PROMPT, params=params)
        for step, (token, logits) in enumerate(
            zip(request.generated, engine.logits[request.id], strict=True)
        ):
            before = request.generated[:step]
            best = adjusted_logits(logits, PROMPT_TOKENS, before, params.logit_bias, *values, ())
            assert token == best.argmax()
        for i, other in enumerate(others):
            assert_matches_oracle(engine, other, [SYSTEM, text(90 + i, 9)])
    assert request.generated != plain


def test_penalties_outlast_a_preemption(make_engine):
    """What has been generated before a request gave its seat back still counts."""
    params = greedy(frequency_penalty=2.0, repetition_penalty=1.3, max_tokens=60)
    prompts = [[SYSTEM, document(50 + i, 40), text(60 + i, 20)] for i in range(3)]
    roomy = make_engine()
    alone = [roomy.ask(prompt, params=params) for prompt in prompts]
    engine = make_engine(kv_pool_bytes=36 * 8 * 512, max_model_len=160)
    requests = engine.run(*prompts, params=params)
    assert any(request.num_preemptions for request in requests)
    assert [r.generated for r in requests] == alone


def test_a_seat_remembers_nothing_of_who_had_it_before(make_engine):
    engine = make_engine()
    before = engine.ask(PROMPT)
    penalised = engine.ask(PROMPT, params=greedy(frequency_penalty=2.0))
    for _ in range(engine.limits.max_num_seqs + 1):
        assert engine.ask(PROMPT) == before
        assert engine.ask(PROMPT, params=greedy(frequency_penalty=2.0)) == penalised


@pytest.mark.parametrize("kind", ["end token", "stop token"])
def test_min_tokens_holds_off_what_would_end_the_output(make_engine, kind):
    """Until then the ending token is not chosen, from then on it ends the output at once."""
    engine = make_engine()
    end = engine.ask(PROMPT)[2]
    stops = {"end token": (), "stop token": (end,)}[kind]
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=stops)
    ends, engine._end_tokens = engine._end_tokens, frozenset([end])
    if kind == "stop token":
        engine._end_tokens = ends
    try:
        (short,) = engine.run(PROMPT, params=params)
        (longer,) = engine.run(PROMPT, params=dataclasses.replace(params, min_tokens=6))
    finally:
        engine._end_tokens = ends
    assert len(short.generated) <= 3
    assert short.generated[-1] == end
    assert end not in longer.generated[:6]
    for step, (token, logits) in enumerate(
        zip(longer.generated, engine.logits[longer.id], strict=True)
    ):
        banned = longer.stop_tokens if step < 6 else ()
        assert token == adjusted_logits(logits, (), (), {}, 1, 0, 0, banned).argmax()


def test_a_stop_token_ends_the_output_and_is_not_shown(make_engine):
    engine = make_engine()
    tokens = engine.ask(PROMPT)
    whole = engine.loaded.tokenizer.decode(tokens)
    params = greedy(stop_token_ids=(tokens[3],))
    engine.add(PROMPT, params)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    shown = "".join(o.text for o in outputs)
    end = tokens.index(tokens[3])
    assert [t for o in outputs for t in o.token_ids] == tokens[: end + 1]
    assert outputs[-1].finish_reason == "stop"
    assert whole.startswith(shown)
    assert len(shown) < len(whole)


def test_stop_strings_count_after_min_tokens(make_engine):
    engine = make_engine()
    request = engine.add(PROMPT, greedy())
    texts = []
    while engine.has_work:
        texts += [o.text for o in engine.step()]
    assert request.num_generated == 12
    stop = next(t for t in texts if t)
    first, *_ = engine.run(PROMPT, params=greedy(stop=(stop,)))
    held, *_ = engine.run(PROMPT, params=greedy(stop=(stop,), min_tokens=12))
    assert first.num_generated <= texts.index(stop) + 1
    assert held.num_generated == 12


@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("sampled", [False, True])
def test_logprobs_are_of_the_logits_before_anything_changes_them(make_engine, count, sampled):
    options = {"temperature": 1.5, "top_k": 5, "frequency_penalty": 1.0, "seed": 3}
    engine = make_engine()
    request = engine.add(PROMPT, greedy(logprobs=count, **(options if sampled else {})))
    other = engine.add([SYSTEM, QUESTION], GREEDY)  # wants none, in the same batch
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert all(o.logprobs is None for o in outputs if o.request is other)
    got = [o.logprobs for o in outputs if o.request is request]
    logits = engine.logits[request.id]
    for token, each, row in zip(request.generated, got, logits, strict=True):
        assert_logprobs(each, row, token, count)


@pytest.mark.parametrize(
    "prompt",
    [
        [text(5, 150)],  # over several prefill steps and several blocks of scored rows
        PROMPT,
        [SYSTEM, A, text(3, 21), B, QUESTION],
        [A, text(4, 1)],
    ],
    ids=["plain", "documents", "text between", "one token"],
)
def test_prompt_logprobs_match_the_oracle(make_engine, loaded, prompt):
    engine = make_engine()
    oracle = oracle_logits(loaded, prompt)
    known, at = {}, 0
    first = next((i for i, p in enumerate(prompt) if isinstance(p, DocumentPiece)), 0)
    tokens: list[int] = []
    for i, piece in enumerate(prompt):
        piece_tokens = piece.tokens if isinstance(piece, DocumentPiece) else piece
        if i >= first and not isinstance(piece, DocumentPiece):
            known.update({at + j: at + j - 1 for j in range(1, len(piece_tokens))})
        at += len(piece_tokens)
        tokens += piece_tokens
    for _ in ("miss", "hit"):
        (request,) = engine.run(prompt, params=greedy(prompt_logprobs=3, max_tokens=4))
        assert len(request.prompt_logprobs) == len(tokens)
        for place, got in enumerate(request.prompt_logprobs):
            assert (got is not None) == (place in known)
            if got is not None:
                exact = log_softmax(oracle[known[place]])
                assert got.token == tokens[place]
                # As far apart as logits may be from the oracle's.
                assert got.logprob == pytest.approx(exact[tokens[place]], abs=4e-4)
                best = [i for i, _ in got.best]
                assert [v for _, v in got.best] == pytest.approx(exact[best].tolist(), abs=4e-4)
                assert exact[best].min() >= np.sort(exact)[-3] - 4e-4
        assert_matches_oracle(engine, request, prompt)


def test_logits_that_are_not_finite_fail_their_request_only(make_engine, loaded):
    """A prompt with a token whose embedding is not finite, among others that have none."""
    model = nnx.clone(loaded.model)
    bad_tokens = {500: jnp.nan, 501: jnp.inf}
    for token, value in bad_tokens.items():
        model.embed.embedding[...] = model.embed.embedding[...].at[token].set(value)
    stock = make_engine(kv_pool_bytes=40 * 8 * 512, max_model_len=320)
    engine = EngineUnderTest(
        dataclasses.replace(loaded, model=model), stock.config, programs=stock.programs
    )
    first, second = [SYSTEM, A, text(70, 9)], [SYSTEM, A, text(71, 9)]
    poisoned = DocumentPiece((5, 6, 500, 7, 8, 9, 10, 11, 12))
    bad_prompts = [
        [SYSTEM, A, (500, 5, 6)],
        [SYSTEM, A, text(70, 9) + text(75, 10) + (501, 5)],  # begins like a good one
        [SYSTEM, poisoned, QUESTION],
        [(*text(76, 20), 501, 5), A, QUESTION],
        [(*text(77, 70), 500, *text(78, 70))],
    ]
    for _ in range(2):  # at first the bad ones' documents have to be encoded, and again later on
        prompts = [bad_prompts[0], first, *bad_prompts[1:3], second, *bad_prompts[3:], first]
        requests = {engine.add(prompt, GREEDY): prompt for prompt in prompts}
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        for request, prompt in requests.items():
            if prompt in bad_prompts:
                (only,) = [o for o in outputs if o.request is request]
                assert (only.finish_reason, only.text, only.token_ids) == ("error", "", ())
            else:
                assert_matches_oracle(engine, request, prompt)
    for pool in engine._runner._pool:
        assert all(np.isfinite(x).all() for x in pool)
    # What is in the index is sound: it can be used by prompts that go on from it.
    longer = [SYSTEM, A, text(70, 9) + text(75, 10)]
    (request,) = engine.run(longer)
    assert request.cached_tokens == 13 + 17 + 16
    assert_matches_oracle(engine, request, longer)
    # A document that cannot be used is not kept either, though somebody wanted it to be.
    index = engine.scheduler.index
    key = engine.add([SYSTEM, poisoned, QUESTION], GREEDY).layout.documents[0].key
    index.keep(key, 2)
    engine.drain()
    assert key not in index
    assert not index.is_kept(key)
    engine.assert_idle()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_p": 1.5}, "min_p is 1.5, must be 0 to 1"),
        ({"min_p": float("nan")}, "min_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, must be 0.01 to 100"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5, must be -2 to 2"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty is -inf, must be -2 to 2"),
        ({"logit_bias": {1: 101}}, "bias of token 1 is 101, must be -100 to 100"),
        ({"logit_bias": {1: float("nan")}}, "bias of token 1 is nan"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "301 biased tokens, at most 300"),
        ({"min_tokens": -1}, "min_tokens is -1, must be 0 or more"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, must be at most max_tokens, 4"),
        ({"stop_token_ids": tuple(range(65))}, "65 stop tokens, at most 64"),
        ({"n": 0}, "n is 0, must be 1 to 16"),
        ({"n": 17}, "n is 17, must be 1 to 16"),
        ({"logprobs": 21}, "logprobs is 21, must be 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1, must be 0 to 20"),
    ],
)
def test_values_out_of_range(values, message):
    with pytest.raises(RequestError, match=message) as error:
        SamplingParams(**values)
    assert error.value.param == next(iter(values))


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_tokens_that_are_not_in_the_vocabulary(make_engine, name):
    value = {"logit_bias": {512: 1.0}, "stop_token_ids": (512,)}[name]
    with pytest.raises(RequestError, match=f"512 in {name} is not in the vocabulary of 512"):
        make_engine().add(PROMPT, SamplingParams(**{name: value}))
