"""Runs the cases of the kernel benchmark: data, check against float64, time, baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lazyattn_jax.bench.kernel_cases import (
    GROUP,
    HEADLINE,
    HEADS,
    KV_HEADS,
    MAX_ROTATION,
    MAX_SHARING,
    Case,
    Step,
    Variant,
    distinct_bytes,
    flops,
    goal,
    make_step,
)
from lazyattn_jax.bench.timing import Chain, Timing
from lazyattn_jax.kernels.mosaic_gpu.plan import num_workers, plan_decode, tile_slots
from lazyattn_jax.kernels.mosaic_gpu.prefill_plan import most_pieces, plan_prefill
from lazyattn_jax.kernels.work import Turns

MAX_ERROR = 1e-2
"""Relative error from which on a kernel counts as wrong."""

CORES = 132

_BASE = 500_000.0
"""Base of the rotary frequencies."""


@dataclass(frozen=True)
class Result:
    """One measurement; ``seconds`` and ``kernels`` are those of one call.

    ``value`` is the fraction of the read ceiling (decode) or of the copy bandwidth (copy), or the
    share of the baseline's time.
    ``headline`` is the time of the case's headline variant over that of this one, which
    ``headline_goal`` bounds. A ``problem`` says why there is no time.
    """

    table: Literal["decode", "prefill", "copy", "write", "plan"]
    case: str
    variant: str = ""
    seconds: float | None = None
    kernel_seconds: float | None = None
    kernels: tuple[tuple[str, float], ...] | None = None
    bytes: int | None = None
    flops: int | None = None
    error: float | None = None
    baseline_seconds: float | None = None
    baseline_kernel_seconds: float | None = None
    baseline_problem: str | None = None
    value: float | None = None
    goal: float | None = None
    headline: float | None = None
    headline_goal: float | None = None
    problem: str | None = None


class Data(NamedTuple):
    """The arrays of a step, on the device."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    turns: Turns


def measure_case(case: Case, variants: Sequence[Variant], ceiling: float) -> Iterator[Result]:
    """Measures the variants of a case, which share data where they can; the headline comes first.

    A variant that fails reports its problem, so that it does not cost the others.
    """
    bench = _CaseBench(case, ceiling)
    for variant in variants:
        try:
            result = bench.measure(variant)
        except Exception as error:  # of any layer: ptxas, XLA, the kernel's own checks
            result = bench.result(variant, problem=_first_line(error))
        yield result


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


class _CaseBench:
    """Holds the data of one step at a time, and what the variants are compared with."""

    def __init__(self, case: Case, ceiling: float) -> None:
        self.case = case
        self.ceiling = ceiling
        self._layout: tuple[int, int] | None = None
        self._step: Step
        self._data: Data | None = None
        self._headline: float | None = None
        self._baselines: dict[int, Timing | str] = {}

    def result(self, variant: Variant, **found: Any) -> Result:
        """A result of this case."""
        table: Literal["decode", "prefill"] = "prefill" if self.case.new else "decode"
        return Result(table, self.case.name, variant.label, **found)

    def measure(self, variant: Variant) -> Result:
        """Checks and times one variant."""
        step, data = self._load(variant)
        attention, work = attention_of(self.case, variant, step)
        chain = Chain(attention)
        args = (*data, jax.device_put(work))
        error = error_of(chain(*args)[0], step, data, rotate=variant.rotate)
        if not error < MAX_ERROR:
            return self.result(variant, error=error, problem=f"wrong: relative error {error:.2g}")
        timing = chain.time(*args)
        result = self.result(
            variant,
            seconds=timing.seconds,
            kernel_seconds=timing.kernel_seconds,
            kernels=timing.kernels,
            bytes=distinct_bytes(step, variant.head_dim),
            flops=flops(step, variant.head_dim),
            error=error,
            goal=goal(self.case, variant),
        )
        result = self._against_headline(result, variant)
        if not self.case.new:
            fraction = distinct_bytes(step, variant.head_dim) / timing.seconds / self.ceiling
            return replace(result, value=fraction)
        baseline = self._baseline(variant.head_dim)
        if isinstance(baseline, str):
            return replace(result, baseline_problem=baseline)
        return replace(
            result,
            value=timing.seconds / baseline.seconds,
            baseline_seconds=baseline.seconds,
            baseline_kernel_seconds=baseline.kernel_seconds,
        )

    def _against_headline(self, result: Result, variant: Variant) -> Result:
        """The two comparisons that have a goal: what rotation and the sharing plan cost."""
        if variant == HEADLINE:
            self._headline = result.seconds
        if self._headline is None or result.seconds is None or (variant.rotate and variant.share):
            return result
        return replace(
            result,
            headline=self._headline / result.seconds,
            headline_goal=MAX_SHARING if variant.rotate else MAX_ROTATION,
        )

    def _load(self, variant: Variant) -> tuple[Step, Data]:
        layout = (variant.head_dim, variant.page_size)
        if self._data is None or layout != self._layout:
            self._data = None  # free it before the next is made
            self._step = make_step(self.case, variant.page_size)
            self._data = make_data(self._step, variant.head_dim)
            self._layout = layout
        return self._step, self._data

    def _baseline(self, head_dim: int) -> Timing | str:
        """cuDNN at the same sizes, or why it does not take them."""
        if head_dim not in self._baselines:
            try:
                self._baselines[head_dim] = time_cudnn(self.case, head_dim)
            except Exception as error:  # of cuDNN or jax; the kernel's own time stands alone
                self._baselines[head_dim] = _first_line(error)
        return self._baselines[head_dim]


def attention_of(case: Case, variant: Variant, step: Step) -> tuple[Callable[..., jax.Array], Any]:
    """The kernel for a step, as a function of ``Data`` and the work list, and that list."""
    # Not everywhere is Pallas' GPU backend there to be imported, nor needed by other benchmarks.
    from lazyattn_jax.kernels.mosaic_gpu.decode import lazy_decode
    from lazyattn_jax.kernels.mosaic_gpu.prefill import lazy_prefill

    options = {"scale": variant.head_dim**-0.5, "rotate": variant.rotate}
    if case.new:
        return partial(lazy_prefill, **options), plan_prefill_step(case, step)
    work = plan_decode(
        step.references,
        step.runs,
        num_rows=step.num_rows,
        page_size=step.page_size,
        group=GROUP,
        tile=tile_slots(variant.head_dim),
        workers=num_workers(KV_HEADS),
        share=variant.share,
    )
    return partial(lazy_decode, **options), work


def plan_prefill_step(case: Case, step: Step) -> Any:
    """The work list of a prefill step."""
    return plan_prefill(
        step.references,
        step.runs,
        num_rows=step.num_rows,
        page_size=step.page_size,
        group=GROUP,
        kv_heads=KV_HEADS,
        workers=CORES,
        most_pieces=most_pieces(step.num_rows, GROUP, KV_HEADS, CORES),
    )


def make_data(step: Step, head_dim: int) -> Data:
    """Random queries and pages."""
    pages = (step.num_pages, KV_HEADS, step.page_size, head_dim)
    angle = angles(step.deltas, head_dim)
    return Data(
        random_normal(0, (step.num_rows, HEADS, head_dim)),
        random_normal(1, pages),
        random_normal(2, pages),
        Turns(jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)),
    )


@partial(jax.jit, static_argnames="shape")
def random_normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Random numbers in bfloat16, made on the device."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def angles(deltas: np.ndarray, head_dim: int) -> np.ndarray:
    """What queries are turned by, ``[U, H//2]``."""
    half = head_dim // 2
    return -deltas[:, None].astype(np.float64) * _BASE ** (-np.arange(half) / half)


def error_of(out: jax.Array, step: Step, data: Data, *, rotate: bool) -> float:
    """Relative error of two rows of a result."""
    rows = sorted({step.num_rows // 3, step.num_rows - 1})
    right = np.stack([expected_row(row, step, data, rotate=rotate) for row in rows])
    found = np.stack([np.asarray(out[row], np.float64) for row in rows])
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


def expected_row(row: int, step: Step, data: Data, *, rotate: bool) -> np.ndarray:
    """Attention of one query row ``[N, H]`` in float64, from the definition."""
    refs, runs = step.references, step.runs
    head_dim = data.q.shape[-1]
    half = head_dim // 2
    q = np.asarray(data.q[row], np.float64).reshape(KV_HEADS, GROUP, head_dim)
    held = np.flatnonzero((refs.row <= row) & (row < refs.row + refs.num_rows))
    counts = -(-runs.length[refs.run[held]] // step.page_size)
    starts = runs.start[refs.run[held]]
    ids = np.concatenate([runs.pages[s : s + n] for s, n in zip(starts, counts, strict=True)])
    k_pages, v_pages = (
        np.asarray(pages[jnp.asarray(ids)]).astype(np.float64).swapaxes(0, 1)
        for pages in (data.k_pages, data.v_pages)
    )  # [K n S H]
    scores, values = [], []
    for i, count, end in zip(held, counts, np.cumsum(counts), strict=True):
        seen = min(int(runs.length[refs.run[i]]), int(refs.causal[i] + row - refs.row[i]) + 1)
        k, v = (
            pages[:, end - count : end].reshape(KV_HEADS, -1, head_dim)[:, :seen]
            for pages in (k_pages, v_pages)
        )
        turned = q
        if rotate:
            angle = angles(step.deltas[refs.turn[i], None], head_dim)[0]
            z = (q[..., :half] + 1j * q[..., half:]) * np.exp(1j * angle)
            turned = np.concatenate([z.real, z.imag], -1)
        scores.append(turned @ k.swapaxes(1, 2) * head_dim**-0.5)
        values.append(v)
    s = np.concatenate(scores, -1)
    weights = np.exp(s - s.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ np.concatenate(values, 1)).reshape(HEADS, head_dim)


def time_cudnn(case: Case, head_dim: int) -> Timing:
    """cuDNN's attention over as many contiguous keys and values, without any rotation.

    Its causal mask lines the first query up with the first key, so it can only be had where there
    is nothing before the new tokens.
    """
    length = case.held * case.tokens + case.new
    q = random_normal(0, (case.requests, case.new, HEADS, head_dim))
    k, v = (random_normal(seed, (case.requests, length, KV_HEADS, head_dim)) for seed in (1, 2))
    attention = partial(
        jax.nn.dot_product_attention, is_causal=case.held == 0, implementation="cudnn"
    )
    return Chain(attention).time(q, k, v)
