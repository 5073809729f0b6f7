"""Draws against the distributions that numpy says they should have."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lazyattn_jax.engine import sampler
from lazyattn_jax.engine.params import Effort, SamplingParams
from lazyattn_jax.engine.sampler import SamplingRows

DRAWS = 20_000
LOGITS = np.array([0.4, 2.5, -0.3, 0.9, 2.1, -1.2], np.float32)
sample = jax.jit(sampler.sample)


def make_rows(
    count: int,
    *,
    temperature: object = 1.0,
    top_k: object = 0,
    top_p: object = 1.0,
    min_p: object = 0.0,
    seed: object = (1, 2),
    step: object = 0,
) -> SamplingRows:
    def column(value: object, dtype: type, *shape: int) -> jax.Array:
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (count, *shape)))

    return SamplingRows(
        column(temperature, np.float32),
        column(top_k, np.int32),
        column(top_p, np.float32),
        column(min_p, np.float32),
        column(seed, np.uint32, 2),
        column(step, np.int32),
    )


def draw(logits: np.ndarray, **options: object) -> np.ndarray:
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    return np.asarray(sample(jnp.asarray(logits), make_rows(len(logits), **options)))


def take(rows: SamplingRows, places: list[int]) -> SamplingRows:
    return jax.tree.map(lambda column: column[jnp.array(places)], rows)


def distribution(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> np.ndarray:
    """Probabilities in float64: the k most likely, of these the fewest that reach top_p, and of
    these the ones that are min_p times as likely as the first."""
    weights = np.exp(logits.astype(np.float64) / temperature)
    best = sorted(range(len(logits)), key=lambda i: -weights[i])
    best = best[: top_k or None]
    total, reached, kept = sum(weights[i] for i in best), 0.0, []
    for i in best:
        if reached < top_p * total:
            kept.append(i)
            reached += weights[i]
    kept = [i for i in kept if weights[i] >= min_p * weights[best[0]]]
    out = np.zeros(len(logits))
    out[kept] = weights[kept] / weights[kept].sum()
    return out


def assert_drawn_from(tokens: np.ndarray, want: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=len(want))
    assert len(counts) == len(want)
    # Five standard deviations; none at all for what is excluded.
    assert (
        np.abs(counts - len(tokens) * want) <= 5 * np.sqrt(len(tokens) * want * (1 - want))
    ).all()


@functools.cache
def different(kind: str) -> dict[str, object]:
    """Randomness for as many rows as there are draws."""
    numbers = np.arange(DRAWS)
    return {
        "steps": {"step": numbers},
        "first word": {"seed": np.stack([numbers, 0 * numbers], axis=1)},
        "second word": {"seed": np.stack([0 * numbers + 7, numbers], axis=1)},
    }[kind]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, 6),
        (3, 1.0, 3),
        (6, 1.0, 6),
        (2**31 - 1, 1.0, 6),
        (1, 1.0, 1),
        (0, 0.5, None),
        (0, 0.8, None),
        (0, 1e-6, 1),
        (3, 0.75, None),
    ],
)
def test_distribution(temperature, top_k, top_p, kept):
    want = distribution(LOGITS, temperature, top_k, top_p)
    assert kept is None or np.count_nonzero(want) == kept
    logits = np.tile(LOGITS, (DRAWS, 1))
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    assert_drawn_from(draw(logits, **options, **different("steps")), want)


@pytest.mark.parametrize("temperature", [0.7, 1.8])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.9, None),
        (0, 1.0, 0.05, None),
        (0, 1.0, 1.0, 1),
        (2, 1.0, 0.01, 2),
        (0, 0.8, 0.3, None),
        (3, 0.75, 0.05, None),
    ],
)
def test_distribution_with_min_p(temperature, top_k, top_p, min_p, kept):
    want = distribution(LOGITS, temperature, top_k, top_p, min_p)
    assert kept is None or np.count_nonzero(want) == kept
    logits = np.tile(LOGITS, (DRAWS, 1))
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    assert_drawn_from(draw(logits, **options, **different("steps")), want)


def test_min_p_excludes_and_includes_at_its_threshold():
    """Half as likely as the best: kept at 0.499, not at 0.501, whatever the temperature."""
    for temperature in (0.5, 1.0, 2.0):
        logits = np.tile(np.log([1.0, 0.5, 1e-4]) * temperature, (DRAWS, 1))
        for min_p, want in ((0.499, [2 / 3, 1 / 3, 0]), (0.501, [1, 0, 0])):
            tokens = draw(logits, temperature=temperature, min_p=min_p, **different("steps"))
            assert_drawn_from(tokens, np.array(want))


def test_top_p_is_of_what_top_k_leaves():
    """The best token has 0.55 of the two most likely, but not of all."""
    want = distribution(LOGITS, 1.0, 2, 0.55)
    assert np.count_nonzero(want) == 1
    assert np.count_nonzero(distribution(LOGITS, 1.0, 0, 0.55)) == 2
    logits = np.tile(LOGITS, (DRAWS, 1))
    assert_drawn_from(draw(logits, top_k=2, top_p=0.55, **different("steps")), want)


@pytest.mark.parametrize("kind", ["first word", "second word"])
def test_distribution_over_seeds(kind):
    tokens = draw(np.tile(LOGITS, (DRAWS, 1)), **different(kind))
    assert_drawn_from(tokens, distribution(LOGITS, 1.0, 0, 1.0))


@pytest.mark.parametrize("kind", ["steps", "first word", "second word"])
def test_draws_of_neighbours_are_independent(kind):
    tokens = draw(np.zeros((DRAWS, 4)), **different(kind))
    pairs = tokens[:-1] * 4 + tokens[1:]
    assert_drawn_from(pairs, np.full(16, 1 / 16))


def test_ties_with_the_last_kept_token_stay():
    logits = np.tile([1.0, 3.0, 3.0, 0.0], (DRAWS, 1))
    for options in ({"top_k": 1}, {"top_p": 0.1}):
        assert_drawn_from(
            draw(logits, **options, **different("steps")), np.array([0.0, 0.5, 0.5, 0.0])
        )


def test_top_p_of_1_excludes_nothing():
    """Not even what rounding takes beyond the sum of 1, or the rest of the batch would matter."""
    logits = jnp.array([[0.0, 30.0, -5.0, 0.0]])
    kept = sampler._filter(logits, make_rows(1))
    np.testing.assert_array_equal(kept, logits)


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(8, 50)).astype(np.float32) * 2


def test_temperature_0_is_argmax(logits):
    assert draw(logits, temperature=0).tolist() == logits.argmax(-1).tolist()
    assert draw([[1.0, 4.0, 4.0]], temperature=0).tolist() == [1]


def test_top_k_1_is_argmax(logits):
    options = {"temperature": 2.0, "top_k": 1, "step": np.arange(8)}
    assert draw(logits, **options).tolist() == logits.argmax(-1).tolist()


def test_greedy_and_sampled_rows_in_one_batch(logits):
    temperature = np.array([0, 1, 0, 2, 0, 1, 1, 0])
    tokens = draw(logits, temperature=temperature, step=np.arange(8))
    greedy = temperature == 0
    assert tokens[greedy].tolist() == logits.argmax(-1)[greedy].tolist()
    # The others are what they are among sampled rows only.
    hot = draw(logits, temperature=np.maximum(temperature, 1), step=np.arange(8))
    assert tokens[~greedy].tolist() == hot[~greedy].tolist()
    assert tokens[~greedy].tolist() != logits.argmax(-1)[~greedy].tolist()


def test_a_row_is_the_same_in_any_batch(logits):
    """Wherever it stands, with others that are filtered, greedy or of another seed."""
    rows = make_rows(
        8,
        temperature=[0.8, 0, 1, 1.5, 1, 0, 2, 1],
        top_k=[0, 0, 5, 0, 0, 3, 0, 10],
        top_p=[1, 1, 1, 1, 0.6, 1, 1, 0.9],
        min_p=[0, 0, 0, 0.2, 0, 0, 0, 0.05],
        seed=np.random.default_rng(1).integers(0, 2**32, (8, 2)),
        step=[0, 1, 2, 3, 2**31 - 1, 5, 0, 0],
    )
    together = np.asarray(sample(jnp.asarray(logits), rows))
    for places in [[i] for i in range(8)] + [[7, 6, 5, 4, 3, 2, 1, 0], [3, 3, 0], [*range(8)] * 4]:
        got = np.asarray(sample(jnp.asarray(logits[places]), take(rows, places)))
        assert got.tolist() == together[places].tolist()


def test_what_no_row_asks_for_can_be_left_out(logits):
    """A row without top_k and top_p gets the same token whether others make the batch sort."""
    rows = make_rows(8, temperature=[0, 0.5, 1, 2, 1, 1, 1, 1], min_p=0.01, step=np.arange(8))
    with_filter, without = (
        sampler.sample(jnp.asarray(logits), rows, filtered=filtered).tolist()
        for filtered in (True, False)
    )
    assert with_filter == without


@pytest.mark.parametrize(
    "options",
    [
        {"step": np.arange(64)},
        {"seed": np.stack([np.arange(64), np.zeros(64)], axis=1)},
        {"seed": np.stack([np.zeros(64), np.arange(64)], axis=1)},
    ],
    ids=["step", "first word", "second word"],
)
def test_every_part_of_the_randomness_counts(options):
    tokens = draw(np.zeros((64, 10_000)), **options)
    # 64 draws of 10,000: more than a few pairs that agree are one in a million.
    assert len(set(tokens.tolist())) > 58


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 0.01])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}], ids=["all", "k", "p"])
def test_extreme_logits(temperature, options):
    logits = np.array(
        [[1e38, 2e38, 3e38, 1e38], [-1e38, -3e38, -2e38, -3e38], [5, 9, 1, 0], [0, -9, -5, -1]],
        np.float32,
    )
    assert draw(logits, temperature=temperature, **options).tolist() == [2, 0, 1, 0]


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.999}], ids=["all", "k", "p"])
def test_tokens_that_are_ruled_out_are_not_drawn(options):
    logits = np.tile([-np.inf, 0.0, -np.inf, 0.0], (DRAWS, 1))
    tokens = draw(logits, **options, **different("steps"))
    assert_drawn_from(tokens, np.array([0, 0.5, 0, 0.5]))


def test_logprobs_are_those_of_the_models_distribution():
    logits = np.random.default_rng(3).normal(size=(5, 40)).astype(np.float32) * 6
    tokens = np.array([0, 39, 7, 7, 12], np.int32)
    got = sampler.logprobs_of(jnp.asarray(logits), jnp.asarray(tokens), 8)
    exact = logits.astype(np.float64)
    exact -= np.logaddexp.reduce(exact, axis=1, keepdims=True)
    order = np.argsort(-exact, axis=1)[:, :8]
    np.testing.assert_array_equal(got.best, order)
    # Float32 rounding of numbers up to 50, over a sum of 40 terms.
    close = {"rtol": 0, "atol": 2e-5}
    np.testing.assert_allclose(got.values, np.take_along_axis(exact, order, 1), **close)
    np.testing.assert_allclose(got.chosen, exact[np.arange(5), tokens], **close)


@pytest.mark.parametrize(
    ("options", "effort"),
    [
        ({"temperature": 0, "top_k": 5, "top_p": 0.5, "logprobs": 3}, Effort.GREEDY),
        ({"temperature": 0.7, "min_p": 0.1}, Effort.DRAWN),
        ({"temperature": 0.7, "top_k": 5}, Effort.FULL),
        ({"temperature": 0.7, "top_p": 0.9}, Effort.FULL),
        ({"temperature": 0, "min_tokens": 2}, Effort.FULL),
        ({"temperature": 0, "logit_bias": {3: 1.0}}, Effort.FULL),
    ],
)
def test_what_it_takes_to_choose_a_requests_tokens(options, effort):
    assert SamplingParams(**options).effort is effort
