"""Loads a GGUF file: weights (dequantised), configuration and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from lazyattn_jax.models.checkpoint import Tensor
from lazyattn_jax.models.config import LlamaConfig
from lazyattn_jax.models.rope import RopeConfig
from lazyattn_jax.models.sentencepiece import sentencepiece_bpe
from lazyattn_jax.models.tokenizer import Tokenizer, byte_level_bpe


class GGUFSource:
    """The metadata and tensors of one GGUF file.

    Raises:
      ValueError: not a GGUF file, truncated, or of another architecture.
    """

    def __init__(self, path: Path) -> None:
        self.description = str(path)
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise ValueError(f"{path} is not a GGUF file or is truncated: {error}") from None
        self._tensors = {t.name: t for t in self._reader.tensors}
        self.architecture = self.get("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise ValueError(
                f"{path}: general.architecture is {self.architecture!r}; this engine runs models "
                f"of: {', '.join(_ARCHITECTURES)}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value, or the default. A leading ``.`` stands for the architecture's keys."""
        field = self._reader.get_field(self._key(key))
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """A metadata value.

        Raises:
          ValueError: the file does not have it.
        """
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.description} has no metadata {self._key(key)!r}")
        return value

    def _key(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def names(self) -> set[str]:
        """Names of all tensors present."""
        return set(self._tensors)

    def name_of(self, tensor: Tensor) -> str:
        """GGUF name."""
        return tensor.gguf

    def read_raw(self, name: str) -> np.ndarray:
        """A tensor in float32, (out, in).

        Raises:
          ValueError: a quantisation that the ``gguf`` package cannot dequantise.
        """
        t = self._tensors[name]
        try:
            return gguf.quants.dequantize(t.data, t.tensor_type)
        except NotImplementedError:
            raise ValueError(
                f"{self.description}: {name!r} is quantised as {t.tensor_type.name}, which the "
                "gguf package cannot dequantise"
            ) from None

    def read(self, tensor: Tensor) -> np.ndarray:
        """A tensor in float32 with Q and K heads in the half-split order of Hugging Face.

        For Llama, llama.cpp stores the two halves of these heads interleaved.
        """
        value = self.read_raw(tensor.gguf)
        if tensor.permuted_heads and self.architecture == "llama":
            heads = int(self.need(_HEAD_COUNTS[tensor.permuted_heads]))
            value = (
                value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
            )
        return value


_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral is a "llama" there
_HEAD_COUNTS = {
    "num_heads": ".attention.head_count",
    "num_kv_heads": ".attention.head_count_kv",
}


def read_config(source: GGUFSource) -> LlamaConfig:
    """Configuration from the metadata."""
    heads = int(source.need(".attention.head_count"))
    hidden = int(source.need(".embedding_length"))
    head_dim = int(
        source.get(".attention.key_length")
        or source.get(".rope.dimension_count")
        or hidden // max(heads, 1)
    )
    ends = (source.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    names = source.names()
    window = source.get(".attention.sliding_window") or None
    return LlamaConfig(
        vocab_size=len(source.need("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=int(source.need(".feed_forward_length")),
        num_layers=int(source.need(".block_count")),
        num_heads=heads,
        num_kv_heads=int(source.get(".attention.head_count_kv", heads)),
        head_dim=head_dim,
        rope=_read_rope(source),
        # Stored as float32: round to the decimal that was meant.
        rms_norm_eps=float(f"{source.need('.attention.layer_norm_rms_epsilon'):.6g}"),
        max_position_embeddings=int(source.need(".context_length")),
        tie_word_embeddings="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names,
        mlp_bias="blk.0.ffn_gate.bias" in names,
        bos_token_id=source.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(int(e) for e in ends if e is not None)),
        model_type="mistral" if window and source.architecture == "llama" else source.architecture,
        sliding_window=window,
    )


def _read_rope(source: GGUFSource) -> RopeConfig:
    theta = float(source.get(".rope.freq_base", 10_000.0))
    if "rope_freqs.weight" in source.names():  # llama.cpp's form of llama3 scaling
        divisors = tuple(float(x) for x in source.read_raw("rope_freqs.weight"))
        return RopeConfig(theta, "divisors", divisors=divisors)
    kind = source.get(".rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta)
    return RopeConfig.from_hf(
        {
            "rope_theta": theta,
            "max_position_embeddings": source.need(".context_length"),
            "rope_scaling": {
                "rope_type": kind,
                "factor": source.need(".rope.scaling.factor"),
                "original_max_position_embeddings": source.get(
                    ".rope.scaling.original_context_length"
                ),
            },
        }
    )


def read_tokenizer(source: GGUFSource) -> Tokenizer:
    """Tokenizer from the vocabulary, merges or scores, and chat template of the file.

    Raises:
      ValueError: a kind of tokenizer that cannot be rebuilt from GGUF metadata.
    """
    kind = source.need("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"{source.description}: tokenizer model {kind!r} cannot be rebuilt from GGUF metadata "
            "(byte-level BPE, 'gpt2', and SentencePiece's BPE, 'llama', can); load the model's "
            "Hugging Face folder instead"
        )
    tokens = source.need("tokenizer.ggml.tokens")
    types = source.need("tokenizer.ggml.token_type")
    pre = source.get("tokenizer.ggml.pre", "gpt-2")

    def of_type(*kinds: int) -> list[str]:
        return [t for t, kind in zip(tokens, types, strict=True) if kind in kinds]

    def token(name: str) -> str | None:
        i = source.get(f"tokenizer.ggml.{name}_token_id")
        return None if i is None else tokens[i]

    special = of_type(gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN)
    whole = of_type(gguf.TokenType.USER_DEFINED)
    if kind == "llama":
        backend = sentencepiece_bpe(
            tokens,
            source.need("tokenizer.ggml.scores"),
            ordinary=[t == gguf.TokenType.NORMAL for t in types],
            special=special,
            unknown=next(iter(of_type(gguf.TokenType.UNKNOWN)), None),
            whole=whole,
            prefix=bool(source.get("tokenizer.ggml.add_space_prefix", True)),
        )
    else:
        merges = source.need("tokenizer.ggml.merges")
        backend = byte_level_bpe(tokens, merges, special, pre, whole=whole)
    return Tokenizer(
        backend,
        bos_token=token("bos"),
        eos_token=token("eos"),
        # Llama 2's and 3's files mostly lack the flag: llama.cpp then goes by the kind of
        # vocabulary and the name of the cutter.
        add_bos=bool(
            source.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre == "llama-bpe")
        ),
        chat_template=source.get("tokenizer.chat_template"),
    )
