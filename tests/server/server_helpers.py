"""Real servers on real sockets, with random weights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import openai
import uvicorn

from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.server.app import ServerConfig, build_app
from lazyattn_jax.server.async_engine import AsyncEngine

MODEL = "tiny"
MAX_BODY = 64 << 10
MAX_LEN = 512
SECONDS = 120  # bound on everything that is waited for, on a busy machine too

CONFIG = EngineConfig(
    kv_pool_bytes=1 << 20,
    max_model_len=MAX_LEN,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_documents=8,
    check_invariants=True,
)


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


class RunningServer:
    """An application behind uvicorn in a thread."""

    def __init__(
        self, load: Callable[[], Engine], keys: tuple[str, ...] = (), **options: Any
    ) -> None:
        self.engine = AsyncEngine(load, **options)
        app = build_app(self.engine, ServerConfig(MODEL, "dummy:tiny", MAX_BODY, keys))
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(app, lifespan="on", ws="none", log_config=None, access_log=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],))
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.http = httpx.Client(base_url=self.url, timeout=SECONDS)
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=keys[0] if keys else "none",
            max_retries=0,
            timeout=SECONDS,
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/{path}", json={"model": MODEL, **body})

    def call[T](self, work: Callable[[Engine], T]) -> T:
        """Runs work between two steps."""
        future = asyncio.run_coroutine_threadsafe(self.engine.call(work), self.engine.loop)
        return future.result(SECONDS)

    def check_idle(self) -> None:
        """Waits until nothing is computed, then looks for anything that was not given back."""
        wait_until(lambda: not self.call(lambda e: e.has_work))
        self.call(_check_idle)
        assert not self.engine._jobs

    def stop(self) -> None:
        self.http.close()
        self.openai.close()
        self._server.should_exit = True
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        assert not self.engine.running


def _check_idle(engine: Engine) -> None:
    scheduler = engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.active
    assert not scheduler.waiting
    assert not scheduler.jobs
    assert not engine._streams
    assert all(segment.pins == 0 for segment in scheduler.index.segments())
    assert scheduler.index.num_available == engine.limits.num_pages  # none is private


@contextlib.contextmanager
def running(load: Callable[[], Engine], *keys: str, **options: Any) -> Iterator[RunningServer]:
    server = RunningServer(load, keys, **options)
    try:
        yield server
    finally:
        server.stop()


SMALL = ("--kv-pool-bytes=1MiB", "--max-num-seqs=4", "--max-num-batched-tokens=64")
SMALL += ("--prefill-buckets=64", "--decode-buckets=4")  # a program of each kind


def start(*options: str, through: Sequence[str] = ()) -> subprocess.Popen[str]:
    """The command, with a tiny model; options that come later win.

    ``through`` is a command that runs the one that follows it. Without ``--compilation-cache`` the
    server uses the one of the tests.
    """
    environment = dict(os.environ)
    if any(option.startswith("--compilation-cache") for option in options):
        for name in os.environ:
            if "_CACHE_" in name and name.startswith("JAX_"):
                del environment[name]
    return subprocess.Popen(
        [
            *through,
            sys.executable,
            "-m",
            "lazyattn_jax.serve",
            "--model=dummy:tiny",
            *SMALL,
            *options,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )


class Gate:
    """Lets an engine take only the steps it is allowed to."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._step = engine.step
        self._permits: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._is_open = False
        self.taken = 0

    def __enter__(self) -> Gate:
        self._engine.step = self._guarded  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        del self._engine.step

    def _guarded(self) -> Any:
        if not self._is_open and (error := self._permits.get(timeout=SECONDS)) is not None:
            raise error
        self.taken += 1
        return self._step()

    def allow(self, steps: int) -> None:
        for _ in range(steps):
            self._permits.put(None)

    def fail(self, error: Exception) -> None:
        """The next step raises."""
        self._permits.put(error)

    def open(self) -> None:
        """Steps are free from here on."""
        self._is_open = True
        self._permits.put(None)


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}
