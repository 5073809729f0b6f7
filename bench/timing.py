"""How the kernel benchmark takes time on a GPU."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

type KernelTimes = tuple[tuple[str, float], ...]
"""Names and seconds of GPU kernels."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, of the whole and of each GPU kernel where that could be had."""

    seconds: float
    kernels: KernelTimes | None = None

    @property
    def kernel_seconds(self) -> float | None:
        """Sum over the kernels of one call."""
        return None if self.kernels is None else sum(seconds for _, seconds in self.kernels)


class Chain:
    """One program of several calls of a function, each of which takes the last one's result."""

    def __init__(self, step: Callable[..., Any], *, calls: int = 16, donate: bool = False) -> None:
        """Makes the program.

        Args:
          step: a function from a carry and arguments to the next carry.
          calls: calls in the program.
          donate: the program may reuse the memory of the carry, which is then lost.
        """
        once = jax.jit(step)  # traced once for all calls

        def run(carry: Any, *args: Any) -> tuple[Any, Any]:
            first = carry = once(carry, *args)
            for _ in range(calls - 1):
                carry = once(carry, *args)
            return None if donate else first, carry

        self._calls = calls
        self._program = jax.jit(run, donate_argnums=(0,) if donate else ())

    def __call__(self, carry: Any, *args: Any) -> tuple[Any, Any]:
        """Results of the first call (unless memory is donated) and of the last."""
        return self._program(carry, *args)

    def time(self, carry: Any, *args: Any) -> Timing:
        """Times a call, in programs that follow one another and kernel by kernel."""
        return Timing(self.seconds(carry, *args), self.kernels(carry, *args))

    def seconds(self, carry: Any, *args: Any, programs: int = 8, repeats: int = 5) -> float:
        """Seconds of one call, the median over ``repeats``.

        So many ``programs`` are under way at once that what a launch costs the host is hidden.
        """
        _, carry = jax.block_until_ready(self._program(carry, *args))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(programs):
                _, carry = self._program(carry, *args)
            jax.block_until_ready(carry)
            times.append(time.perf_counter() - start)
        return statistics.median(times) / (self._calls * programs)

    def kernels(self, carry: Any, *args: Any, iterations: int = 3) -> KernelTimes | None:
        """Seconds of every GPU kernel of one call, as CUPTI reports them.

        None where CUPTI is not there or taken by another profiler, or where it reports other
        kernels each time. Not for chains that donate.
        """
        try:
            from jax.experimental.mosaic.gpu import profiler

            measure = profiler.measure(self._program, aggregate=False, iterations=iterations)
            _, found = measure(carry, *args)
        except Exception:  # a second opinion: whatever CUPTI has to complain about, go on without
            return None
        if not found:
            return None
        return per_call(found if iterations > 1 else [found], self._calls)


def per_call(programs: Sequence[Sequence[tuple[str, float]]], calls: int) -> KernelTimes:
    """Kernels of one call, from the milliseconds of those of some equal programs.

    The compiler moves what the calls have in common before the first; that comes first here too,
    with its share for one call. Where calls differ, kernels of one name are added up.
    """
    kernels = [
        (same[0][0], statistics.median(ms for _, ms in same) / 1e3)
        for same in zip(*programs, strict=True)
    ]
    size, common = divmod(len(kernels), calls)
    before, rest = kernels[:common], kernels[common:]
    found = [(name, seconds / calls) for name, seconds in before]
    rounds = [rest[i : i + size] for i in range(0, len(rest), max(1, size))]
    for same in zip(*rounds, strict=True):
        if len({name for name, _ in same}) > 1:
            by_name = sorted(kernels)
            return tuple(
                (name, sum(seconds for _, seconds in group) / calls)
                for name, group in itertools.groupby(by_name, key=lambda kernel: kernel[0])
            )
        found.append((same[0][0], statistics.median(seconds for _, seconds in same)))
    return tuple(found)


def read_ceiling(num_bytes: int = 1 << 32) -> float:
    """Bytes a second of a sum over an array: the most that this GPU reads in this run."""

    def step(mean: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.abs(x - mean))

    x = jax.random.normal(jax.random.key(0), (num_bytes // 4,), jnp.float32)
    return x.nbytes / Chain(step).seconds(jnp.float32(0), x)


def host_seconds(function: Callable[[], Any], repeats: int = 20) -> float:
    """Median seconds of a function on the host."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
