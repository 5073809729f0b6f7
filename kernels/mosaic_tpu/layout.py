"""How queries, angles and pages lie in a TPU's memory, for both kernels.

A vector register is 8 x 128 (float32) or 16 x 128 (bfloat16), so everything has rows of 128
elements. At head_dim 64 a row of the pool is a slot's key next to its value, ``[K | V]``: nothing
is padded in memory, and one copy brings both. A query is then ``[q | q']``, where ``q'`` is the
query turned by a right angle, and ``[K | V]`` is multiplied by the turned query next to zeros.

Turning is the same for both: ``x * cos + roll(x, 64) * sin``.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from lazyattn_jax.kernels.work import Turns

LANES = 128
"""Elements of a row."""


def padded_queries(q: Float[Array, "*n H"]) -> Float[Array, "*n 128"]:
    """Queries as rows of ``LANES`` elements."""
    if q.shape[-1] == LANES:
        return q
    x1, x2 = jnp.split(q, 2, axis=-1)
    return jnp.concatenate([x1, x2, -x2, x1], axis=-1)


def angle_rows(turns: Turns, scale: float) -> Float[Array, "U 1 128"]:
    """Cosines and sines of every turn in a row, times the scale of scores in powers of two."""
    cos, sin = (x[:, None] * (scale * math.log2(math.e)) for x in turns)
    parts = (cos, sin) if cos.shape[-1] == LANES // 2 else (cos, cos, sin, sin)
    return jnp.concatenate(parts, axis=-1)


def factors(
    angles: Float[Array, "*n 128"], head_dim: int
) -> tuple[Float[Array, "*n 128"], Float[Array, "*n 128"]]:
    """What to multiply a query, and a query rolled by half a row, with; inside a kernel."""
    other = pltpu.roll(angles, LANES // 2, angles.ndim - 1)
    left = lax.broadcasted_iota(jnp.int32, angles.shape, angles.ndim - 1) < LANES // 2
    if head_dim == LANES:
        return jnp.where(left, angles, other), jnp.where(left, -other, angles)
    return jnp.where(left, angles, 0.0), jnp.where(left, other, 0.0)


def rolled(x: jax.Array) -> jax.Array:
    """Queries rolled by half a row, float32; inside a kernel."""
    return pltpu.roll(x.astype(jnp.float32), LANES // 2, x.ndim - 1)
