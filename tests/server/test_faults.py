"""Clients that leave, engines that fail, servers that stop: nothing hangs, nothing leaks."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from server_helpers import MODEL, Gate, RunningServer, chat_body, running, wait_until

from lazyattn_jax.engine.engine import Engine

LONG = {"max_tokens": 300, "ignore_eos": True}


@pytest.fixture
def own_server(engine: Engine) -> Iterator[RunningServer]:
    """An application of its own around the shared engine."""
    with running(lambda: engine) as server:
        wait_until(lambda: server.engine.unavailable is None)
        yield server


def aborts_waiting(server: RunningServer) -> bool:
    return server.engine._commands.qsize() > 0


def test_client_leaves_a_stream(server: RunningServer, engine: Engine) -> None:
    body = chat_body("hello", stream=True, n=2, documents=["some text"], **LONG)
    with Gate(engine) as gate:
        gate.allow(8)  # leading text, document, question, a token; each is read a step later
        with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()  # kept: when it goes the response is closed
            assert next(lines).startswith("data: {")
            requests = [request for request, _ in engine._streams.values()]
            assert len(requests) == 2
        # The abort waits for the ninth step, or has come before that.
        wait_until(lambda: aborts_waiting(server) or not engine._streams)
        gate.open()
        server.check_idle()
    assert all(request.num_generated < 10 for request in requests)


def test_client_leaves_without_a_stream(server: RunningServer, engine: Engine) -> None:
    body = json.dumps(chat_body("hello", **LONG)).encode()
    with Gate(engine) as gate:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body
            )
            wait_until(lambda: engine._streams)
            [(request, _)] = engine._streams.values()
        wait_until(lambda: aborts_waiting(server))
        gate.open()
        server.check_idle()
    assert request.num_generated < 10


def test_client_leaves_in_mid_body(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
    assert server.http.get("/health").status_code == 200


def test_aborting_who_is_gone(server: RunningServer) -> None:
    server.call(lambda engine: engine.abort("nobody"))
    with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as r:
        r.read()
    assert server.post("completions", prompt="x").status_code == 200


def test_bug_in_one_request(
    server: RunningServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "add", broken)
        answer = server.post("completions", prompt="x")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.headers["x-request-id"]
    assert server.post("completions", prompt="x").status_code == 200


def test_engine_fault(own_server: RunningServer, engine: Engine) -> None:
    def post(text: str) -> httpx.Response:
        return own_server.post("chat/completions", **chat_body(text, **LONG))

    body = {"prompt": "hello", "temperature": 0, "stream": True, **LONG}
    with Gate(engine) as gate, ThreadPoolExecutor(6) as pool:
        gate.allow(4)
        with own_server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert "error" not in next(lines)
            # More than run at once. Some may be in the engine when it fails, some before it.
            others: list[Future[httpx.Response]] = [pool.submit(post, str(i)) for i in range(6)]
            queued = own_server.engine._commands
            wait_until(lambda: len(engine._streams) + queued.qsize() == 7)
            gate.fail(RuntimeError("the device is gone"))
            rest = [line for line in lines if line]
        answers = [other.result() for other in others]
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert "the device is gone" in error["message"]
    assert response.status_code == 200  # it had begun
    for answer in answers:
        assert answer.status_code in (500, 503)
        assert "the device is gone" in answer.json()["error"]["message"]
    health = own_server.http.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "failed"
    assert "the device is gone" in health.json()["reason"]
    later = post("later")
    assert later.status_code == 503
    assert later.json()["error"]["code"] == "failed"


def test_fault_before_the_first_token(own_server: RunningServer, engine: Engine) -> None:
    """Running requests get a 500, also those that wanted a stream."""

    def post(stream: bool) -> httpx.Response:
        # Long enough to take several steps.
        return own_server.post("completions", prompt="hello " * 30, stream=stream, **LONG)

    with Gate(engine) as gate, ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, True)
        wait_until(lambda: len(engine._streams) == 1)
        second = pool.submit(post, False)
        wait_until(lambda: own_server.engine._commands.qsize() == 1)
        gate.allow(1)
        wait_until(lambda: len(engine._streams) == 2)
        gate.fail(RuntimeError("the device is gone"))
        answers = [first.result(), second.result()]
    for answer in answers:
        check_fault(answer)


def check_fault(answer: httpx.Response) -> None:
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "the engine failed: RuntimeError: the device is gone",
        "type": "server_error",
        "param": None,
        "code": "engine_fault",
    }


def test_stopping_ends_what_runs(own_server: RunningServer, engine: Engine) -> None:
    with Gate(engine) as gate, ThreadPoolExecutor(1) as pool:
        running_one = pool.submit(own_server.post, "completions", prompt="hello", **LONG)
        wait_until(lambda: engine._streams)
        own_server.engine.loop.call_soon_threadsafe(own_server.engine.request_stop)
        wait_until(lambda: aborts_waiting(own_server))
        gate.open()
        answer = running_one.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "shutting_down"
    assert own_server.http.get("/health").json()["status"] == "shutting_down"
    assert own_server.post("completions", prompt="x").status_code == 503


def test_loading_takes_time_and_fails() -> None:
    go = threading.Event()

    def load() -> Engine:
        assert go.wait(30)
        raise ValueError("no such model")

    with running(load) as server:
        try:
            health = server.http.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "loading"})
            answer = server.post("completions", prompt="x")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "loading"
            assert answer.headers["retry-after"]
            assert server.http.get("/v1/models").status_code == 503
        finally:
            go.set()
        wait_until(lambda: server.engine.load_error)
        assert server.http.get("/health").json()["status"] == "failed"
        assert "no such model" in server.http.get("/health").json()["reason"]


def test_unknown_fields_are_logged_once(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lazyattn_jax")
    body = {"prompt": "x", "max_tokens": 1, "made_up": 1, "user": "me", "model": MODEL}
    for _ in range(2):
        assert server.post("completions", **body, **{"a\nb": 2}).status_code == 200
    lines = [r.getMessage() for r in caplog.records if "unknown field" in r.getMessage()]
    assert len(lines) == 2
    assert "'made_up'" in lines[0]
    assert r"'a\nb'" in lines[1]
