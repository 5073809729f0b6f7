"""``python -m lazyattn_jax.finetune``: block fine-tuning of a model."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lazyattn_jax.finetune.batches import BatchShape, Source
from lazyattn_jax.finetune.checkpoints import Checkpoints
from lazyattn_jax.finetune.data import Questions, Recipe
from lazyattn_jax.finetune.export import FORMATS, export_adapter, export_model
from lazyattn_jax.finetune.report import Report, plot
from lazyattn_jax.finetune.train import Settings, Trainer
from lazyattn_jax.models.checkpoint import LoadedModel
from lazyattn_jax.models.load import EMBEDDED, load_model

_OPTIONS = "options.json"
_FREE = ("resume", "export", "output")  # may differ when training is resumed
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
_RATES = {True: 5e-4, False: 3e-5}  # peak learning rate of an adapter, of all weights


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lazyattn_jax.finetune",
        description="Trains a model to answer from documents that were encoded apart from each "
        "other: every sample under the full and under the block mask, loss on the answer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=EMBEDDED, help="as for the server")
    files: dict[str, Any] = {"type": Path, "metavar": "FILE", "nargs": "+"}
    add(
        "--data",
        required=True,
        help="JSON lines, plain or gzip: 'question', 'answers', and 'title' and 'text' of the "
        "passage that holds the answer, or 'documents'",
        **files,
    )
    add("--held-out", default=[], help="the same, to score the model on", **files)
    add("--held-out-limit", type=int, default=128, metavar="N", help="samples of those")
    add("--output", type=Path, required=True, metavar="DIR", help="folder of this run")
    add("--resume", action="store_true", help="go on from the last checkpoint in it")
    add(
        "--export",
        nargs="+",
        choices=FORMATS,
        default=[],
        help="also write the whole model as of the best checkpoint; an adapter is always written",
    )
    add("--dtype", choices=("auto", *_DTYPES), default="auto", help="auto: bfloat16 but on a CPU")
    _add_training(parser.add_argument_group("training"))
    _add_samples(parser.add_argument_group("samples"))
    return parser


def _add_training(group: argparse._ArgumentGroup) -> None:
    add, default = group.add_argument, Settings()
    add("--steps", type=int, default=default.steps, metavar="N", help="updates of the weights")
    add("--rank", type=int, default=default.rank, help="of the adapter; 0 trains all weights")
    add(
        "--learning-rate",
        type=float,
        metavar="RATE",
        help=f"its peak (default: {_RATES[True]} for an adapter, {_RATES[False]} for all weights)",
        default=argparse.SUPPRESS,
    )
    add("--schedule", choices=("cosine", "linear"), default=default.schedule, help="of its fall")
    add("--warmup", type=float, default=default.warmup, metavar="SHARE", help="of the steps")
    add("--weight-decay", type=float, default=default.weight_decay, help="of AdamW")
    add(
        "--block-share",
        type=float,
        default=default.block_share,
        metavar="SHARE",
        help="of the loss that is the block mask's, the rest is the full mask's",
    )
    add(
        "--distill",
        type=float,
        default=default.distill,
        metavar="WEIGHT",
        help="of KL(full mask || block mask) on the answers",
    )
    add("--eval-every", type=int, default=default.eval_every, metavar="STEPS", help="and save")
    add("--seed", type=int, default=default.seed, help="of samples and of a new adapter")


def _add_samples(group: argparse._ArgumentGroup) -> None:
    add, recipe, shape = group.add_argument, Recipe(), BatchShape()
    add(
        "--documents",
        type=int,
        nargs=2,
        default=list(recipe.documents),
        metavar=("LEAST", "MOST"),
        help="of a sample",
    )
    add("--untitled", type=float, default=recipe.untitled, metavar="SHARE", help="without titles")
    add(
        "--joined",
        type=float,
        default=recipe.joined,
        metavar="SHARE",
        help="with several passages a document",
    )
    add(
        "--cloze",
        type=float,
        default=recipe.cloze,
        metavar="SHARE",
        help="that ask to fill a gap in a sentence",
    )
    add("--system", default=recipe.system, metavar="TEXT", help="system message; may be empty")
    add("--ask", default=recipe.ask, metavar="TEXT", help="user's message, with {question} in it")
    add("--rows", type=int, default=shape.rows, metavar="N", help="computed at once")
    add("--parts", type=int, default=shape.parts, metavar="N", help="of a step, each that many")
    add("--length", type=int, default=shape.length, metavar="TOKENS", help="of a row")
    add("--targets", type=int, default=shape.targets, metavar="TOKENS", help="of answers in a row")


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, or goes on training, and exports; returns the exit status."""
    args = make_parser().parse_args(argv)
    if "learning_rate" not in args:
        args.learning_rate = _RATES[args.rank > 0]
    args.documents = tuple(args.documents)
    try:
        _run(args)
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    settings, recipe, shape = (_made(kind, args) for kind in (Settings, Recipe, BatchShape))
    dtype = args.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    options = json.loads(json.dumps(vars(args) | {"dtype": dtype}, default=str))
    _check_folder(args, options)
    loaded = load_model(args.model, dtype=jnp.dtype(jnp.float32))
    end = next(iter(loaded.config.eos_token_ids), loaded.tokenizer.eos_token_id)
    if end is None:
        raise ValueError(f"model {args.model!r} has no token that ends a text")

    def source(paths: list[Path], recipe: Recipe) -> Source:
        files = [Questions(path) for path in paths]
        return Source(files, loaded.tokenizer, recipe, shape, end=end, seed=args.seed)

    training, held_out = source(args.data, recipe), []
    next(training.epoch(0))  # an error now rather than in a folder that has been made
    if args.held_out:
        # Scored on questions of the file alone, in the form that they are asked in.
        plain = dataclasses.replace(recipe, untitled=0.0, joined=0.0, cloze=0.0)
        held_out = source(args.held_out, plain).some(args.held_out_limit)
    trainer = Trainer(loaded, settings, shape, jnp.dtype(_DTYPES[dtype]))
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / _OPTIONS).write_text(json.dumps(options, indent=2) + "\n", "utf-8")
    with contextlib.closing(Checkpoints(args.output / "checkpoints")) as checkpoints:
        with Report(args.output, settings.steps, checkpoints.last or 0) as report:
            trainer.run(training, held_out, checkpoints, report)
        if not plot(args.output):
            print("no plot: matplotlib is not installed (pip install lazyattn-jax[bench])")
        _export(args, trainer, checkpoints, loaded, jnp.dtype(_DTYPES[dtype]))


def _made(kind: type, args: argparse.Namespace) -> Any:
    return kind(**{f.name: getattr(args, f.name) for f in dataclasses.fields(kind)})


def _check_folder(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Checks that the folder can hold this run.

    Raises:
      ValueError: it has one that is not to be resumed, or one of other options, or a model.
    """
    for folder in args.export:
        if (args.output / folder).exists():
            raise ValueError(f"{args.output / folder} exists already; models are not overwritten")
    path = args.output / _OPTIONS
    if path.exists():
        if not args.resume:
            raise ValueError(f"{args.output} holds a run; go on with --resume or take another DIR")
        before = json.loads(path.read_text("utf-8"))
        for name, value in options.items():
            if name not in _FREE and before.get(name) != value:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is {value!r}, the run to resume has {before.get(name)!r}")
    elif args.resume:
        raise ValueError(f"{args.output} holds no run to resume")


def _export(
    args: argparse.Namespace,
    trainer: Trainer,
    checkpoints: Checkpoints,
    loaded: LoadedModel,
    dtype: jnp.dtype,
) -> None:
    best, last = checkpoints.best, checkpoints.last
    assert best is not None  # the last step has a checkpoint
    assert last is not None
    if args.rank:
        for name, step in (("best", best), ("last", last)):
            path = args.output / f"adapter-{name}.safetensors"
            notes = {"base_model": args.model, "step": str(step)}
            export_adapter(trainer.weights(checkpoints, step), loaded, path, notes)
            print(f"{path}: step {step}, {path.stat().st_size / 1e6:.1f} MB")
    for kind in args.export:
        weights = trainer.merged(trainer.weights(checkpoints, best))
        export_model(weights, loaded, args.output / kind, kind, dtype)
        print(f"{args.output / kind}: step {best}")


if __name__ == "__main__":
    sys.exit(main())
