"""The offline API over a tiny model."""

from __future__ import annotations

import dataclasses

import pytest

from lazyattn_jax import LLM, Document, DocumentContext, SamplingParams
from lazyattn_jax.engine.request import RequestError
from lazyattn_jax.llm import Usage

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
DOCUMENTS = [Document("The moss is green.", title="Moss"), "Tin melts at 232 degrees."]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is green?"}]


@pytest.fixture(scope="module")
def llm():
    llm = LLM(
        "dummy:tiny",
        progress=False,
        kv_pool_bytes=1 << 20,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        check_invariants=True,
    )
    yield llm
    index = llm.engine.scheduler.index
    assert not llm.engine.scheduler.has_work
    assert index.num_available == llm.engine.limits.num_pages


def test_one_prompt_and_several_and_token_ids_agree(llm):
    prompts = ["Tell me of moss.", "And of tin?"]
    both = llm.generate(prompts, GREEDY, documents=DOCUMENTS)
    alone = [llm.generate(p, GREEDY, documents=DOCUMENTS)[0] for p in prompts]
    tokens = llm.generate([llm.tokenizer.encode(p) for p in prompts], GREEDY, documents=DOCUMENTS)
    (single,) = llm.generate(llm.tokenizer.encode(prompts[0]), GREEDY, documents=DOCUMENTS)
    for some in (alone, tokens):
        assert [c.token_ids for c in some] == [c.token_ids for c in both]
    assert single.token_ids == both[0].token_ids
    assert both[0].text == llm.tokenizer.decode(both[0].token_ids)
    assert both[0].finish_reason == "length"
    assert both[0].time_to_first_token > 0


def test_a_call_says_how_documents_are_treated(llm):
    """Ahead of a call with a gap of its own; and repaired, which leaves nothing to be found."""
    context = DocumentContext(gap=7)
    llm.cache_documents(DOCUMENTS, messages=CHAT, context=context)
    usage = llm.chat(CHAT, GREEDY, documents=DOCUMENTS, context=context)[0].usage
    assert all(d.cached_tokens == d.tokens for d in usage.documents)
    context = DocumentContext(gap=7, repair=1000)
    for usage in (
        llm.chat(CHAT, GREEDY, documents=DOCUMENTS, context=context)[0].usage,
        llm.generate("Why?", GREEDY, documents=DOCUMENTS, context=context)[0].usage,
        Usage.of(
            list(llm.stream_chat(CHAT, GREEDY, documents=DOCUMENTS, context=context))[-1].request
        ),
    ):
        assert [d.cached_tokens for d in usage.documents] == [0] * len(DOCUMENTS)


def test_usage_names_documents_and_counts_reuse(llm):
    llm.engine.scheduler.index.clear()
    first = llm.chat(CHAT, GREEDY, documents=DOCUMENTS)[0].usage
    second = llm.chat(CHAT, GREEDY, documents=DOCUMENTS[::-1])[0].usage
    moss = len(llm.tokenizer.encode("Title: Moss\nThe moss is green.\n\n"))
    tin = len(llm.tokenizer.encode("Tin melts at 232 degrees.\n\n"))
    assert [(d.name, d.tokens, d.cached_tokens) for d in first.documents] == [
        ("Moss", moss, 0),
        ("1", tin, 0),
    ]
    assert [(d.tokens, d.cached_tokens) for d in second.documents] == [(tin, tin), (moss, moss)]
    lead = len(llm.tokenizer.encode("system: Be brief.\nuser: "))
    assert first.cached_tokens == 0
    assert second.cached_tokens == lead + moss + tin
    assert first.completion_tokens == 8
    whole = len(llm.tokenizer.encode("system: Be brief.\nuser: What is green?\nassistant: "))
    assert first.prompt_tokens == whole + moss + tin


def test_several_conversations_are_one_batch(llm):
    other = [{"role": "user", "content": "What melts?"}]
    both = llm.chat([CHAT, other], GREEDY, documents=DOCUMENTS)
    assert both[0].token_ids == llm.chat(CHAT, GREEDY, documents=DOCUMENTS)[0].token_ids
    assert both[1].token_ids == llm.chat(other, GREEDY, documents=DOCUMENTS)[0].token_ids
    assert both[0].token_ids != both[1].token_ids


def test_stream_gives_the_same_text_and_ends_early_when_left(llm):
    whole = llm.chat(CHAT, GREEDY, documents=DOCUMENTS)[0]
    outputs = list(llm.stream_chat(CHAT, GREEDY, documents=DOCUMENTS))
    assert "".join(o.text for o in outputs) == whole.text
    assert [o.finish_reason for o in outputs] == [None] * 7 + ["length"]
    stream = llm.stream_chat(CHAT, GREEDY, documents=DOCUMENTS)
    next(stream)
    stream.close()
    assert not llm.engine.scheduler.has_work


def test_a_stop_string_ends_the_text_before_it(llm):
    whole = llm.generate("Say it.", GREEDY)[0].text
    stop = whole[len(whole) // 2 :][:4]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=(stop,))
    (completion,) = llm.generate("Say it.", params)
    assert completion.text == whole[: whole.index(stop)]
    assert completion.finish_reason == "stop"


def test_several_answers_to_each_prompt(llm):
    llm.engine.scheduler.index.clear()
    params = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
    answers = llm.generate(["Tell me of moss.", "And of tin?"], params, documents=DOCUMENTS)
    assert len(answers) == 6
    for i, prompt in enumerate(["Tell me of moss.", "And of tin?"]):
        for j, answer in enumerate(answers[3 * i : 3 * i + 3]):
            alone = dataclasses.replace(params, n=1, seed=5 + j)
            (want,) = llm.generate(prompt, alone, documents=DOCUMENTS)
            assert answer.token_ids == want.token_ids
    assert len({a.token_ids for a in answers[:3]}) == 3
    # The documents were computed for the first answer, the others found them.
    assert [d.cached_tokens for d in answers[0].usage.documents] == [0, 0]
    assert all(d.cached_tokens == d.tokens for a in answers[1:3] for d in a.usage.documents)


def test_logprobs_of_answers_and_prompts(llm):
    plain = llm.generate("Tell me of moss.", GREEDY)[0]
    assert plain.logprobs is None
    assert plain.prompt_logprobs is None
    params = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1)
    for answer in llm.generate("Tell me of moss.", dataclasses.replace(params, n=2)):
        assert answer.token_ids == plain.token_ids
        # Greedy: the most likely token each time.
        assert [t.token for t in answer.logprobs] == list(answer.token_ids)
        assert [t.best[0] for t in answer.logprobs] == [
            (t.token, t.logprob) for t in answer.logprobs
        ]
        assert all(len(t.best) == 2 for t in answer.logprobs)
        prompt = llm.tokenizer.encode("Tell me of moss.")
        assert answer.prompt_logprobs[0] is None
        assert [t.token for t in answer.prompt_logprobs[1:]] == prompt[1:]
    # The same numbers another way: what was an answer becomes the end of the prompt.
    (again,) = llm.generate(
        prompt + list(plain.token_ids), dataclasses.replace(params, max_tokens=1)
    )
    got = [t.logprob for t in again.prompt_logprobs[len(prompt) :]]
    assert got == pytest.approx([t.logprob for t in answer.logprobs], abs=1e-4)


def test_a_stream_is_of_one_answer(llm):
    with pytest.raises(RequestError, match="n is 2, but this gives one answer") as error:
        next(llm.stream_chat(CHAT, SamplingParams(n=2)))
    assert error.value.param == "n"


def test_documents_cached_ahead_are_found_by_requests_with_the_same_system_text(llm):
    llm.engine.scheduler.index.clear()
    ahead = llm.cache_documents(DOCUMENTS, messages=CHAT)
    assert [d.cached_tokens for d in ahead.documents] == [0, 0]
    again = llm.cache_documents(DOCUMENTS, messages=CHAT)
    assert [d.cached_tokens for d in again.documents] == [d.tokens for d in again.documents]
    usage = llm.chat([CHAT[0], {"role": "user", "content": "Hm?"}], GREEDY, documents=DOCUMENTS)
    assert all(d.cached_tokens == d.tokens for d in usage[0].usage.documents)
    usage = llm.chat(
        [{"role": "system", "content": "Other."}, CHAT[1]], GREEDY, documents=DOCUMENTS
    )
    assert all(d.cached_tokens == 0 for d in usage[0].usage.documents)


def test_documents_cached_ahead_for_plain_prompts(llm):
    llm.engine.scheduler.index.clear()
    llm.cache_documents(DOCUMENTS)
    usage = llm.generate("Hm?", GREEDY, documents=DOCUMENTS)[0].usage
    assert all(d.cached_tokens == d.tokens for d in usage.documents)


@pytest.mark.parametrize(
    ("call", "param", "message"),
    [
        (lambda llm: llm.generate(""), "prompt", "empty"),
        (lambda llm: llm.generate("x", documents=[""]), "documents", "empty"),
        (lambda llm: llm.generate("x", documents=[7]), "documents", "int 7"),
        (lambda llm: llm.generate("x", documents="text"), "documents", "must be a list"),
        (lambda llm: llm.generate(["fine", "x" * 4000]), "prompt", "4000 tokens, at most 2047"),
        (lambda llm: llm.chat([]), "messages", "non-empty"),
        (lambda llm: llm.cache_documents([]), "documents", "no documents"),
        (lambda llm: llm.generate([[1, 99999]]), "prompt", "99999.*512"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing_behind(llm, call, param, message):
    with pytest.raises(RequestError, match=message) as error:
        call(llm)
    assert error.value.param == param
    assert not llm.engine.scheduler.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_pool_bytes": 100}, "100 bytes does not hold one page of 8,192 bytes"),
        ({"max_model_len": 4096}, "max_model_len is 4096.*at most 2048"),
        ({"max_model_len": 2048, "kv_pool_bytes": 1 << 18}, "2048 tokens.*holds 512.*1,048,576"),
        ({"page_size": 24}, "page_size is 24.*power of two"),
        ({"max_num_seqs": -1}, "max_num_seqs is -1"),
        ({"document_context": "all"}, "'all'.*'auto', 'prefix', 'none' or 'full'"),
        ({"document_gap": -1}, "document_gap is -1"),
        ({"dtype": "int8"}, "'int8'.*float32"),
        ({"adapter": "none.safetensors"}, "'none.safetensors' is no file"),
        ({"adapter": "x", "document_context": "prefix"}, "'x' is for documents encoded alone"),
        ({"attention": "cuda"}, "'cuda'.*xla"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        LLM("dummy:tiny", progress=False, **options)
