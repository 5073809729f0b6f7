"""Compiles an engine's whole steps for a TPU that need not be there, and says what they take of it.

The largest prefill and decode step of an engine with default options, whose pool has the share of
memory that it has by default. Weights are described, not made: a model of any size will do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lazyattn_jax.bench import record
from lazyattn_jax.cache.pool import LayerKV, bytes_per_token, make_pool
from lazyattn_jax.engine.config import POOL_SHARE, EngineConfig
from lazyattn_jax.engine.inputs import empty_inputs, make_choices
from lazyattn_jax.engine.limits import Limits, work_lists
from lazyattn_jax.engine.params import Effort
from lazyattn_jax.engine.seats import Seats, make_seats
from lazyattn_jax.engine.step import Rebuild, choose, step, take_apart
from lazyattn_jax.kernels.api import wants_fused_pages
from lazyattn_jax.kernels.mosaic_tpu.ahead import (
    HBM,
    TOPOLOGIES,
    compile_for_tpu,
    compiler,
    kernels_of,
)
from lazyattn_jax.models.config import NAMED_SHAPES, LlamaConfig
from lazyattn_jax.models.llama import Llama

GIB = 2**30
_ATTENTION = "mosaic_tpu"
_DTYPE = jnp.dtype(jnp.bfloat16)

_PAGE_SIZE = 64
# What an engine takes on a TPU unless told otherwise.
_OPTIONS = EngineConfig(page_size=_PAGE_SIZE, max_num_seqs=256, max_num_batched_tokens=4096)


@dataclass(frozen=True)
class Taken:
    """What a compiled step takes of a device: all in bytes.

    ``others`` are arguments beside weights and pool, ``results`` what is not written in place,
    ``vmem`` the most that a kernel takes of a core's memory.
    """

    name: str
    seconds: float
    weights: int = 0
    pool: int = 0
    others: int = 0
    temporaries: int = 0
    results: int = 0
    code: int = 0
    vmem: int = 0
    problem: str | None = None

    @property
    def total(self) -> int:
        """Everything in the device's memory while the step runs."""
        return self.weights + self.pool + self.others + self.temporaries + self.results + self.code


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "tpu-steps", help="whole steps compiled for a TPU: their memory", description=__doc__
    )
    parser.add_argument(
        "--aot", choices=list(TOPOLOGIES), required=True, help="the TPU, which need not be there"
    )
    parser.add_argument(
        "--model",
        nargs="+",
        choices=sorted(NAMED_SHAPES),
        default=["llama3-1b"],
        metavar="NAME",
        help=f"of {', '.join(sorted(NAMED_SHAPES))} (default: llama3-1b)",
    )
    parser.add_argument("--json", type=Path, help="also write what they take there, in bytes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Compiles, and prints a table.

    Raises:
      SystemExit: a step that does not compile or does not fit.
    """
    jax.config.update("jax_platforms", "cpu")
    console = Console()
    failed, models = False, {}
    for name in args.model:
        config = NAMED_SHAPES[name]
        try:
            limits = limits_for(args.aot, config)
        except ValueError as error:
            console.print(f"[red]{name}, {args.aot}: {escape(str(error))}[/red]")
            failed = True
            continue
        found = []
        for program in ("decode", "prefill", "choose"):
            with console.status(f"{name}, {program}"):
                found.append(measure(args.aot, config, limits, program))
        console.print(table_of(f"{name} on a {args.aot}", found, limits, HBM[args.aot]))
        for one in found:
            if one.problem is not None:
                console.print(f"[red]{one.name}: {escape(one.problem)}[/red]")
        failed |= any(one.problem or one.total > HBM[args.aot] for one in found)
        models[name] = {
            "pages": limits.num_pages,
            "steps": [asdict(one) | {"total": one.total} for one in found],
        }
    if args.json:
        compiled = {"generation": args.aot, "compiler": compiler(), "may_be_taken": HBM[args.aot]}
        record.write(args.json, compiled | {"models": models})
    if failed:
        raise SystemExit(1)


def limits_for(generation: str, config: LlamaConfig) -> Limits:
    """The sizes of an engine with default options on one device.

    Raises:
      ValueError: the weights leave no room.
    """
    left = HBM[generation] - _bytes(_model(config)[1])
    pool = int(left * POOL_SHARE)
    if pool < _PAGE_SIZE * bytes_per_token(config, _DTYPE):
        raise ValueError(f"the weights take {-left / GIB:.2f} GiB more than there are")
    return replace(_OPTIONS, kv_pool_bytes=pool).resolve_limits(config, _DTYPE)


def measure(generation: str, config: LlamaConfig, limits: Limits, kind: str) -> Taken:
    """Compiles one of an engine's largest programs for one device.

    Args:
      generation: of the device.
      config: of the model.
      limits: of the engine.
      kind: ``decode``, ``prefill``, or ``choose``: tokens for a whole batch, with full effort.
    """
    prefill = kind == "prefill"
    bucket = (limits.prefill_buckets if prefill else limits.decode_buckets)[-1]
    name = f"{kind} {bucket}"
    start = time.perf_counter()
    try:
        if kind == "choose":
            program = compile_choice(generation, config, limits)
        else:
            program = compile_step(generation, config, limits, prefill=prefill, bucket=bucket)
    except Exception as error:  # of any layer: it does not cost the other steps
        lines = str(error).splitlines() or [""]
        problem = f"{type(error).__name__}: {lines[0]}"
        return Taken(name, time.perf_counter() - start, problem=problem)
    seconds = time.perf_counter() - start
    memory: Any = program.memory_analysis()
    weights, pool = _bytes(_model(config)[1]), _bytes(_pool(config, limits))
    others = memory.argument_size_in_bytes
    if kind != "choose":  # which takes neither of these, and the seats
        others += _bytes(_seats(config, limits)) - weights - pool
    return Taken(
        name,
        seconds,
        weights,
        pool,
        others,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.generated_code_size_in_bytes,
        max((kernel.vmem for kernel in kernels_of(program)), default=0),
    )


def compile_step(
    generation: str, config: LlamaConfig, limits: Limits, *, prefill: bool, bucket: int
) -> jax.stages.Compiled:
    """A step of an engine, compiled for one device."""
    lists = work_lists(
        limits,
        _ATTENTION,
        group=config.num_heads // config.num_kv_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_cores=0,
    )
    rebuild, weights = _model(config)
    inputs = empty_inputs(limits, lists, config.head_dim, prefill=prefill, bucket=bucket)
    scale = config.head_dim**-0.5
    call = partial(step, rebuild, prefill=prefill, attention=_ATTENTION, scale=scale)
    args = (weights, _pool(config, limits), _seats(config, limits).token, inputs)
    return compile_for_tpu(generation, call, *args, donate=(1,))


def compile_choice(generation: str, config: LlamaConfig, limits: Limits) -> jax.stages.Compiled:
    """The choice of tokens for the largest batch, with full effort, compiled for one device."""
    rows = limits.decode_buckets[-1]
    logits = jax.ShapeDtypeStruct((rows, config.vocab_size), jnp.float32)
    usable = jax.ShapeDtypeStruct((rows,), bool)
    choices = make_choices(rows, (), limits.max_num_seqs, Effort.FULL)
    call = partial(choose, effort=Effort.FULL)
    seats = _seats(config, limits)
    return compile_for_tpu(generation, call, logits, usable, seats, choices, donate=(2,))


def _pool(config: LlamaConfig, limits: Limits) -> list[LayerKV]:
    fused = wants_fused_pages(_ATTENTION, config.head_dim)
    return jax.eval_shape(
        lambda: make_pool(config, limits.num_pages, limits.page_size, _DTYPE, fused=fused)
    )


def _seats(config: LlamaConfig, limits: Limits) -> Seats:
    return jax.eval_shape(lambda: make_seats(limits.max_num_seqs, config.vocab_size, 1))


def _model(config: LlamaConfig) -> tuple[Rebuild, list[Array]]:
    return take_apart(nnx.eval_shape(lambda: Llama(config, dtype=_DTYPE, rngs=nnx.Rngs(0))))


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def table_of(title: str, found: Iterable[Taken], limits: Limits, hbm: int) -> Table:
    """A row for each step."""
    table = Table(
        box=box.SIMPLE,
        title=f"{title}: GiB of memory, and MiB of VMEM",
        title_justify="left",
        caption=f"steps by rows; pool: {limits.num_pages} pages of {limits.page_size}; "
        f"{hbm / GIB:.2f} GiB may be taken",
        caption_justify="left",
    )
    table.add_column("step", no_wrap=True)
    for name in ("s", "weights", "pool", "other", "temp", "out", "sum", "fits", "VMEM"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        if one.problem is not None:
            table.add_row(one.name, f"{one.seconds:.0f}", *[""] * 6, "[red]no[/red]", "")
            continue
        parts = (one.weights, one.pool, one.others, one.temporaries, one.results + one.code)
        table.add_row(
            one.name,
            f"{one.seconds:.0f}",
            *(f"{part / GIB:.2f}" for part in (*parts, one.total)),
            "[green]yes[/green]" if one.total <= hbm else "[red]no[/red]",
            f"{one.vmem / 2**20:.1f}",
        )
    return table
