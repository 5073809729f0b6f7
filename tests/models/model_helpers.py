"""Golden checkpoints, a plain run of the model, and a tokenizer as small as the checkpoints."""

from __future__ import annotations

import functools
import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from lazyattn_jax.models.config import LlamaConfig
from lazyattn_jax.models.llama import Llama
from lazyattn_jax.models.rope import Rotations
from lazyattn_jax.models.tokenizer import Tokenizer, byte_level_bpe

GOLDEN = Path(__file__).parents[1] / "golden"
SCALED = ("tiny_llama3", "tiny_yarn", "tiny_linear")  # Llamas with a scaled RoPE
TINY = (*SCALED, "tiny_mistral", "tiny_qwen2", "tiny_qwen3")


@functools.cache
def golden() -> dict[str, Any]:
    return json.loads((GOLDEN / "golden.json").read_text("utf-8"))


def causal_attention(cache: None, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
    """Attention of one sequence to itself; query head n reads KV head n // group."""
    tokens, heads, head_dim = q.shape
    q = q.reshape(tokens, k.shape[1], -1, head_dim)
    scores = jnp.einsum("tkgh,skh->kgts", q, k) / math.sqrt(head_dim)
    visible = jnp.tril(jnp.ones((1, 1, tokens, tokens), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("kgts,skh->tkgh", weights, v).reshape(tokens, heads, head_dim), cache


def logits_of(model: Llama, config: LlamaConfig, tokens: list[int]) -> np.ndarray:
    """Logits [T V] of a sequence that starts at position 0."""
    cos, sin = Rotations(config.rope.inverse_frequencies(config.head_dim)).rows(
        np.arange(len(tokens)),
        factor=config.rope.attention_factor,
    )
    graph, weights = nnx.split(model)
    return np.asarray(_logits(graph, config.num_layers, weights, np.array(tokens), cos, sin))


@partial(jax.jit, static_argnums=(0, 1))  # a program, where there would be one for every operation
def _logits(graph, num_layers, weights, tokens, cos, sin) -> jax.Array:
    model = nnx.merge(graph, weights)
    hidden, _ = model(tokens, cos, sin, [None] * num_layers, causal_attention)
    return model.logits(hidden)


def params_of(model: Llama) -> dict[str, np.ndarray]:
    """Every parameter by its dotted name."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(param[...]) for path, param in flat}


def assert_same_params(model: Llama, other: Llama) -> None:
    ours, theirs = params_of(model), params_of(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a Hugging Face folder."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


# As large as the golden vocabularies: three special tokens, printable ASCII, fillers.
SPECIAL = ["<unk>", "<s>", "</s>"]
VOCABULARY = [*SPECIAL, *map(chr, range(33, 127)), "Ġ", "Ċ", "Ġt", "he", "Ġthe"]
VOCABULARY += [f"<filler{i}>" for i in range(len(VOCABULARY), 128)]
MERGES = ["Ġ t", "h e", "Ġt he"]


def small_tokenizer() -> Tokenizer:
    return Tokenizer(
        byte_level_bpe(VOCABULARY, MERGES, SPECIAL),
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{{ messages[0].content }}",
    )


def copy_golden(name: str, folder: Path) -> Path:
    """A golden checkpoint as a complete model folder: the golden ones have no tokenizer."""
    shutil.copytree(GOLDEN / name, folder)
    small_tokenizer().save(folder)
    return folder


def edit_json(path: Path, *drop: str, **changes: Any) -> None:
    values = json.loads(path.read_text("utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in drop}), "utf-8")


def llama3_divisors(
    theta: float, head_dim: int, *, factor: float, low: float, high: float, original: int
) -> list[float]:
    """What Llama 3.1 divides each frequency by, told by wavelengths as in Meta's description."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
