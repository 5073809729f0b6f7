"""Attention shapes of real models, and steps of them, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lazyattn_jax.kernels.work import References, Runs, Turns


@dataclass(frozen=True)
class ModelShape:
    """Heads of one layer on one device."""

    name: str
    num_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.num_heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.head_dim**-0.5


SMOLLM2_135M = ModelShape("SmolLM2-135M", 9, 3, 64)
LLAMA_3_2_1B = ModelShape("Llama-3.2-1B", 32, 8, 64)
LLAMA_3_1_8B = ModelShape("Llama-3.1-8B", 32, 8, 128)
LLAMA_3_1_70B_SHARD = ModelShape("Llama-3.1-70B, one of 8 devices", 8, 1, 128)

MODEL_SHAPES = (SMOLLM2_135M, LLAMA_3_2_1B, LLAMA_3_1_8B, LLAMA_3_1_70B_SHARD)

_DOCUMENT = 512
"""Tokens of a document of the steps below."""


def decode_step(page_size: int, *, requests: int, documents: int) -> tuple[References, Runs]:
    """Requests that hold the same documents, next to a tail of their own."""
    row = np.repeat(np.arange(requests), documents + 1)
    run = np.tile(np.arange(documents + 1), requests)
    run[documents :: documents + 1] += np.arange(requests)
    runs = _runs([_DOCUMENT] * documents + [100] * requests, page_size)
    turn = 1 + np.arange(len(row))
    return References(row, np.ones_like(row), run, turn, runs.length[run]), runs


def prefill_step(
    page_size: int, *, requests: int, tokens: int, documents: int
) -> tuple[References, Runs]:
    """New tokens of requests that attend to documents of their own, next to themselves."""
    row = np.repeat(np.arange(requests) * tokens, documents + 1)
    run = np.arange(len(row))
    own = run % (documents + 1) == documents
    runs = _runs(np.where(own, tokens, _DOCUMENT), page_size)
    causal = np.where(own, 0, _DOCUMENT)
    return References(row, np.full_like(row, tokens), run, 1 + run, causal), runs


def arguments(
    shape: ModelShape,
    page_size: int,
    dtype: Any,
    num_rows: int,
    references: References,
    runs: Runs,
    work: Any,
    *,
    fused: bool = False,
) -> tuple[Any, ...]:
    """``q, k_pages, v_pages, turns, work`` of a step, each array a ``jax.ShapeDtypeStruct``.

    With fused pages ``v_pages`` is none.
    """
    q = jax.ShapeDtypeStruct((num_rows, shape.num_heads, shape.head_dim), dtype)
    width = shape.head_dim * (2 if fused else 1)
    pages = jax.ShapeDtypeStruct((len(runs.pages), shape.kv_heads, page_size, width), dtype)
    num_turns = len(references.row) + 1
    angles = jax.ShapeDtypeStruct((num_turns, shape.head_dim // 2), jnp.float32)
    tables = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), work)
    return q, pages, None if fused else pages, Turns(angles, angles), tables


def _runs(lengths: Any, page_size: int) -> Runs:
    length = np.asarray(lengths)
    pages = -(-length // page_size)
    return Runs(np.arange(pages.sum()), np.cumsum(pages) - pages, length)
