"""Compiles every kernel for an H200 that need not be there, and reports registers and spills."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from lazyattn_jax.kernels.model_shapes import MODEL_SHAPES, ModelShape
from lazyattn_jax.kernels.mosaic_gpu.ahead import Usage, usage_on_h200
from lazyattn_jax.kernels.mosaic_gpu.model_shapes import (
    copy_arguments,
    decode_arguments,
    prefill_arguments,
)
from lazyattn_jax.kernels.mosaic_gpu.prefill_plan import MOST_PIECES

PAGE_SIZES = (16, 32, 64, 128)
KERNELS = ("decode", "prefill", "prefill in pieces", "copy")


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of the GPU kernels of one call: of the attention, and of a merge."""

    kernel: str
    model: str
    page_size: int
    usages: tuple[Usage, ...] = ()
    problem: str | None = None

    @property
    def spilled_bytes(self) -> int:
        """Bytes of all spill instructions."""
        return sum(usage.spill_stores + usage.spill_loads for usage in self.usages)

    @property
    def is_good(self) -> bool:
        """Whether it compiles without a spill."""
        return self.problem is None and self.spilled_bytes == 0


def compile_all(console: Console) -> bool:
    """Compiles, prints a table, and says whether all kernels compile without a spill."""
    jax.config.update("jax_platforms", "cpu")  # no driver is needed, so ask for none
    cases = [(k, model, size) for model in MODEL_SHAPES for k in KERNELS for size in PAGE_SIZES]
    found = []
    # Drawn by hand: the process's output is turned aside while a kernel compiles.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=len(cases))
        for kernel, model, size in cases:
            label = f"{model.name}, {kernel}, pages of {size}"
            progress.update(task, description=label, refresh=True)
            found.append(compile_kernel(kernel, model, size))
            progress.advance(task)
    console.print(table_of(found))
    return all(one.is_good for one in found)


def compile_kernel(kernel: str, model: ModelShape, page_size: int) -> Compiled:
    """Compiles one kernel at a model's sizes."""
    from lazyattn_jax.kernels.mosaic_gpu.copies import copy_pages
    from lazyattn_jax.kernels.mosaic_gpu.decode import lazy_decode
    from lazyattn_jax.kernels.mosaic_gpu.prefill import lazy_prefill

    try:
        if kernel == "decode":
            args = decode_arguments(model, page_size)
            usages = usage_on_h200(partial(lazy_decode, scale=model.scale), *args)
        elif kernel == "copy":
            usages = usage_on_h200(copy_pages, *copy_arguments(model, page_size))
        else:
            pieces = MOST_PIECES if kernel == "prefill in pieces" else 1
            args = prefill_arguments(model, page_size, most_pieces=pieces)
            usages = usage_on_h200(partial(lazy_prefill, scale=model.scale), *args)
    except Exception as error:  # of any layer: it does not cost the other kernels
        lines = str(error).splitlines() or [""]
        problem = f"{type(error).__name__}: {lines[0]}"
        return Compiled(kernel, model.name, page_size, problem=problem)
    return Compiled(kernel, model.name, page_size, tuple(usages))


def table_of(found: list[Compiled]) -> Table:
    """Registers and spills by model and kernel; page sizes side by side."""
    table = Table(
        title="Compiled for an H200: registers a thread of the attention and, if any, the merge",
        title_justify="left",
    )
    table.add_column("model")
    table.add_column("kernel")
    for size in PAGE_SIZES:
        table.add_column(f"pages of {size}", justify="right")
    cells = {(one.model, one.kernel, one.page_size): _cell(one) for one in found}
    for model, kernel in dict.fromkeys((one.model, one.kernel) for one in found):
        row = [cells.get((model, kernel, size), "") for size in PAGE_SIZES]
        table.add_row(model, kernel, *row)
    return table


def _cell(one: Compiled) -> str:
    if one.problem is not None:
        return f"[red]{escape(one.problem)}[/red]"
    registers = ", ".join(str(usage.registers) for usage in one.usages)
    if one.spilled_bytes:
        return f"[red]{registers}; spills {one.spilled_bytes} B[/red]"
    return registers
