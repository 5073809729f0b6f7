"""What a request is made of: tokens, documents, and where each stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lazyattn_jax.cache.segments import document_key, page_key, root_key


class RequestError(ValueError):
    """A request that cannot be served as it is; ``param`` names the field to change."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class DocumentPiece:
    """The tokens of one document in a prompt.

    ``name`` is what the user calls it. ``content_id`` names what is in it, wherever it came from.
    """

    tokens: tuple[int, ...]
    name: str = ""
    content_id: str = ""


Prompt = Sequence[Sequence[int] | DocumentPiece]
"""A prompt in reading order: runs of token ids, and documents between them."""


def as_text(prompt: Prompt) -> Prompt:
    """A prompt whose documents are text like any other."""
    return [p.tokens if isinstance(p, DocumentPiece) else p for p in prompt]


@dataclass(frozen=True)
class DocumentContext:
    """What documents are encoded after: nothing, or the text before the first one and a gap.

    ``gap`` positions are left out between that prefix and the document, so that the document sees
    the prefix from afar, as most documents of a real prompt do.
    """

    prefix: bool = True
    gap: int = 200


@dataclass(frozen=True)
class PlacedDocument:
    """A document in one request.

    ``start`` is where its token 0 stands in the request, ``encoded_at`` the position its keys are
    rotated at, ``insert_at`` the number of stream tokens that precede it, ``after_prefix`` whether
    it was encoded after the leading text.
    """

    key: bytes
    piece: DocumentPiece
    start: int
    encoded_at: int
    insert_at: int
    after_prefix: bool

    @property
    def delta(self) -> int:
        """How far on from where it was encoded the document stands."""
        return self.start - self.encoded_at


@dataclass(frozen=True)
class Layout:
    """A prompt laid out: leading text, documents, and the stream of all text after the first one.

    A prompt without documents is all stream. Positions run on without gaps in reading order.
    ``adapted`` says whether all of it is computed with the model's adapter.
    """

    root: bytes
    page_size: int
    leading: tuple[int, ...]
    leading_keys: tuple[bytes, ...]
    documents: tuple[PlacedDocument, ...]
    stream: tuple[int, ...]
    stream_positions: tuple[int, ...]
    num_tokens: int
    adapted: bool

    @property
    def prefix_key(self) -> bytes | None:
        """Key of the leading text, or none if there is none."""
        return self.leading_keys[-1] if self.leading_keys else None

    def stream_key(self, page: int, previous: bytes | None, tokens: Sequence[int]) -> bytes:
        """Key of one full page of the stream.

        Args:
          page: which page.
          previous: key of the page before; none for page 0.
          tokens: the stream so far: that of the prompt and what has been generated.
        """
        at, end = page * self.page_size, (page + 1) * self.page_size
        content: list[Sequence[int] | bytes] = []
        for document in self.documents:
            if at <= document.insert_at < end:
                content += [tokens[at : document.insert_at], document.key]
                at = document.insert_at
        content.append(tokens[at:end])
        return page_key(previous or self.prefix_key or self.root, content)


def lay_out(
    prompt: Prompt,
    *,
    page_size: int,
    fingerprint: bytes,
    salt: str,
    context: DocumentContext,
    adapter: bytes | None = None,
    encode_only: bool = False,
) -> Layout:
    """Finds every piece's place and key.

    Args:
      prompt: the pieces in reading order.
      page_size: tokens a page.
      fingerprint: identifies the model.
      salt: separates the segments of users who must not share.
      context: what documents are encoded after.
      adapter: identifies the model with its adapter, if it has one: what has documents that are
        encoded alone is computed with it, and shares nothing with the rest.
      encode_only: the prompt is there to have its documents encoded: no text need follow them.

    Raises:
      RequestError: the prompt is empty, ends with a document, or has an empty document.
    """
    first_document = next((i for i, p in enumerate(prompt) if isinstance(p, DocumentPiece)), None)
    adapted = adapter is not None and first_document is not None and not context.prefix
    root = root_key(adapter if adapter is not None and adapted else fingerprint, salt)
    leading = tuple(
        t
        for piece in prompt[: first_document or 0]
        for t in piece  # type: ignore[union-attr]
    )
    keys: list[bytes] = []
    for at in range(0, len(leading), page_size):
        keys.append(page_key(keys[-1] if keys else root, [leading[at : at + page_size]]))
    prefix = keys[-1] if keys and context.prefix else None
    gap = context.gap if prefix else 0
    encoded_at = len(leading) + gap if prefix else 0

    position = len(leading)
    documents: list[PlacedDocument] = []
    stream: list[int] = []
    positions: list[int] = []
    for piece in prompt[first_document or 0 :]:
        if isinstance(piece, DocumentPiece):
            if not piece.tokens:
                raise RequestError(
                    "documents", f"document {piece.name or len(documents)!r} is empty"
                )
            key = document_key(root, prefix, gap, piece.tokens)
            documents.append(
                PlacedDocument(key, piece, position, encoded_at, len(stream), prefix is not None)
            )
            position += len(piece.tokens)
        else:
            stream += piece
            positions += range(position, position + len(piece))
            position += len(piece)
    if encode_only and documents:
        position -= len(stream)
        stream, positions = [], []
    elif documents and documents[-1].insert_at == len(stream):
        raise RequestError("prompt", "the prompt ends with a document; text must follow it")
    elif not stream:
        raise RequestError("prompt", "the prompt is empty")
    return Layout(
        root,
        page_size,
        leading,
        tuple(keys),
        tuple(documents),
        tuple(stream),
        tuple(positions),
        position,
        adapted,
    )
