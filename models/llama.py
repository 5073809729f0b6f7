"""Llama and its relatives in Flax NNX, with the attention over cached keys and values passed in.

The model projects and rotates; *what* a token attends to is the caller's business: ``attend``
gets a layer's cache and the layer's new queries, keys and values, and returns the attention output
and the cache for the next step. The engine passes attention over its pool, training passes a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from lazyattn_jax.kernels.rotary import rotate
from lazyattn_jax.models.config import LlamaConfig

Cache = TypeVar("Cache")
Attend = Callable[
    [Cache, Float[Array, "*T N H"], Float[Array, "*T K H"], Float[Array, "*T K H"]],
    tuple[Float[Array, "*T N H"], Cache],
]


class Linear(nnx.Linear):
    """A linear layer, with a low-rank update (LoRA, arXiv 2106.09685) if it is given one.

    ``lora_a`` [in rank] and ``lora_b`` [rank out] are none, or what ``lora.add_adapter`` sets.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lora_a: nnx.Param | None = nnx.data(None)
        self.lora_b: nnx.Param | None = nnx.data(None)

    def __call__(
        self, x: Float[Array, "*T I"], adapted: Bool[Array, "*T"] | None = None
    ) -> Float[Array, "*T O"]:
        """Rows through the layer; the update goes to the rows that are ``adapted``, or to all."""
        out = super().__call__(x)
        if self.lora_a is None or self.lora_b is None:
            return out
        low = x @ self.lora_a[...]
        if adapted is not None:
            low = jnp.where(adapted[..., None], low, 0)
        return out + low @ self.lora_b[...]


def _linear(size_in: int, size_out: int, *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> Linear:
    return Linear(
        size_in,
        size_out,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        kernel_init=nnx.initializers.normal(0.02),
        rngs=rngs,
    )


class Attention(nnx.Module):
    """Projections and rotation around the attention that is passed in."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        d, h, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = h
        self.q = _linear(d, config.num_heads * h, bias=bias, dtype=dtype, rngs=rngs)
        self.k = _linear(d, config.num_kv_heads * h, bias=bias, dtype=dtype, rngs=rngs)
        self.v = _linear(d, config.num_kv_heads * h, bias=bias, dtype=dtype, rngs=rngs)
        o_bias = config.attention_output_bias
        self.o = _linear(config.num_heads * h, d, bias=o_bias, dtype=dtype, rngs=rngs)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = _norm(h, config, dtype, rngs)
            self.k_norm = _norm(h, config, dtype, rngs)

    def __call__(
        self,
        x: Float[Array, "*T D"],
        cos: Float[Array, "*T H//2"],
        sin: Float[Array, "*T H//2"],
        cache: Cache,
        attend: Attend[Cache],
        adapted: Bool[Array, "*T"] | None = None,
    ) -> tuple[Float[Array, "*T D"], Cache]:
        """Attention block output and the layer's cache with the new tokens in it."""
        q, k, v = (
            proj(x, adapted).reshape(*x.shape[:-1], -1, self.head_dim)
            for proj in (self.q, self.k, self.v)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out, cache = attend(cache, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o(out.reshape(*x.shape[:-1], -1), adapted), cache


class MLP(nnx.Module):
    """SwiGLU feed-forward network (arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        d, f, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate = _linear(d, f, bias=bias, dtype=dtype, rngs=rngs)
        self.up = _linear(d, f, bias=bias, dtype=dtype, rngs=rngs)
        self.down = _linear(f, d, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "*T D"], adapted: Bool[Array, "*T"] | None = None
    ) -> Float[Array, "*T D"]:
        """Position-wise, so it knows nothing of requests."""
        return self.down(jax.nn.silu(self.gate(x, adapted)) * self.up(x, adapted), adapted)


class Layer(nnx.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config.hidden_size, config, dtype, rngs)
        self.attention = Attention(config, dtype, rngs)
        self.mlp_norm = _norm(config.hidden_size, config, dtype, rngs)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(
        self,
        x: Float[Array, "*T D"],
        cos: Float[Array, "*T H//2"],
        sin: Float[Array, "*T H//2"],
        cache: Cache,
        attend: Attend[Cache],
        adapted: Bool[Array, "*T"] | None = None,
    ) -> tuple[Float[Array, "*T D"], Cache]:
        """The residual stream after this layer, and the layer's cache."""
        out, cache = self.attention(self.attention_norm(x), cos, sin, cache, attend, adapted)
        x = x + out
        return x + self.mlp(self.mlp_norm(x), adapted), cache


class Llama(nnx.Module):
    """Llama (arXiv 2302.13971, 2407.21783): decoder-only, grouped queries, RoPE, SwiGLU.

    Mistral (2310.06825) has the same form, Qwen2 (2407.10671) biases of queries, keys and values,
    Qwen3 (2505.09388) a norm of each query and key head.
    """

    def __init__(
        self, config: LlamaConfig, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.embed = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=dtype,
            param_dtype=dtype,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.layers = nnx.List([Layer(config, dtype, rngs) for _ in range(config.num_layers)])
        self.norm = _norm(config.hidden_size, config, dtype, rngs)
        if not config.tie_word_embeddings:
            self.head = _linear(
                config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs
            )
        self.tied = config.tie_word_embeddings

    def __call__(
        self,
        tokens: Int[Array, "*T"],
        cos: Float[Array, "*T H//2"],
        sin: Float[Array, "*T H//2"],
        caches: Sequence[Cache],
        attend: Attend[Cache],
        adapted: Bool[Array, "*T"] | None = None,
    ) -> tuple[Float[Array, "*T D"], list[Cache]]:
        """Final hidden states (normalised), and every layer's cache.

        Args:
          tokens: token ids.
          cos: cosines of each token's RoPE angles (``rope.Rotations``), float32.
          sin: sines of the same.
          caches: one per layer, handed to ``attend`` untouched.
          attend: attention of one layer; see the module's docstring.
          adapted: which tokens an adapter is for, if the layers have one; all by default.
        """
        x = self.embed(tokens)
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, cos, sin, cache, attend, adapted)
            new_caches.append(cache)
        return self.norm(x), new_caches

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Next-token logits in float32."""
        out = self.embed.attend(hidden) if self.tied else self.head(hidden)
        return out.astype(jnp.float32)


class RMSNorm(nnx.RMSNorm):
    """Computes in float32 and returns its input's dtype: promotion is explicit."""

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        """Rows scaled to a root mean square of 1, times the learned scale."""
        return super().__call__(x.astype(jnp.float32)).astype(x.dtype)


def _norm(size: int, config: LlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> RMSNorm:
    return RMSNorm(
        size,
        epsilon=config.rms_norm_eps,
        dtype=jnp.float32,
        param_dtype=dtype,
        rngs=rngs,
    )
