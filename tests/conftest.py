"""Strict configuration of jax for all tests."""

from __future__ import annotations

import os

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="let jax use a GPU: for tests/gpu")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("gpu"):
        jax.config.update("jax_platforms", "cpu")
        # Processes that tests start would report that the compiler's plugin is no complete CUDA.
        os.environ["JAX_PLATFORMS"] = "cpu"
