"""What reuse brings to one request: time to first token cold and warm, and the speed of decoding.

Every trial has documents of its own. They are asked about once (cold: they have to be encoded) and
again in another order with another question (warm: all are in the pool). Decoding over documents is
compared with decoding over the same number of tokens of plain text.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from lazyattn_jax.bench import record
from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import DocumentPiece, Prompt
from lazyattn_jax.llm import LLM
from lazyattn_jax.models.load import EMBEDDED

_SYSTEM_TOKENS = 30


@dataclass(frozen=True)
class Timing:
    """Seconds to the first token, and per token after it."""

    first: float
    each: float


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("reuse", help="cold and warm time to first token, decode speed")
    parser.add_argument("--model", default=EMBEDDED, help="default: %(default)s")
    parser.add_argument("--documents", type=int, default=10, help="a prompt; default: %(default)s")
    parser.add_argument("--document-tokens", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--question-tokens", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--trials", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="also write the results there as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table, and writes JSON where asked."""
    engine = LLM(args.model).engine
    rng = random.Random(0)
    timings: dict[str, list[Timing]] = {"cold": [], "warm": [], "plain": []}
    _time(engine, _plain(rng, engine, args), args.output_tokens)  # first use of everything
    for _ in track(range(args.trials), description="Measuring", transient=True):
        system = _tokens(rng, engine, _SYSTEM_TOKENS)
        documents = [
            DocumentPiece(_tokens(rng, engine, args.document_tokens)) for _ in range(args.documents)
        ]
        for name in ("cold", "warm"):
            rng.shuffle(documents)
            question = _tokens(rng, engine, args.question_tokens)
            prompt: Prompt = [system, *documents, question]
            timings[name].append(_time(engine, prompt, args.output_tokens))
        timings["plain"].append(_time(engine, _plain(rng, engine, args), args.output_tokens))
    results = summarise(timings)
    Console().print(_table(timings, results))
    if args.output:
        settings = {
            k: v for k, v in vars(args).items() if isinstance(v, int | str) and k != "command"
        }
        record.write(args.output, {"settings": settings, "results": results})


def summarise(timings: dict[str, list[Timing]]) -> dict[str, float]:
    """Medians in milliseconds, and the ratios that matter, each the median over trials."""
    results = {}
    for name, trials in timings.items():
        results[f"{name}_first_token_ms"] = 1000 * statistics.median(t.first for t in trials)
        results[f"{name}_token_ms"] = 1000 * statistics.median(t.each for t in trials)
    pairs = list(zip(timings["warm"], timings["cold"], timings["plain"], strict=True))
    results["warm_to_cold"] = statistics.median(w.first / c.first for w, c, _ in pairs)
    results["documents_to_plain"] = statistics.median(w.each / p.each for w, _, p in pairs)
    return results


def _time(engine: Engine, prompt: Prompt, output_tokens: int) -> Timing:
    request = engine.add(
        prompt, SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    )
    while engine.has_work:
        engine.step()
    end = time.monotonic()
    assert request.first_token_at is not None
    first = request.first_token_at
    return Timing(first - request.arrived_at, (end - first) / (output_tokens - 1))


def _plain(rng: random.Random, engine: Engine, args: argparse.Namespace) -> Prompt:
    total = _SYSTEM_TOKENS + args.documents * args.document_tokens + args.question_tokens
    return [_tokens(rng, engine, total)]


def _tokens(rng: random.Random, engine: Engine, count: int) -> tuple[int, ...]:
    vocab = engine.loaded.config.vocab_size
    return tuple(rng.randrange(vocab // 2, vocab) for _ in range(count))


def _table(timings: dict[str, list[Timing]], results: dict[str, float]) -> Table:
    table = Table(
        title="Reuse (medians)",
        title_justify="left",
        caption=f"first token, warm to cold: {results['warm_to_cold']:.3f}     "
        f"token, documents to plain text: {results['documents_to_plain']:.3f}",
        caption_justify="left",
    )
    table.add_column("")
    table.add_column("time to first token", justify="right")
    table.add_column("time per token after it", justify="right")
    labels = {
        "cold": "documents, none in the pool",
        "warm": "documents, all in the pool, in another order",
        "plain": "as many tokens of plain text, none in the pool",
    }
    for name in timings:
        table.add_row(
            labels[name],
            f"{results[f'{name}_first_token_ms']:.0f} ms",
            f"{results[f'{name}_token_ms']:.1f} ms",
        )
    return table
