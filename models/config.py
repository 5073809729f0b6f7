"""Configuration of a model of the Llama family, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazyattn_jax.models.rope import RopeConfig

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The models that this engine runs: ``model_type`` and the name of the architecture."""
_DEFAULT_WINDOW = 4096  # transformers', where a configuration leaves sliding_window out


@dataclass(frozen=True)
class LlamaConfig:
    """Shape and constants of a Llama, Mistral, Qwen2 or Qwen3 model.

    Sizes are numbers of elements. ``sliding_window`` is how many tokens the layers that have a
    window see, their own included; none if every layer sees all that precedes.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "llama"
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"model config: {name} is {getattr(self, name)}, must be at least 1"
                )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model config: {self.num_heads} attention heads are not a multiple of "
                f"{self.num_kv_heads} key/value heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"model config: head_dim is {self.head_dim}, RoPE needs an even number"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"model config: sliding_window is {self.sliding_window}, must be at least 1"
            )

    @property
    def attention_output_bias(self) -> bool:
        """Whether the projection after the attention has a bias as well: not in Qwen2."""
        return self.attention_bias and self.model_type != "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether each head of the queries and keys is normalised before it is rotated."""
        return self.model_type == "qwen3"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads the dictionary of a ``config.json``.

        Raises:
          ValueError: not one of ``MODEL_TYPES``, a missing entry, or a variant that is not
            supported.
        """
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            known = ", ".join(MODEL_TYPES)
            raise ValueError(f"model_type is {kind!r}; this engine runs models of: {known}")
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"hidden_act is {act!r}; models of type {kind!r} use 'silu'")
        if (partial := config.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ValueError(f"partial_rotary_factor is {partial}; only 1.0 is supported")
        try:
            heads = int(config["num_attention_heads"])
            hidden = int(config["hidden_size"])
            eos = config.get("eos_token_id")
            return cls(
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or _default_head_dim(kind, hidden, heads)),
                rope=RopeConfig.from_hf(config),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                bos_token_id=config.get("bos_token_id"),
                eos_token_ids=tuple(eos)
                if isinstance(eos, list)
                else ()
                if eos is None
                else (eos,),
                model_type=kind,
                sliding_window=_sliding_window(config),
            )
        except KeyError as missing:
            raise ValueError(f"config.json has no {missing.args[0]!r}") from None

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` dictionary of this configuration; ``from_hf`` reads it back."""
        return {
            "architectures": [MODEL_TYPES[self.model_type]],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids),
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            "max_window_layers": 0,
            **self.rope.to_hf(),
        }


def _default_head_dim(kind: str, hidden: int, heads: int) -> int:
    return 128 if kind == "qwen3" else hidden // max(heads, 1)


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    kind, window = config["model_type"], config.get("sliding_window", _DEFAULT_WINDOW)
    if kind == "llama" or window is None:
        return None
    if kind != "mistral":  # Qwen: has a window without using it, or in its last layers only
        first = int(config.get("max_window_layers", 28))
        windowed = (
            first < int(config["num_hidden_layers"])
            if config.get("layer_types") is None
            else "sliding_attention" in config["layer_types"]
        )
        if not (config.get("use_sliding_window") and windowed):
            return None
    return int(window)


_LLAMA3_ROPE = RopeConfig(
    theta=500_000.0,
    scaling="llama3",
    factor=8.0,
    original_max_positions=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
_LLAMA3_TOKENS: dict[str, Any] = {
    "bos_token_id": 128_000,
    "eos_token_ids": (128_001, 128_008, 128_009),
}

NAMED_SHAPES = {
    "tiny": LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope=RopeConfig(theta=10_000.0),
        max_position_embeddings=2048,
        eos_token_ids=(0,),
    ),
    "smollm2-135m": LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope=RopeConfig(theta=100_000.0),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    "llama3-1b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rope=RopeConfig(
            theta=500_000.0,
            scaling="llama3",
            factor=32.0,
            original_max_positions=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        **_LLAMA3_TOKENS,
    ),
    "llama3-8b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope=_LLAMA3_ROPE,
        max_position_embeddings=131_072,
        **_LLAMA3_TOKENS,
    ),
}
"""Shapes that ``dummy:<size>`` makes random weights for."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      ValueError: not JSON, or not an object; the message names the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value
