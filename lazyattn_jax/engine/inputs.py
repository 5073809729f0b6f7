"""What a compiled step takes from the host besides its plan. Host code (numpy)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lazyattn_jax.cache.pool import Slots
from lazyattn_jax.engine.limits import Limits
from lazyattn_jax.engine.params import MAX_BIASES, MAX_STOP_IDS, Effort
from lazyattn_jax.engine.plan import StepPlan
from lazyattn_jax.engine.runs import Request
from lazyattn_jax.engine.sampler import SamplingRows
from lazyattn_jax.engine.seats import Adjustments, Occupant, padded
from lazyattn_jax.kernels.work import Turns, WorkLists, Works


class Choices(NamedTuple):
    """How tokens are chosen, and for whom; the same for both kinds of step."""

    sampling: SamplingRows
    adjustments: Adjustments


class StepInputs(NamedTuple):
    """Everything a step needs from the host.

    A token below 0 is the one that its row's seat got last; rows of a prefill step have no seat.
    ``adapted`` says which tokens the model's adapter is for; none if it has no adapter.
    """

    tokens: Int[Array, "T"]
    cos: Float[Array, "T H//2"]
    sin: Float[Array, "T H//2"]
    slots: Slots
    turns: Turns
    works: Works
    adapted: Bool[Array, "T"] | None
    sampled: Int[Array, "B"]  # rows that a token is chosen after
    seat: Int[Array, "B"]  # of each of them


def step_inputs(
    plan: StepPlan, sampled: Int[np.ndarray, "B"], seat: Int[np.ndarray, "B"]
) -> StepInputs:
    """The inputs of a planned step."""
    slots = Slots(plan.page, plan.offset)
    tokens = plan.tokens, plan.cos, plan.sin, slots
    return StepInputs(*tokens, plan.turns, plan.works, plan.adapted, sampled, seat)


def empty_inputs(
    limits: Limits,
    lists: WorkLists,
    head_dim: int,
    *,
    prefill: bool,
    bucket: int,
    adapter: bool = False,
) -> StepInputs:
    """Inputs of a batch shape with nothing to do in them."""
    half = head_dim // 2
    num_turns = limits.turns(prefill, bucket)
    plan = StepPlan(
        bucket,
        np.zeros(bucket, np.int32),
        np.zeros((bucket, half), np.float32),
        np.zeros((bucket, half), np.float32),
        np.full(bucket, limits.num_pages, np.int32),
        np.zeros(bucket, np.int32),
        Turns(*(np.zeros((num_turns, half), np.float32) for _ in range(2))),
        lists.empty(prefill, bucket),
        np.zeros(bucket, bool) if adapter else None,
    )
    size = limits.choices(prefill, bucket)
    return step_inputs(plan, padded([], size, 0), padded([], size, limits.max_num_seqs))


def make_choices(size: int, requests: Sequence[Request], num_seats: int, effort: Effort) -> Choices:
    """Choices for ``requests``, padded to ``size``; only their seats if no more is needed."""
    count = len(requests)
    seat = padded([r.seat for r in requests], size, num_seats)
    rows = np.zeros((12, size))
    rows[1] = rows[3] = 1  # top_p and repetition
    if effort is not Effort.GREEDY and count:
        rows[:11, :count] = np.array([r.choice_row for r in requests]).T
        rows[11, :count] = [r.num_sampled for r in requests]
    temperature, top_p, min_p, repetition, presence, frequency = rows[:6].astype(np.float32)
    top_k, step = rows[[6, 11]].astype(np.int32)
    seed = rows[7:9].T.astype(np.uint32)
    used, held = rows[9] > 0, rows[11] < rows[10]
    return Choices(
        SamplingRows(temperature, top_k, top_p, min_p, seed, step),
        Adjustments(seat, used, held, repetition, presence, frequency),
    )


def occupant(
    request: Request | None, *, max_tokens: int, vocab_size: int, end_tokens: int
) -> Occupant:
    """What a request's seat is set to when it is admitted.

    Args:
      request: with a seat; without one, what empties seat 0.
      max_tokens: size of the arrays of prompt and output.
      vocab_size: of the model.
      end_tokens: stop tokens that a request can have beside its own.
    """
    prompt: list[int] = []
    biases: Mapping[int, float] = {}
    seat, output, stops = 0, [], []
    if request is not None:
        layout, biases = request.layout, request.params.logit_bias
        prompt += layout.leading + layout.stream
        prompt += chain.from_iterable(d.piece.tokens[d.repaired :] for d in layout.documents)
        seat, output, stops = request.seat, request.generated, sorted(request.stop_tokens)
    values = np.zeros(MAX_BIASES, np.float32)
    values[: len(biases)] = list(biases.values())
    return Occupant(
        np.asarray(seat, np.int32),
        padded(prompt, max_tokens, vocab_size),
        padded(output, max_tokens, vocab_size),
        padded(list(biases), MAX_BIASES, vocab_size),
        values,
        padded(stops, MAX_STOP_IDS + end_tokens, vocab_size),
    )
