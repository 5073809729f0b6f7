"""The training loop: steps, evaluations and checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from lazyattn_jax.finetune.batches import Batch, BatchShape, Source
from lazyattn_jax.finetune.checkpoints import Checkpoints, State
from lazyattn_jax.finetune.forward import Forward, Losses, Weights, init_lora, merge_lora, stack
from lazyattn_jax.models.checkpoint import LoadedModel

_CLIP = 1.0
_BETAS = 0.9, 0.95


@dataclass(frozen=True)
class Settings:
    """How a model is trained.

    Attributes:
      steps: updates of the weights.
      rank: of the low-rank adapter that is trained; 0 trains all weights.
      learning_rate: its peak.
      schedule: how it falls to 0 after the warm-up: ``cosine`` or ``linear``.
      warmup: share of the steps in which it rises.
      weight_decay: of AdamW.
      block_share: of the loss is that of the block mask, the rest that of the full mask.
      distill: weight of KL(full mask || block mask) on the answer's tokens, beside that loss.
      eval_every: steps between two evaluations, each followed by a checkpoint.
      seed: of the first adapter.
    """

    steps: int = 1000
    rank: int = 16
    learning_rate: float = 5e-4
    schedule: str = "cosine"
    warmup: float = 0.03
    weight_decay: float = 0.0
    block_share: float = 0.8
    distill: float = 1.0
    eval_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("eval_every", 1), ("rank", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least {least}")
        if self.schedule not in ("cosine", "linear"):
            raise ValueError(f"schedule is {self.schedule!r}, must be 'cosine' or 'linear'")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is {self.warmup}, must be from 0 to less than 1")
        if not 0 <= self.block_share <= 1:
            raise ValueError(f"block_share is {self.block_share}, must be between 0 and 1")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}, must be above 0")
        for name in ("weight_decay", "distill"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be 0 or more")

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        rise = round(self.steps * self.warmup)
        if step < rise:
            return self.learning_rate * (step + 1) / (rise + 1)
        done = (step - rise) / (self.steps - rise)
        share = (1 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1 - done
        return self.learning_rate * share


@dataclass(frozen=True)
class Score:
    """Mean loss in nats a token under both masks, the share of answers word for word, and KL."""

    full: float
    block: float
    exact_full: float
    exact_block: float
    divergence: float

    @classmethod
    def of(cls, losses: Losses) -> Score:
        """Reads losses from the device."""
        host = jax.device_get(losses)
        exact = host.exact / max(float(host.answers), 1.0)
        return cls(*map(float, (*host.loss, *exact, host.divergence)))


class Listener(Protocol):
    """Is told how training goes."""

    def trained(self, step: int, score: Score, rate: float) -> None:
        """A step is done; its score was measured before its update."""

    def evaluated(self, step: int, score: Score) -> None:
        """The held-out samples were scored after a step."""


class Trainer:
    """Trains one model, on all devices of this process.

    Args:
      loaded: the model, in float32.
      settings: how to train it.
      shape: of the batches; its rows are spread over the devices.
      dtype: of the computation; weights that are trained are kept in float32.

    Raises:
      ValueError: rows that cannot be spread evenly, or positions beyond the model's.
    """

    def __init__(
        self, loaded: LoadedModel, settings: Settings, shape: BatchShape, dtype: jnp.dtype
    ) -> None:
        devices = jax.devices()
        if shape.rows % len(devices):
            raise ValueError(
                f"rows is {shape.rows}, must be a multiple of the {len(devices)} devices"
            )
        if shape.length > loaded.config.max_position_embeddings:
            raise ValueError(
                f"length is {shape.length}, the model is made for at most "
                f"{loaded.config.max_position_embeddings} positions"
            )
        mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,))
        self._spread = NamedSharding(mesh, PartitionSpec(None, "data"))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._settings = settings
        self._forward = Forward(loaded.config, dtype, shape.length)
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(_CLIP),
            optax.scale_by_adam(*_BETAS),
            optax.add_decayed_weights(settings.weight_decay),
        )
        self.base = stack(loaded.model)
        frozen, weights = {}, self.base
        if settings.rank:
            weights = init_lora(self.base, settings.rank, jax.random.key(settings.seed))
            frozen = {
                n: x.astype(dtype) if n.startswith("layers.") else x for n, x in self.base.items()
            }
        self._frozen = jax.device_put(frozen, self._everywhere)
        state = State(weights, self._optimizer.init(weights))
        # Copies: a step gives its state's memory away, and the base is still needed.
        self._state = jax.tree.map(jnp.copy, jax.device_put(state, self._everywhere))
        self._train = jax.jit(self._train_step, donate_argnums=0)
        self._score = jax.jit(self._score_step)

    def run(
        self,
        source: Source,
        held_out: Iterable[Batch],
        checkpoints: Checkpoints,
        listener: Listener,
    ) -> None:
        """Trains to the end, from the last checkpoint on if there is one."""
        settings, held_out = self._settings, list(held_out)
        step = checkpoints.last or 0
        if step:
            self._state = checkpoints.restore(step, self._state)
        elif held_out:
            listener.evaluated(0, self._evaluate(held_out))
        unread: Callable[[], None] | None = None
        for batch in source.endless(skip=step):
            if step >= settings.steps:
                break
            rate = np.float32(settings.rate(step))
            self._state, losses = self._train(self._state, self._frozen, self._put(batch), rate)
            if unread is not None:  # of the step before: the device has work meanwhile
                unread()
            step += 1
            unread = partial(self._tell, listener, step, losses, float(rate))
            if step % settings.eval_every == 0 or step == settings.steps:
                unread()
                unread = None
                score = self._evaluate(held_out) if held_out else Score.of(losses)
                if held_out:
                    listener.evaluated(step, score)
                checkpoints.save(step, self._state, score.block)
        checkpoints.wait()

    def weights(self, checkpoints: Checkpoints, step: int) -> Weights:
        """What has been trained, as it was after a step that has a checkpoint."""
        return checkpoints.restore(step, self._state).weights

    def merged(self, weights: Weights) -> Weights:
        """All weights of the model, with what has been trained in them."""
        return merge_lora(self.base, weights) if self._settings.rank else weights

    def _tell(self, listener: Listener, step: int, losses: Losses, rate: float) -> None:
        listener.trained(step, Score.of(losses), rate)

    def _put(self, batch: Batch) -> Batch:
        return jax.device_put(batch, self._spread)

    def _evaluate(self, batches: list[Batch]) -> Score:
        scores = []
        for batch in batches:
            losses = self._score(self._state.weights, self._frozen, self._put(batch))
            scores.append((jax.device_get(losses), int((batch.owner >= 0).sum())))
        total = sum(n for _, n in scores)
        # Weights add up to 1 in every batch; batches have more or fewer targets.
        loss, divergence = (
            sum(getattr(s, name) * n for s, n in scores) / total for name in ("loss", "divergence")
        )
        exact, answers = (sum(getattr(s, name) for s, _ in scores) for name in ("exact", "answers"))
        return Score.of(Losses(loss, exact, answers, divergence))

    def _train_step(
        self, state: State, frozen: Weights, batch: Batch, rate: Float[Array, ""]
    ) -> tuple[State, Losses]:
        block = self._settings.block_share

        def objective(weights: Weights, part: Batch) -> tuple[jax.Array, Losses]:
            losses = self._forward.losses({**frozen, **weights}, part)
            distance = losses.divergence * self._settings.distill
            return losses.loss @ jnp.array([1 - block, block]) + distance, losses

        def add(total: Any, part: Batch) -> tuple[Any, None]:
            grads, losses = jax.grad(objective, has_aux=True)(state.weights, part)
            return jax.tree.map(jnp.add, total, (grads, losses)), None

        zero = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(
                jax.grad(objective, has_aux=True),
                state.weights,
                jax.tree.map(lambda x: x[0], batch),
            ),
        )
        (grads, losses), _ = lax.scan(add, zero, batch)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            updates, optimizer = self._optimizer.update(grads, state.optimizer, state.weights)
        # The rate is an argument so that the program is the same for every schedule.
        updates = jax.tree.map(lambda u: -rate * u, updates)
        return State(optax.apply_updates(state.weights, updates), optimizer), losses

    def _score_step(self, weights: Weights, frozen: Weights, batch: Batch) -> Losses:
        parts = lax.map(lambda part: self._forward.losses({**frozen, **weights}, part), batch)
        return jax.tree.map(lambda x: x.sum(0), parts)


def as_record(score: Score) -> dict[str, float]:
    """A score as a dictionary."""
    return dataclasses.asdict(score)
