"""Compiling for an H200 without one: XLA's deviceless compilation against a described card.

Needs the CUDA plugin and ``ptxas``, but no driver: ``pip install 'lazyattn-jax[ahead]'``. jax then
runs on the CPU (``jax_platforms``). It proves that a kernel compiles and what it takes of a core,
not that it is right or fast.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

# The public figures of the card, as XLA's xla/backends/gpu/target_config/specs/h200.txtpb has them.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
runtime_version { major: 13 minor: 0 patch: 0 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


class Usage(NamedTuple):
    """What ``ptxas`` says that one kernel takes: registers a thread, and bytes of local memory."""

    kernel: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int


def compile_for_h200(
    function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compiles ``function`` for arguments like ``args`` (arrays or shapes); returns the result.

    The memory of the arguments ``donate`` may be reused.

    Raises:
      RuntimeError: the plugin that compiles is not installed.
    """
    for module in ("jax_plugins.xla_cuda13", "nvidia.cu13"):
        if not _is_installed(module):
            raise RuntimeError(f"no {module}; install lazyattn-jax[ahead] to compile for an H200")
    topology = topologies.get_topology_desc(platform="cuda", target_config=_H200, topology="1x1x1")
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function, donate_argnums=donate).lower(*shapes).compile()


def usage_on_h200(function: Callable[..., Any], *args: Any) -> list[Usage]:
    """Compiles ``function`` as above; returns what each of its Mosaic GPU kernels takes.

    The order is that in which they were compiled, which need not be that of their calls. Not for
    use by several threads at once: ``ptxas`` reports on the standard output of the process, which
    is turned aside meanwhile.

    Raises:
      RuntimeError: as above, or ``ptxas`` did not report on every kernel.
    """
    with _asked_of_ptxas(), _turned_aside() as output:
        compiled = compile_for_h200(function, *args)
        _flush()
        output.seek(0)
        found = _usages(output.read().decode(errors="replace"))
    kernels = len(re.findall(r'custom_call_target="mosaic_gpu\w*"', compiled.as_text() or ""))
    if len(found) != kernels:
        raise RuntimeError(
            f"ptxas reported on {len(found)} kernels of {kernels}; a program out of jax's cache is "
            "not compiled again: unset jax_compilation_cache_dir"
        )
    return found


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@contextlib.contextmanager
def _asked_of_ptxas() -> Iterator[None]:
    """Has ``ptxas`` report: Mosaic GPU reads this variable whenever it compiles a kernel."""
    name = "MOSAIC_GPU_DUMP_PTXAS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _turned_aside() -> Iterator[IO[bytes]]:
    """Everything that the process writes to its output meanwhile; written out after an error."""
    with tempfile.TemporaryFile() as output, contextlib.ExitStack() as undo:
        _flush()
        for descriptor in (1, 2):
            kept = os.dup(descriptor)
            undo.callback(os.close, kept)
            undo.callback(os.dup2, kept, descriptor)
            os.dup2(output.fileno(), descriptor)
        try:
            yield output
        except BaseException:
            _flush()
            undo.close()
            output.seek(0)
            os.write(2, output.read())
            raise
        _flush()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _usages(report: str) -> list[Usage]:
    found = []
    for block in report.split("Compiling entry function")[1:]:
        numbers = [
            re.search(pattern, block)
            for pattern in (
                r"Used (\d+) registers",
                r"(\d+) bytes spill stores",
                r"(\d+) bytes spill loads",
                r"(\d+) bytes stack frame",
            )
        ]
        name = re.match(r" '(\w+)'", block)
        if name is None or None in numbers:
            raise RuntimeError(f"cannot read ptxas's report: {block}")
        found.append(Usage(name[1], *(int(n[1]) for n in numbers if n)))
    return found
