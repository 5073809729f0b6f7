"""One more tile in the softmax of some rows; inside a kernel."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from lazyattn_jax.kernels.mosaic_tpu.layout import LANES

LOWEST = -1e30
"""Stands for minus infinity where a difference of two is taken."""


def attend(queries, keys, values, state, visible):
    """Online softmax (arXiv 1805.02867), in powers of two.

    Args:
      queries: turned and scaled, ``[R, 128]``, for each piece of the tile, or one for all.
      keys: of the tile ``[n, 128]``; the slots of a piece are a multiple of 128.
      values: of the tile.
      state: largest score and sum of weights, each in all elements of its row, and weighted
        values: ``[R, 128]``, float32.
      visible: for each piece the slots that every row sees, a number or ``[R, 128]``; none if it is
        all of them.

    Returns:
      The new state.
    """
    top, total, out = state
    # bfloat16 products are exact in float32; float32 inputs must not be rounded.
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    slots = len(keys) // len(queries)
    scores = [
        lax.dot_general(
            q,
            keys[i * slots : (i + 1) * slots],
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        for i, q in enumerate(queries)
    ]
    s = jnp.concatenate(scores, 1)
    if visible is not None:
        s = jnp.concatenate(
            [
                _masked(part, seen)
                for part, seen in zip(jnp.split(s, len(visible), 1), visible, strict=True)
            ],
            1,
        )
    above = jnp.maximum(top, s.max(1, keepdims=True))
    p = jnp.exp2(s - jnp.tile(above, (1, s.shape[1] // LANES)))
    keep = jnp.exp2(top - above)
    o = jnp.dot(
        p.astype(values.dtype), values, precision=precision, preferred_element_type=jnp.float32
    )
    return above, total * keep + p.sum(1, keepdims=True), out * keep + o


def _masked(scores, seen):
    if hasattr(seen, "shape") and seen.shape:
        seen = jnp.tile(seen, (1, scores.shape[1] // LANES))
    return jnp.where(lax.broadcasted_iota(jnp.int32, scores.shape, 1) < seen, scores, LOWEST)
