"""Low-rank adapters (LoRA, arXiv 2106.09685): their file, and models that have one.

A file is one safetensors with the names and layout of the PEFT library: ``lora_A`` [rank, in] and
``lora_B`` [out, rank] for each linear layer. Their scale is 1 (``lora_alpha`` equal to the rank).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from lazyattn_jax.models.checkpoint import LoadedModel, fingerprint, tensors
from lazyattn_jax.models.config import LlamaConfig
from lazyattn_jax.models.llama import Linear, Llama

_PREFIX = "base_model.model."
_PARTS = {"lora_a": "lora_A", "lora_b": "lora_B"}

Adapter = Mapping[str, jax.Array]
"""``lora_a`` [in rank] and ``lora_b`` [rank out] by dotted names: ``layers.0.mlp.up.lora_a``."""


def linears(config: LlamaConfig) -> Iterator[tuple[str, str]]:
    """The layers that an adapter can have an update for: names here and in checkpoints."""
    for t in tensors(config):
        if t.param.startswith("layers.") and t.param.endswith(".kernel"):
            yield t.param.removesuffix(".kernel"), t.hf.removesuffix(".weight")


def save_adapter(
    adapter: Adapter, config: LlamaConfig, path: Path, notes: Mapping[str, str] | None = None
) -> None:
    """Writes an adapter in bfloat16; ``notes`` become the file's metadata."""
    values = {}
    for name, hf in linears(config):
        for part, peft in _PARTS.items():
            value = adapter[f"{name}.{part}"]
            values[f"{_PREFIX}{hf}.{peft}.weight"] = value.T.astype(jnp.bfloat16)
    save_file(values, path, {"format": "pt", **(notes or {})})


def read_adapter(path: Path, config: LlamaConfig) -> dict[str, jax.Array]:
    """Reads an adapter for a model of this shape. Linear layers may be left out.

    Raises:
      ValueError: no such file, not an adapter, or one for a model of another shape.
    """
    if not path.is_file():
        raise ValueError(f"adapter {str(path)!r} is no file; give a safetensors file or 'none'")
    known = {
        f"{_PREFIX}{hf}.{peft}.weight": f"{name}.{part}"
        for name, hf in linears(config)
        for part, peft in _PARTS.items()
    }
    try:
        with safe_open(path, framework="flax") as file:
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None
    if unknown := sorted(values.keys() - known.keys()):
        raise ValueError(
            f"{path} has {len(unknown)} tensors that are no part of an adapter for this model, "
            f"among them {unknown[0]!r}"
        )
    if not values:
        raise ValueError(f"{path} holds no tensors")
    return {known[name]: value.T for name, value in values.items()}


def add_adapter(model: Llama, adapter: Adapter) -> Llama:
    """The same weights with an adapter beside them, cast to the model's dtype.

    Raises:
      ValueError: a layer lacks one of its two matrices, or they do not fit it.
    """
    model = nnx.merge(*nnx.split(model))  # shares every array with the model given
    for name in dict.fromkeys(key.rpartition(".")[0] for key in adapter):
        layer = _find(model, name)
        a, b = (adapter.get(f"{name}.{part}") for part in _PARTS)
        size_in, size_out = layer.kernel.shape
        if a is None or b is None:
            raise ValueError(f"the adapter has one of two matrices for {name}")
        if a.shape[0] != size_in or b.shape[1] != size_out or a.shape[1] != b.shape[0]:
            raise ValueError(
                f"the adapter's matrices for {name} are {a.shape} and {b.shape}, the layer is "
                f"{size_in} x {size_out}"
            )
        dtype = layer.kernel.dtype
        layer.lora_a, layer.lora_b = (nnx.data(nnx.Param(x.astype(dtype))) for x in (a, b))
    return model


def with_adapter(loaded: LoadedModel, path: Path) -> LoadedModel:
    """A loaded model with the adapter of a file beside its weights. Errors as those above."""
    adapter = read_adapter(path, loaded.config)
    try:
        model = add_adapter(loaded.model, adapter)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return dataclasses.replace(
        loaded, model=model, adapter_fingerprint=fingerprint(model, loaded.config)
    )


def _find(model: Llama, name: str) -> Linear:
    part = model
    for step in name.split("."):
        part = part[int(step)] if step.isdigit() else getattr(part, step)
    return part
