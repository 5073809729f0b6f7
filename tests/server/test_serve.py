"""The command line: starting, failing to start, and stopping."""

from __future__ import annotations

import argparse
import gc
import re
import signal
import socket

import httpx
import pytest
from server_helpers import SECONDS, start, wait_until

from lazyattn_jax import serve
from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.serve import make_parser, parse_size
from lazyattn_jax.server.replies import data_line


def test_start_serve_and_stop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = start("--port", str(port), "--served-model-name", "it")
    try:
        statuses: list[object] = []

        def ready() -> bool:
            assert process.poll() is None, process.communicate()
            try:
                statuses.append(httpx.get(f"{url}/health").json()["status"])
            except httpx.TransportError:
                return False
            return statuses[-1] == "ok"

        wait_until(ready)
        assert statuses[0] == "loading"  # the socket is there long before the model
        body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as response:
            lines = response.iter_lines()
            assert '"model":"it"' in next(lines)
            process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        assert last == "data: [DONE]" or "shutting down" in last
        out, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    assert "Traceback" not in errors
    for part in ("it", "139.6 K", "float32", "1.0 MiB, 128 pages of 16, 2048 tokens", url):
        assert part in out
    bar = re.search(r"Compiling batch shapes .* (\d+)/(\d+) \d+:\d\d:\d\d", out)
    assert bar
    assert int(bar[1]) == int(bar[2]) > 1


def test_stop_while_loading() -> None:
    process = start("--port=0", "--log-level=debug")
    try:
        assert process.stderr is not None
        assert any("Application startup complete" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_what_keeps_it_from_starting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = {
            ("--port", port): (f"port {port}", "in use", "--port"),
            ("--port=0", "--model=dummy:none"): ("dummy:none", "tiny"),
            ("--port=0", "--max-model-len=4096"): ("4096", "2048"),
        }
        processes = [start(*options) for options in cases]
        results = [process.communicate(timeout=SECONDS) for process in processes]
    for process, (_, errors), parts in zip(processes, results, cases.values(), strict=True):
        assert process.returncode == 2
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
        assert all(part in errors for part in parts), errors


def test_garbage_collection_does_not_look_at_what_loading_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[object] = []

    def load(*args: object) -> object:
        left.append([])
        return left[-1]

    monkeypatch.setattr(serve, "load_for", load)
    monkeypatch.setattr(serve, "start_engine", load)
    try:
        engine = serve._load("some model", "none", EngineConfig())
        assert engine is left[1]
        looked_at = set(map(id, gc.get_objects()))
        assert looked_at.isdisjoint(map(id, left))
        assert id(looked_at) in set(map(id, gc.get_objects()))  # but at what comes later it does
    finally:
        gc.unfreeze()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        make_parser().parse_args(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: 127.0.0.1)" in shown
    assert "90% of the memory" in shown
    for action in make_parser()._actions[1:]:
        assert action.help
        assert (
            "(default: " in action.help
            or "%(default)s" in action.help
            or action.dest == "page_size"
        )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 2**29),
        ("1GiB", 2**30),
        ("1.5 gib", 3 * 2**29),
        ("2e9", 2 * 10**9),
        ("1GB", 10**9),
        ("64k", 64_000),
        ("1048576", 2**20),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "1XiB", "1i", "nan", "1e999"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="512MiB"):
        parse_size(text)


def test_event_lines_have_no_breaks_inside() -> None:
    """Whatever a client splits lines with."""
    line = data_line('{"text": "a\u2028b\u2029c\x85d é"}'.encode())
    assert line.decode() == 'data: {"text": "a\\u2028b\\u2029c\\u0085d é"}\n\n'
    assert len(line.decode().splitlines()) == 2
