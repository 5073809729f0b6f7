"""Random weights, scaled up so that what a token attends to decides what comes next."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from flax import nnx

from lazyattn_jax.models.checkpoint import LoadedModel, dummy, fingerprint
from lazyattn_jax.models.config import NAMED_SHAPES, LlamaConfig
from lazyattn_jax.models.tokenizer import dummy_tokenizer


def sharpen(model: nnx.Module) -> None:
    """Scales all linear layers up."""
    for path, param in nnx.to_flat_state(nnx.state(model)):
        if path[-1] == "kernel":
            param[...] = param[...] * 8


def loaded_as(model: nnx.Module, config: LlamaConfig) -> LoadedModel:
    """A model with the tokenizer of dummies."""
    tokenizer = dummy_tokenizer(config.vocab_size)
    return LoadedModel(model, config, tokenizer, fingerprint(model, config), "small")


@functools.cache
def small_model() -> LoadedModel:
    config = NAMED_SHAPES["tiny"]
    model = dummy(config, jnp.float32)
    sharpen(model)
    return loaded_as(model, config)
