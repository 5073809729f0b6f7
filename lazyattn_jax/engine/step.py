"""The traced programs: a step of the model over the pool, and the choice of tokens after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lazyattn_jax.cache.pool import LayerKV, write
from lazyattn_jax.engine.inputs import Choices, StepInputs
from lazyattn_jax.engine.params import MAX_LOGPROBS, Effort
from lazyattn_jax.engine.sampler import Logprobs, greedy, logprobs_of, sample
from lazyattn_jax.engine.seats import Seats, adjust, remember
from lazyattn_jax.kernels.api import copy_pages, lazy_decode, lazy_prefill
from lazyattn_jax.kernels.dense import BLOCK_ROWS
from lazyattn_jax.kernels.work import Moves
from lazyattn_jax.models.llama import Llama

SCORED_ROWS = 64
"""Rows whose logits are computed at once for log-probabilities of a prompt: they are large."""


type Rebuild = Callable[[list[Array]], Llama]
"""Makes a model of its weights."""


class Computed(NamedTuple):
    """What a step has computed; all of it is on the device and may not be there yet.

    ``sound`` is false for rows that came out with a number that is not finite, or would have put
    one into the pool; ``usable`` for rows to choose a token after that are not sound, or whose
    logits are not finite.
    """

    logits: Float[Array, "B V"]
    usable: Bool[Array, "B"]
    hidden: Float[Array, "T D"]
    sound: Bool[Array, "T"]


def take_apart(model: Llama) -> tuple[Rebuild, list[Array]]:
    """A model as a flat list of weights, which costs the host little to hand to a program."""
    graph, state = nnx.split(model)
    weights, tree = jax.tree.flatten(state)
    return lambda leaves: nnx.merge(graph, jax.tree.unflatten(tree, leaves)), weights


def step(
    rebuild: Rebuild,
    weights: list[Array],
    pool: list[LayerKV],
    last: Int[Array, "R"],
    inputs: StepInputs,
    *,
    prefill: bool,
    attention: str,
    scale: float,
) -> tuple[Computed, list[LayerKV]]:
    """One step, up to the logits. Layers are unrolled: a scan would copy every weight it slices.

    ``last`` is the last token of each seat.
    """
    model = rebuild(weights)
    broken: Array | bool = False

    def attend(kv: LayerKV, q: Array, k: Array, v: Array) -> tuple[Array, LayerKV]:
        # The pool must stay finite: a weight of 0 does not silence a NaN, so it would get into
        # whatever shares a block with its request.
        nonlocal broken
        finite = jnp.isfinite(k), jnp.isfinite(v)
        broken = broken | ~finite[0] | ~finite[1]  # reduced to rows once, after the last layer
        stored = (jnp.where(fine, x, 0) for fine, x in zip(finite, (k, v), strict=True))
        # Without it every layer's keys and values would be kept for one fusion at the end.
        k, v, broken = lax.optimization_barrier((*stored, broken))
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
        own = jnp.minimum(inputs.seat, last.shape[0] - 1)
        tokens = jnp.where(tokens < 0, last[own], tokens)
    hidden, pool = model(tokens, inputs.cos, inputs.sin, pool, attend, inputs.adapted)
    logits = model.logits(hidden[inputs.sampled])
    rows = jnp.isfinite(hidden).all(axis=-1) & ~jnp.any(broken, axis=(1, 2))
    usable = rows[inputs.sampled] & jnp.isfinite(logits).all(axis=-1)
    return Computed(logits, usable, hidden, rows), pool


def choose(
    logits: Float[Array, "B V"],
    usable: Bool[Array, "B"],
    seats: Seats,
    choices: Choices,
    *,
    effort: Effort,
) -> tuple[Int[Array, "B"], Seats]:
    """Chooses a token after each row, -1 after one that is not usable; noted in the row's seat.

    A program of its own for each effort: the host knows what the batch needs, and a condition on
    the device would make it wait there.
    """
    if effort is Effort.FULL:
        token = sample(adjust(logits, seats, choices.adjustments), choices.sampling)
    elif effort is Effort.DRAWN:
        token = sample(logits, choices.sampling, filtered=False)
    else:
        token = greedy(logits)
    seats = remember(seats, choices.adjustments.seat, token)
    return jnp.where(usable, token, -1), seats


def rate(logits: Float[Array, "B V"], tokens: Int[Array, "B"]) -> Logprobs:
    """Log-probabilities of chosen tokens and of the most likely ones; of a token -1, anything."""
    return logprobs_of(logits, tokens, min(MAX_LOGPROBS, logits.shape[1]))


def copy(pool: list[LayerKV], moves: Moves, *, implementation: str) -> list[LayerKV]:
    """Copies pages within the pool, with their keys turned."""
    return [LayerKV(*copy_pages(*kv, moves, implementation=implementation)) for kv in pool]


def score(
    rebuild: Rebuild,
    weights: list[Array],
    hidden: Float[Array, "T D"],
    rows: Int[Array, "n"],
    targets: Int[Array, "n"],
) -> Logprobs:
    """Log-probabilities of ``targets`` after rows of a step's hidden states."""
    return rate(rebuild(weights).logits(hidden[rows]), targets)
