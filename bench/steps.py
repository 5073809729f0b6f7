"""Single steps of an engine against what the memory could do at best.

``alone``: time to first token of one request whose documents are all cached, against the time to
read the weights once. ``decode``: a decode step of requests that share nothing, against the time to
read the weights and their KV once. ``host``: the host's own work for a step with many requests
running.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table

from lazyattn_jax.bench import record
from lazyattn_jax.bench.timing import read_ceiling
from lazyattn_jax.bench.workloads import Workload, token_maker
from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import DocumentPiece, Prompt
from lazyattn_jax.engine.runs import Request, State
from lazyattn_jax.llm import keep_compiled, load_for, start_engine
from lazyattn_jax.models.load import EMBEDDED
from lazyattn_jax.options import MODEL_HELP, add_engine_options, engine_config

NAMES = ("alone", "decode", "host")


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "steps", help="single steps against the memory's speed", description=__doc__
    )
    add = parser.add_argument
    add("--model", default=EMBEDDED, help=MODEL_HELP)
    add("--only", nargs="+", choices=NAMES, default=NAMES, help="default: all")
    add("--document-tokens", type=int, default=512, help="default: %(default)s")
    add("--alone-documents", type=int, default=20, help="default: %(default)s")
    add("--decode-requests", type=int, default=64, help="default: %(default)s")
    add("--decode-documents", type=int, default=10, help="a request; default: %(default)s")
    add(
        "--host-document-tokens",
        type=int,
        default=128,
        help="small ones, for a step to hold all requests (default: %(default)s)",
    )
    add("--host-requests", type=int, default=256, help="default: %(default)s")
    add("--host-pool", type=int, default=100, help="documents drawn from; default: %(default)s")
    add("--question-tokens", type=int, default=64, help="default: %(default)s")
    add("--steps", type=int, default=40, help="timed of each; default: %(default)s")
    add("--json", type=Path, help="also write the results there")
    add("--compilation-cache", metavar="DIR", help="keep compiled programs there (default: off)")
    add_engine_options(parser.add_argument_group("engine"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table, and writes JSON where asked.

    Raises:
      SystemExit: memory that does not suffice, or options that are out of range.
    """
    console = Console()
    try:
        if args.compilation_cache is not None:
            keep_compiled(args.compilation_cache)
        config = engine_config(args)
        loaded = load_for(config, args.model, args.adapter)
        weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(loaded.model)))
        ceiling = read_ceiling(1 << 32 if jax.default_backend() == "gpu" else 1 << 26)
        steps = Steps(start_engine(loaded, config), args, weights, ceiling)
        results = {name: getattr(steps, name)() for name in args.only}
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    console.print(table_of(results, ceiling, weights))
    if args.json:
        kept = {"read_ceiling": ceiling, "weight_bytes": weights, "results": results}
        record.write(args.json, kept)


class Steps:
    """Measures steps of one engine, whose pool is emptied before each measurement.

    Args:
      engine: idle.
      args: sizes.
      weight_bytes: of the model.
      ceiling: bytes a second that the memory can be read with.
    """

    def __init__(
        self, engine: Engine, args: argparse.Namespace, weight_bytes: int, ceiling: float
    ) -> None:
        self._engine = engine
        self._args = args
        self._weights = weight_bytes
        self._ceiling = ceiling

    def alone(self) -> dict[str, float]:
        """Time to first token of one request with cached documents in another order each time."""
        documents = self._args.alone_documents
        trials = self._prompts("permute", documents, count=12)
        times = []
        for prompt in trials:
            begin = time.perf_counter()
            request = self._engine.add(prompt, _params(2))
            while not request.num_generated:
                self._engine.step()
            times.append(time.perf_counter() - begin)
            self._finish([request])
        return self._result(statistics.median(times[2:]), self._weights)

    def decode(self) -> dict[str, float]:
        """A decode step of requests that share no document."""
        args = self._args
        count = args.decode_requests
        prompts = self._prompts("unique", args.decode_documents, count=count)
        seconds, _, requests = self._decode(prompts)
        tokens = sum(len(r.run.tokens) + _context_tokens(r) for r in requests)
        size = self._engine.page_bytes // self._engine.limits.page_size
        self._finish(requests)
        return self._result(seconds, self._weights + tokens * size) | {"kv_tokens": tokens}

    def host(self) -> dict[str, float]:
        """The host's work for a decode step of many requests."""
        args = self._args
        prompts = self._prompts(
            "zipf",
            args.decode_documents,
            count=args.host_requests,
            pool=args.host_pool,
            document_tokens=args.host_document_tokens,
        )
        seconds, host, requests = self._decode(prompts)
        self._finish(requests)
        return {"seconds": seconds, "host_seconds": host, "requests": len(requests)}

    def _decode(self, prompts: Sequence[Prompt]) -> tuple[float, float, list[Request]]:
        """Seconds of a decode step, and of the host's work for it."""
        engine, steps = self._engine, self._args.steps
        requests = [engine.add(p, _params(4 * steps + 4 * len(prompts))) for p in prompts]
        while not all(r.num_generated for r in requests):
            engine.step()
            if any(r.state is State.FINISHED for r in requests):
                raise ValueError(
                    f"{len(requests)} requests do not run at once; raise kv_pool_bytes (now "
                    f"{engine.limits.num_pages * engine.page_bytes:,}) or max_num_seqs (now "
                    f"{engine.limits.max_num_seqs})"
                )
        for _ in range(4):
            engine.step()
        times = []
        host = engine.stats.host_seconds
        for _ in range(steps):
            begin = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begin)
        return statistics.median(times), (engine.stats.host_seconds - host) / steps, requests

    def _prompts(self, name: str, documents: int, *, count: int, **sizes: int) -> list[Prompt]:
        self._engine.scheduler.index.clear()
        sizes = {"document_tokens": self._args.document_tokens} | sizes
        sizes["question_tokens"] = self._args.question_tokens
        workload = Workload(name, documents=documents, **sizes)  # type: ignore[arg-type]
        queries = workload.queries(token_maker(self._engine.loaded.config.vocab_size))
        prompts: list[Prompt] = []
        for query in (next(queries) for _ in range(count)):
            pieces = [DocumentPiece(tuple(d)) for d in query.documents]  # type: ignore[arg-type]
            prompts.append([query.system, *pieces, query.question])  # type: ignore[list-item]
        return prompts

    def _finish(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._engine.abort(request.id)
        while self._engine.has_work:
            self._engine.step()

    def _result(self, seconds: float, num_bytes: int) -> dict[str, float]:
        best = num_bytes / self._ceiling
        return {"seconds": seconds, "best_seconds": best, "to_best": seconds / best}


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def _context_tokens(request: Request) -> int:
    return sum(placement.num_tokens for placement in request.run.context)


def table_of(results: dict[str, dict[str, float]], ceiling: float, weights: int) -> Table:
    """What was measured, next to the least that reading takes."""
    table = Table(
        title=f"Steps (read ceiling {ceiling / 1e12:.2f} TB/s, weights {weights / 1e9:.2f} GB)",
        title_justify="left",
    )
    table.add_column("")
    for name in ("measured", "reading takes", "to that"):
        table.add_column(name, justify="right")
    labels = {"alone": "time to first token", "decode": "decode step", "host": "decode step"}
    for name, found in results.items():
        best = found.get("best_seconds")
        table.add_row(
            f"{name}: {labels[name]}",
            f"{1000 * found['seconds']:.2f} ms",
            "" if best is None else f"{1000 * best:.2f} ms",
            "" if best is None else f"{found['to_best']:.2f}",
        )
        if "host_seconds" in found:
            host = f"{1000 * found['host_seconds']:.2f} ms"
            table.add_row(f"host work of it, {found['requests']:.0f} requests", host, "", "")
    return table
