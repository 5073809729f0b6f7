"""Steps of real models without data for the Hopper kernels, for tests and benchmarks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lazyattn_jax.kernels.model_shapes import ModelShape, arguments, decode_step, prefill_step
from lazyattn_jax.kernels.mosaic_gpu.plan import num_workers, plan_decode, tile_slots
from lazyattn_jax.kernels.mosaic_gpu.prefill_plan import plan_prefill
from lazyattn_jax.kernels.work import Moves, Turns


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
    references, runs = decode_step(page_size, requests=requests, documents=documents)
    work = plan_decode(
        references,
        runs,
        num_rows=requests,
        page_size=page_size,
        group=shape.group,
        tile=tile_slots(shape.head_dim),
        workers=num_workers(shape.kv_heads),
    )
    return arguments(shape, page_size, dtype, requests, references, runs, work)


def copy_arguments(
    shape: ModelShape, page_size: int, *, dtype: Any = jnp.bfloat16, pages: int = 64
) -> tuple[Any, ...]:
    """Shapes of the arguments of ``copies.copy_pages``: ``k_pages, v_pages, moves``."""
    pool = jax.ShapeDtypeStruct((500, shape.kv_heads, page_size, shape.head_dim), dtype)
    index = jax.ShapeDtypeStruct((pages,), jnp.int32)
    turn = jax.ShapeDtypeStruct((pages, shape.head_dim // 2), jnp.float32)
    return pool, pool, Moves(index, index, index, Turns(turn, turn))


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
    references, runs = prefill_step(
        page_size, requests=requests, tokens=tokens, documents=documents
    )
    work = plan_prefill(
        references,
        runs,
        num_rows=requests * tokens,
        page_size=page_size,
        group=shape.group,
        kv_heads=shape.kv_heads,
        most_pieces=most_pieces,
    )
    return arguments(shape, page_size, dtype, requests * tokens, references, runs, work)
