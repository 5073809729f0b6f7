"""What the device remembers of each running request: its seat.

A request has one seat from admission to its end. Its row here holds its last token, so that a step
can start before the host has read what the step before it chose; and what its logits are adjusted
by, which is too much to send with every step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lazyattn_jax.engine.params import MAX_BIASES, MAX_STOP_IDS


class Seats(NamedTuple):
    """State by seat. ``V`` of a vocabulary of ``V`` tokens is no token: padding.

    ``counts`` is odd for tokens of the prompt, plus 2 for each time a token is in the output.
    ``stops`` are the tokens that may not come before ``min_tokens`` others.
    """

    token: Int[Array, "R"]
    counts: Int[Array, "R V"]
    bias_ids: Int[Array, "R b"]
    biases: Float[Array, "R b"]
    stops: Int[Array, "R e"]


class Occupant(NamedTuple):
    """Who takes a seat: what its row is set to. Lists are padded with ``V``."""

    seat: Int[Array, ""]
    prompt: Int[Array, "T"]
    output: Int[Array, "T"]
    bias_ids: Int[Array, "b"]
    biases: Float[Array, "b"]
    stops: Int[Array, "e"]


class Adjustments(NamedTuple):
    """How the logits of each row of a batch are adjusted, and whose they are.

    A ``seat`` past the last one marks padding. Rows without ``used`` are left as they are.
    """

    seat: Int[Array, "B"]
    used: Bool[Array, "B"]
    stops_held: Bool[Array, "B"]
    repetition: Float[Array, "B"]
    presence: Float[Array, "B"]
    frequency: Float[Array, "B"]


def make_seats(num_seats: int, vocab_size: int, end_tokens: int) -> Seats:
    """Empty seats, for requests with ``end_tokens`` stop tokens beside their own."""
    return Seats(
        jnp.zeros(num_seats, jnp.int32),
        jnp.zeros((num_seats, vocab_size), jnp.int32),
        jnp.full((num_seats, MAX_BIASES), vocab_size, jnp.int32),
        jnp.zeros((num_seats, MAX_BIASES), jnp.float32),
        jnp.full((num_seats, MAX_STOP_IDS + end_tokens), vocab_size, jnp.int32),
    )


def padded(values: list[int], size: int, fill: int) -> Int[np.ndarray, "n"]:
    """A list as an array of a fixed size."""
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


def sit(seats: Seats, occupant: Occupant) -> Seats:
    """Sets the row of one seat."""
    row = jnp.zeros(seats.counts.shape[1], jnp.int32)
    row = row.at[occupant.prompt].set(1, mode="drop").at[occupant.output].add(2, mode="drop")
    at = occupant.seat
    return Seats(
        seats.token,
        seats.counts.at[at].set(row),
        seats.bias_ids.at[at].set(occupant.bias_ids),
        seats.biases.at[at].set(occupant.biases),
        seats.stops.at[at].set(occupant.stops),
    )


def adjust(logits: Float[Array, "B V"], seats: Seats, rows: Adjustments) -> Float[Array, "B V"]:
    """Logits with bias and penalties, and -inf for stop tokens that may not come yet."""
    row = jnp.arange(logits.shape[0])[:, None]
    own = jnp.minimum(rows.seat, seats.token.shape[0] - 1)
    out = logits.at[row, seats.bias_ids[own]].add(seats.biases[own], mode="drop")
    counts = seats.counts[own]
    factor = rows.repetition[:, None]
    repeated = jnp.where(out > 0, out / factor, out * factor)
    out = jnp.where(counts > 0, repeated, out)
    times = counts >> 1
    out -= rows.frequency[:, None] * times.astype(jnp.float32)
    out -= jnp.where(times > 0, rows.presence[:, None], 0)
    held = jnp.where(rows.stops_held[:, None], seats.stops[own], logits.shape[1])
    out = out.at[row, held].set(-jnp.inf, mode="drop")
    return jnp.where(rows.used[:, None], out, logits)


def remember(seats: Seats, seat: Int[Array, "B"], token: Int[Array, "B"]) -> Seats:
    """Notes the token that each row's seat got."""
    return seats._replace(
        token=seats.token.at[seat].set(token, mode="drop"),
        counts=seats.counts.at[seat, token].add(2, mode="drop"),
    )
