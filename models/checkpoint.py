"""The one table that maps checkpoint tensors to model parameters, and how a model is assembled."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lazyattn_jax.models.config import LlamaConfig
from lazyattn_jax.models.llama import Llama
from lazyattn_jax.models.tokenizer import Tokenizer


class Tensor(NamedTuple):
    """One row of the table: a parameter, its two checkpoint names, and how it is laid out."""

    param: str
    hf: str
    gguf: str
    transpose: bool = False  # checkpoints store (out, in), Flax kernels are (in, out)
    permuted_heads: str = ""  # GGUF interleaves the halves of Q and K heads; which head count


_HEAD_TENSORS = (
    Tensor("embed.embedding", "model.embed_tokens.weight", "token_embd.weight"),
    Tensor("norm.scale", "model.norm.weight", "output_norm.weight"),
    Tensor("head.kernel", "lm_head.weight", "output.weight", True),
)
_LAYER_TENSORS = (
    Tensor("attention_norm.scale", "input_layernorm.weight", "attn_norm.weight"),
    Tensor("attention.q.kernel", "self_attn.q_proj.weight", "attn_q.weight", True, "num_heads"),
    Tensor("attention.q.bias", "self_attn.q_proj.bias", "attn_q.bias", False, "num_heads"),
    Tensor("attention.q_norm.scale", "self_attn.q_norm.weight", "attn_q_norm.weight"),
    Tensor("attention.k.kernel", "self_attn.k_proj.weight", "attn_k.weight", True, "num_kv_heads"),
    Tensor("attention.k.bias", "self_attn.k_proj.bias", "attn_k.bias", False, "num_kv_heads"),
    Tensor("attention.k_norm.scale", "self_attn.k_norm.weight", "attn_k_norm.weight"),
    Tensor("attention.v.kernel", "self_attn.v_proj.weight", "attn_v.weight", True),
    Tensor("attention.v.bias", "self_attn.v_proj.bias", "attn_v.bias"),
    Tensor("attention.o.kernel", "self_attn.o_proj.weight", "attn_output.weight", True),
    Tensor("attention.o.bias", "self_attn.o_proj.bias", "attn_output.bias"),
    Tensor("mlp_norm.scale", "post_attention_layernorm.weight", "ffn_norm.weight"),
    Tensor("mlp.gate.kernel", "mlp.gate_proj.weight", "ffn_gate.weight", True),
    Tensor("mlp.gate.bias", "mlp.gate_proj.bias", "ffn_gate.bias"),
    Tensor("mlp.up.kernel", "mlp.up_proj.weight", "ffn_up.weight", True),
    Tensor("mlp.up.bias", "mlp.up_proj.bias", "ffn_up.bias"),
    Tensor("mlp.down.kernel", "mlp.down_proj.weight", "ffn_down.weight", True),
    Tensor("mlp.down.bias", "mlp.down_proj.bias", "ffn_down.bias"),
)


def tensors(config: LlamaConfig) -> Iterator[Tensor]:
    """Every tensor of a model of this shape."""
    for t in _HEAD_TENSORS:
        if not (t.param == "head.kernel" and config.tie_word_embeddings):
            yield t
    for i in range(config.num_layers):
        for t in _LAYER_TENSORS:
            if not _wanted(t.param, config):
                continue
            yield t._replace(
                param=f"layers.{i}.{t.param}",
                hf=f"model.layers.{i}.{t.hf}",
                gguf=f"blk.{i}.{t.gguf}",
            )


def _wanted(param: str, config: LlamaConfig) -> bool:
    if param in ("attention.q_norm.scale", "attention.k_norm.scale"):
        return config.qk_norm
    if param == "attention.o.bias":
        return config.attention_output_bias
    if param.endswith(".bias"):
        return config.mlp_bias if param.startswith("mlp") else config.attention_bias
    return True


class Source(Protocol):
    """Where tensors come from, by the names of the table."""

    description: str

    def names(self) -> set[str]:
        """Names of all tensors present."""

    def name_of(self, tensor: Tensor) -> str:
        """The name that this source gives a tensor of the table."""

    def read(self, tensor: Tensor) -> np.ndarray | jax.Array:
        """A tensor in the layout of Hugging Face checkpoints."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with what is needed to use it.

    ``fingerprint`` identifies its weights and dtype without an adapter, ``adapter_fingerprint``
    those together with the adapter beside them; none if there is no adapter.
    """

    model: Llama
    config: LlamaConfig
    tokenizer: Tokenizer
    fingerprint: bytes
    name: str
    adapter_fingerprint: bytes | None = None

    @property
    def document_fingerprint(self) -> bytes:
        """Identifies what documents that are encoded alone are computed with."""
        return self.adapter_fingerprint or self.fingerprint


def assemble(config: LlamaConfig, dtype: jnp.dtype, source: Source) -> Llama:
    """Builds a model from a source, one tensor at a time.

    Raises:
      ValueError: a tensor is missing, unknown or of another shape; the message names it.
    """
    wanted = list(tensors(config))
    names = source.names()
    known = {source.name_of(t) for t in wanted}
    if missing := sorted(known - names):
        raise ValueError(
            f"{source.description} lacks {len(missing)} of {len(known)} tensors, "
            f"among them {missing[0]!r}"
        )
    if unknown := sorted(n for n in names - known if not _ignorable(n, config)):
        raise ValueError(
            f"{source.description} has {len(unknown)} tensors that its configuration does not "
            f"account for, among them {unknown[0]!r}"
        )
    graph, abstract = nnx.split(
        nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    )
    flat = dict(nnx.to_flat_state(abstract))
    for t in wanted:
        path = tuple(int(part) if part.isdigit() else part for part in t.param.split("."))
        value = source.read(t)
        value = value.T if t.transpose else value
        shape = flat[path].shape
        if value.shape != shape:
            raise ValueError(
                f"{source.description}: {source.name_of(t)!r} has shape {value.shape}, "
                f"the configuration needs {shape}"
            )
        flat[path] = flat[path].replace(jnp.asarray(value, dtype))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def dummy(config: LlamaConfig, dtype: jnp.dtype) -> Llama:
    """Random weights made on the device: normal, standard deviation 0.02; norms are ones."""
    graph, abstract = nnx.split(
        nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    )
    flat = {}
    for n, (path, param) in enumerate(nnx.to_flat_state(abstract)):
        if path[-1] == "scale":
            value = jnp.ones(param.shape, dtype)
        elif path[-1] == "bias":
            value = jnp.zeros(param.shape, dtype)
        else:
            value = _draw(jax.random.key(n), param.shape, dtype)
        flat[path] = param.replace(value)
    return nnx.merge(graph, nnx.from_flat_state(flat))


def fingerprint(model: Llama, config: LlamaConfig) -> bytes:
    """SHA-256 over the configuration and a checksum of every parameter's bits and their places."""
    digest = hashlib.sha256(json.dumps(config.to_hf(), sort_keys=True).encode())
    for path, param in nnx.to_flat_state(nnx.state(model)):
        digest.update(f"{path}{param.dtype}{int(_checksum(param[...]))}".encode())
    return digest.digest()


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
    width = jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint16
    bits = jax.lax.bitcast_convert_type(x.reshape(-1), width).astype(jnp.uint32)
    # Mixed as in MurmurHash3: a plain weighted sum misses two flipped signs or moved rows.
    mixed = bits * jnp.uint32(0x9E3779B1) + jnp.arange(bits.size, dtype=jnp.uint32)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _ignorable(name: str, config: LlamaConfig) -> bool:
    return (
        name.endswith(".rotary_emb.inv_freq")  # a buffer that old checkpoints saved
        or name == "rope_freqs.weight"  # GGUF: read with the configuration
        or (config.tie_word_embeddings and name in ("lm_head.weight", "output.weight"))
    )
