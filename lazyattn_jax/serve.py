"""``python -m lazyattn_jax.serve``: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import uvicorn
from flax import nnx
from rich.console import Console
from rich.table import Table

from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.reuse import MODES
from lazyattn_jax.llm import keep_compiled, load_for, start_engine
from lazyattn_jax.models.load import EMBEDDED
from lazyattn_jax.options import MODEL_HELP, UNITS, add_engine_options, engine_config, parse_size
from lazyattn_jax.server.app import MIB, ServerConfig, build_app
from lazyattn_jax.server.async_engine import MAX_WAITING, AsyncEngine
from lazyattn_jax.server.logs import set_up_logging

_GRACE_SECONDS = 5  # for running requests to finish once the server is told to stop
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that they close first


def _count_of_requests(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, at least 1")
    return int(text)


def parse_key(text: str) -> str:
    """An API key, or the one that ``@FILE`` names the file of.

    Raises:
      argparse.ArgumentTypeError: there is none, or it cannot be sent in a header.
    """
    key = text
    if text.startswith("@"):
        try:
            key = Path(text[1:]).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(f"cannot read {text[1:]!r}: {error}") from None
    if not re.fullmatch(r"[!-~]+", key):
        raise argparse.ArgumentTypeError("a key must be printable ASCII without spaces")
    return key


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lazyattn_jax.serve",
        description="Serve a model over OpenAI's HTTP interface, with the KV of every document "
        "computed once and shared by all requests.",
    )
    add = parser.add_argument
    add("--model", default=EMBEDDED, help=MODEL_HELP)
    add("--served-model-name", metavar="NAME", help="what clients call it (default: as --model)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add(
        "--port",
        type=int,
        default=8000,
        help="port to listen on; 0 takes a free one (default: %(default)s)",
    )
    add(
        "--max-body-bytes",
        type=parse_size,
        default=32 * MIB,
        metavar="SIZE",
        help="largest request body (default: 32MiB)",
    )
    add(
        "--max-waiting",
        type=_count_of_requests,
        default=MAX_WAITING,
        metavar="N",
        help="requests that may wait to be computed; more are told to try again later "
        "(default: %(default)s)",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what to log to stderr (default: %(default)s)",
    )
    add(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="lines for people, or a JSON object a line (default: %(default)s)",
    )
    add(
        "--api-key",
        action="append",
        type=parse_key,
        metavar="KEY",
        help="refuse requests without this key; @FILE takes it from a file; may be given "
        "more than once (default: none is needed)",
    )
    add(
        "--compilation-cache",
        metavar="DIR",
        help="keep compiled programs there, for quicker starts (default: off)",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--reuse",
        choices=tuple(MODES),
        default=EngineConfig.reuse,
        help="lazy attends to documents where they are; block copies them, turned, for each "
        "request; prefix reuses equal beginnings of prompts, with full attention; none computes "
        "everything anew (default: %(default)s)",
    )
    add_engine_options(engine)
    return parser


class Server(uvicorn.Server):
    """A server that loads the engine while it listens already."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, name: str, url: str) -> None:
        super().__init__(config)
        self._engine = engine
        self._name = name
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen, and to load."""
        await super().startup(sockets)
        self._watch = asyncio.create_task(self._watch_loading())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets running requests finish for a while, then ends them with an error."""
        self._watch.cancel()
        asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._engine.request_stop)
        await super().shutdown(sockets)

    async def _watch_loading(self) -> None:
        await self._engine.loaded()
        if self._engine.engine is None:
            self.should_exit = True
        else:
            Console().print(_summary(self._engine.engine, self._name, self._url))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until it is told to stop; returns the exit status."""
    args = make_parser().parse_args(argv)
    set_up_logging(args.log_level, args.log_format)
    if args.compilation_cache is not None:
        keep_compiled(args.compilation_cache)
    # Before and after uvicorn handles signals itself, which it passes on in the end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit)
    try:
        config = engine_config(args)
        listener = _listen(args.host, args.port)
    except ValueError as error:
        return _fail(error)
    engine = AsyncEngine(lambda: _load(args.model, args.adapter, config), args.max_waiting)
    name = args.served_model_name or args.model
    keys = tuple(args.api_key or ())
    app = build_app(engine, ServerConfig(name, args.model, args.max_body_bytes, keys))
    server = Server(_uvicorn_config(app), engine, name, _url(listener))
    with contextlib.suppress(SystemExit):  # from the signal that uvicorn passes on
        server.run(sockets=[listener])
    if engine.load_error is not None:
        return _fail(engine.load_error)
    if engine.running:
        # Loading cannot be interrupted, and an interpreter that ends under it may crash.
        sys.stdout.flush()
        os._exit(0)
    return 0


def _load(model: str, adapter: str, config: EngineConfig) -> Engine:
    with Console().status(f"Loading {model}"):
        loaded = load_for(config, model, adapter)
    engine = start_engine(loaded, config)
    # Tracing and compiling leave some hundred thousand objects that stay. Every full collection
    # would look at them all, and hold up all requests for as long.
    gc.collect()
    gc.freeze()
    return engine


def _uvicorn_config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_GRACE_SECONDS + 2,
    )


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket.

    Raises:
      ValueError: the address cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"cannot listen on {host} port {port}: {reason}; choose another --host or --port"
        ) from None


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _summary(engine: Engine, name: str, url: str) -> Table:
    """What has been started, as a table."""
    limits, config = engine.limits, engine.config
    leaves = jax.tree.leaves(nnx.state(engine.loaded.model))
    device = jax.devices()[0]
    rows = {
        "model": name,
        "parameters": f"{_count(sum(leaf.size for leaf in leaves))}, {leaves[0].dtype}, "
        f"{_bytes(sum(leaf.nbytes for leaf in leaves))}",
        "device": f"{device.device_kind} ({device.platform})",
        "KV pool": f"{_bytes(limits.num_pages * engine.page_bytes)}, {limits.num_pages} pages of "
        f"{limits.page_size}, {limits.num_pages * limits.page_size} tokens",
        "max_model_len": str(limits.max_model_len),
        "prefill": f"{', '.join(map(str, limits.prefill_buckets))} tokens a step",
        "decode": f"{', '.join(map(str, limits.decode_buckets))} requests a step",
        "attention": config.attention,
        "reuse": config.reuse,
        "documents": _documents(engine),
        "adapter": "for requests with documents"
        if engine.loaded.adapter_fingerprint is not None
        else "none",
        "listening on": f"[bold]{url}/v1[/bold]",
    }
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows.items():
        table.add_row(*row)
    return table


def _documents(engine: Engine) -> str:
    context = engine.context
    if not engine.config.reuse_mode.independent:
        return "text like any other"
    text = (
        f"encoded after the leading text, gap {context.gap}" if context.prefix else "encoded alone"
    )
    if context.repair:
        text += f", the first {context.repair} tokens computed in each request"
    if context.temperature != 1:
        text += f", temperature {context.temperature}"
    return text


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        size = UNITS[unit[:2].lower()]
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"


def _exit(*_: object) -> NoReturn:
    raise SystemExit(0)


def _fail(error: Exception) -> int:
    """Says on one line why there is no server."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    print(f"error: {kind}{' '.join(str(error).split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
