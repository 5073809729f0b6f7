"""The jitted steps: model, pool and sampler in one program per batch shape, all compiled ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from lazyattn_jax.cache.pool import LayerKV, Slots, make_pool, write
from lazyattn_jax.engine.limits import Limits, work_lists
from lazyattn_jax.engine.plan import Planner, StepPlan
from lazyattn_jax.engine.runs import Chunk, Request, TokenRun
from lazyattn_jax.engine.sampler import SamplingRows, sample
from lazyattn_jax.kernels.api import choose, lazy_decode, lazy_prefill, wants_fused_pages
from lazyattn_jax.kernels.dense import BLOCK_ROWS
from lazyattn_jax.kernels.work import Turns, Works
from lazyattn_jax.models.checkpoint import LoadedModel


class StepInputs(NamedTuple):
    """Everything a step needs from the host."""

    tokens: Int[Array, "T"]
    cos: Float[Array, "T H//2"]
    sin: Float[Array, "T H//2"]
    slots: Slots
    turns: Turns
    works: Works
    sampled: Int[Array, "B"]  # rows of T that a token is sampled after
    sampling: SamplingRows


@dataclass(frozen=True)
class StepResult:
    """Sampled tokens on the host, and the logits they were sampled from, on the device."""

    tokens: Int[np.ndarray, "B"]
    logits: Float[Array, "B V"]


class Runner:
    """Runs prefill and decode steps on one device.

    Args:
      loaded: the model.
      limits: batch shapes and pool size.
      attention: implementation of the attention, see ``kernels.api``.
      check: check every plan before it runs.
    """

    def __init__(
        self, loaded: LoadedModel, limits: Limits, attention: str = "auto", *, check: bool = False
    ) -> None:
        self._limits = limits
        self._config = loaded.config
        graph, self._weights = nnx.split(loaded.model)
        self._dtype = loaded.model.embed.embedding.dtype
        rope = loaded.config.rope
        group = loaded.config.num_heads // loaded.config.num_kv_heads
        device = jax.devices()[0]
        attention = choose(
            attention,
            dtype=self._dtype,
            head_dim=loaded.config.head_dim,
            page_size=limits.page_size,
            group=group,
            device=device,
        )
        self._lists = work_lists(
            limits,
            attention,
            group=group,
            kv_heads=loaded.config.num_kv_heads,
            num_cores=getattr(device, "core_count", 0),
        )
        frequencies = rope.inverse_frequencies(loaded.config.head_dim)
        self._planner = Planner(
            limits, self._lists, frequencies, rope.attention_factor, check=check
        )
        self._pool = make_pool(
            loaded.config,
            limits.num_pages,
            limits.page_size,
            self._dtype,
            fused=wants_fused_pages(attention, loaded.config.head_dim),
        )
        scale = loaded.config.head_dim**-0.5
        self._step = jax.jit(
            partial(_step, graph, attention=attention, scale=scale),
            donate_argnums=1,
            static_argnames="prefill",
        )
        self._compiled: dict[tuple[bool, int], Callable[..., Any]] = {}

    def compile(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles every batch shape.

        Args:
          progress: called with the number of shapes done and their total.
        """
        limits = self._limits
        shapes = [(False, b) for b in limits.decode_buckets]
        shapes += [(True, b) for b in limits.prefill_buckets]
        progress(0, len(shapes))
        # Tracing is Python and serial; compiling releases the interpreter lock.
        with ThreadPoolExecutor(2) as pool:
            lowered = ((shape, self._lower(*shape)) for shape in shapes)
            pending = [(shape, pool.submit(low.compile)) for shape, low in lowered]
            for done, (shape, future) in enumerate(pending, 1):
                self._compiled[shape] = future.result()
                progress(done, len(shapes))

    def _lower(self, prefill: bool, bucket: int) -> jax.stages.Lowered:
        inputs = self._empty_inputs(prefill, bucket)
        return self._step.lower(self._weights, self._pool, inputs, prefill=prefill)

    def prefill(self, chunks: Sequence[Chunk]) -> StepResult:
        """Computes chunks; returns a token for each that ends its prompt, in order."""
        plan = self._planner.prefill(chunks)
        ends = np.cumsum([c.count for c in chunks]) - 1
        rows = [int(end) for c, end in zip(chunks, ends, strict=True) if c.samples]
        owners = [c.owner for c in chunks if c.samples and isinstance(c.owner, Request)]
        return self._run(True, plan, rows, owners)

    def decode(self, requests: Sequence[Request]) -> StepResult:
        """Computes the last token of every request; returns the next ones, in order."""
        runs: list[TokenRun] = [r.run for r in requests]
        return self._run(False, self._planner.decode(runs), range(len(runs)), requests)

    def _run(
        self, prefill: bool, plan: StepPlan, rows: Sequence[int], requests: Sequence[Request]
    ) -> StepResult:
        sampled, sampling = self._sampling(prefill, plan.bucket, rows, requests)
        inputs = _inputs(plan, sampled, sampling)
        step = self._compiled[prefill, plan.bucket]
        tokens, logits, self._pool = step(self._weights, self._pool, inputs)
        return StepResult(np.asarray(tokens)[: len(rows)], logits)

    def _sampling(
        self, prefill: bool, bucket: int, rows: Sequence[int], requests: Sequence[Request]
    ) -> tuple[np.ndarray, SamplingRows]:
        size = self._limits.prefill_samples(bucket) if prefill else bucket
        sampled = np.zeros(size, np.int32)
        sampled[: len(rows)] = rows
        sampling = SamplingRows(
            np.zeros(size, np.float32),
            np.zeros(size, np.int32),
            np.ones(size, np.float32),
            np.zeros((size, 2), np.uint32),
            np.zeros(size, np.int32),
        )
        for i, request in enumerate(requests):
            sampling.temperature[i] = request.params.temperature
            sampling.top_k[i] = request.params.top_k
            sampling.top_p[i] = request.params.top_p
            sampling.seed[i] = (request.seed >> 32 & 0xFFFFFFFF, request.seed & 0xFFFFFFFF)
            sampling.step[i] = request.num_generated
        return sampled, sampling

    def _empty_inputs(self, prefill: bool, bucket: int) -> StepInputs:
        """Inputs of a batch shape with nothing to do in them."""
        limits, half = self._limits, self._config.head_dim // 2
        num_turns = self._lists.num_turns(prefill, bucket)
        plan = StepPlan(
            bucket,
            np.zeros(bucket, np.int32),
            np.zeros((bucket, half), np.float32),
            np.zeros((bucket, half), np.float32),
            np.full(bucket, limits.num_pages, np.int32),
            np.zeros(bucket, np.int32),
            Turns(*(np.zeros((num_turns, half), np.float32) for _ in range(2))),
            self._lists.empty(prefill, bucket),
        )
        return _inputs(plan, *self._sampling(prefill, bucket, (), ()))


def _inputs(plan: StepPlan, sampled: np.ndarray, sampling: SamplingRows) -> StepInputs:
    slots = Slots(plan.page, plan.offset)
    return StepInputs(
        plan.tokens, plan.cos, plan.sin, slots, plan.turns, plan.works, sampled, sampling
    )


def _step(
    graph: nnx.GraphDef,
    weights: nnx.State,
    pool: list[LayerKV],
    inputs: StepInputs,
    *,
    prefill: bool,
    attention: str,
    scale: float,
) -> tuple[Int[Array, "B"], Float[Array, "B V"], list[LayerKV]]:
    """One step, traced. Layers are unrolled: a scan would copy every weight it slices."""
    model = nnx.merge(graph, weights)

    def attend(kv: LayerKV, q: Array, k: Array, v: Array) -> tuple[Array, LayerKV]:
        kv = write(kv, k, v, inputs.slots)
        options: dict[str, Any] = {"scale": scale, "implementation": attention}
        if prefill:
            (work,) = inputs.works
            out = lazy_prefill(q, kv.k, kv.v, inputs.turns, work, block_rows=BLOCK_ROWS, **options)
        else:
            out = lazy_decode(q, kv.k, kv.v, inputs.turns, inputs.works, **options)
        return out, kv

    hidden, pool = model(inputs.tokens, inputs.cos, inputs.sin, pool, attend)
    logits = model.logits(hidden[inputs.sampled])
    return sample(logits, inputs.sampling), logits, pool
