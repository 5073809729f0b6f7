"""The model over packed rows, under the full and the block mask, and the loss of both.

Weights are flat dictionaries by the parameters' dotted names, those of all layers stacked under
``layers.*`` with the layer first: one layer is compiled and scanned over, and what is computed
again in the backward pass is chosen for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lazyattn_jax.finetune.batches import Batch
from lazyattn_jax.models.config import LlamaConfig
from lazyattn_jax.models.llama import Llama
from lazyattn_jax.models.rope import Rotations

Weights = Mapping[str, jax.Array]
_LAYERS = "layers."


def stack(model: Llama) -> dict[str, jax.Array]:
    """The weights of a model, layers stacked."""
    flat = _flat(nnx.state(model))
    names = [n.removeprefix(f"{_LAYERS}0.") for n in flat if n.startswith(f"{_LAYERS}0.")]
    weights = {n: x for n, x in flat.items() if not n.startswith(_LAYERS)}
    for name in names:
        layers = [flat[f"{_LAYERS}{i}.{name}"] for i in range(len(model.layers))]
        weights[f"{_LAYERS}{name}"] = jnp.stack(layers)
    return weights


def unstack(weights: Weights) -> dict[str, jax.Array]:
    """The parameters by their names in the model, one array a layer."""
    flat: dict[str, jax.Array] = {}
    for name, value in weights.items():
        if name.startswith(_LAYERS):
            rest = name.removeprefix(_LAYERS)
            flat |= {f"{_LAYERS}{i}.{rest}": value[i] for i in range(len(value))}
        else:
            flat[name] = value
    return flat


def init_lora(weights: Weights, rank: int, key: jax.Array) -> dict[str, jax.Array]:
    """A new adapter for every linear layer, float32: at first it changes nothing."""
    adapter: dict[str, jax.Array] = {}
    for name, kernel in weights.items():
        if name.startswith(_LAYERS) and name.endswith(".kernel"):
            layers, size_in, size_out = kernel.shape
            key, own = jax.random.split(key)
            layer = name.removesuffix(".kernel")
            a = jax.random.normal(own, (layers, size_in, rank)) * size_in**-0.5
            adapter |= {
                f"{layer}.lora_a": a,
                f"{layer}.lora_b": jnp.zeros((layers, rank, size_out)),
            }
    return adapter


def merge_lora(weights: Weights, adapter: Weights) -> dict[str, jax.Array]:
    """The weights with an adapter added to them."""
    merged = dict(weights)
    for name in adapter:
        layer, _, part = name.rpartition(".")
        if part == "lora_a":
            a, b = adapter[name], adapter[f"{layer}.lora_b"]
            kernel = weights[f"{layer}.kernel"]
            exact = jnp.einsum("lir,lro->lio", a, b, precision=lax.Precision.HIGHEST)
            merged[f"{layer}.kernel"] = (kernel + exact.astype(jnp.float32)).astype(kernel.dtype)
    return merged


def visible(sample: Int[Array, "B T"], document: Int[Array, "B T"]) -> Bool[Array, "B 2 T T"]:
    """Which tokens (columns) each token (rows) sees: under the full mask, and the block mask.

    Of its own sample a token sees what precedes; under the block mask tokens of a document see
    their own document only, as the engine encodes it with document context ``none``.
    """
    length = sample.shape[1]
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    full = causal & (sample[:, :, None] == sample[:, None, :])
    is_text = document[:, :, None] < 0
    return jnp.stack([full, full & (is_text | (document[:, :, None] == document[:, None, :]))], 1)


class Losses(NamedTuple):
    """Weighted sums over the targets of a batch, under the full mask and under the block mask.

    ``exact`` counts the answers of which every token is the most likely one: what greedy decoding
    would give word for word. ``divergence`` is KL(full || block) in nats.
    """

    loss: Float[Array, "2"]
    exact: Float[Array, "2"]
    answers: Float[Array, ""]
    divergence: Float[Array, ""]


class Forward:
    """Computes losses of a model of one shape.

    Args:
      config: of the model.
      dtype: of activations, and of the weights of the layers while they are used.
      length: longest position.
    """

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, length: int) -> None:
        abstract = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
        self._layer = _Module(abstract.layers[0])
        # Embedding and logits are few rows' work: in float32 they round no logits.
        abstract = nnx.eval_shape(lambda: Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
        abstract.layers = nnx.List([])
        self._ends = _Module(abstract)
        self._dtype = dtype
        self._scale = config.head_dim**-0.5
        rotations = Rotations(config.rope.inverse_frequencies(config.head_dim))
        self._cos, self._sin = rotations.rows(np.arange(length), config.rope.attention_factor)

    def hidden(
        self,
        weights: Weights,
        tokens: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        mask: Bool[Array, "R T T"],
    ) -> Float[Array, "R T D"]:
        """Final hidden states, normalised."""
        ends = self._ends.merge(weights)
        cos, sin = jnp.asarray(self._cos)[positions], jnp.asarray(self._sin)[positions]

        def attend(cache: None, q: Array, k: Array, v: Array) -> tuple[Array, None]:
            return attention(q, k, v, mask, self._scale), cache

        def body(x: Array, layer: Weights) -> tuple[Array, None]:
            module = self._layer.merge({n: w.astype(self._dtype) for n, w in layer.items()})
            return module(x, cos, sin, None, attend)[0], None

        layers = {n.removeprefix(_LAYERS): w for n, w in weights.items() if n.startswith(_LAYERS)}
        # The projections are kept for the backward pass; the attention is computed again, whose
        # scores would not fit in memory.
        body = jax.checkpoint(body, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        x, _ = lax.scan(body, ends.embed(tokens).astype(self._dtype), layers)
        return ends.norm(x)

    def logits(self, weights: Weights, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Next-token logits, float32."""
        return self._ends.merge(weights).logits(hidden.astype(jnp.float32))

    def losses(self, weights: Weights, batch: Batch) -> Losses:
        """Losses of one part of a batch (arrays without their axis ``A``)."""
        mask = visible(batch.sample, batch.document)
        rows, _, length, _ = mask.shape
        tokens, positions = (jnp.repeat(x, 2, axis=0) for x in (batch.tokens, batch.positions))
        hidden = self.hidden(weights, tokens, positions, mask.reshape(-1, length, length))
        hidden = hidden.reshape(rows, 2, length, -1)
        chosen = jnp.take_along_axis(hidden, batch.place[:, None, :, None], axis=2)
        logits = self.logits(weights, chosen)
        logp = jax.nn.log_softmax(logits)
        target = batch.target[:, None, :, None]
        loss = -jnp.take_along_axis(logp, target, axis=-1)[..., 0]
        full, block = lax.stop_gradient(logp[:, 0]), logp[:, 1]
        divergence = jnp.sum(jnp.exp(full) * (full - block), axis=-1)
        right = logits.argmax(-1) == batch.target[:, None]
        exact, answers = _exact(right, batch.owner)
        return Losses(
            jnp.einsum("rpm,rm->p", loss, batch.weight),
            exact,
            answers,
            jnp.sum(divergence * batch.weight),
        )


def attention(
    q: Float[Array, "R T N H"],
    k: Float[Array, "R T K H"],
    v: Float[Array, "R T K H"],
    mask: Bool[Array, "R T T"],
    scale: float,
) -> Float[Array, "R T N H"]:
    """Masked attention of rows to themselves; scores and softmax in float32."""
    # Only cuDNN has a kernel for this that never writes the scores down, and only for 16 bits.
    on_gpu = jax.default_backend() == "gpu" and q.dtype.itemsize == 2
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask[:, None], scale=scale, implementation="cudnn" if on_gpu else "xla"
    )


class _Module:
    """A module apart from its weights, put together from arrays by name."""

    def __init__(self, module: nnx.Module) -> None:
        self._graph, state = nnx.split(module)
        self._paths = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}

    def merge(self, weights: Weights) -> Any:
        """The module with those of the weights that are its own, and adapters of its layers."""
        flat = {path: weights[name] for name, path in self._paths.items()}
        module = nnx.merge(self._graph, nnx.from_flat_state(flat))
        own = {name.rpartition(".")[0] for name in self._paths}
        for name, value in weights.items():
            layer, _, part = name.rpartition(".")
            if part in ("lora_a", "lora_b") and layer in own:
                setattr(attrgetter(layer)(module), part, nnx.data(nnx.Param(value)))
        return module


def _exact(
    right: Bool[Array, "R 2 M"], owner: Int[Array, "R M"]
) -> tuple[Float[Array, "2"], Float[Array, ""]]:
    """How many answers have only right tokens, and how many answers there are."""
    answers = jnp.arange(owner.shape[1])
    own = owner[:, None, :] == answers[None, :, None]  # [R answer M]
    there = own.any(-1)
    wrong = jnp.any(own[:, None] & ~right[:, :, None], axis=-1)  # [R 2 answer]
    exact = (there[:, None] & ~wrong).sum(axis=(0, 2))
    return exact.astype(jnp.float32), there.sum().astype(jnp.float32)


def _flat(state: nnx.State) -> dict[str, jax.Array]:
    return {".".join(map(str, path)): param[...] for path, param in nnx.to_flat_state(state)}
