"""Writes GGUF files the way llama.cpp's converter does, from Hugging Face names and layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType
from model_helpers import MERGES, SPECIAL, VOCABULARY, llama3_divisors

Encode = Callable[[np.ndarray], tuple[np.ndarray, GGMLQuantizationType]]


def permute(value: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows that llama.cpp wants of Q and K: the two halves of a head interleaved."""
    return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def as_float32(value: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
    return value, GGMLQuantizationType.F32


def quantised(kind: GGMLQuantizationType) -> Encode:
    """Matrices in this form, vectors in float32, as llama.cpp does."""

    def encode(value: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        return (gguf.quants.quantize(value, kind), kind) if value.ndim == 2 else as_float32(value)

    return encode


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    *,
    encode: Encode = as_float32,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    user_defined: Sequence[str] = (),
) -> Path:
    """Writes a file.

    Args:
      path: where.
      config: the values of a ``config.json``.
      weights: tensors by their Hugging Face names.
      encode: the bytes and type that a tensor is stored with.
      architecture: llama.cpp's name of it.
      metadata: values to replace, or to leave out if they are none.
      user_defined: tokens to give this type.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    permuted = {"q_proj": heads, "k_proj": kv_heads} if architecture == "llama" else {}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("sliding_window") is not None:
        writer.add_sliding_window(config["sliding_window"])
    _add_rope(writer, config, head_dim)
    _add_tokenizer(writer, config, user_defined)
    for key, value in (metadata or {}).items():
        if value is None:
            del writer.kv_data[0][key]
        else:
            writer.kv_data[0][key].value = value

    kind = gguf.MODEL_ARCH[architecture.upper()]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, value in weights.items():
        for part, count in permuted.items():
            value = permute(value, count) if part in name else value
        data, kind = encode(value)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any], head_dim: int) -> None:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    writer.add_rope_freq_base(theta)
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "llama3":
        divisors = llama3_divisors(
            theta,
            head_dim,
            factor=rope["factor"],
            low=rope["low_freq_factor"],
            high=rope["high_freq_factor"],
            original=rope["original_max_position_embeddings"],
        )
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    elif kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_tokenizer(
    writer: gguf.GGUFWriter, config: Mapping[str, Any], user_defined: Sequence[str]
) -> None:
    kinds = dict.fromkeys(SPECIAL, TokenType.CONTROL)
    kinds |= dict.fromkeys(user_defined, TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([kinds.get(token, TokenType.NORMAL) for token in VOCABULARY])
    writer.add_token_merges(MERGES)
    eos = config["eos_token_id"]
    first, *others = eos if isinstance(eos, list) else [eos]
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(first)
    for token in others:
        writer.add_eot_token_id(token)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0].content }}")
