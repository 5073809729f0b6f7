"""Logits of training are those that the engine serves, under both masks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finetune_helpers import END, RECIPE, SHAPE, log_softmax, write_questions
from small_models import small_model

from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import DocumentPiece
from lazyattn_jax.finetune.batches import _batch, _Row
from lazyattn_jax.finetune.data import Question, Questions, draw, make_sample
from lazyattn_jax.finetune.forward import Forward, stack, visible
from lazyattn_jax.prompt import chat_prompt

ANSWER = 6  # tokens that the engine generates


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig(
        page_size=8,
        kv_pool_bytes=200 * 8 * 512,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=512,
        max_documents=8,
        document_context="none",
    )
    return Engine(small_model(), config)


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Questions:
    return Questions(write_questions(tmp_path_factory.mktemp("data") / "questions.jsonl"))


def serve(engine: Engine, prompt) -> tuple[list[int], list[dict[int, float]]]:
    """Greedy tokens, and the best log-probabilities before each of them."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=20)
    request = engine.add(prompt, params)
    best = []
    while engine.has_work:
        best += [dict(o.logprobs.best) for o in engine.step() if o.logprobs is not None]
    return request.generated, best


@pytest.mark.parametrize("mask", ["full", "block"])
def test_training_logits_are_serving_logits(engine, questions, mask):
    """The sample stands behind another one in its row, and its answer is what was served."""
    loaded = small_model()
    asked = questions.all[3]
    documents = draw(questions, 3, RECIPE, np.random.default_rng(1))
    prompt = chat_prompt(loaded.tokenizer, RECIPE.messages(asked.text), documents)
    assert sum(isinstance(p, DocumentPiece) for p in prompt) == len(documents) >= 2
    if mask == "full":  # plain text, as any server reads it
        prompt = [[t for p in prompt for t in (p.tokens if isinstance(p, DocumentPiece) else p)]]
    generated, served = serve(engine, prompt)

    row = _Row()
    for question in (Question("and?", "yes", asked.documents), asked):
        sample = make_sample(loaded.tokenizer, RECIPE, question, documents, END, SHAPE.length)
        row.add(sample)
    sample.tokens[-sample.num_answer :] = 0
    batch = jax.tree.map(lambda x: x[0], _batch([row], SHAPE))
    first = int(batch.place[0][batch.owner[0] == 1][0])  # the last token of the prompt
    batch.tokens[0, first + 1 : first + ANSWER] = generated[:-1]
    batch.positions[0, first + 1 : first + ANSWER] = batch.positions[0, first] + np.arange(
        1, ANSWER
    )
    batch.sample[0, first + 1 : first + ANSWER] = 1

    forward = Forward(loaded.config, jnp.dtype("float32"), SHAPE.length)
    weights = stack(loaded.model)
    sees = visible(batch.sample, batch.document)[:, ["full", "block"].index(mask)]
    hidden = forward.hidden(weights, batch.tokens, batch.positions, sees)
    trained = log_softmax(np.asarray(forward.logits(weights, hidden[0])))
    for i, best in enumerate(served):
        assert generated[i] == trained[first + i].argmax()
        ids = list(best)
        np.testing.assert_allclose(trained[first + i, ids], list(best.values()), atol=2e-4, rtol=0)


def test_what_a_token_sees():
    """Two samples in a row, then padding; the first is text, two documents, text."""
    sample = np.array([[0, 0, 0, 0, 0, 1, 1, -1]])
    document = np.array([[-1, 1, 1, 2, -1, 1, -1, -1]])
    full, block = np.asarray(visible(sample, document))[0].astype(int)
    assert full.tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]
    assert block.tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]


def test_losses_are_those_of_every_answer_token(questions):
    """Against a sum over tokens in numpy; the divergence is KL(full || block)."""
    loaded = small_model()
    samples = [
        make_sample(
            loaded.tokenizer,
            RECIPE,
            questions.all[i],
            draw(questions, i, RECIPE, np.random.default_rng(i)),
            END,
            SHAPE.length,
        )
        for i in range(3)
    ]
    rows = [_Row(), _Row()]
    for row, sample in zip((rows[0], rows[0], rows[1]), samples, strict=True):
        row.add(sample)
    batch = jax.tree.map(lambda x: x[0], _batch(rows, SHAPE))
    forward = Forward(loaded.config, jnp.dtype("float32"), SHAPE.length)
    weights = stack(loaded.model)
    losses = jax.device_get(jax.jit(forward.losses)(weights, batch))

    logp = []
    for sample in samples:
        n, mask = (
            len(sample.tokens),
            visible(np.zeros((1, len(sample.tokens))), sample.document[None]),
        )
        both = [
            forward.hidden(weights, sample.tokens[None], np.arange(n)[None], mask[:, i])[0]
            for i in range(2)
        ]
        logp.append(log_softmax(np.asarray(forward.logits(weights, jnp.stack(both)))))
    targets = [s.tokens[-s.num_answer :] for s in samples]
    rows_of = [p[:, -len(t) - 1 : -1] for p, t in zip(logp, targets, strict=True)]
    total = sum(map(len, targets))
    chosen = [
        p[:, np.arange(len(t)), t] for p, t in zip(rows_of, targets, strict=True)
    ]  # [2 answer]
    want = -sum(c.sum(1) for c in chosen) / total
    np.testing.assert_allclose(losses.loss, want, rtol=1e-4)
    kl = sum((np.exp(p[0]) * (p[0] - p[1])).sum() for p in rows_of) / total
    np.testing.assert_allclose(losses.divergence, kl, rtol=1e-3)
    assert losses.divergence > 0.01
    right = [(p.argmax(-1) == t).all(1) for p, t in zip(rows_of, targets, strict=True)]
    assert losses.exact.tolist() == np.sum(right, axis=0).tolist()
    assert losses.answers == 3
