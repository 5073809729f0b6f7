"""Whether a prompt can be served at all: everything is checked when a request is made."""

from __future__ import annotations

import numpy as np

from lazyattn_jax.engine.limits import Limits
from lazyattn_jax.engine.request import DocumentPiece, Layout, Prompt, RequestError


def check_prompt(prompt: Prompt, vocab: int, max_documents: int) -> None:
    """Checks that all tokens are in the vocabulary, and that documents are not too many nor empty.

    Raises:
      RequestError: they are not.
    """
    documents = [p for p in prompt if isinstance(p, DocumentPiece)]
    if len(documents) > max_documents:
        raise RequestError(
            "documents",
            f"{len(documents)} documents, at most {max_documents} are allowed (max_documents)",
        )
    for i, document in enumerate(documents):
        if not document.tokens:
            raise RequestError("documents", f"document {document.name or i!r} is empty")
    for piece in prompt:
        tokens = np.asarray(piece.tokens if isinstance(piece, DocumentPiece) else piece)
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab):
            wrong = tokens[(tokens < 0) | (tokens >= vocab)][0]
            raise RequestError(
                "prompt", f"token id {wrong} is not in the vocabulary of {vocab} tokens"
            )


def fit(limits: Limits, layout: Layout, wanted: int | None, *, least: int) -> int:
    """Tokens that may be generated.

    Args:
      limits: of the engine.
      layout: of the prompt.
      wanted: tokens that are asked for; none for as many as fit.
      least: tokens that there must be room for.

    Raises:
      RequestError: the prompt or the tokens do not fit the context or the pool.
    """
    prompt = layout.num_tokens
    context_room = limits.max_model_len - prompt
    if context_room < least:
        raise RequestError(
            "prompt",
            f"the prompt with its documents has {prompt} tokens, at most "
            f"{limits.max_model_len - least} fit in the context of {limits.max_model_len} "
            f"(max_model_len) with {least} tokens of output",
        )
    if wanted is not None and wanted > context_room:
        raise RequestError(
            "max_tokens",
            f"max_tokens is {wanted}, the prompt of {prompt} tokens leaves {context_room} of "
            f"the context of {limits.max_model_len} (max_model_len)",
        )
    distinct = {d.key: d for d in layout.reused}.values()
    fixed = len(layout.leading_keys)
    fixed += sum(limits.pages_for(len(d.piece.tokens)) for d in distinct)
    fixed += limits.copied_pages(layout)
    # What is repaired is there twice, and must not wait for pages that are kept.
    pages = limits.num_pages - limits.max_kept_pages
    pool_room = (pages - fixed) * limits.page_size - len(layout.stream)
    if pool_room < (wanted or least):
        needed = fixed + limits.pages_for(len(layout.stream) + (wanted or least))
        raise RequestError(
            "prompt",
            f"the prompt of {prompt} tokens with {wanted or least} tokens of output takes "
            f"{needed} pages, the whole pool has {limits.num_pages} (kv_pool_bytes), of which "
            f"{limits.max_kept_pages} may be pinned",
        )
    return wanted or min(context_room, pool_room)
