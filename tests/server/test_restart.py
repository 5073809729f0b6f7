"""Servers that are told to stop, or killed, while they have a lot to do."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from server_helpers import SECONDS, chat_body, start, wait_until

STREAMS, WHOLES = 6, 6


@contextlib.contextmanager
def server(
    port: int, *options: str, through: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    url = f"http://127.0.0.1:{port}"
    process = start(f"--port={port}", *options, through=through)

    def ready() -> bool:
        assert process.poll() is None, process.communicate()
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(ready)
        yield process, url
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def body(number: int, **fields: Any) -> dict[str, Any]:
    documents = [f"Document {number % 3}: {'text ' * 20}"]
    return chat_body(f"{number}", documents=documents, ignore_eos=True, **fields)


def stream(url: str, number: int, tokens: int) -> list[str]:
    """The events that came, until the end or until the connection broke."""
    lines = []
    fields = body(number, max_tokens=tokens, stream=True)
    with contextlib.suppress(httpx.TransportError):
        path = f"{url}/v1/chat/completions"
        with httpx.stream("POST", path, json=fields, timeout=SECONDS) as response:
            lines.extend(line for line in response.iter_lines() if line)
    return lines


def whole(url: str, number: int, tokens: int) -> httpx.Response:
    fields = body(number, max_tokens=tokens)
    return httpx.post(f"{url}/v1/chat/completions", json=fields, timeout=SECONDS)


def running_requests(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=SECONDS).text
    name = "lazyattn:num_requests_running "
    return next(
        float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)
    )


def test_stopped_under_load() -> None:
    """Everybody gets an answer or an error that says why, and the process ends well."""
    with server(free_port()) as (process, url), ThreadPoolExecutor(STREAMS + WHOLES) as pool:
        streams = [pool.submit(stream, url, i, 1500) for i in range(STREAMS)]
        wholes = [pool.submit(whole, url, i, 4 if i % 2 else 1500) for i in range(WHOLES)]
        wait_until(lambda: running_requests(url) > 1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0
        assert "Traceback" not in errors
        for events in (future.result() for future in streams):
            check_stream(events)
        for answer in (future.result() for future in finished(wholes)):
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["finish_reason"] == "length"
            else:
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "shutting_down"


def finished(futures: list[Future[httpx.Response]]) -> list[Future[httpx.Response]]:
    """But those whose connection was refused: the server had stopped listening."""
    refused = [f for f in futures if isinstance(f.exception(), httpx.ConnectError)]
    assert all(f.exception() is None or f in refused for f in futures)
    return [f for f in futures if f not in refused]


def check_stream(events: list[str]) -> None:
    if events and events[-1] == "data: [DONE]":
        assert '"finish_reason":"length"' in events[-2]
    elif events:
        # Before the first event it is an ordinary answer.
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["code"] == "shutting_down"


def test_killed_and_started_again(tmp_path: Path) -> None:
    """Nothing is kept but compiled programs; on the same port the next one answers the same."""
    port, cache = free_port(), tmp_path / "cache"
    options = (f"--compilation-cache={cache}",)
    with server(port, *options) as (process, url), ThreadPoolExecutor(STREAMS) as pool:
        first = whole(url, 0, 12).json()
        loaded = httpx.post(f"{url}/v1/documents", json={"documents": ["abc"]}, timeout=SECONDS)
        [card] = loaded.json()["data"]
        streams = [pool.submit(stream, url, i, 1500) for i in range(STREAMS)]
        wait_until(lambda: running_requests(url) > 1)
        process.kill()
        process.communicate()
        # Cut off: whoever had not finished knows it, there is no end in the stream.
        assert any("[DONE]" not in "".join(future.result()) for future in streams)
    programs = set(cache.iterdir())
    assert programs
    with server(port, *options) as (_, url):
        again = whole(url, 0, 12).json()
        assert again["choices"] == first["choices"]
        assert again["usage"] == first["usage"]  # nothing is in the pool
        assert httpx.get(f"{url}/v1/documents").json()["data"] == []
        assert httpx.get(f"{url}/v1/documents/{card['id']}").status_code == 404
    compiled = {path for path in cache.iterdir() if path.name.endswith("-cache")}
    assert compiled == {path for path in programs if path.name.endswith("-cache")}


def test_compiled_programs_that_cannot_be_kept(tmp_path: Path) -> None:
    """As with a full disk: no file can be written, and everything works without."""
    no_files = ("sh", "-c", 'ulimit -f 0 && exec "$@"', "sh")
    cache = tmp_path / "cache"
    with server(free_port(), f"--compilation-cache={cache}", through=no_files) as (_, url):
        answer = whole(url, 0, 12)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 12
    assert not [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size]
