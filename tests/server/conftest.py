"""A real server on a real socket, with random weights."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import pytest
from server_helpers import CONFIG, RunningServer, running, wait_until

from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.models.load import load_model


@pytest.fixture(scope="session")
def session_server() -> Iterator[RunningServer]:
    def load() -> Engine:
        return Engine(load_model("dummy:tiny", dtype=jnp.float32), CONFIG)

    with running(load) as server:
        wait_until(lambda: server.engine.unavailable is None)
        yield server


@pytest.fixture
def server(session_server: RunningServer) -> Iterator[RunningServer]:
    """The server that tests share; nothing may be left behind in its engine."""
    yield session_server
    session_server.check_idle()


@pytest.fixture
def engine(server: RunningServer) -> Iterator[Engine]:
    """The shared engine, idle, for a test that wraps an application of its own around it."""
    server.check_idle()
    engine = server.engine.engine
    assert engine is not None
    yield engine
    for name in list(engine._streams):
        engine.abort(name)
