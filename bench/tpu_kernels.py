"""Compiles the TPU kernels for a TPU that need not be there: memory, cycles, and jax's own kernel.

Cycles are those of a core that never waits for memory (``kernels.mosaic_tpu.schedule``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from lazyattn_jax.bench import record, tpu_anchor
from lazyattn_jax.bench.kernel_cases import (
    CASES,
    GROUP,
    HEADLINE,
    HEADS,
    KV_HEADS,
    Case,
    Variant,
    make_step,
    variants,
)
from lazyattn_jax.kernels.model_shapes import ModelShape, arguments
from lazyattn_jax.kernels.mosaic_tpu import decode, loops, prefill
from lazyattn_jax.kernels.mosaic_tpu.ahead import (
    abstract_device,
    compile_for_tpu,
    compiler,
    kernels_of,
    schedules_kept,
    take_schedule,
)
from lazyattn_jax.kernels.mosaic_tpu.plan import plan_decode, plan_prefill
from lazyattn_jax.kernels.mosaic_tpu.schedule import Loop, cycles
from lazyattn_jax.kernels.mosaic_tpu.support import is_fused

MAX_CYCLES = 1.15
"""Goal: cycles, of those of jax's kernel."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one kernel: seconds, bytes of a core's memory, and cycles."""

    seconds: float = 0.0
    vmem: int = 0
    cycles: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class Compared:
    """The lazy kernel and jax's at a case."""

    case: str
    variant: str
    lazy: Compiled
    anchor: Compiled

    @property
    def ratio(self) -> float | None:
        """Cycles, of those of jax's kernel."""
        if self.lazy.problem or self.anchor.problem:
            return None
        return self.lazy.cycles / self.anchor.cycles


def compile_all(
    generation: str, names: Sequence[str], quick: bool, json: Path | None, console: Console
) -> bool:
    """Compiles, prints a table, keeps it in ``json``, and says whether all lazy kernels compile."""
    jax.config.update("jax_platforms", "cpu")
    cases = [
        (case, variant)
        for case in CASES
        if case.name in names
        for variant in ([HEADLINE] if quick else variants(case))
        # They always turn, and what differs otherwise is in cases of its own.
        if variant.rotate and variant.share
    ]
    found = []
    with (
        schedules_kept() as folder,
        jax.sharding.use_abstract_mesh(_mesh(generation)),
        Progress(console=console, transient=True) as progress,
    ):
        task = progress.add_task("", total=len(cases))
        for case, variant in cases:
            label = f"{case.name} {variant.label}".strip()
            progress.update(task, description=label)
            found.append(compare(folder, generation, case, variant))
            progress.advance(task)
    console.print(table_of(generation, found))
    for one in found:
        for name, kernel in (("lazy", one.lazy), ("jax", one.anchor)):
            if kernel.problem is not None:
                label = f"{one.case} {one.variant}".strip()
                console.print(f"[red]{label}, {name}: {escape(kernel.problem)}[/red]")
    if json:
        compiled = {"generation": generation, "compiler": compiler()}
        results = [asdict(one) | {"ratio": one.ratio} for one in found]
        record.write(json, compiled | {"results": results})
    return all(one.lazy.problem is None for one in found)


def _mesh(generation: str) -> AbstractMesh:
    return AbstractMesh((), (), abstract_device=abstract_device(generation))


def compare(folder: Path, generation: str, case: Case, variant: Variant) -> Compared:
    """Compiles the lazy kernel and jax's at a case; schedules are written to ``folder``."""
    lazy = _compiled(folder, generation, *_lazy(case, variant))
    for candidate in tpu_anchor.anchors(case, variant):
        anchor = _compiled(folder, generation, tpu_anchor.KERNEL, *candidate)
        if anchor.problem is None:
            break
    return Compared(case.name, variant.label, lazy, anchor)


def _lazy(case: Case, variant: Variant) -> tuple[str, Any, tuple[Any, ...], tuple[Loop, ...]]:
    """Name, call, arguments and loops of the lazy kernel at a case."""
    step = make_step(case, variant.page_size)
    shape = ModelShape(case.name, HEADS, KV_HEADS, variant.head_dim)
    work: Any
    if case.new:
        sizes = {"num_rows": step.num_rows, "page_size": step.page_size, "group": GROUP}
        work = plan_prefill(step.references, step.runs, **sizes)
    else:
        work = plan_decode(step.references, step.runs, page_size=step.page_size)
    args = arguments(
        shape,
        step.page_size,
        jnp.bfloat16,
        step.num_rows,
        step.references,
        step.runs,
        work,
        fused=is_fused(variant.head_dim),
    )
    cores = pltpu.get_tpu_info().num_cores
    if case.new:
        prefill_shape, _ = prefill.kernel_shape(*args[:3])
        blocks = KV_HEADS // prefill_shape.reader.heads // cores
        trips = loops.prefill_loops(prefill_shape, blocks, work)
        return "lazy_prefill", partial(prefill.lazy_prefill, scale=shape.scale), args, trips
    decode_shape, _ = decode.kernel_shape(*args[:3])
    blocks = KV_HEADS // decode_shape.reader.heads // cores
    trips = loops.decode_loops(decode_shape, blocks, work)
    return "lazy_decode", partial(decode.lazy_decode, scale=shape.scale), args, trips


def _compiled(
    folder: Path,
    generation: str,
    name: str,
    call: Any,
    args: tuple[Any, ...],
    trips: tuple[Loop, ...],
) -> Compiled:
    start = time.perf_counter()
    try:
        program = compile_for_tpu(generation, call, *args)
        seconds = time.perf_counter() - start
        [kernel] = kernels_of(program)
        count = cycles(take_schedule(folder, generation, name), trips)
    except Exception as error:  # of any layer: it does not cost the other kernels
        lines = str(error).splitlines() or [""]
        return Compiled(problem=f"{type(error).__name__}: {lines[0]}")
    return Compiled(seconds, kernel.vmem, count)


def table_of(generation: str, found: Sequence[Compared]) -> Table:
    """A row for each case."""
    table = Table(
        box=box.SIMPLE,
        title=f"Compiled for a {generation}: seconds, MiB of VMEM, and cycles without waiting",
        title_justify="left",
        caption="jax: its ragged_paged_attention, which turns and shares nothing; goal of the "
        f"ratio at most {MAX_CYCLES}",
        caption_justify="left",
    )
    for name in ("case", "variant"):
        table.add_column(name)
    for name in ("s", "MiB", "cycles", "jax s", "jax MiB", "jax cycles", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        table.add_row(one.case, one.variant, *_cells(one.lazy), *_cells(one.anchor), _ratio(one))
    return table


def _cells(one: Compiled) -> tuple[str, str, str]:
    if one.problem is not None:
        return "", "", "[red]failed[/red]"
    return f"{one.seconds:.1f}", f"{one.vmem / 2**20:.1f}", f"{one.cycles:,}"


def _ratio(one: Compared) -> str:
    if one.ratio is None:
        return ""
    color = "green" if one.ratio <= MAX_CYCLES else "red"
    return f"[{color}]{one.ratio:.2f}[/{color}]"
