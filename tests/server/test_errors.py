"""What is refused, and how."""

from __future__ import annotations

from typing import Any

import pytest
from server_helpers import MAX_BODY, MAX_LEN, MODEL, RunningServer, chat_body

HUGE = 10**30


def check_error(response: Any, status: int, param: str | None, *parts: object) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    for part in parts:
        assert str(part) in error["message"], error
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"prompt=hello", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b"[" * 5000, "not valid JSON"),
        (b'{"n": 1' + b"0" * 5000 + b"}", "not valid JSON"),
        (b'["hello"]', '["hello"], must be a JSON object'),
        (b"null", "null, must be a JSON object"),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_bad_bodies(server: RunningServer, path: str, body: bytes, part: str) -> None:
    check_error(server.http.post(f"/v1/{path}", content=body), 400, None, part)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    ("field", "value", "parts"),
    [
        ("temperature", 3, ("3", "0 to 2")),
        ("temperature", 999999, ("999999", "0 to 2")),
        ("temperature", -0.1, ("-0.1", "0 to 2")),
        ("temperature", "hot", ('"hot"', "must be a number")),
        ("temperature", True, ("true", "must be a number")),
        ("top_p", 0, ("0", "above 0 and at most 1")),
        ("top_p", -1, ("-1", "above 0 and at most 1")),
        ("top_p", 1.5, ("1.5", "at most 1")),
        ("top_k", -2, ("-2", "0 (off) or more")),
        ("top_k", HUGE, (HUGE, "0 (off) or more")),
        ("n", 0, ("0", "1 to 16")),
        ("n", 17, ("17", "1 to 16")),
        ("n", HUGE, (HUGE, "1 to 16")),
        ("max_tokens", 0, ("0", "at least 1")),
        ("max_tokens", -5, ("-5", "at least 1")),
        ("max_tokens", "abc", ('"abc"', "must be an integer")),
        ("max_tokens", 1.5, ("1.5", "must be an integer")),
        ("max_tokens", True, ("true", "must be an integer")),
        ("max_tokens", MAX_LEN, (MAX_LEN, "max_model_len")),
        ("max_tokens", HUGE, (HUGE, MAX_LEN, "max_model_len")),
        ("max_completion_tokens", 0, ("max_completion_tokens is 0", "at least 1")),
        ("max_completion_tokens", HUGE, (f"max_completion_tokens is {HUGE}", MAX_LEN)),
        ("seed", HUGE, (HUGE, 2**63 - 1)),
        ("seed", "x", ('"x"', "must be an integer")),
        ("stop", [""], ("empty",)),
        ("stop", ["a"] * 17, ("17", "16")),
        ("stop", 5, ("5", "a string or a list of strings")),
        ("stop", [5], ("[5]", "a string or a list of strings")),
        ("stream", "yes", ('"yes"', "true or false")),
        ("stream_options", 5, ("5", "must be an object")),
        ("model", 5, ("5", "must be a string")),
        ("cache_salt", 5, ("5", "must be a string")),
        ("documents", "text", ("'text'", "must be a list")),
        ("documents", [5], ("5", "a string or an object")),
        ("documents", [""], ("is empty",)),
        ("documents", [{"id": "a", "text": "  "}], ("'a'", "is empty")),
        ("documents", [{"id": "a"}], ("'a'", "/v1/documents")),
        ("documents", [{"title": "a"}], ("'title'", "no 'text'")),
        ("documents", [{"text": 5}], ("5", "must be a string")),
        ("documents", ["x"] * 9, ("9 documents", "at most 8", "max_documents")),
        ("document_context", "all", ("'all'", "'prefix' or 'none'")),
        ("document_context", 5, ("5", "must be a string")),
        ("document_gap", HUGE, (HUGE, "0 to 1000000")),
        ("document_gap", 1.5, ("1.5", "must be an integer")),
        ("document_repair", -1, ("-1", "0 or more")),
        ("document_select", -1, ("document_select is -1", "0 or more")),
        ("document_temperature", 0, ("0", "0.1 to 10")),
        ("document_temperature", "x", ('"x"', "must be a number")),
        ("best_of", 2, ("2", "null or 1")),
        ("min_p", 1.5, ("1.5", "0 to 1")),
        ("repetition_penalty", 0, ("0", "0.01 to 100")),
        ("presence_penalty", 2.5, ("2.5", "-2 to 2")),
        ("frequency_penalty", -3, ("-3", "-2 to 2")),
        ("frequency_penalty", "x", ('"x"', "must be a number")),
        ("logit_bias", {"5": 101}, ("token 5", "101", "-100 to 100")),
        ("logit_bias", {"512": 1}, ("512", "vocabulary of 512")),
        ("logit_bias", {"x": 1}, ('{"x": 1}', "token ids as its keys")),
        ("logit_bias", {"-1": 1}, ('{"-1": 1}', "token ids as its keys")),
        ("logit_bias", {"5": "1"}, ('{"5": "1"}', "numbers as its values")),
        ("logit_bias", [1], ("[1]", "must be an object")),
        ("min_tokens", -1, ("-1", "0 or more")),
        ("min_tokens", 13, ("13", "at most max_tokens")),
        ("stop_token_ids", [512], ("512", "vocabulary of 512")),
        ("stop_token_ids", ["5"], ('["5"]', "a list of token ids")),
        ("stop_token_ids", [5] * 65, ("65", "64")),
        ("prompt_logprobs", 21, ("21", "0 to 20")),
        ("prompt_logprobs", 10**400, ("1000", "0 to 20")),  # no float is as large
        ("timeout", 0, ("0", "above 0")),
        ("timeout", -1.5, ("-1.5", "above 0")),
        ("timeout", "x", ('"x"', "must be a number")),
        ("tools", [{"type": "function"}], ("function", "null or []")),
        ("echo", True, ("true", "null or false")),
        ("echo", 0, ("0", "null or false")),
        ("suffix", "end", ('"end"', 'null or ""')),
        ("response_format", {"type": "json_object"}, ("json_object", '{"type": "text"}')),
    ],
)
def test_bad_fields(
    server: RunningServer, path: str, field: str, value: Any, parts: tuple[Any, ...]
) -> None:
    body = chat_body("hello") if path.startswith("chat") else {"prompt": "hello", "max_tokens": 4}
    check_error(server.post(path, **{**body, field: value}), 400, field, *parts)


@pytest.mark.parametrize(
    ("path", "fields", "param", "parts"),
    [
        ("completions", {"logprobs": 21}, "logprobs", ("21", "0 to 20")),
        ("completions", {"logprobs": True}, "logprobs", ("true", "must be an integer")),
        ("chat/completions", {"logprobs": 5}, "logprobs", ("5", "must be true or false")),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs", ("2", "logprobs is not true")),
        (
            "chat/completions",
            {"logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            ("21", "0 to 20"),
        ),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ("stream",)),
    ],
)
def test_bad_logprobs(
    server: RunningServer, path: str, fields: dict[str, Any], param: str, parts: tuple[Any, ...]
) -> None:
    body = chat_body("hello") if path.startswith("chat") else {"prompt": "hello", "max_tokens": 4}
    check_error(server.post(path, **body, **fields), 400, param, *parts)


def test_nested_field(server: RunningServer) -> None:
    body = chat_body("hello", stream=True, stream_options={"include_usage": 1})
    answer = server.post("chat/completions", **body)
    check_error(answer, 400, "stream_options.include_usage", "1", "true or false")


def test_not_a_number(server: RunningServer) -> None:
    for text, shown in (("NaN", "nan"), ("Infinity", "inf"), ("1e999", "inf")):
        content = f'{{"prompt": "x", "temperature": {text}}}'
        check_error(server.http.post("/v1/completions", content=content), 400, "temperature", shown)


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        (None, ("null", "must be a string")),
        (5, ("5", "must be a string")),
        ("", ("empty",)),
        ([], ("0 prompts", "1 to 1024")),
        (["x"] * 1025, ("1025 prompts", "1 to 1024")),
        ([[]], ("empty",)),
        (["a", ""], ("empty",)),
        ([1, "a"], ('[1, "a"]', "must be a string")),
        ([True], ("[true]", "must be a string")),
        ([1.5], ("[1.5]", "must be a string")),
        ([512], ("512", "vocabulary of 512")),
        ([-1], ("-1", "vocabulary of 512")),
        ("x" * MAX_LEN, (MAX_LEN, MAX_LEN - 1, "max_model_len")),
    ],
)
def test_bad_prompts(server: RunningServer, prompt: Any, parts: tuple[Any, ...]) -> None:
    check_error(server.post("completions", prompt=prompt), 400, "prompt", *parts)


@pytest.mark.parametrize(
    ("messages", "parts"),
    [
        (None, ("must be a non-empty list",)),
        ([], ("[]", "must be a non-empty list")),
        ("hello", ("'hello'", "must be a non-empty list")),
        ([5], ("messages[0]", "5", "'role'")),
        ([{"content": "hello"}], ("messages[0]", "'role'")),
        ([{"role": "user", "content": 5}], ("messages[0].content", "5", "a string or a list")),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            ("messages[0].content[0]", "image_url"),
        ),
        ([{"role": "user", "content": "x" * 600}], (MAX_LEN - 1, "max_model_len")),
    ],
)
def test_bad_messages(server: RunningServer, messages: Any, parts: tuple[Any, ...]) -> None:
    check_error(server.post("chat/completions", messages=messages), 400, "messages", *parts)


def test_missing_fields(server: RunningServer) -> None:
    check_error(server.post("completions"), 400, "prompt", "is missing")
    check_error(server.post("chat/completions"), 400, "messages", "is missing")


def test_documents_make_the_prompt_too_long(server: RunningServer) -> None:
    answer = server.post("chat/completions", **chat_body("hello", documents=["x" * 300, "y" * 300]))
    check_error(answer, 400, "messages", "documents", MAX_LEN, "max_model_len")
    answer = server.post("completions", prompt="hello", documents=["x" * 300, "y" * 300])
    check_error(answer, 400, "prompt", MAX_LEN, "max_model_len")


def test_errors_before_a_stream_are_ordinary(server: RunningServer) -> None:
    answer = server.post("completions", prompt=[512], stream=True)
    check_error(answer, 400, "prompt", "512")


def test_one_bad_prompt_of_several(server: RunningServer) -> None:
    check_error(server.post("completions", prompt=[[5, 6], [512]]), 400, "prompt", "512")
    server.check_idle()  # nothing of the good one is computed


def test_unknown_model(server: RunningServer) -> None:
    answer = server.post("chat/completions", **chat_body("hello", model="gpt-9"))
    error = check_error(answer, 404, "model", "'gpt-9'", repr(MODEL))
    assert error["code"] == "model_not_found"


def test_unknown_paths_and_methods(server: RunningServer) -> None:
    check_error(server.http.get("/v1/nowhere"), 404, None, "GET '/v1/nowhere'")
    check_error(server.http.post("/nowhere"), 404, None, "POST '/nowhere'")
    check_error(server.http.post("/v1/completions/"), 404, None, "/v1/completions/")
    check_error(server.http.get("/a%1Bb"), 404, None, r"'/a\x1bb'")
    answer = server.http.get("/v1/completions")
    check_error(answer, 405, None, "GET '/v1/completions'", "POST")
    assert answer.headers["allow"] == "POST"
    check_error(server.http.delete("/health"), 405, None, "DELETE '/health'", "GET")


@pytest.mark.parametrize("size", [MAX_BODY + 1, 10 * MAX_BODY])
def test_too_large_a_body(server: RunningServer, size: int) -> None:
    body = b" " * size
    announced = server.http.post("/v1/completions", content=body)
    assert check_error(announced, 413, None, size, MAX_BODY)["code"] == "body_too_large"
    if size < 2 * MAX_BODY:  # else the server does not wait for its end
        chunks = (body[i : i + 4096] for i in range(0, size, 4096))
        check_error(server.http.post("/v1/completions", content=chunks), 413, None, size, MAX_BODY)


def test_largest_body(server: RunningServer) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'.ljust(MAX_BODY)
    assert server.http.post("/v1/completions", content=body).status_code == 200


def test_all_is_well_after_errors(server: RunningServer) -> None:
    for fields in ({"prompt": [512]}, {"prompt": "a", "n": 0}, {"prompt": ""}):
        assert server.post("completions", **fields).status_code == 400
    answer = server.post("completions", prompt="a", max_tokens=4, temperature=0, documents=["b"])
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
