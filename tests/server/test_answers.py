"""What clients get, through the client library that most of them use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from server_helpers import MAX_LEN, MODEL, RunningServer, chat_body

DOCUMENTS = [
    {"id": "frog", "title": "Frogs", "text": "The glass frog lives in cloud forests."},
    {"id": "clock", "title": "Clocks", "text": "The comet clock was built by Jonas Weir."},
    {"id": "dog", "text": "Rescue dogs train for eighteen months."},
]


def chat(server: RunningServer, text: str = "What is it?", **fields: Any) -> Any:
    extensions = ("documents", "document_select", "top_k", "cache_salt", "ignore_eos")
    extra = {k: fields.pop(k) for k in extensions if k in fields}
    return server.openai.chat.completions.create(
        model=MODEL, **chat_body(text, **fields), extra_body=extra
    )


def complete(server: RunningServer, prompt: Any, **fields: Any) -> Any:
    documents = {"documents": fields.pop("documents")} if "documents" in fields else {}
    fields = {"temperature": 0, "max_tokens": 12, **fields}
    return server.openai.completions.create(
        model=MODEL, prompt=prompt, **fields, extra_body=documents
    )


def test_chat(server: RunningServer) -> None:
    answer = chat(server)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    usage = answer.usage
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert "documents" not in usage.prompt_tokens_details.model_dump()


def test_chat_stream_equals_answer(server: RunningServer) -> None:
    whole = chat(server).choices[0]
    chunks = list(chat(server, stream=True))
    assert all(c.object == "chat.completion.chunk" and c.usage is None for c in chunks)
    assert len({c.id for c in chunks}) == 1
    first = chunks[0].choices[0].delta
    assert first.role == "assistant"
    assert first.content  # no chunk before the first text
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_completion_stream_equals_answer(server: RunningServer) -> None:
    whole = complete(server, "Once upon a time")
    assert whole.id.startswith("cmpl-")
    assert whole.object == "text_completion"
    chunks = list(complete(server, "Once upon a time", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(c.choices[0].text or c.choices[0].finish_reason for c in chunks)


def test_stream_usage(server: RunningServer) -> None:
    usage = chat(server, documents=DOCUMENTS).usage
    fields = {"stream": True, "stream_options": {"include_usage": True}, "documents": DOCUMENTS}
    chunks = list(chat(server, **fields))
    assert chunks[-1].choices == []
    assert all(c.usage is None and c.choices for c in chunks[:-1])
    last = chunks[-1].usage
    assert (last.prompt_tokens, last.total_tokens) == (usage.prompt_tokens, usage.total_tokens)
    reused = [d["cached_tokens"] for d in last.prompt_tokens_details.documents]
    assert reused == [d["tokens"] for d in usage.prompt_tokens_details.documents]


def test_documents_are_chosen(server: RunningServer) -> None:
    """The answer is that over the chosen documents alone, and usage tells them from the others."""
    given = [*DOCUMENTS, "A third one.", "A fourth."]
    fields = {"documents": given, "document_select": 2}
    extra = {"stream": True, "stream_options": {"include_usage": True}}
    answer = chat(server, **fields)
    details = answer.usage.prompt_tokens_details
    kept = [text for text, shown in zip(given, details.documents, strict=True) if shown["used"]]
    assert len(kept) == 2
    scores = [(shown["score"], shown["used"]) for shown in details.documents]
    assert [used for _, used in sorted(scores)] == [False] * 3 + [True] * 2
    assert details.selection_tokens > 0
    alone = chat(server, documents=kept)
    assert answer.choices == alone.choices
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
    assert all("used" not in shown for shown in alone.usage.prompt_tokens_details.documents)
    *chunks, last = chat(server, **fields, **extra)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == answer.choices[0].message.content
    shown = [(d["used"], d["score"]) for d in last.usage.prompt_tokens_details.documents]
    assert shown == [(used, score) for score, used in scores]


def test_raw_stream(server: RunningServer) -> None:
    """Each event is one data line, and the chunks have exactly the fields they should."""
    with server.http.stream("POST", "/v1/chat/completions", json=chat_body("a", stream=True)) as r:
        assert r.headers["content-type"].startswith("text/event-stream")
        body = r.read().decode()
    events = body.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert all(e.startswith('data: {"id":"chatcmpl-') and "\n" not in e for e in events[:-1])
    assert '"delta":{"role":"assistant","content":' in events[0]
    assert '"role"' not in events[1]
    assert '"usage"' not in body


def test_documents_are_reused_in_another_order(server: RunningServer) -> None:
    salt = {"cache_salt": "order"}
    first = chat(server, documents=DOCUMENTS, **salt).usage
    again = chat(server, documents=DOCUMENTS[::-1], **salt).usage
    assert [d["cached_tokens"] for d in first.prompt_tokens_details.documents] == [0, 0, 0]
    documents = again.prompt_tokens_details.documents
    assert [d["id"] for d in documents] == ["dog", "clock", "frog"]
    assert all(d["cached_tokens"] == d["tokens"] > 0 for d in documents)
    assert again.prompt_tokens == first.prompt_tokens
    assert again.prompt_tokens_details.cached_tokens >= sum(d["tokens"] for d in documents)
    # Not so for those who must not share.
    other = chat(server, documents=DOCUMENTS, cache_salt="another").usage
    assert other.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize(
    "form",
    [
        [f"Title: {d['title']}\n{d['text']}" if "title" in d else d["text"] for d in DOCUMENTS],
        [{k: d[k] for k in ("title", "text") if k in d} for d in DOCUMENTS],
        [
            {"id": d["id"], "data": {k: d[k] for k in ("title", "text") if k in d}}
            for d in DOCUMENTS
        ],
    ],
    ids=["strings", "title and text", "id and data"],
)
def test_document_forms(server: RunningServer, form: list[Any]) -> None:
    reference = chat(server, documents=DOCUMENTS)
    answer = chat(server, documents=form)
    assert answer.choices[0].message.content == reference.choices[0].message.content
    documents = answer.usage.prompt_tokens_details.documents
    assert all(d["cached_tokens"] == d["tokens"] for d in documents)


def test_documents_as_content_parts(server: RunningServer) -> None:
    reference = chat(server, documents=DOCUMENTS)
    parts: list[Any] = [{"type": "document", **d} for d in DOCUMENTS[:2]]
    source = {"type": "text", "data": DOCUMENTS[2]["text"]}
    parts.append({"type": "document", "source": source})
    messages = chat_body("")["messages"]
    messages[1]["content"] = [*parts, {"type": "text", "text": "What is it?"}]
    answer = server.openai.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=12
    )
    assert answer.choices[0].message.content == reference.choices[0].message.content
    assert len(answer.usage.prompt_tokens_details.documents) == 3


def test_several_prompts(server: RunningServer) -> None:
    prompts = ["One", "Two and more", "Three"]
    alone = [complete(server, p, documents=["Some text."]) for p in prompts]
    together = complete(server, prompts, documents=["Some text."])
    assert [c.index for c in together.choices] == [0, 1, 2]
    assert [c.text for c in together.choices] == [a.choices[0].text for a in alone]
    assert together.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone)
    assert together.usage.completion_tokens == 36
    [document] = together.usage.prompt_tokens_details.documents
    [one] = alone[0].usage.prompt_tokens_details.documents
    assert document["tokens"] == 3 * one["tokens"]
    texts = ["", "", ""]
    for chunk in complete(server, prompts, documents=["Some text."], stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in together.choices]


def test_token_prompts(server: RunningServer) -> None:
    assert server.engine.engine is not None
    tokens = server.engine.engine.loaded.tokenizer.encode("One")
    text = complete(server, "One").choices[0].text
    assert complete(server, tokens).choices[0].text == text
    assert [c.text for c in complete(server, [tokens, tokens]).choices] == [text, text]


def test_n_choices(server: RunningServer) -> None:
    one = [chat(server, temperature=1, seed=7 + i).choices[0].message.content for i in range(2)]
    both = chat(server, temperature=1, seed=7, n=2)
    assert [c.index for c in both.choices] == [0, 1]
    assert [c.message.content for c in both.choices] == one
    assert one[0] != one[1]
    assert both.usage.completion_tokens == 24
    assert both.usage.prompt_tokens == chat(server).usage.prompt_tokens
    streams: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chat(server, temperature=1, seed=7, n=2, stream=True):
        streams[chunk.choices[0].index].append(chunk.choices[0])
    for text, chunks in zip(one, streams.values(), strict=True):
        assert "".join(c.delta.content or "" for c in chunks) == text
        assert chunks[0].delta.role == "assistant"
        assert chunks[-1].finish_reason == "length"


def test_seeds(server: RunningServer) -> None:
    def text(seed: int) -> str:
        return (
            chat(server, temperature=1.5, top_p=0.95, top_k=100, seed=seed)
            .choices[0]
            .message.content
        )

    assert text(3) == text(3)
    assert text(3) != text(4)


@pytest.mark.parametrize("as_list", [False, True])
def test_stop_strings(server: RunningServer, as_list: bool) -> None:
    whole = complete(server, "Stop", max_tokens=30).choices[0].text
    stop = whole[9:14]  # several characters, across tokens
    answer = complete(server, "Stop", max_tokens=30, stop=[stop, "\0never"] if as_list else stop)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 30
    chunks = complete(server, "Stop", max_tokens=30, stop=stop, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == answer.choices[0].text


def test_neutral_values_are_accepted(server: RunningServer) -> None:
    neutral = {
        "stop": None,
        "logprobs": None,
        "seed": None,
        "n": None,
        "top_p": None,
        "top_k": -1,
        "best_of": 1,
        "repetition_penalty": 1.0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "response_format": {"type": "text"},
        "user": "me",
        "stream": False,
        "stream_options": None,
        "documents": None,
        "cache_salt": None,
        "made_up_field": 5,
        "limit": 1,  # names that the server uses for itself
        "model_extra": {},
        "__class__": "x",
    }
    plain = server.post("chat/completions", **chat_body("hello")).json()
    answer = server.post("chat/completions", **chat_body("hello"), **neutral)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain["choices"]


def test_token_limits(server: RunningServer) -> None:
    assert complete(server, "Hi", max_tokens=openai.omit).usage.completion_tokens <= 16
    newer = server.post("chat/completions", **chat_body("Hi", max_completion_tokens=3))
    assert newer.json()["usage"]["completion_tokens"] == 3
    # The default of 16 is no reason to refuse a prompt that leaves less room than that.
    body = {"prompt": "x" * (MAX_LEN - 5), "temperature": 0, "ignore_eos": True}
    near = server.post("completions", **body)
    assert near.json()["usage"]["completion_tokens"] == 5
    # Without a limit a chat goes on to its end, or that of the context.
    open_ended = server.post(
        "chat/completions", **chat_body("Hi", max_tokens=None, ignore_eos=True)
    )
    assert open_ended.json()["usage"]["total_tokens"] == MAX_LEN


def test_models(server: RunningServer) -> None:
    [model] = server.openai.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "lazyattn_jax")
    assert model.model_extra == {"root": "dummy:tiny", "max_model_len": MAX_LEN}
    assert server.openai.models.retrieve(MODEL).created == model.created
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("other/model")


def test_health_and_request_ids(server: RunningServer) -> None:
    answer = server.http.get("/health", headers={"x-request-id": "a<b>\tc-1"})
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert answer.headers["x-request-id"] == "abc-1"
    made_up = {server.http.get("/health").headers["x-request-id"] for _ in range(2)}
    assert len(made_up) == 2
    long = server.http.get("/nowhere", headers={"x-request-id": "y" * 5000})
    assert long.headers["x-request-id"] == "y" * 128


def test_clients_at_once_get_what_they_get_alone(server: RunningServer) -> None:
    """More requests than are computed at a time, with and without shared documents."""

    def ask(i: int) -> str:
        documents = DOCUMENTS[i % 3 :] if i % 2 else []
        body = chat_body(f"Question {i}, {'please ' * i}", documents=documents, max_tokens=40)
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        return answer.json()["choices"][0]["message"]["content"]

    alone = [ask(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone
    assert len(set(alone)) == 8
