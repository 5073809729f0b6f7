"""Options of an engine on a command line."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from typing import get_args

from lazyattn_jax.cache.eviction import POLICIES
from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.kernels.api import Implementation

MODEL_HELP = (
    "'smollm2-135m', a GGUF file, a Hugging Face or Orbax folder, a hub name like 'owner/model', "
    "or 'dummy:<size>' for random weights (default: %(default)s)"
)
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str) -> int:
    """Bytes of a size such as ``1GiB``, ``512MiB``, ``2e9`` or ``1048576``.

    Raises:
      argparse.ArgumentTypeError: something else.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e[0-9]{1,2})?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in UNITS or float(match[1]) * UNITS[match[2]] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 512MiB, 1GiB, 2e9 or 1048576")
    return int(float(match[1]) * UNITS[match[2]])


def add_engine_options(group: argparse._ArgumentGroup) -> None:
    """Adds ``--adapter``, and an option for every field of ``EngineConfig`` but ``reuse``."""
    defaults = EngineConfig()
    add = group.add_argument
    add(
        "--adapter",
        default="auto",
        metavar="FILE",
        help="low-rank adapter for requests with documents, as lazyattn_jax.finetune writes it, or "
        "'none' (default: the one that is shipped for the model, if there is one)",
    )
    add(
        "--kv-pool-bytes",
        type=parse_size,
        metavar="SIZE",
        help="size of the KV pool, e.g. 512MiB or 2e9 (default: 1GiB on a CPU, else 90%% of the "
        "memory that the weights leave)",
    )
    add(
        "--host-kv-bytes",
        type=parse_size,
        metavar="SIZE",
        default=defaults.host_kv_bytes,
        help="memory of the host for documents that the pool has no room for: they come back from "
        "there instead of being computed again (default: none)",
    )
    add("--page-size", type=int, metavar="TOKENS", help="a power of two (default: 16; on a TPU 64)")
    add(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="prompt and output together (default: what the model was made for, or what fits in "
        "the pool)",
    )
    add(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="requests computed at the same time (default: 16 on a CPU, else 256)",
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        metavar="TOKENS",
        help="tokens of one prefill step (default: 512 on a CPU, else 4096)",
    )
    for kind, unit, last in (
        ("prefill", "TOKENS", "--max-num-batched-tokens"),
        ("decode", "N", "--max-num-seqs"),
    ):
        add(
            f"--{kind}-buckets",
            type=int,
            nargs="+",
            default=(),
            metavar=unit,
            help=f"sizes that {kind} steps are padded to, rising to {last}; all are compiled "
            "before the first request (default: a few)",
        )
    add(
        "--max-documents",
        type=int,
        metavar="N",
        default=defaults.max_documents,
        help="documents of one request (default: %(default)s)",
    )
    add(
        "--document-context",
        choices=("auto", "prefix", "none", "full"),
        default=defaults.document_context,
        help="encode documents after the request's leading text, or alone, as block-fine-tuned "
        "models want it, or (reuse none) after all that precedes them; auto is alone with an "
        "adapter, else after the leading text (default: %(default)s)",
    )
    add(
        "--document-gap",
        type=int,
        metavar="POSITIONS",
        default=defaults.document_gap,
        help="positions left out between that text and a document (default: %(default)s)",
    )
    add(
        "--document-repair",
        type=int,
        metavar="TOKENS",
        default=defaults.document_repair,
        help="first tokens of every document, rounded up to whole pages, that each request "
        "computes itself, after all that precedes them (default: %(default)s)",
    )
    add(
        "--document-temperature",
        type=float,
        metavar="T",
        default=defaults.document_temperature,
        help="scores of text against documents are divided by it: below 1 text looks more sharply "
        "at documents (default: %(default)s)",
    )
    add(
        "--document-select",
        type=int,
        metavar="N",
        default=defaults.document_select,
        help="answer over so many of a request's documents, those that make the text after them "
        "likeliest; 0 is over all (default: %(default)s)",
    )
    add(
        "--eviction",
        choices=tuple(POLICIES),
        default=defaults.eviction,
        help="which documents and texts go first when the pool is full: lfu and gdsf weigh how "
        "often they were used and what they cost, lfu also before they went last; lru goes by the "
        "last use (default: %(default)s)",
    )
    add(
        "--max-overtaken",
        type=int,
        metavar="N",
        default=defaults.max_overtaken,
        help="so many requests may be computed before one that came earlier, if fewer of their "
        "documents have to be encoded (default: %(default)s, first come, first served)",
    )
    add(
        "--share-reads",
        action=argparse.BooleanOptionalAction,
        default=defaults.share_reads,
        help="read a document once a decode step for all requests that hold it; without it for "
        "measuring what that brings (default: on)",
    )
    add(
        "--attention",
        choices=get_args(Implementation),
        default=defaults.attention,
        help="implementation of the attention (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default=defaults.dtype,
        help="of weights, activations and KV; auto is float32 on a CPU, else bfloat16 "
        "(default: %(default)s)",
    )
    add(
        "--check-invariants",
        action="store_true",
        help="check all pages and pins after every step; slow (default: off)",
    )


def engine_config(args: argparse.Namespace, **options: object) -> EngineConfig:
    """The configuration that a command line asks for, but for some ``options``.

    Raises:
      ValueError: an option is out of range.
    """
    given = {f.name: getattr(args, f.name) for f in fields(EngineConfig) if f.name in args}
    return EngineConfig(**(given | options))
