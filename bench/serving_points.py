"""The points of a serving benchmark: ways of reusing KV, loads and workloads, one after another."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
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
from lazyattn_jax.engine.request import DocumentPiece, Prompt
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

    def load(self, begin: float, span: Span) -> Load:
        """When its requests are sent; the clients of a closed loop come in half of the warm-up."""
        if self.rate is not None:
            return OpenLoop(self.rate, begin, self.workload.seed)
        assert self.concurrency is not None
        return ClosedLoop(self.concurrency, begin, span.warmup / 2)

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
    """Engines in this process, one at a time: one model and the same programs.

    Each point begins with an empty pool or, with ``preload``, with the documents that come again in
    it, as many of those asked for most often as the pool and the host's memory hold.

    Args:
      loaded: the model.
      config: of the engines but for what ``WAYS`` set.
      compiled: told of compiled batch shapes: done, total.
      preload: see above.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        compiled: Callable[[int, int], None] = lambda done, total: None,
        *,
        preload: bool = False,
    ) -> None:
        self.loaded = loaded
        self._config = config
        self._compiled = compiled
        self._preload = preload
        self._programs: Programs = {}
        self._engine: tuple[str, float, Engine] | None = None
        self._make = token_maker(loaded.config.vocab_size)

    def engine(self, reuse: str, pool_share: float = 1.0) -> Engine:
        """An idle engine; the last one, if that is such a one. There is room for one only."""
        if self._engine is None or self._engine[:2] != (reuse, pool_share):
            self._engine = None
            gc.unfreeze()
            gc.collect()
            self._engine = reuse, pool_share, self._new_engine(reuse, pool_share)
            gc.freeze()  # as the server does
        return self._engine[2]

    def _new_engine(self, reuse: str, pool_share: float) -> Engine:
        if pool_share < 1 and self._config.check_invariants:
            raise ValueError("check_invariants would miss the pages that pool_share takes away")
        config = replace(self._config, **WAYS[reuse])
        engine = Engine(self.loaded, config, self._compiled, programs=self._programs)
        prompt = [self._make(np.random.default_rng(), 8)]
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        _finish(engine)
        engine.scheduler.index.clear()
        # The shape of the pool is part of the programs, so what is not to be used is taken away.
        engine.scheduler.index.allocate(engine.limits.num_pages - _usable(engine, pool_share))
        return engine

    def run(self, point: Point, span: Span, progress: Progress) -> Outcome:
        """See ``Target``."""
        assert point.reuse is not None
        engine = self.engine(point.reuse, point.pool_share)
        usable = _usable(engine, point.pool_share)
        if point.pool_share < 1 and usable < engine.limits.most_pages:
            raise ValueError(
                f"pool_share {point.pool_share} leaves {usable} pages, and a request may take "
                f"{engine.limits.most_pages}: raise it or lower max_model_len"
            )
        prompts: list[Prompt] = []
        if self._preload:
            prompts = self._usual(engine, point.workload, usable + engine.limits.host_pages)
        if not prompts:
            engine.scheduler.index.clear()
        for prompt in prompts:
            engine.add(prompt, SamplingParams(), encode_only=True)
        _finish(engine)
        queries = point.workload.queries(self._make)
        outcome = drive(
            engine, queries, lambda begin: point.load(begin, span), span, progress=progress
        )
        outcome.figures["kv_pool_bytes"] = usable * engine.page_bytes
        return outcome

    def _usual(self, engine: Engine, workload: Workload, num_pages: int) -> list[Prompt]:
        """Prompts of the documents asked for most often, as many as so many pages hold."""
        reuse, pages = engine.config.reuse_mode, engine.limits.pages_for
        if not (reuse.shared and reuse.independent):
            return []  # nobody would find them
        system, documents = workload.usual(self._make)
        fit = (num_pages - pages(workload.system_tokens)) // pages(workload.document_tokens)
        usual: list[Prompt] = [
            [system, DocumentPiece(document)] for document in islice(documents, fit)
        ]
        return usual[::-1]  # what is asked for most often is there in the end


def _usable(engine: Engine, pool_share: float) -> int:
    return int(engine.limits.num_pages * pool_share)


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


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
