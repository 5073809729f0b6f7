"""The points of a serving benchmark: ways of reusing KV, loads and workloads, one after another."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from lazyattn_jax.bench.serving_engine import Outcome, Span, drive
from lazyattn_jax.bench.serving_load import ClosedLoop, Load, OpenLoop
from lazyattn_jax.bench.serving_metrics import Limits, summarise
from lazyattn_jax.bench.workloads import Workload, token_maker
from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.reuse import MODES
from lazyattn_jax.engine.runner import Programs
from lazyattn_jax.models.checkpoint import LoadedModel

WAYS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {mode: {"reuse": mode} for mode in MODES}
    | {"lazy-unshared": {"reuse": "lazy", "share_reads": False}}
)
"""Ways of reusing KV by name: options of the engine."""

type Progress = Callable[[float, int], None]
"""Told of the seconds gone by and the requests answered."""


@dataclass(frozen=True)
class Point:
    """One run: at a ``rate`` (open loop) or a ``concurrency`` (closed loop).

    ``pool_share`` is the share of the KV pool that may be used. ``reuse`` is one of ``WAYS``, none
    for a server.
    """

    workload: Workload
    reuse: str | None = None
    rate: float | None = None
    concurrency: int | None = None
    pool_share: float = 1.0

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("either a rate or a concurrency must be given")
        if not 0 < self.pool_share <= 1:
            raise ValueError(f"pool_share is {self.pool_share}, must be above 0 and at most 1")

    def load(self, begin: float) -> Load:
        """When its requests are sent."""
        if self.rate is not None:
            return OpenLoop(self.rate, begin, self.workload.seed)
        assert self.concurrency is not None
        return ClosedLoop(self.concurrency)

    @property
    def label(self) -> str:
        """What it is, in words."""
        load = f"{self.rate:.3g} a second" if self.rate else f"{self.concurrency} at a time"
        words = [self.reuse or "server", self.workload.name, load]
        if self.workload.name == "zipf":
            words.insert(2, f"alpha {self.workload.alpha:g}")
        if self.pool_share < 1:
            words.append(f"{self.pool_share:.0%} of the pool")
        return ", ".join(words)


class Target(Protocol):
    """Where load is put on."""

    def run(self, point: Point, span: Span, progress: Progress) -> Outcome:
        """Puts the load of a point on it."""


class EngineTarget:
    """Engines in this process: one model, the same programs, and an empty pool for each point.

    Args:
      loaded: the model.
      config: of the engines but for what ``WAYS`` set.
      compiled: told of compiled batch shapes: done, total.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        compiled: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._loaded = loaded
        self._config = config
        self._compiled = compiled
        self._programs: Programs = {}

    def engine(self, reuse: str, pool_share: float = 1.0) -> Engine:
        """An engine with an empty pool, used once. Nothing of an earlier one may be in use."""
        if pool_share < 1 and self._config.check_invariants:
            raise ValueError("check_invariants would miss the pages that pool_share takes away")
        gc.collect()  # there is no room for two pools
        config = replace(self._config, **WAYS[reuse])
        engine = Engine(self._loaded, config, self._compiled, programs=self._programs)
        rng = np.random.default_rng()
        make = token_maker(self._loaded.config.vocab_size)
        engine.add([make(rng, 8)], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        while engine.has_work:
            engine.step()
        engine.scheduler.index.clear()
        # The shape of the pool is part of the programs, so what is not to be used is taken away.
        unused = engine.limits.num_pages - int(engine.limits.num_pages * pool_share)
        engine.scheduler.index.allocate(unused)
        return engine

    def run(self, point: Point, span: Span, progress: Progress) -> Outcome:
        """See ``Target``."""
        assert point.reuse is not None
        engine = self.engine(point.reuse, point.pool_share)
        queries = point.workload.queries(token_maker(self._loaded.config.vocab_size))
        return drive(engine, queries, point.load, span, progress=progress)


def measure(
    target: Target, point: Point, span: Span, limits: Limits, progress: Progress
) -> dict[str, Any]:
    """Figures of one point, as they are kept."""
    outcome = target.run(point, span, progress)
    settings = asdict(point) | {"workload": _given(point.workload)}
    found = summarise(outcome.records, outcome.begin, outcome.end, limits)
    return settings | found | outcome.figures


def _given(workload: Workload) -> dict[str, Any]:
    return {k: v for k, v in asdict(workload).items() if v is not None}
