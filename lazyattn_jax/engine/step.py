"""The traced programs: model, pool, seats and sampler in one step."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lazyattn_jax.cache.pool import LayerKV, write
from lazyattn_jax.engine.inputs import StepInputs
from lazyattn_jax.engine.params import MAX_LOGPROBS
from lazyattn_jax.engine.sampler import Logprobs, logprobs_of, sample
from lazyattn_jax.engine.seats import Seats, adjust, remember
from lazyattn_jax.kernels.api import copy_pages, lazy_decode, lazy_prefill
from lazyattn_jax.kernels.dense import BLOCK_ROWS
from lazyattn_jax.kernels.work import Moves

SCORED_ROWS = 64
"""Rows whose logits are computed at once for log-probabilities of a prompt: they are large."""


class StepResult(NamedTuple):
    """What a step has chosen; all of it is on the device and may not be there yet.

    ``sound`` is false for rows that came out with a number that is not finite, or would have put
    one into the pool. A token of -1 means that its row is not sound, or its logits not finite.
    """

    tokens: Int[Array, "B"]
    logits: Float[Array, "B V"]
    logprobs: Logprobs
    hidden: Float[Array, "T D"]
    sound: Bool[Array, "T"]


def step(
    graph: nnx.GraphDef,
    weights: nnx.State,
    pool: list[LayerKV],
    seats: Seats,
    inputs: StepInputs,
    *,
    prefill: bool,
    attention: str,
    scale: float,
) -> tuple[StepResult, list[LayerKV], Seats]:
    """One step. Layers are unrolled: a scan would copy every weight it slices."""
    model = nnx.merge(graph, weights)
    choices = inputs.choices
    seat = choices.adjustments.seat

    sound = []

    def attend(kv: LayerKV, q: Array, k: Array, v: Array) -> tuple[Array, LayerKV]:
        # The pool must stay finite: a weight of 0 does not silence a NaN, so it would get into
        # whatever shares a block with its request.
        finite = jnp.isfinite(k).all(axis=(1, 2)) & jnp.isfinite(v).all(axis=(1, 2))
        sound.append(finite)
        k, v = (jnp.where(finite[:, None, None], x, 0) for x in (k, v))
        kv = write(kv, k, v, inputs.slots, implementation=attention)
        options: dict[str, Any] = {"scale": scale, "implementation": attention}
        if prefill:
            (work,) = inputs.works
            out = lazy_prefill(q, kv.k, kv.v, inputs.turns, work, block_rows=BLOCK_ROWS, **options)
        else:
            out = lazy_decode(q, kv.k, kv.v, inputs.turns, inputs.works, **options)
        return out, kv

    tokens = inputs.tokens
    if not prefill:
        own = jnp.minimum(seat, seats.token.shape[0] - 1)
        tokens = jnp.where(tokens < 0, seats.token[own], tokens)
    hidden, pool = model(tokens, inputs.cos, inputs.sin, pool, attend, inputs.adapted)
    logits = model.logits(hidden[choices.sampled])
    token = sample(adjust(logits, seats, choices.adjustments), choices.sampling)
    wanted = partial(logprobs_of, best=min(MAX_LOGPROBS, logits.shape[1]))
    nothing = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(wanted, logits, token)
    )
    logprobs = lax.cond(choices.logprobs, lambda: wanted(logits, token), lambda: nothing)
    rows = reduce(jnp.logical_and, sound, jnp.isfinite(hidden).all(axis=-1))
    usable = rows[choices.sampled] & jnp.isfinite(logits).all(axis=-1)
    chosen = jnp.where(usable, token, -1)
    return StepResult(chosen, logits, logprobs, hidden, rows), pool, remember(seats, seat, token)


def copy(pool: list[LayerKV], moves: Moves, *, implementation: str) -> list[LayerKV]:
    """Copies pages within the pool, with their keys turned."""
    return [LayerKV(*copy_pages(*kv, moves, implementation=implementation)) for kv in pool]


def score(
    graph: nnx.GraphDef,
    weights: nnx.State,
    hidden: Float[Array, "T D"],
    rows: Int[Array, "n"],
    targets: Int[Array, "n"],
) -> Logprobs:
    """Log-probabilities of ``targets`` after rows of a step's hidden states."""
    logits = nnx.merge(graph, weights).logits(hidden[rows])
    return logprobs_of(logits, targets, min(MAX_LOGPROBS, logits.shape[1]))
