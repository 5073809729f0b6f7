"""Compiling for a TPU without one, with the real compiler: libtpu against a described topology.

Needs libtpu, but no TPU: ``pip install 'lazyattn-jax[ahead]'``. jax then runs on the CPU
(``jax_platforms``). It proves that a program compiles, what it takes of the chip's memories and how
its instructions are scheduled, not that it is right or fast.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from lazyattn_jax.kernels.mosaic_tpu.schedule import Part, parse

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
"""The smallest topology of each generation; programs are compiled for one device of it."""

HBM = {
    gen: int(gib * 2**30)
    for gen, gib in {"v4": 15.25, "v5e": 15.75, "v5p": 95.73, "v6e": 31.24, "tpu7x": 94.74}.items()
}
"""Bytes of memory that a program may take of one device of each, as libtpu says in its refusals."""

_DELAY_SLOTS = {"v4": 1, "tpu7x": 6}
"""Bundles after a branch that run in any case, as schedules show; 4 in all others."""

_DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={}"
_PASS = "final_bundles"

# Without these libtpu asks the network which machine this is, and allows one process only.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Kernel(NamedTuple):
    """A Pallas kernel of a compiled program, and the bytes that it takes of a core's memory."""

    name: str
    vmem: int


def is_installed() -> bool:
    """Whether the compiler is there."""
    return importlib.util.find_spec("libtpu") is not None


def compiler() -> str:
    """The compiler and its version."""
    return f"libtpu {importlib.metadata.version('libtpu')}"


def abstract_device(generation: str) -> AbstractDevice:
    """What jax asks about a device of a generation, for ``jax.sharding.use_abstract_mesh``."""
    device = _device(generation)
    return AbstractDevice(
        device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu"
    )


def compile_for_tpu(
    generation: str,
    function: Callable[..., Any],
    *args: Any,
    donate: int | tuple[int, ...] = (),
) -> jax.stages.Compiled:
    """Compiles ``function`` for one device of a generation.

    Args:
      generation: one of ``TOPOLOGIES``.
      function: what to compile, jitted or not.
      args: arrays, or shapes, like its arguments.
      donate: arguments whose memory the results may take.

    Raises:
      RuntimeError: libtpu is not installed.
    """
    sharding = SingleDeviceSharding(_device(generation))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    mesh = AbstractMesh((), (), abstract_device=abstract_device(generation))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function, donate_argnums=donate).trace(*shapes)
        return traced.lower(lowering_platforms=("tpu",)).compile()


@contextmanager
def schedules_kept() -> Iterator[Path]:
    """A folder where libtpu writes the schedules of all that is compiled meanwhile.

    libtpu looks for the folder when it is first used, so nothing may have been compiled before in
    the process, and this may be used once.
    """
    name = "LIBTPU_INIT_ARGS"
    before = os.environ.get(name, "")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[name] = f"{before} {_DUMP.format(folder, f'.*{_PASS}')}".strip()
        try:
            yield Path(folder)
        finally:
            os.environ[name] = before


def take_schedule(folder: Path, generation: str, kernel: str) -> Part:
    """Reads the schedule of the kernel that was just compiled, and empties the folder.

    Args:
      folder: of ``schedules_kept``.
      generation: what was compiled for.
      kernel: name of the kernel, one in the program.

    Raises:
      RuntimeError: no such schedule, or several.
    """
    pattern = re.compile(rf"-{re.escape(kernel)}[.\d]*-\d+-{_PASS}\.txt$")
    files = list(folder.iterdir())
    found = [file for file in files if pattern.search(file.name)]
    if len(found) != 1:
        raise RuntimeError(
            f"libtpu wrote {len(found)} schedules of {kernel}, expected 1; they are written if "
            "nothing was compiled in the process before they were asked for"
        )
    part = parse(found[0].read_text(), _DELAY_SLOTS.get(generation, 4))
    for file in files:
        file.unlink()
    return part


def kernels_of(compiled: jax.stages.Compiled) -> list[Kernel]:
    """The Pallas kernels of a program.

    Raises:
      RuntimeError: the compiler does not say what one of them takes.
    """
    found = []
    for line in (compiled.as_text() or "").splitlines():
        if 'custom_call_target="tpu_custom_call"' not in line:
            continue
        name = re.match(r"\s*(?:ROOT )?%([\w-]+)", line)
        used = re.search(r'"used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"', line)
        if name is None or used is None:
            raise RuntimeError(f"cannot read what a kernel takes: {line[:200]}")
        found.append(Kernel(name[1], int(used[1])))
    return found


def _device(generation: str) -> Any:
    if not is_installed():
        raise RuntimeError("no libtpu; install lazyattn-jax[ahead] to compile for a TPU")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    name = TOPOLOGIES[generation]
    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
