"""API keys, and what the log says of requests."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import httpx
import openai
import pytest
from server_helpers import MODEL, RunningServer, chat_body, running, wait_until

from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.serve import make_parser, parse_key
from lazyattn_jax.server.logs import JsonFormatter


def test_keys(engine: Engine) -> None:
    with running(lambda: engine, "first-key", "second-key") as server:
        wait_until(lambda: server.engine.unavailable is None)
        assert server.openai.models.list().data[0].id == MODEL  # has the first key
        second = {"authorization": "bearer second-key"}
        assert server.http.get("/v1/models", headers=second).status_code == 200
        for path in ("/health", "/metrics"):
            assert server.http.get(path).status_code == 200
        for value in ("", "first-key", "Basic first-key", "Bearer", "Bearer first-ke", "Bearer é"):
            headers = {b"authorization": value.encode("latin-1")}
            answer = server.http.get("/v1/models", headers=headers)
            check_refused(answer)
        body = chat_body("hello")
        check_refused(server.http.post("/v1/chat/completions", json=body))
        check_refused(server.http.post("/v1/documents", json={"documents": ["x"]}))
        check_refused(server.http.post("/tokenize", json={"prompt": "x"}))
        check_refused(server.http.post("/detokenize", json={"tokens": [2]}))
        check_refused(server.http.get("/v1/nowhere"))
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        with client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def check_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert error["code"] == "invalid_api_key"
    assert "first-key" not in error["message"]


def test_keys_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-a-file\n")
    args = make_parser().parse_args(["--api-key", "a-key", "--api-key", f"@{file}"])
    assert args.api_key == ["a-key", "from-a-file"]
    for bad in ("", "two words", "ключ", "@" + str(tmp_path / "nothing"), f"@{tmp_path}"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_key(bad)


def test_log_entries(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lazyattn_jax")
    caplog.handler.setFormatter(JsonFormatter())
    headers = {"x-request-id": "my-request"}
    body = chat_body("hello\n")
    good = server.http.post("/v1/chat/completions", json=body, headers=headers)
    server.http.post("/v1/chat/completions", json={**body, "n": 0}, headers=headers)
    server.http.post("/v1/chat/completions", json={**body, "stream": True}, headers=headers)
    wait_until(lambda: len(caplog.text.splitlines()) == 3)
    entries = [json.loads(line) for line in caplog.text.splitlines()]
    usage = good.json()["usage"]
    assert [e["status"] for e in entries] == [200, 400, 200]
    for entry in entries:
        assert entry["request_id"] == "my-request"
        assert entry["path"] == "/v1/chat/completions"
        assert entry["level"] == "info"
        assert entry["logger"] == "lazyattn_jax.server.app"
        assert entry["time"].endswith("+00:00")
    first, error, last = entries
    assert first["response_id"] == good.json()["id"]
    for entry in (first, last):
        assert entry["prompt_tokens"] == usage["prompt_tokens"]
        assert entry["completion_tokens"] == 12
        assert entry["seconds"] > 0
    assert "n is 0" in error["message"]


def test_exceptions_in_the_log() -> None:
    try:
        raise KeyError("a bug\nin two lines")
    except KeyError as error:
        info = (KeyError, error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "", 1, "%s failed", ("it",), info)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["message"] == "it failed"
    assert "KeyError" in entry["exception"]
