"""Repaired and sharpened documents: against an oracle, against full attention, on hits."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from engine_helpers import GREEDY, assert_matches_oracle, document, oracle_logits, text

from lazyattn_jax.bench.quality_runs import token_losses
from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.engine.request import DocumentContext, DocumentPiece, RequestError, lay_out

PAGE = 8
SHORT, LONG, LAST = document(1, 5), document(2, 43), document(3, 24)
PROMPT = [text(10, 11), SHORT, LONG, text(11, 3), LAST, text(12, 9)]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"repair": 8}, {"repair": 24}, {"temperature": 0.7}, {"repair": 16, "temperature": 1.3}],
)
def test_logits_are_the_oracles(make_engine, prefix, options):
    """Both when everything is computed and when everything is found, also in one batch."""
    engine = make_engine()
    context = DocumentContext(prefix, 200, **options)
    for batch in (1, 3):
        for request in engine.run(*[PROMPT] * batch, context=context):
            assert_matches_oracle(engine, request, PROMPT, prefix=prefix, **options)


def test_a_document_that_need_not_be_turned_is_sharpened_too(make_engine):
    """It stands where it was encoded."""
    engine = make_engine()
    prompt = [LAST, text(21, 9)]
    request = engine.run(prompt, context=DocumentContext(False, temperature=0.7))[0]
    assert request.layout.documents[0].delta == 0
    assert_matches_oracle(engine, request, prompt, prefix=False, temperature=0.7)


@pytest.mark.parametrize("prefix", [True, False])
def test_repair_of_everything_is_full_attention(make_engine, prefix):
    """Whole documents repaired: logits of the same tokens as plain text, and no document kept."""
    engine = make_engine()
    plain = [p.tokens if isinstance(p, DocumentPiece) else p for p in PROMPT]
    for repair in (43, 10_000):
        request = engine.run(PROMPT, context=DocumentContext(prefix, repair=repair))[0]
        assert_matches_oracle(engine, request, plain)
        assert request.generated == engine.ask(plain)
        assert request.cached_document_tokens == [0, 0, 0]
    assert not any(s.is_document for s in engine.scheduler.index.segments())


def test_repaired_documents_are_shared_with_all_others(make_engine):
    """One copy, however much of it is repaired: in the pool, and in one batch."""
    engine = make_engine()
    contexts = [DocumentContext(repair=repair) for repair in (0, 5, 20, 43)]
    alone = []
    for context in contexts:
        request = engine.run(PROMPT, context=context)[0]
        assert_matches_oracle(engine, request, PROMPT, repair=-(-context.repair // PAGE) * PAGE)
        alone.append(request.generated)
    documents = [s for s in engine.scheduler.index.segments() if s.is_document]
    assert sorted(s.num_tokens for s in documents) == [5, 24, 43]
    requests = [engine.add(PROMPT, GREEDY, context=context) for context in contexts]
    engine.drain()
    assert [r.generated for r in requests] == alone
    assert [r.cached_document_tokens for r in requests] == [
        [5, 43, 24],
        [0, 35, 16],
        [0, 19, 0],
        [0, 0, 0],
    ]
    assert len({tuple(r.generated) for r in requests}) > 1


def test_text_after_documents_is_shared_only_if_they_are_seen_alike(make_engine):
    """The same tokens in the stream after the same documents, seen in two ways."""
    engine = make_engine()
    prompt = [text(20, 4), LAST, text(21, 30)]
    for temperature in (1.0, 0.5):
        context = DocumentContext(temperature=temperature)
        request = engine.run(prompt, context=context)[0]
        assert_matches_oracle(engine, request, prompt, temperature=temperature)
    again = engine.run(prompt, context=context)[0]
    assert again.cached_tokens == 4 + 24 + 24  # three pages of the last text
    assert again.generated == request.generated


def test_stream_keys_tell_repaired_from_repeated():
    """Tokens that stand before a document are no repair of it."""
    layout = lay_out(
        [LAST, text(1, 9)],
        page_size=PAGE,
        fingerprint=b"",
        salt="",
        context=DocumentContext(False, repair=PAGE),
    )
    assert layout.stream == LAST.tokens[:PAGE] + text(1, 9)
    assert layout.stream_positions == (*range(8), *range(24, 33))
    other = replace(layout, documents=(replace(layout.documents[0], repaired=0),))
    keys = [x.stream_key(1, b"before", (*x.stream, 1, 2)) for x in (layout, other)]
    assert keys[0] != keys[1]


def test_documents_are_loaded_whole(make_engine):
    """Loaded ahead and then asked about with a repair: only the repair is computed."""
    engine = make_engine()
    context = DocumentContext(repair=8)
    engine.run(PROMPT, context=context, encode_only=True)
    request = engine.run(PROMPT, context=context)[0]
    assert request.cached_document_tokens == [0, 35, 16]
    assert_matches_oracle(engine, request, PROMPT, repair=8)


def test_what_is_there_twice_leaves_room_for_pinned_documents(make_engine):
    """60 pages of document, 59 of them again: more than pinned documents may leave."""
    engine = make_engine()
    prompt = [text(1, 8), document(4, 480), text(2, 8)]
    with pytest.raises(RequestError, match=r"takes 123 pages, .* has 200 .* 100 may be pinned"):
        engine.add(prompt, GREEDY, context=DocumentContext(repair=472))
    assert len(engine.run(prompt, context=DocumentContext(repair=480))[0].generated) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repair": -1}, "document_repair is -1, must be 0 or more"),
        ({"select": -1}, "document_select is -1, must be 0 or more"),
        ({"gap": -1}, "document_gap is -1, must be 0 to 1000000"),
        ({"gap": 1_000_001}, "document_gap is 1000001, must be 0 to 1000000"),
        ({"temperature": 0.0}, "document_temperature is 0.0, must be 0.1 to 10"),
        ({"temperature": float("nan")}, "document_temperature is nan"),
    ],
)
def test_bad_contexts(options, message):
    with pytest.raises(RequestError, match=message):
        DocumentContext(**options)
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{f"document_{name}": value for name, value in options.items()})


def test_losses_are_those_of_the_model(make_engine):
    """The benchmark's losses against the model applied to each text at once."""
    engine = make_engine()
    texts = ["The glass frog", "lives in cloud forests.", "x"]
    losses = token_losses(engine, texts)
    for string, some in zip(texts, losses, strict=True):
        tokens = engine.loaded.tokenizer.encode(string)
        logits = oracle_logits(engine.loaded, [tokens])
        expected = -jax.nn.log_softmax(logits)[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(some, expected, atol=2e-4)
