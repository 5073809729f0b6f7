"""``python -m lazyattn_jax.bench``: one subcommand per benchmark."""

from __future__ import annotations

import argparse
import sys

from lazyattn_jax.bench import (
    compare,
    eviction,
    figures,
    kernels,
    latency,
    quality,
    reuse,
    scale,
    serve,
    soak,
    steps,
    tpu_steps,
)


def main() -> int:
    """Runs the benchmark that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m lazyattn_jax.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    reuse.add_command(commands)
    kernels.add_command(commands)
    tpu_steps.add_command(commands)
    eviction.add_command(commands)
    latency.add_command(commands)
    serve.add_command(commands)
    compare.add_command(commands)
    steps.add_command(commands)
    figures.add_command(commands)
    scale.add_command(commands)
    quality.add_command(commands)
    soak.add_command(commands)
    args = parser.parse_args()
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
