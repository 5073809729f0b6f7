"""What sampling fields do over HTTP, and requests that end early, alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import pytest
from server_helpers import CONFIG, MODEL, Gate, RunningServer, chat_body, running, wait_until

from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.runs import TokenLogprobs
from lazyattn_jax.models.load import load_model
from lazyattn_jax.models.tokenizer import dummy_tokenizer
from lazyattn_jax.server.logprobs import chat_logprobs, prompt_logprobs, text_logprobs

LONG = {"max_tokens": 300, "ignore_eos": True}


def answer(server: RunningServer, path: str = "completions", **fields: Any) -> dict[str, Any]:
    body = chat_body("hello") if path.startswith("chat") else {"prompt": "hello"}
    response = server.post(path, **{**body, "temperature": 0, "max_tokens": 12, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_logprobs_of_a_chat(server: RunningServer) -> None:
    """In the client library's own types; the streamed ones are the same."""
    options = {"logprobs": True, "top_logprobs": 3}
    create = server.openai.chat.completions.create
    choice = create(model=MODEL, **chat_body("hello"), **options).choices[0]
    content = choice.logprobs.content
    assert len(content) == 12
    # Bytes that make no character show as U+FFFD, alone as often as there are tokens of them.
    shown = "".join(c.token for c in content)
    assert shown.replace("\ufffd", "") == choice.message.content.replace("\ufffd", "")
    for each in content:
        assert len(each.top_logprobs) == 3
        assert each.logprob == each.top_logprobs[0].logprob <= 0  # greedy
        assert each.top_logprobs[0].logprob >= each.top_logprobs[2].logprob
        assert each.bytes is None or bytes(each.bytes).decode() == each.token
    chunks = list(create(model=MODEL, **chat_body("hello"), **options, stream=True))
    streamed = [
        c
        for chunk in chunks
        if chunk.choices[0].logprobs
        for c in chunk.choices[0].logprobs.content
    ]
    assert streamed == content
    plain = create(model=MODEL, **chat_body("hello"), logprobs=True).choices[0]
    assert [c.top_logprobs for c in plain.logprobs.content] == [[]] * 12
    assert create(model=MODEL, **chat_body("hello")).choices[0].logprobs is None


def test_logprobs_of_a_completion(server: RunningServer) -> None:
    fields = {"model": MODEL, "prompt": "hello", "temperature": 0, "max_tokens": 8}
    choice = server.openai.completions.create(**fields, logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    for token, value, best in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert best[token] == value
        assert len(best) <= 2
    for token, at in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[at:].startswith(token)
    pieces = server.openai.completions.create(**fields, logprobs=2, stream=True)
    shown = [c.choices[0].logprobs for c in pieces if c.choices[0].logprobs]
    assert [at for piece in shown for at in piece.text_offset] == logprobs.text_offset
    assert [x for piece in shown for x in piece.token_logprobs] == logprobs.token_logprobs


def test_prompt_logprobs(server: RunningServer) -> None:
    """The same whether they come with the prompt or with the answer that continues it."""
    tokens = server.engine.engine.loaded.tokenizer.encode("hello")
    first = answer(server, prompt=tokens, logprobs=0, max_tokens=3)["choices"][0]
    generated = [
        int(next(iter(entry)))
        for entry in answer(
            server,
            prompt=tokens,
            max_tokens=3,
            prompt_logprobs=1,
        )["choices"][0]["prompt_logprobs"][1:]
    ]
    assert len(generated) == len(tokens) - 1
    encode = server.engine.engine.loaded.tokenizer.backend
    words = {encode.decode([i]): i for i in range(512)}
    whole = tokens + [words[t] for t in first["logprobs"]["tokens"]]
    entries = answer(server, prompt=whole, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    got = [entry[str(t)]["logprob"] for entry, t in zip(entries[1:], whole[1:], strict=True)]
    # Computed in one prefill step there and in three decode steps here, in float32.
    assert got[-3:] == pytest.approx(first["logprobs"]["token_logprobs"], abs=1e-4)
    chat = answer(server, "chat/completions", prompt_logprobs=1, documents=["some text"])
    usage = chat["usage"]
    assert len(chat["prompt_logprobs"]) == usage["prompt_tokens"]
    known = [entry is not None for entry in chat["prompt_logprobs"]]
    assert 0 < sum(known) < usage["prompt_tokens"] - 9  # not of the document and what precedes it
    assert known[-1]


def test_penalties_bias_and_stop_tokens_reach_the_engine(server: RunningServer) -> None:
    plain = answer(server, logprobs=1)["choices"][0]
    tokenizer = server.engine.engine.loaded.tokenizer
    words = {tokenizer.show(i): i for i in range(512)}
    first = words[plain["logprobs"]["tokens"][0]]
    biased = answer(server, logit_bias={str(first): -100}, logprobs=1)["choices"][0]
    assert biased["logprobs"]["tokens"][0] != plain["logprobs"]["tokens"][0]
    stopped = answer(server, stop_token_ids=[first])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["text"] == ""
    assert stopped["usage"]["completion_tokens"] == 1
    forced = {"logit_bias": {"7": 100}, "max_tokens": 6}
    same = answer(server, **forced)["choices"][0]["text"]
    assert same == tokenizer.show(7) * 6
    for penalty in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        # The bias is far above the logits of these weights, and just what the penalty takes away.
        fields = {"logit_bias": {"7": 2}, penalty: 100 if "repetition" in penalty else 2}
        tokens = answer(server, **fields, logprobs=0)["choices"][0]["logprobs"]["tokens"]
        assert tokens[0] == tokenizer.show(7)
        assert tokens[1] != tokenizer.show(7)


def test_answers_to_one_prompt_share_it(server: RunningServer, engine: Engine) -> None:
    """The second answer computes no full page of the prompt again."""
    with Gate(engine) as gate, ThreadPoolExecutor(1) as pool:
        future = pool.submit(answer, server, prompt="many words " * 20, n=3, max_tokens=40)
        wait_until(lambda: len(engine._streams) == 3)
        requests = [request for request, _ in engine._streams.values()]
        gate.allow(30)
        wait_until(lambda: all(r.num_generated for r in requests))
        pages = [request.run.pages[: 220 // 16] for request in requests]
        gate.open()
        future.result()
    assert pages[0] == pages[1] == pages[2]
    assert [r.cached_tokens for r in requests] == [0, 220 // 16 * 16, 220 // 16 * 16]


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_ends_a_request(server: RunningServer, stream: bool) -> None:
    response = server.post("completions", prompt="hello", stream=stream, timeout=1e-6, **LONG)
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("deadline_exceeded", "timeout")
    assert "timeout of 1e-06 seconds" in error["message"]
    assert answer(server, timeout=600)["choices"][0]["finish_reason"] == "length"


@pytest.fixture
def narrow_server(engine: Engine) -> Iterator[RunningServer]:
    """An application around the shared engine in which three may wait."""
    with running(lambda: engine, max_waiting=3) as server:
        wait_until(lambda: server.engine.unavailable is None)
        yield server


def test_a_full_line_is_429(narrow_server: RunningServer, engine: Engine) -> None:
    """Who runs and who waits already is not concerned, and later there is room again."""

    def post(**fields: Any) -> Any:
        return narrow_server.post("completions", prompt="hello", max_tokens=4, **fields)

    too_many = post(n=4)
    assert too_many.status_code == 400
    assert "4 answers are asked for at once, at most 3" in too_many.json()["error"]["message"]
    with Gate(engine) as gate, ThreadPoolExecutor(2) as pool:
        # The gate holds the engine in a step, which admits one; the others wait for its prompt.
        first = pool.submit(post, n=3)
        wait_until(lambda: engine.num_waiting == 3)
        second = pool.submit(post, n=2)
        wait_until(lambda: narrow_server.engine._commands.qsize() == 1)
        gate.allow(1)
        response = second.result()
        gate.open()
        assert first.result().status_code == 200
    assert response.status_code == 429
    assert 1 <= int(response.headers["retry-after"]) <= 60
    error = response.json()["error"]
    assert error["code"] == "line_full"
    assert error["type"] == "rate_limit_error"
    assert "2 requests are waiting, at most 3 may (--max-waiting)" in error["message"]
    assert post(n=2).status_code == 200


def test_a_probability_of_0_is_a_number_in_json() -> None:
    """JSON has no infinity."""
    tokens = [TokenLogprobs(5, -math.inf, ((6, 0.0), (7, -math.inf)))]
    tokenizer = dummy_tokenizer(300)
    shown = (chat_logprobs(tokenizer, tokens), text_logprobs(tokenizer, tokens),
             prompt_logprobs(tokenizer, tokens))  # fmt: skip
    for each in shown:
        assert json.dumps(each, allow_nan=False).count("-9999.0") == 2


def test_logits_that_are_not_finite_are_an_error_of_one_request(engine: Engine) -> None:
    loaded = load_model("dummy:tiny", dtype=jnp.float32)
    embedding = loaded.model.embed.embedding
    embedding[...] = embedding[...].at[500].set(jnp.nan)
    broken = Engine(loaded, CONFIG, programs=engine.programs)
    with running(lambda: broken) as server, ThreadPoolExecutor(2) as pool:
        wait_until(lambda: server.engine.unavailable is None)
        good = pool.submit(answer, server, logit_bias={"500": -100}, **LONG)
        bad = server.post("completions", prompt=[5, 500, 7], n=2, max_tokens=5)
        assert bad.status_code == 500
        assert bad.json()["error"]["code"] == "invalid_logits"
        assert good.result()["usage"]["completion_tokens"] == 300
        assert server.http.get("/health").status_code == 200
        server.check_idle()
