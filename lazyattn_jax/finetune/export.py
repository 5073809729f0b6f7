"""What training leaves for others to load: an adapter, or a model with it merged in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from lazyattn_jax.finetune.forward import Weights, unstack
from lazyattn_jax.models import hf
from lazyattn_jax.models.checkpoint import LoadedModel
from lazyattn_jax.models.load import save_checkpoint
from lazyattn_jax.models.lora import save_adapter

FORMATS = ("safetensors", "orbax")


def export_adapter(
    weights: Weights, loaded: LoadedModel, path: Path, notes: Mapping[str, str]
) -> None:
    """Writes a trained adapter as one safetensors file, in bfloat16."""
    save_adapter(unstack(weights), loaded.config, path, notes)


def export_model(
    weights: Weights, loaded: LoadedModel, folder: Path, kind: str, dtype: jnp.dtype
) -> None:
    """Writes a whole model that the engine, and for ``safetensors`` transformers, can load.

    Raises:
      ValueError: the folder exists already.
    """
    flat = unstack(weights)
    graph, state = nnx.split(loaded.model)
    values = [
        (path, param.replace(flat[".".join(map(str, path))].astype(dtype)))
        for path, param in nnx.to_flat_state(state)
    ]
    merged = dataclasses.replace(loaded, model=nnx.merge(graph, nnx.from_flat_state(values)))
    save = {"safetensors": hf.save_folder, "orbax": save_checkpoint}[kind]
    save(merged, folder)
