"""New keys and values in the pool's arrays."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from lazyattn_jax.cache.pool import LayerKV, Slots, write


@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
@pytest.mark.parametrize("fused", [False, True])
def test_tokens_are_written_where_they_belong_and_padding_nowhere(implementation, fused):
    """Three tokens in two of four pages, and two past the last page."""
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 5, 3, 8)).astype(np.float32)
    page, offset = np.array([2, 0, 2, 4, 4]), np.array([1, 3, 0, 0, 1])
    pages = rng.normal(size=(2, 4, 3, 4, 8)).astype(np.float32)
    expected = pages.copy()
    for token in range(3):
        for new, kept in zip((k, v), expected, strict=True):
            for head in range(3):
                kept[page[token], head, offset[token]] = new[token, head]
    given = (np.concatenate(pages, -1), None) if fused else pages
    kv = LayerKV(*(x if x is None else jnp.asarray(x) for x in given))
    slots = Slots(jnp.asarray(page), jnp.asarray(offset))
    found = write(kv, jnp.asarray(k), jnp.asarray(v), slots, implementation=implementation)
    if fused:
        np.testing.assert_array_equal(found.k, np.concatenate(expected, -1))
    else:
        np.testing.assert_array_equal([found.k, found.v], expected)
