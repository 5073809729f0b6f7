"""Requests that nobody would send: never a 500, never a hang, and the server goes on as before."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_helpers import MODEL, RunningServer, chat_body

from lazyattn_jax.server.protocol import NEUTRAL, WITHOUT_EFFECT

FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

text = st.text(max_size=20)
numbers = st.one_of(
    st.integers(-3, 20),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, -1, 10**30, 1e308]),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, text)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


def mostly(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Of the right type, but for one time in ten."""
    return st.integers(0, 9).flatmap(lambda number: strategy if number else anything)


documents = st.lists(
    mostly(
        st.one_of(
            text,
            st.fixed_dictionaries({"text": mostly(text)}, optional={"title": mostly(text)}),
            st.fixed_dictionaries({"id": mostly(text)}, optional={"data": mostly(text)}),
            st.fixed_dictionaries({"data": st.fixed_dictionaries({"text": mostly(text)})}),
        )
    ),
    max_size=4,
)
parts = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": mostly(text)}),
    st.fixed_dictionaries(
        {"type": st.just("document")},
        optional={"text": mostly(text), "source": anything, "document": anything},
    ),
    anything,
)
messages = st.lists(
    mostly(
        st.fixed_dictionaries(
            {"role": mostly(st.sampled_from(["system", "user", "assistant", "tool"]))},
            optional={"content": mostly(st.one_of(text, st.lists(parts, max_size=3)))},
        )
    ),
    max_size=4,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just(MODEL),
    "documents": mostly(documents),
    "temperature": mostly(st.floats(0, 2)),
    "top_p": mostly(st.floats(0, 1)),
    "top_k": mostly(st.integers(-1, 50)),
    "seed": mostly(st.integers()),
    "max_completion_tokens": mostly(st.integers(1, 4)),
    "stop": mostly(st.one_of(text, st.lists(text, max_size=3))),
    "n": mostly(st.integers(1, 3)),
    "stream": mostly(st.booleans()),
    "stream_options": mostly(st.fixed_dictionaries({}, optional={"include_usage": st.booleans()})),
    "ignore_eos": mostly(st.booleans()),
    "cache_salt": mostly(text),
    **{name: st.sampled_from([*NEUTRAL[name], 0, "x"]) for name in NEUTRAL},
    **dict.fromkeys(WITHOUT_EFFECT, anything),
}
LIMITED = {"max_tokens": st.integers(1, 4)}  # so that what is accepted ends soon
prompts = st.one_of(
    text, st.lists(text, max_size=3), st.lists(st.integers(-1, 520), max_size=5), anything
)


@st.composite
def bodies(draw: st.DrawFn, required: dict[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True))
    return draw(st.fixed_dictionaries({**required, **{name: FIELDS[name] for name in names}}))


def check(server: RunningServer, path: str, body: Any) -> None:
    answer = server.http.post(f"/v1/{path}", content=json.dumps(body))
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text
    else:
        assert answer.json()["object"]


@FUZZ
@given(body=bodies({"messages": mostly(messages), **LIMITED}))
def test_chat(server: RunningServer, body: Any) -> None:
    check(server, "chat/completions", body)


@FUZZ
@given(body=bodies({"prompt": prompts, **LIMITED}))
def test_completions(server: RunningServer, body: Any) -> None:
    check(server, "completions", body)


@FUZZ
@given(
    body=st.fixed_dictionaries(
        {"documents": mostly(documents), "cache_salt": st.just("fuzz")},
        optional={"messages": mostly(messages), "pinned": mostly(st.booleans())},
    )
)
def test_documents(server: RunningServer, body: Any) -> None:
    check(server, "documents", body)
    listed = server.http.get("/v1/documents?cache_salt=fuzz")
    for card in listed.json()["data"]:
        gone = server.http.delete(f"/v1/documents/{card['id']}?cache_salt=fuzz")
        assert gone.status_code == 200


@FUZZ
@given(
    body=st.fixed_dictionaries(
        {},
        optional={
            "prompt": mostly(text),
            "messages": mostly(messages),
            "documents": mostly(documents),
            "tokens": mostly(st.lists(st.integers(-1, 520))),
            "add_special_tokens": mostly(st.booleans()),
            "return_token_strs": mostly(st.booleans()),
            "add_generation_prompt": mostly(st.booleans()),
        },
    )
)
@pytest.mark.parametrize("path", ["tokenize", "detokenize"])
def test_tokens(server: RunningServer, path: str, body: Any) -> None:
    answer = server.http.post(f"/{path}", content=json.dumps(body))
    assert answer.status_code in (200, 400), (answer.status_code, answer.text)
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]


@FUZZ
@given(body=st.binary(max_size=60) | anything.map(lambda value: json.dumps(value).encode()))
@pytest.mark.parametrize(
    "path", ["v1/chat/completions", "v1/completions", "v1/documents", "tokenize", "detokenize"]
)
def test_bodies_that_are_none(server: RunningServer, path: str, body: bytes) -> None:
    answer = server.http.post(f"/{path}", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


PATHS = ["/", "/health", "/metrics", "/v1/models", "/v1/documents", "/v1/pool", "/static/page.js"]


@FUZZ
@given(
    method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "BREW"]),
    path=st.sampled_from([*PATHS, "/v1/completions", "/v1/chat/completions"]),
    rest=st.text(st.characters(codec="utf-8", exclude_characters="#"), max_size=8),
    headers=st.dictionaries(
        st.sampled_from(["x-request-id", "authorization", "content-type", "accept", "range"]),
        st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=12),
        max_size=3,
    ),
)
def test_paths_methods_and_headers(
    server: RunningServer, method: str, path: str, rest: str, headers: dict[str, str]
) -> None:
    raw = [(name.encode(), value.strip().encode("latin-1")) for name, value in headers.items()]
    raw = [(name, value) for name, value in raw if not set(value) & {0x7F, *range(0x80, 0xA1)}]
    answer = server.http.request(method, path, params={"cache_salt": rest}, headers=raw)
    assert answer.status_code < 500, (answer.status_code, answer.text)
    if rest and path != "/":
        answer = server.http.request(method, f"{path}/{quote(rest)}", headers=raw)
        assert answer.status_code < 500, (answer.status_code, answer.text)
    assert answer.headers["x-request-id"]


def test_all_is_well_after_that(server: RunningServer) -> None:
    answer = server.post("chat/completions", **chat_body("hello"))
    assert answer.json()["usage"]["completion_tokens"] == 12
