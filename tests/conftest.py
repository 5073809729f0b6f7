"""Strict configuration of jax for all tests, and one folder of compiled programs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

# What takes some time to compile, the workers and the processes that tests start compile once. With
# a limit to its size jax locks the folder, so that nobody reads what is half written.
CACHE = {
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    "jax_compilation_cache_max_size": 4 << 30,
}
LONG = ("test_demo.py", "test_notebooks.py", "test_restart.py", "test_soak.py")
FOLDER = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="let jax use a GPU: for tests/gpu")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("gpu"):
        return
    jax.config.update("jax_platforms", "cpu")
    # Processes that tests start would report that the compiler's plugin is no complete CUDA.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if hasattr(config, "workerinput"):  # of pytest-xdist: the environment tells it all
        return
    config.stash[FOLDER] = tempfile.TemporaryDirectory(prefix="lazyattn-tests-")
    for name, value in {"jax_compilation_cache_dir": config.stash[FOLDER].name, **CACHE}.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def pytest_unconfigure(config: pytest.Config) -> None:
    if FOLDER in config.stash:
        config.stash[FOLDER].cleanup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first: at the end, one worker would wait for the other's."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture
def compiled_afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing comes out of the folder: for tests of what compilers report."""
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
