"""Documents as the server knows them: those stored under an id, and those that requests bring.

All but ``resolve`` runs in the engine's thread, between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lazyattn_jax.cache.segments import Segment, root_key
from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.request import RequestError
from lazyattn_jax.engine.runs import Request
from lazyattn_jax.prompt import Document, parse_documents
from lazyattn_jax.server.async_engine import Observer

MAX_STORED = 10_000
MAX_STORED_BYTES = 256 << 20
_MAX_RECORDS = 2 * MAX_STORED  # of documents that are stored or were seen


@dataclass
class Record:
    """One document, by its content, and what became of it.

    ``keys`` are those of its segments: one for each text that it was encoded after. ``text_bytes``
    is the size of what is stored.
    """

    name: str
    tokens: int = 0
    hits: int = 0
    last_used: float | None = None
    keys: set[bytes] = field(default_factory=set)
    stored: Document | None = None
    created: float = 0.0
    text_bytes: int = 0


class Documents(Observer):
    """Records of documents, by salt and content."""

    def __init__(self) -> None:
        self._records: dict[tuple[bytes, str], Record] = {}

    # What requests do with documents --------------------------------------------------------------

    def added(self, request: Request) -> None:
        """Notes which segments a document has."""
        for placed in request.layout.documents:
            record = self._record(request.layout.root, placed.piece.content_id, placed.piece.name)
            record.tokens = len(placed.piece.tokens)
            record.keys.add(placed.key)

    def started(self, request: Request) -> None:
        """Counts hits of requests that ask something."""
        if not request.layout.stream:
            return
        now = time.time()
        cached = request.cached_document_tokens
        for placed, tokens in zip(request.layout.documents, cached, strict=True):
            record = self._record(request.layout.root, placed.piece.content_id, placed.piece.name)
            record.hits += tokens > 0
            record.last_used = now

    def _record(self, root: bytes, content_id: str, name: str = "") -> Record:
        if len(self._records) >= _MAX_RECORDS:
            self._forget_some()
        record = self._records.setdefault((root, content_id), Record(content_id))
        if name and name != content_id:
            record.name = name
        return record

    def _forget_some(self) -> None:
        """Drops the older half of what is not stored."""
        seen = [key for key, record in self._records.items() if record.stored is None]
        for key in seen[: len(seen) // 2 + 1]:
            del self._records[key]

    # Stored documents -----------------------------------------------------------------------------

    def resolve(self, values: Any, root: bytes) -> list[Document]:
        """Reads a list of documents, in which ``{"id": ...}`` alone stands for a stored one.

        May be called from any thread.

        Raises:
          RequestError: not a list of documents, or no such document is stored.
        """
        if isinstance(values, Sequence) and not isinstance(values, str):
            values = [self._stored(value, root) for value in values]
        return parse_documents(values)

    def _stored(self, value: Any, root: bytes) -> Any:
        if not (isinstance(value, Mapping) and set(value) == {"id"}):
            return value
        name = value["id"]
        record = self._records.get((root, name)) if isinstance(name, str) else None
        if record is None or record.stored is None:
            raise RequestError(
                "documents", f"no document is stored under id {name!r}; see POST /v1/documents"
            )
        return record.stored

    def check_room(self, documents: Sequence[Document], root: bytes) -> None:
        """Sees whether documents can be stored.

        Raises:
          RequestError: there are too many already, or they are too large.
        """
        stored = [r for r in self._records.values() if r.stored is not None]
        new = {d.content_id: d for d in documents}
        for content_id in list(new):
            record = self._records.get((root, content_id))
            if record is not None and record.stored is not None:
                del new[content_id]
        size = sum(r.text_bytes for r in stored) + sum(
            len(d.content.encode()) for d in new.values()
        )
        if len(stored) + len(new) > MAX_STORED or size > MAX_STORED_BYTES:
            raise RequestError(
                "documents",
                f"{len(stored)} documents are stored, with {len(new)} more they would have "
                f"{size} bytes; at most {MAX_STORED} with {MAX_STORED_BYTES} bytes can be stored: "
                "DELETE some",
            )

    def store(self, documents: Sequence[Document], root: bytes) -> None:
        """Stores documents under the ids of their contents."""
        for document in documents:
            record = self._record(root, document.content_id, document.id or document.title)
            if record.stored is None:
                named = Document(document.text, document.title, document.content_id)
                record.stored, record.created = named, time.time()
                record.text_bytes = len(document.content.encode())

    def delete(self, engine: Engine, content_id: str, root: bytes) -> bool:
        """Forgets a document, and evicts its segments unless they are in use. False: no such."""
        record = self._records.get((root, content_id))
        if record is None or record.stored is None:
            return False
        for key in record.keys:
            engine.scheduler.index.let_go(key)
            engine.scheduler.index.discard(key)
        del self._records[root, content_id]
        return True

    def cards(self, engine: Engine, root: bytes) -> dict[str, dict[str, Any]]:
        """What there is to say of the stored documents of one salt, by id."""
        segments = _segments(engine)
        return {
            content_id: _card(engine, content_id, record, segments)
            for (of, content_id), record in self._records.items()
            if of == root and record.stored is not None
        }

    # The pool -------------------------------------------------------------------------------------

    def pool(self, engine: Engine, root: bytes) -> dict[str, Any]:
        """What is in the pool; documents only of one salt, and who uses them now."""
        scheduler, index = engine.scheduler, engine.scheduler.index
        segments = _segments(engine)
        documents: list[dict[str, Any]] = []
        for (of, content_id), record in self._records.items():
            resident = [segments[key] for key in record.keys if key in segments]
            if of != root or not resident:
                continue
            users = [
                r.id
                for r in scheduler.active
                if any(d.key in record.keys for d in r.layout.documents)
            ]
            documents.append(
                {
                    "id": content_id,
                    "name": record.name,
                    "tokens": record.tokens,
                    "pages": sum(len(s.pages) for s in resident),
                    "pinned": any(index.is_kept(s.key) for s in resident),
                    "users": users,
                    "hits": record.hits,
                    "last_used_at": _seconds(record.last_used),
                }
            )
        total, free = engine.limits.num_pages, index.num_free
        shown = sum(d["pages"] for d in documents)
        of_documents = sum(len(s.pages) for s in segments.values() if s.is_document)
        return {
            "pages": {
                "total": total,
                "free": free,
                "documents": shown,
                "other_documents": of_documents - shown,
                "text": index.num_cached - of_documents,
                "private": total - free - index.num_cached,
            },
            "page_bytes": engine.page_bytes,
            "documents": documents,
            "running": len(scheduler.active),
            "waiting": engine.num_waiting,
        }


def salt_root(engine: Engine, salt: str | None) -> bytes:
    """The key that all segments of one salt descend from."""
    return root_key(engine.loaded.document_fingerprint, salt or "")


def _segments(engine: Engine) -> dict[bytes, Segment]:
    return {segment.key: segment for segment in engine.scheduler.index.segments()}


def _card(
    engine: Engine, content_id: str, record: Record, segments: Mapping[bytes, Segment]
) -> dict[str, Any]:
    index = engine.scheduler.index
    pages = sum(len(segments[key].pages) for key in record.keys if key in segments)
    assert record.stored is not None
    return {
        "id": content_id,
        "object": "document",
        "created_at": _seconds(record.created),
        "title": record.stored.title,
        "bytes": record.text_bytes,
        "tokens": record.tokens,
        "kv_bytes": pages * engine.page_bytes,
        "pinned": any(index.is_kept(key) for key in record.keys),
        "hits": record.hits,
        "last_used_at": _seconds(record.last_used),
    }


def _seconds(moment: float | None) -> int | None:
    return None if moment is None else int(moment)
