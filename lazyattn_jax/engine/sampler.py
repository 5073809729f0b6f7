"""Chooses the next token of every row, on the device."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32


class SamplingRows(NamedTuple):
    """Sampling parameters of each row of a batch.

    ``seed`` are the two words of a request's seed, ``step`` counts its generated tokens: together
    they are all that a row's random numbers depend on.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    seed: UInt32[Array, "B 2"]
    step: Int[Array, "B"]


def greedy(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """The most likely tokens."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(
    logits: Float[Array, "B V"], rows: SamplingRows, *, filtered: bool = True
) -> Int[Array, "B"]:
    """Token ids: the most likely one where temperature is 0, else drawn.

    top_k is applied before top_p, top_p to the probabilities that top_k leaves, and min_p last, as
    in transformers.

    Args:
      logits: of each row.
      rows: how each row's token is chosen.
      filtered: without it no row has top_k or top_p, and the vocabulary need not be sorted.
    """
    # With the largest at 0, no temperature is low enough to overflow.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = shifted / jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None]
    kept = _filter(scaled, rows) if filtered else scaled
    # The largest is 0 and always kept, so this needs no probabilities.
    kept = jnp.where(scaled >= jnp.log(rows.min_p)[:, None], kept, -jnp.inf)

    def noise(seed: UInt32[Array, "2"], step: Int[Array, ""]) -> Float[Array, "V"]:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), step)
        return jax.random.gumbel(key, logits.shape[-1:])

    # The largest of log-probability plus Gumbel noise is a draw from the distribution.
    drawn = jnp.argmax(kept + jax.vmap(noise)(rows.seed, rows.step), axis=-1)
    return jnp.where(rows.temperature > 0, drawn.astype(jnp.int32), greedy(logits))


def _filter(scaled: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Sets to -inf what top_k and top_p exclude; tokens as likely as the last kept one stay."""
    vocab = scaled.shape[-1]
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    rank = jnp.arange(vocab)[None, :]
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)[:, None]
    p = jax.nn.softmax(jnp.where(rank < k, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    # Rounding may take the sum to 1 before the last token, which top_p = 1 keeps all the same.
    kept = (rank < k) & ((before < rows.top_p[:, None]) | (rows.top_p >= 1)[:, None])
    last = jnp.max(jnp.where(kept, rank, 0), axis=-1, keepdims=True)
    threshold = jnp.take_along_axis(ordered, last, axis=-1)
    return jnp.where(scaled >= threshold, scaled, -jnp.inf)


class Logprobs(NamedTuple):
    """Log-probabilities of the chosen tokens, and the most likely tokens with theirs."""

    chosen: Float[Array, "B"]
    best: Int[Array, "B k"]
    values: Float[Array, "B k"]


def logprobs_of(logits: Float[Array, "B V"], tokens: Int[Array, "B"], best: int) -> Logprobs:
    """Log-probabilities under the model's own distribution; ``best`` alternatives a row."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    values, ids = lax.top_k(logprobs, best)
    return Logprobs(chosen, ids.astype(jnp.int32), values)
