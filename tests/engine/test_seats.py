"""Adjusted logits against a plain computation of each rule, token by token, in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import adjusted_logits

from lazyattn_jax.engine.params import MAX_BIASES, MAX_STOP_IDS
from lazyattn_jax.engine.seats import Adjustments, Occupant, Seats, adjust, make_seats, padded
from lazyattn_jax.engine.seats import remember as remember_
from lazyattn_jax.engine.seats import sit as sit_

VOCAB, NUM_SEATS, END_TOKENS = 40, 4, 2
sit, remember, adjusted = jax.jit(sit_), jax.jit(remember_), jax.jit(adjust)


def occupant(seat, prompt=(), output=(), bias=None, stops=()) -> Occupant:
    bias = bias or {}
    values = np.zeros(MAX_BIASES, np.float32)
    values[: len(bias)] = list(bias.values())
    return Occupant(
        np.asarray(seat, np.int32),
        padded(list(prompt), 32, VOCAB),
        padded(list(output), 32, VOCAB),
        padded(list(bias), MAX_BIASES, VOCAB),
        values,
        padded(list(stops), MAX_STOP_IDS + END_TOKENS, VOCAB),
    )


def rows(seat, *, used=True, held=False, repetition=1.0, presence=0.0, frequency=0.0):
    count = len(seat)
    values = [
        np.broadcast_to(np.asarray(x, dtype), count)
        for x, dtype in (
            (used, bool),
            (held, bool),
            *((x, np.float32) for x in (repetition, presence, frequency)),
        )
    ]
    return Adjustments(np.asarray(seat, np.int32), *values)


def empty() -> Seats:
    return make_seats(NUM_SEATS, VOCAB, END_TOKENS)


@pytest.mark.parametrize("seed", range(6))
def test_every_row_by_its_own_rules(seed):
    """Seats of random requests, taken one after another, whose outputs then grow by themselves."""
    rng = np.random.default_rng(seed)
    seats, known = empty(), {}
    for seat in [0, 1, 2, 3, 1]:  # seat 1 is taken twice: nothing is left of who had it first
        prompt, output = (rng.integers(0, VOCAB, rng.integers(0, 30)).tolist() for _ in range(2))
        ids = rng.choice(VOCAB, rng.integers(0, 6), replace=False).tolist()
        bias = {i: float(rng.uniform(-100, 100)) for i in ids}
        stops = rng.choice(VOCAB, rng.integers(0, 5), replace=False).tolist()
        seats = sit(seats, occupant(seat, prompt, output, bias, stops))
        known[seat] = (prompt, output, bias, stops)
    for _ in range(5):
        order = rng.permutation(NUM_SEATS)[:3].tolist()
        tokens = rng.integers(0, 4, 4).astype(np.int32)  # few, so that some come again
        seats = remember(seats, np.array([*order, NUM_SEATS], np.int32), tokens)
        for seat, token in zip(order, tokens[:3].tolist(), strict=True):
            known[seat][1].append(token)
            assert seats.token[seat] == token
    order = rng.permutation(NUM_SEATS).tolist()
    logits = rng.normal(size=(5, VOCAB)).astype(np.float32) * 5
    used, held = [True, True, False, True, False], [True, False, True, True, True]
    numbers = {
        "repetition": rng.uniform(0.5, 2, 5),
        "presence": rng.uniform(-2, 2, 5),
        "frequency": rng.uniform(-2, 2, 5),
    }
    batch = rows([*order, NUM_SEATS], used=used, held=held, **numbers)
    got = np.asarray(adjusted(jnp.asarray(logits), seats, batch))
    for i, seat in enumerate(order):
        if not used[i]:
            np.testing.assert_array_equal(got[i], logits[i])
            continue
        prompt, output, bias, stops = known[seat]
        values = [float(np.float32(x[i])) for x in numbers.values()]
        want = adjusted_logits(logits[i], prompt, output, bias, *values, stops if held[i] else ())
        # A few roundings of numbers up to 250 in float32.
        np.testing.assert_allclose(got[i], want, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(got[4], logits[4])  # padding


def test_known_answers():
    """By hand: 4 / 2, -4 * 2, and 3 - 0.5 - 2 x 0.25 for a token that came twice."""
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :5] = [4, -4, 3, 4, 1]
    seats = sit(empty(), occupant(2, prompt=[0, 1, 1], output=[2, 2], bias={4: 2.5}, stops=[3]))
    penalised = rows([2], presence=0.5, frequency=0.25)
    got = np.asarray(adjusted(jnp.asarray(logits), seats, penalised))[0]
    assert got[:6].tolist() == [4, -4, 2, 4, 3.5, 0]
    got = np.asarray(adjusted(jnp.asarray(logits), seats, rows([2], repetition=2.0, held=True)))[0]
    assert got[:6].tolist() == [2, -8, 1.5, -np.inf, 3.5, 0]


def test_a_batch_without_adjustments_is_left_alone():
    logits = np.random.default_rng(0).normal(size=(2, VOCAB)).astype(np.float32)
    seats = sit(empty(), occupant(0, prompt=range(20), output=[1, 2], bias={3: 9.0}))
    batch = rows([0, 1], used=False, held=True, repetition=3.0, presence=1.0)
    np.testing.assert_array_equal(adjusted(jnp.asarray(logits), seats, batch), logits)
