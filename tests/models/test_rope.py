"""RoPE frequencies and turns against formulas written out here."""

from __future__ import annotations

import math
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import llama3_divisors

from lazyattn_jax.kernels.rotary import rotate
from lazyattn_jax.models.config import NAMED_SHAPES
from lazyattn_jax.models.rope import RopeConfig, Rotations

LLAMA31 = {
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def plain(theta: float, head_dim: int) -> np.ndarray:
    return np.array([theta ** (-i / head_dim) for i in range(0, head_dim, 2)])


def scaled(kind: str, **entries: object) -> dict:
    return {"rope_theta": 10_000.0, "rope_scaling": {"rope_type": kind, **entries}}


@pytest.mark.parametrize(("shape", "factor"), [("llama3-8b", 8.0), ("llama3-1b", 32.0)])
def test_llama3_frequencies(shape, factor):
    config = NAMED_SHAPES[shape]
    divisors = llama3_divisors(
        500_000.0, config.head_dim, factor=factor, low=1.0, high=4.0, original=8192
    )
    # Each of the three cases of the description is there.
    assert divisors[0] == 1
    assert divisors[-1] == factor
    assert any(1 < d < factor for d in divisors)
    want = plain(500_000.0, config.head_dim) / divisors
    got = config.rope.inverse_frequencies(config.head_dim)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_llama3_is_read_as_llama31_publishes_it():
    assert RopeConfig.from_hf(LLAMA31) == NAMED_SHAPES["llama3-8b"].rope
    newer = {"rope_parameters": {"rope_theta": 500_000.0, **LLAMA31["rope_scaling"]}}
    assert RopeConfig.from_hf(newer) == NAMED_SHAPES["llama3-8b"].rope


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear_divides_positions(key):
    rope = RopeConfig.from_hf({"rope_theta": 1e4, "rope_scaling": {key: "linear", "factor": 4.0}})
    np.testing.assert_allclose(rope.inverse_frequencies(64), plain(1e4, 64) / 4, rtol=1e-12)


def test_default_frequencies():
    np.testing.assert_allclose(
        RopeConfig.from_hf({}).inverse_frequencies(16), plain(10_000.0, 16), rtol=1e-12
    )


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    rope = RopeConfig.from_hf(scaled("yarn", factor=4.0, original_max_position_embeddings=4096))
    ratio = plain(10_000.0, 128) / rope.inverse_frequencies(128)
    turns = 4096 * plain(10_000.0, 128) / (2 * math.pi)
    # The ramp's ends are rounded outwards to whole pairs, hence the pairs well inside only.
    np.testing.assert_allclose(ratio[turns > 40], 1, rtol=1e-12)
    np.testing.assert_allclose(ratio[turns < 0.8], 4, rtol=1e-12)
    assert np.all(np.diff(ratio) >= -1e-12)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("entries", "want"),
    [
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
    ],
)
def test_yarn_attention_factor(entries, want):
    assert RopeConfig.from_hf(scaled("yarn", factor=4.0, **entries)).attention_factor == (
        pytest.approx(want)
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (scaled("dynamic", factor=2.0), r"'dynamic' .* cannot be reused"),
        (scaled("longrope", factor=2.0), r"'longrope' is not one of default, linear, llama3, yarn"),
        (scaled("linear"), "'linear' needs 'factor'"),
        (scaled("llama3", factor=8.0, high_freq_factor=4.0), "'llama3' needs 'low_freq_factor'"),
        (scaled("linear", factor=0.5), r"factor is 0\.5, must be at least 1"),
    ],
)
def test_what_cannot_be_done_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(config)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(1e4),
        RopeConfig(1e4, "linear", 4.0),
        RopeConfig(1e4, "divisors", divisors=(1.0, 2.5)),
        NAMED_SHAPES["llama3-1b"].rope,
        RopeConfig(1e4, "yarn", 4.0, original_max_positions=64, beta_fast=16.0, truncate=False),
    ],
    ids=lambda rope: rope.scaling,
)
def test_config_round_trip(rope):
    assert RopeConfig.from_hf(rope.to_hf()) == rope


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_rotations_near_far_and_backwards(factor):
    """In batches longer and shorter than what is worked on at once, with tables that grow."""
    frequencies = NAMED_SHAPES["llama3-8b"].rope.inverse_frequencies(128)
    rotations = Rotations(frequencies)
    edge = Rotations.FAR
    far = np.array([3, -3, 0, 255, 256, -257, edge - 1, edge, -edge, 1_000_000, -1_000_000])
    for positions in (far[:3], np.arange(-300, 300), far, far[:0]):
        cos, sin = rotations.rows(positions, factor=factor)
        assert cos.dtype == sin.dtype == np.float32
        assert cos.shape == sin.shape == (len(positions), 64)
        for row, position in enumerate(positions.tolist()):
            angles = [position * float(f) for f in frequencies]
            want_cos = [factor * math.cos(a) for a in angles]
            want_sin = [factor * math.sin(a) for a in angles]
            # Half a unit in float32's last place: angles made in float32 are off by 0.03.
            np.testing.assert_allclose(cos[row], want_cos, rtol=0, atol=1e-7 * factor)
            np.testing.assert_allclose(sin[row], want_sin, rtol=0, atol=1e-7 * factor)


def test_far_positions_are_not_kept():
    rotations = Rotations(NAMED_SHAPES["llama3-8b"].rope.inverse_frequencies(128))
    tracemalloc.start()
    for edge, kept in ((1_000_000, 0), (Rotations.FAR, 8 << 20)):
        before, _ = tracemalloc.get_traced_memory()
        rotations.rows(np.arange(edge - 64 * 256, edge, 256))
        grown = tracemalloc.get_traced_memory()[0] - before
        # A block of near ones is 256 x 64 x 2 x 4 bytes, and there are 64 of them.
        assert kept <= grown < max(3 * kept, 1 << 20)
    tracemalloc.stop()


def turned(x: np.ndarray, *positions: int) -> np.ndarray:
    """The rows of x, all turned by the same positions, one after the other."""
    frequencies = plain(10_000.0, x.shape[-1])
    out = jnp.asarray(x)
    for position in positions:
        cos, sin = Rotations(frequencies).rows(np.full(len(x), position))
        out = rotate(out, jnp.asarray(cos), jnp.asarray(sin))
    return np.asarray(out)


@pytest.fixture
def heads() -> np.ndarray:
    """Two rows of three heads."""
    return np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32)


def test_rotate_multiplies_complex_numbers(heads):
    z = heads[..., :8] + 1j * heads[..., 8:]
    z = z * np.exp(1j * 5 * plain(10_000.0, 16))
    want = np.concatenate([z.real, z.imag], axis=-1)
    np.testing.assert_allclose(turned(heads, 5), want, atol=1e-6)


@pytest.mark.parametrize(("a", "b"), [(3, 4), (1000, -993), (70_000, -70_000), (-5, 12)])
def test_turns_add_up(heads, a, b):
    np.testing.assert_allclose(turned(heads, a, b), turned(heads, a + b), atol=2e-6)


def test_scores_depend_on_the_difference_of_positions(heads):
    q, k = heads
    near = turned(q[None], 12) * turned(k[None], 5)
    far = turned(q[None], 90_012) * turned(k[None], 90_005)
    other = turned(q[None], 13) * turned(k[None], 5)
    np.testing.assert_allclose(near.sum(-1), far.sum(-1), atol=1e-5)
    assert np.abs(near.sum(-1) - other.sum(-1)).max() > 0.1


def test_rotate_keeps_bfloat16_but_works_in_float32(heads):
    cos, sin = Rotations(plain(10_000.0, 16)).rows(np.array([7, 8]))
    low = jnp.asarray(heads, jnp.bfloat16)
    got = rotate(low, jnp.asarray(cos), jnp.asarray(sin))
    want = rotate(low.astype(jnp.float32), jnp.asarray(cos), jnp.asarray(sin))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want.astype(jnp.bfloat16)))
