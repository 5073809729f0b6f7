"""Attention shapes of real models, and steps of them without data, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lazyattn_jax.kernels.mosaic_gpu.plan import num_workers, plan_decode
from lazyattn_jax.kernels.mosaic_gpu.prefill_plan import plan_prefill
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


def decode_arguments(
    shape: ModelShape,
    page_size: int,
    *,
    dtype: Any = jnp.bfloat16,
    requests: int = 64,
    documents: int = 10,
) -> tuple[Any, ...]:
    """Shapes of the arguments of ``decode.lazy_decode``: requests that hold the same documents.

    Args:
      shape: heads of the model.
      page_size: slots of a page.
      dtype: of queries and pages.
      requests: query rows.
      documents: documents that each request holds, next to a tail of its own.

    Returns:
      ``q, k_pages, v_pages, turns, work``, each array a ``jax.ShapeDtypeStruct``.
    """
    row = np.repeat(np.arange(requests), documents + 1)
    run = np.tile(np.arange(documents + 1), requests)
    run[documents :: documents + 1] += np.arange(requests)
    runs = _runs([_DOCUMENT] * documents + [100] * requests, page_size)
    work = plan_decode(
        References(row, np.ones_like(row), run, 1 + np.arange(len(row)), runs.length[run]),
        runs,
        num_rows=requests,
        page_size=page_size,
        group=shape.group,
        workers=num_workers(shape.kv_heads),
    )
    return _arguments(shape, page_size, dtype, requests, len(row), runs, work)


def prefill_arguments(
    shape: ModelShape,
    page_size: int,
    *,
    dtype: Any = jnp.bfloat16,
    requests: int = 8,
    tokens: int = 64,
    documents: int = 10,
    most_pieces: int = 1,
) -> tuple[Any, ...]:
    """Shapes of the arguments of ``prefill.lazy_prefill``: questions over documents.

    Args:
      shape: heads of the model.
      page_size: slots of a page.
      dtype: of queries and pages.
      requests: requests of the step.
      tokens: new tokens of each request.
      documents: documents that each request's tokens attend to, next to themselves.
      most_pieces: see ``prefill_plan.plan_prefill``.

    Returns:
      ``q, k_pages, v_pages, turns, work``, each array a ``jax.ShapeDtypeStruct``.
    """
    row = np.repeat(np.arange(requests) * tokens, documents + 1)
    run = np.arange(len(row))
    own = run % (documents + 1) == documents
    runs = _runs(np.where(own, tokens, _DOCUMENT), page_size)
    causal = np.where(own, 0, _DOCUMENT)
    work = plan_prefill(
        References(row, np.full_like(row, tokens), run, 1 + run, causal),
        runs,
        num_rows=requests * tokens,
        page_size=page_size,
        group=shape.group,
        kv_heads=shape.kv_heads,
        most_pieces=most_pieces,
    )
    return _arguments(shape, page_size, dtype, requests * tokens, len(row), runs, work)


def _runs(lengths: Any, page_size: int) -> Runs:
    length = np.asarray(lengths)
    pages = -(-length // page_size)
    return Runs(np.arange(pages.sum()), np.cumsum(pages) - pages, length)


def _arguments(
    shape: ModelShape,
    page_size: int,
    dtype: Any,
    num_rows: int,
    num_turns: int,
    runs: Runs,
    work: Any,
) -> tuple[Any, ...]:
    q = jax.ShapeDtypeStruct((num_rows, shape.num_heads, shape.head_dim), dtype)
    pool = (len(runs.pages), shape.kv_heads, page_size, shape.head_dim)
    pages = jax.ShapeDtypeStruct(pool, dtype)
    angles = jax.ShapeDtypeStruct((num_turns + 1, shape.head_dim // 2), jnp.float32)
    tables = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), work)
    return q, pages, pages, Turns(angles, angles), tables
