"""Retrieval-augmented generation in JAX over one shared KV pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lazyattn_jax.engine.params import SamplingParams
    from lazyattn_jax.engine.request import DocumentContext
    from lazyattn_jax.llm import LLM, Completion
    from lazyattn_jax.prompt import Document

__all__ = ["LLM", "Completion", "Document", "DocumentContext", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The scheduler and the cache are used without jax, so importing the package must not load it.
    if name in ("LLM", "Completion"):
        from lazyattn_jax import llm as module
    elif name == "Document":
        from lazyattn_jax import prompt as module  # type: ignore[no-redef]
    elif name == "SamplingParams":
        from lazyattn_jax.engine import params as module  # type: ignore[no-redef]
    elif name == "DocumentContext":
        from lazyattn_jax.engine import request as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
