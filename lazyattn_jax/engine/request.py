"""What a request is made of: tokens, documents, and where each stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lazyattn_jax.cache.segments import document_key, page_key, root_key, seen_key


class RequestError(ValueError):
    """A request that cannot be served as it is; ``param`` names the field to change."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class DocumentPiece:
    """The tokens of one document in a prompt.

    ``name`` is what the user calls it. ``content_id`` names what is in it, wherever it came from.
    If ``dropped`` the prompt is as if it were not there, but for one thing: the leading text ends
    at the first document, dropped or not, so that the others are encoded as if all were there.
    """

    tokens: Sequence[int]
    name: str = ""
    content_id: str = ""
    dropped: bool = False


Prompt = Sequence[Sequence[int] | DocumentPiece]
"""A prompt in reading order: runs of token ids, and documents between them."""


MAX_GAP = 1_000_000
"""Positions that can be left out: as many as the longest contexts that models are made for."""

TEMPERATURES = 0.1, 10.0
"""The range of document temperatures."""


def as_text(prompt: Prompt) -> Prompt:
    """A prompt whose documents are text like any other."""
    kept = (p for p in prompt if not (isinstance(p, DocumentPiece) and p.dropped))
    return [p.tokens if isinstance(p, DocumentPiece) else p for p in kept]


@dataclass(frozen=True)
class DocumentContext:
    """What documents are encoded after, what is done about what they do not see, and which count.

    Attributes:
      prefix: they are encoded after the text before the first one, else after nothing.
      gap: positions left out between that prefix and the document, so that the document sees the
        prefix from afar, as most documents of a real prompt do.
      repair: so many of the first tokens of every document, rounded up to whole pages, are text of
        the request: computed after all that precedes them and not shared as a document (EPIC,
        arXiv 2410.15332). The rest is attended to as it was encoded, and stays one copy for all.
      temperature: scores of text against documents are divided by it (APE, arXiv 2502.05431).
      adapter: where they are encoded after nothing, and the model has an adapter for that, all of
        the request is computed with it.
      select: answer over so many of the documents, if there are more: over those that make the text
        after them likeliest (superposition prompting, arXiv 2404.06910). 0 answers over all.

    Raises:
      RequestError: a value out of range.
    """

    prefix: bool = True
    gap: int = 200
    repair: int = 0
    temperature: float = 1.0
    adapter: bool = True
    select: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.gap <= MAX_GAP:
            raise RequestError(
                "document_gap", f"document_gap is {self.gap}, must be 0 to {MAX_GAP}"
            )
        if self.repair < 0:
            raise RequestError(
                "document_repair", f"document_repair is {self.repair}, must be 0 or more"
            )
        if self.select < 0:
            raise RequestError(
                "document_select", f"document_select is {self.select}, must be 0 or more"
            )
        low, high = TEMPERATURES
        if not low <= self.temperature <= high:
            raise RequestError(
                "document_temperature",
                f"document_temperature is {self.temperature}, must be {low} to {high}",
            )


@dataclass(frozen=True)
class PlacedDocument:
    """A document in one request.

    ``start`` is where its token 0 stands in the request, ``encoded_at`` the position its keys are
    rotated at, ``insert_at`` the number of stream tokens that precede what is reused of it,
    ``after_prefix`` whether it was encoded after the leading text. Its first ``repaired`` tokens
    are in the stream, and none is reused if these are all.
    """

    key: bytes
    piece: DocumentPiece
    start: int
    encoded_at: int
    insert_at: int
    after_prefix: bool
    repaired: int = 0
    temperature: float = 1.0

    @property
    def reused(self) -> int:
        """Tokens that are attended to as they were encoded."""
        return len(self.piece.tokens) - self.repaired

    @property
    def seen_key(self) -> bytes:
        """Key of what text after it sees of its segment."""
        return seen_key(self.key, self.repaired, self.temperature)

    @property
    def delta(self) -> int:
        """How far on from where it was encoded the document stands."""
        return self.start - self.encoded_at


@dataclass(frozen=True)
class Layout:
    """A prompt laid out: leading text, documents, and the stream of all text after the first one.

    What is repaired of a document is in the stream too.
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
    def reused(self) -> tuple[PlacedDocument, ...]:
        """The documents that are not repaired from beginning to end."""
        return tuple(d for d in self.documents if d.reused)

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
        for document in self.reused:
            if at <= document.insert_at < end:
                content += [tokens[at : document.insert_at], document.seen_key]
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
      context: what documents are encoded after, and what of them is repaired.
      adapter: identifies the model with its adapter, if it has one: what has documents that are
        encoded alone is computed with it, and shares nothing with the rest, unless ``context`` says
        no.
      encode_only: the prompt is there to have its documents encoded, and nothing repaired: no text
        need follow them.

    Raises:
      RequestError: the prompt is empty or ends with a document.
    """
    first_document = next((i for i, p in enumerate(prompt) if isinstance(p, DocumentPiece)), None)
    with_adapter = first_document is not None and not context.prefix and context.adapter
    adapted = adapter is not None and with_adapter
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
            if piece.dropped:
                continue
            length = len(piece.tokens)
            pages = 0 if encode_only else -(-context.repair // page_size)
            repaired = min(pages * page_size, length)
            stream += piece.tokens[:repaired]
            positions += range(position, position + repaired)
            documents.append(
                PlacedDocument(
                    document_key(root, prefix, gap, piece.tokens),
                    piece,
                    position,
                    encoded_at,
                    len(stream),
                    prefix is not None,
                    repaired,
                    context.temperature,
                )
            )
            position += length
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
