"""Loads a Hugging Face folder: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from lazyattn_jax.models.checkpoint import LoadedModel, Tensor, assemble, tensors
from lazyattn_jax.models.config import LlamaConfig, read_json
from lazyattn_jax.models.llama import Llama

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class SafetensorsSource:
    """The tensors of one or several safetensors files, verified against their index.

    Raises:
      ValueError: a shard is missing, truncated, or holds other tensors than its index says.
    """

    def __init__(self, folder: Path) -> None:
        self.description = str(folder)
        index_path = folder / _INDEX
        if index_path.exists():
            index = read_json(index_path).get("weight_map")
            if not isinstance(index, dict) or not index:
                raise ValueError(f"{index_path} has no 'weight_map'")
            files = sorted(set(index.values()))
        elif (folder / _SINGLE).exists():
            index, files = None, [_SINGLE]
        else:
            raise ValueError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")
        self._files: dict[str, Any] = {}
        for file in files:
            if not (folder / file).exists():
                raise ValueError(f"{index_path} names the shard {file!r}, which is not in {folder}")
            try:
                handle = safe_open(folder / file, framework="flax")
            except SafetensorError as error:
                raise ValueError(f"{folder / file} is truncated or damaged: {error}") from None
            held = set(handle.keys())
            if index is not None:
                listed = {name for name, f in index.items() if f == file}
                if held != listed:
                    odd = sorted(held ^ listed)[0]
                    where = "but its index does not" if odd in held else "which it does not hold"
                    verb = "holds" if odd in held else "should hold"
                    raise ValueError(
                        f"{folder / file} {verb} {odd!r}, {where}: the shard is from another "
                        "checkpoint or the download is incomplete"
                    )
            self._files |= dict.fromkeys(held, handle)

    def names(self) -> set[str]:
        """Names of all tensors present."""
        return set(self._files)

    def name_of(self, tensor: Tensor) -> str:
        """Hugging Face name."""
        return tensor.hf

    def read(self, tensor: Tensor) -> jax.Array:
        """The tensor in its stored dtype."""
        return self._files[tensor.hf].get_tensor(tensor.hf)


def load_config(folder: Path) -> LlamaConfig:
    """Reads config.json, and the end tokens of generation_config.json where there is one.

    Raises:
      ValueError: the file is missing or describes a model that is not supported.
    """
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} has no config.json; is it a model folder?")
    values = read_json(path)
    try:
        config = LlamaConfig.from_hf(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    generation = folder / "generation_config.json"
    if generation.exists():
        eos = read_json(generation).get("eos_token_id")
        if eos is not None:
            ids = tuple(eos) if isinstance(eos, list) else (eos,)
            config = dataclasses.replace(config, eos_token_ids=ids)
    return config


def load_weights(folder: Path, config: LlamaConfig, dtype: jnp.dtype) -> Llama:
    """Loads the safetensors of a folder.

    Raises:
      ValueError: see ``SafetensorsSource`` and ``checkpoint.assemble``.
    """
    return assemble(config, dtype, SafetensorsSource(folder))


def save_folder(loaded: LoadedModel, folder: Path) -> None:
    """Writes a folder with one safetensors file that ``load_model`` and transformers read.

    Raises:
      ValueError: the folder exists already.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists already; models are not overwritten")
    folder.mkdir(parents=True)
    flat = {
        ".".join(map(str, path)): param[...]
        for path, param in nnx.to_flat_state(nnx.state(loaded.model))
    }
    values = {
        t.hf: flat[t.param].T if t.transpose else flat[t.param] for t in tensors(loaded.config)
    }
    save_file(values, folder / _SINGLE, {"format": "pt"})
    config = loaded.config.to_hf() | {"dtype": str(loaded.model.embed.embedding.dtype)}
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    loaded.tokenizer.save(folder)
