"""How good answers over reused documents are: against full attention, on questions with answers.

Every question is asked over the same documents in every mode, with the same tokens in the same
order, so that modes differ only in what tokens attend to. All goes through the engine, batched.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from lazyattn_jax.bench import record
from lazyattn_jax.bench.answer_metrics import (
    Interval,
    Mark,
    bootstrap,
    substring_match,
    summarise,
    token_f1,
)
from lazyattn_jax.bench.quality_runs import (
    FULL,
    FULL_ADAPTER,
    Mode,
    answer,
    asks,
    cost,
    token_losses,
)
from lazyattn_jax.bench.question_sets import QuestionSet, question_sets, reordered
from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.request import RequestError
from lazyattn_jax.llm import keep_compiled, load_for, start_engine
from lazyattn_jax.models.load import EMBEDDED
from lazyattn_jax.options import MODEL_HELP, add_engine_options, engine_config
from lazyattn_jax.questions import read_json_lines


def add_command(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("quality", help="how many answers over reused documents are right")
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="JSON lines, plain or gzip: question, answers, and title and text (the passage that "
        "holds the answer) or documents; may be given more than once",
    )
    add(
        "--documents",
        type=int,
        action="append",
        metavar="N",
        help="documents a question; may be given more than once (default: 10)",
    )
    add(
        "--modes",
        type=parse_modes,
        default="full,prefix,none",
        help="full (full attention), prefix and none (what documents are encoded after), with "
        "options after colons, such as prefix:gap=600; an adapter is for none, but not for "
        "none:stock, and for full:adapter (default: %(default)s)",
    )
    add("--limit", type=int, metavar="M", help="questions of each file (default: all)")
    add(
        "--orders",
        type=int,
        default=1,
        metavar="K",
        help="ask over every question's documents in so many orders (default: %(default)s)",
    )
    add(
        "--perplexity",
        type=Path,
        metavar="FILE",
        help="also measure the perplexity of the texts in a file of JSON lines, each asked alone",
    )
    add(
        "--timed",
        type=int,
        default=5,
        metavar="M",
        help="questions asked one at a time to time the first token (default: %(default)s)",
    )
    add("--max-tokens", type=int, default=32, help="of an answer (default: %(default)s)")
    add("--seed", type=int, default=0, help="of documents and orders (default: %(default)s)")
    add("--model", default=EMBEDDED, help=MODEL_HELP)
    add("--compilation-cache", metavar="DIR", help="keep compiled programs there")
    add("--answers", type=Path, metavar="FILE", help="also write every answer as JSON lines")
    add("--output", type=Path, metavar="FILE", help="also write the results there as JSON")
    add_engine_options(parser.add_argument_group("engine"))
    parser.set_defaults(run=run)


def parse_modes(text: str) -> list[Mode]:
    """Reads modes with commas between them.

    Raises:
      argparse.ArgumentTypeError: one cannot be read, or is there twice.
    """
    names = text.split(",")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} has a mode twice")
    return [Mode.parse(name) for name in names]


def run(args: argparse.Namespace) -> None:
    """Asks, prints a table for each set of questions, and writes JSON where asked."""
    counts = args.documents or [10]
    try:
        if not args.data and args.perplexity is None:
            raise ValueError("there is nothing to measure: give --data or --perplexity")
        for name in ("limit", "orders", "timed", "max_tokens"):
            if (value := getattr(args, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}, must be at least 1")
        sets = [
            (path, count, question_sets(path, count, seed=args.seed, limit=args.limit))
            for path in args.data
            for count in counts
        ]
        texts = [] if args.perplexity is None else _texts(args.perplexity)
        _measure(_engine(args), sets, texts, args)
    except (ValueError, RequestError) as error:
        raise SystemExit(f"error: {error}") from None


def _measure(
    engine: Engine,
    sets: list[tuple[Path, int, list[QuestionSet]]],
    texts: list[str],
    args: argparse.Namespace,
) -> None:
    console = Console()
    results: dict[str, Any] = {"settings": _settings(args)}
    answers: list[dict[str, Any]] = []
    if texts:
        losses = token_losses(engine, texts)
        results["perplexity"] = perplexity(losses)
        mean, low, high = (f"{x:.2f}" for x in results["perplexity"])
        console.print(f"Perplexity of {len(texts)} texts: {mean} ({low} to {high})")
    for path, count, questions in sets:
        title = f"{path.name}, {len(questions)} questions, {count} documents"
        rows, some = _ask(engine, questions, title, args)
        here = {"data": path.name, "documents": count}
        results.setdefault("sets", []).append({**here, "modes": rows})
        answers += [here | a for a in some]
        console.print(_table(title, rows))
        # Every set is worth keeping, whatever happens to the next one.
        if args.output is not None:
            record.write(args.output, results)
        if args.answers is not None:
            lines = (json.dumps(a, ensure_ascii=False) + "\n" for a in answers)
            args.answers.write_text("".join(lines), encoding="utf-8")
    if args.output is not None:
        record.write(args.output, results)


def _ask(
    engine: Engine, questions: list[QuestionSet], title: str, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the table, and all answers."""
    orders = [reordered(questions, order, seed=args.seed) for order in range(args.orders)]
    asked = asks(engine.loaded.tokenizer, orders, args.modes)
    texts = answer(engine, asked, max_tokens=args.max_tokens, title=title)
    marks = []
    for ask, text in zip(asked, texts, strict=True):
        right = questions[ask.question].answers
        scores = substring_match(text, right), token_f1(text, right)
        marks.append(Mark(ask.question, ask.order, ask.mode.name, *scores))
    rows = summarise(marks, against=[FULL, FULL_ADAPTER])
    for row, mode in zip(rows, args.modes, strict=True):
        timed = [a.prompt for a in asked if a.mode is mode and a.order == 0][: args.timed]
        row.update(asdict(cost(engine, timed, mode)))
    answers = [asdict(mark) | {"text": text} for mark, text in zip(marks, texts, strict=True)]
    return rows, answers


def perplexity(losses: list[list[float]]) -> Interval:
    """``exp`` of the mean loss of a token; the interval is by resampling texts.

    Raises:
      ValueError: no text has two tokens.
    """
    sums = np.array([(sum(some), len(some)) for some in losses if some])
    if not len(sums):
        raise ValueError("no text has two tokens, so that there is no perplexity")
    total, count = sums.sum(0)
    # Each text's part of the mean over tokens.
    low, high = bootstrap((sums[:, 0] - sums[:, 1] * total / count) * len(sums) / count)[1:]
    return Interval(*(math.exp(total / count + x) for x in (0.0, low, high)))


def _texts(path: Path) -> list[str]:
    texts = [line.get("text") for _, line in read_json_lines(path)]
    found = list(dict.fromkeys(t for t in texts if isinstance(t, str) and t))
    if not found:
        raise ValueError(f"{path} has no texts")
    return found


def _engine(args: argparse.Namespace) -> Engine:
    if args.compilation_cache is not None:
        keep_compiled(args.compilation_cache)
    config = engine_config(args)
    loaded = load_for(config, args.model, args.adapter)
    if loaded.adapter_fingerprint is None and any(m.name == FULL_ADAPTER for m in args.modes):
        raise ValueError(
            f"mode {FULL_ADAPTER!r} wants an adapter, and there is none: give --adapter"
        )
    return start_engine(loaded, config)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    settings = {k: v for k, v in vars(args).items() if isinstance(v, int | str) and k != "command"}
    return settings | {"modes": [mode.name for mode in args.modes]}


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", caption=_CAPTION, caption_justify="left")
    table.box = box.SIMPLE_HEAD
    table.add_column("mode", overflow="fold")
    modes = [row["mode"] for row in rows]
    others = [name for name in (FULL, FULL_ADAPTER) if name in modes]
    orders = ["orders"] if rows[0]["orders"] > 1 else []
    to_others = [f"to {name}" for name in others]
    for name in ["match, %", *to_others, *orders, "F1, %", "tokens", "first token"]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        differences = [row["differences"].get(name, {}).get("match") for name in others]
        table.add_row(
            row["mode"],
            _shown(row["match"]),
            *map(_shown, differences),
            *(f"± {100 * row['order_deviation']:.2f}" for _ in orders),
            _shown(row["f1"]),
            f"{row['computed_tokens']:.0f}\n[dim]of {row['prompt_tokens']:.0f}[/dim]",
            f"{row['first_token_ms']:.0f} ms",
        )
    return table


_CAPTION = (
    "Below each mean its 95 % interval. Orders: standard deviation of match over orders of the "
    "documents. Tokens: of the prompt that are computed when the documents are in the pool, and "
    "the time to the first token then, of a request that is alone."
)


def _shown(interval: Interval | None) -> str:
    """A share as a percentage."""
    if interval is None:
        return ""
    mean, low, high = (f"{100 * x:.1f}" for x in interval)
    return f"{mean}\n[dim]{low}, {high}[/dim]"
