"""Mixed traffic over a small pool for some minutes, and what must hold all the while.

A server of its own is started, with invariants checked after every step, and with a pool an eighth
of the documents' KV. Clients ask about documents that follow Zipf's law, stream, read slowly,
leave, give deadlines, load and pin documents, and send nonsense (``soak_traffic``). It fails, with
status 1, if a request gets anything but what it should get, if a greedy answer is another one than
to the same question asked alone, if a page, a pin or a request is left over, if a step was
compiled, if the server's resident memory grows, or if the server does not end well when it is told
to.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from lazyattn_jax.bench import record
from lazyattn_jax.bench.soak_traffic import Corpus, Traffic
from lazyattn_jax.models.load import EMBEDDED

MAX_LEN = 640
_PAGE = 16
_START_SECONDS = 600
_QUIET_SECONDS = 60  # for the server to find out about clients that left
_GROWTH = 1.05  # of resident memory, from the second quarter of the run to the last


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("soak", help="mixed traffic for minutes; nothing may go wrong")
    parser.add_argument("--model", default=EMBEDDED, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=10, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=12, help="default: %(default)s")
    parser.add_argument(
        "--questions", type=int, default=24, help="asked alone first; default: %(default)s"
    )
    parser.add_argument(
        "--document-words", type=int, default=70, help="on average; default: %(default)s"
    )
    parser.add_argument(
        "--pool-bytes",
        type=int,
        default=45 << 20,
        help="default: %(default)s, 1,024 tokens of SmolLM2-135M in float32",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="also write the results there as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Runs, prints what happened, and exits with status 1 if anything was wrong."""
    results = asyncio.run(_soak(args))
    Console().print(_table(results))
    for problem in results["problems"][:20]:
        Console().print(f"[red]wrong:[/red] {problem}", highlight=False)
    if args.output:
        settings = {k: v for k, v in vars(args).items() if isinstance(v, int | float | str)}
        record.write(args.output, {"settings": settings, "results": results})
    if results["problems"]:
        sys.exit(1)


async def _soak(args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    async with _server(args) as (process, http, log):
        corpus = await Corpus.fill(http, rng, args.document_words, MAX_LEN)
        traffic = Traffic(http, corpus, rng)
        await traffic.ask_alone(args.questions)
        seconds, begin = 60 * args.minutes, time.monotonic()
        clients = [
            asyncio.create_task(traffic.client(begin + seconds)) for _ in range(args.clients)
        ]
        memory = []
        while any(not client.done() for client in clients):
            memory.append(_resident_bytes(process.pid))
            await asyncio.sleep(min(1, seconds / 20))
        await asyncio.gather(*clients)
        problems = traffic.problems + await _leftovers(http, traffic) + _growth(memory)
        counts = await _counters(http)
        process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(process.wait, 60)
        text = log.read_text("utf-8")
        if status != 0 or "Traceback" in text:
            problems.append(f"the server ended with status {status}; its log ends {text[-600:]!r}")
    return {
        "seconds": round(time.monotonic() - begin, 1),
        "documents": len(corpus.documents),
        "working_set": round(corpus.tokens / corpus.pool_tokens, 2),
        "requests": traffic.counts,
        "greedy_answers_compared": traffic.compared,
        "preemptions": counts["num_preemptions_total"],
        "evictions": counts["evictions_total"],
        "document_hit_rate": round(
            counts["document_hit_tokens_total"] / counts["document_query_tokens_total"], 3
        ),
        "resident_mib": [round(x / 2**20) for x in _quarters(memory)],
        "problems": problems,
    }


@contextlib.asynccontextmanager
async def _server(
    args: argparse.Namespace,
) -> AsyncIterator[tuple[subprocess.Popen[bytes], httpx.AsyncClient, Path]]:
    """A server that is ready, a client of it, and the file that its log goes to."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "lazyattn_jax.serve",
        f"--model={args.model}",
        f"--port={port}",
    ]
    command += [f"--kv-pool-bytes={args.pool_bytes}", f"--page-size={_PAGE}"]
    command += [f"--max-model-len={MAX_LEN}", "--max-num-seqs=8", "--max-num-batched-tokens=256"]
    command += ["--max-documents=8", "--check-invariants", "--log-level=warning"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        limits = httpx.Limits(max_connections=None)
        url, timeout = f"http://127.0.0.1:{port}", httpx.Timeout(120)
        try:
            async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as http:
                await _ready(process, http, log)
                yield process, http, log
        finally:
            process.kill()
            process.wait()


async def _ready(process: subprocess.Popen[bytes], http: httpx.AsyncClient, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {log.read_text('utf-8')[-600:]}")
        with contextlib.suppress(httpx.TransportError):
            if (await http.get("/health")).status_code == 200:
                return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the server was not ready within {_START_SECONDS} seconds")


async def _counters(http: httpx.AsyncClient) -> dict[str, float]:
    """The metrics without labels, by their names without the prefix."""
    text = (await http.get("/metrics")).text
    return {name: float(value) for name, value in re.findall(r"^lazyattn:(\w+) (\S+)$", text, re.M)}


async def _leftovers(http: httpx.AsyncClient, traffic: Traffic) -> list[str]:
    """What has not been given back once nothing is asked any more."""
    end, pool = time.monotonic() + _QUIET_SECONDS, {}
    while time.monotonic() < end:
        pool = (await http.get("/v1/pool")).json()
        if not (pool["running"] or pool["waiting"]):
            break
        await asyncio.sleep(0.1)
    problems = [
        f"{pool[name]} requests are {name}" for name in ("running", "waiting") if pool[name]
    ]
    if private := pool["pages"]["private"]:
        problems.append(f"{private} pages belong to nobody")
    for salt in traffic.salts:
        stored = (await http.get("/v1/documents", params={"cache_salt": salt})).json()["data"]
        if stored:
            problems.append(f"{len(stored)} documents are stored that were deleted")
    counts = await _counters(http)
    for name in ("kv_cache_usage_perc", "kv_pinned_bytes", "recompiles_total"):
        if counts[name]:
            problems.append(f"{name} is {counts[name]} at the end, must be 0")
    if (await http.get("/health")).status_code != 200:
        problems.append("the server is not healthy any more")
    return problems


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _quarters(memory: list[int]) -> list[float]:
    """Medians of the quarters of a run."""
    size = max(1, len(memory) // 4)
    return [statistics.median(memory[i * size : (i + 1) * size]) for i in range(4)]


def _growth(memory: list[int]) -> list[str]:
    _, second, _, last = _quarters(memory)
    if last > second * _GROWTH:
        sizes = f"{second / 2**20:.0f} to {last / 2**20:.0f} MiB"
        return [f"resident memory grew from {sizes} between the second and the last quarter"]
    return []


def _table(results: dict[str, Any]) -> Table:
    table = Table(title="Soak", title_justify="left", show_header=False)
    for name, value in results.items():
        if name == "requests":
            value = ", ".join(f"{count} {kind}" for kind, count in sorted(value.items()))
        elif name == "problems":
            value = len(value)
        table.add_row(name.replace("_", " "), str(value))
    return table
