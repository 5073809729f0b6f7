"""From messages and documents to a prompt: token ids with documents as pieces of their own.

A document is always tokenised by itself, so the same document gives the same tokens, and the same
segment, wherever it stands. To find where a chat template puts documents, sentinels are rendered in
their place and the text is cut there.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import meta

from lazyattn_jax.engine.request import DocumentPiece, Prompt, RequestError
from lazyattn_jax.models.tokenizer import TemplateError, Tokenizer


@dataclass(frozen=True)
class Document:
    """A document: text, with a title and an id if it has them.

    Raises:
      RequestError: text, title or id are not strings, or there is no text.
    """

    text: str
    title: str = ""
    id: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "title", "id"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise RequestError(
                    "documents", f"a document's {name} is {_shown(value)}, must be a string"
                )
        if not self.text.strip():
            raise RequestError("documents", f"document {self.id or self.title!r} is empty")

    @classmethod
    def parse(cls, value: Any) -> Document:
        """Reads a document in any of the forms that clients send.

        Those are a string, ``{"title", "text"}`` (vLLM, transformers) and ``{"id", "data": {...}}``
        (Cohere).

        Raises:
          RequestError: something else.
        """
        if isinstance(value, Document):
            return value
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, Mapping):
            raise RequestError(
                "documents", f"a document is {_shown(value)}, must be a string or an object"
            )
        fields = {**value, **value["data"]} if isinstance(value.get("data"), Mapping) else value
        if isinstance(value.get("data"), str):
            fields = {**value, "text": value["data"]}
        text = next((fields[k] for k in _TEXT_KEYS if fields.get(k) is not None), None)
        if text is None:
            raise RequestError(
                "documents", f"a document with {sorted(value)} has no 'text'; see the API's forms"
            )
        name = fields.get("id", fields.get("doc_id"))
        return cls(text, fields.get("title") or "", "" if name is None else str(name))

    @property
    def content_id(self) -> str:
        """A name for the title and the text: equal ones have the same."""
        digest = hashlib.sha256()
        for part in (s.encode(errors="surrogatepass") for s in (self.title, self.text)):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return f"doc-{digest.hexdigest()[:32]}"

    @property
    def content(self) -> str:
        """The text that the model reads."""
        title = f"Title: {self.title}\n" if self.title else ""
        return f"{title}{self.text}\n\n"


_TEXT_KEYS = ("text", "contents", "content", "snippet", "chunk")


def parse_documents(values: Any) -> list[Document]:
    """Reads a list of documents.

    Raises:
      RequestError: not a list, or an entry is not a document.
    """
    if values is None:
        return []
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        raise RequestError("documents", f"documents is {_shown(values)}, must be a list")
    return [Document.parse(value) for value in values]


def text_prompt(
    tokenizer: Tokenizer,
    text: str | Sequence[int],
    documents: Sequence[Document] = (),
    *,
    salt: str = "",
) -> Prompt:
    """A plain prompt with documents before its text.

    The begin-of-text token, for models that want one, comes before the documents; once, also if
    the text begins with it, as a chat template that the client has rendered does.

    Documents' tokens are remembered, for prompts with the same ``salt``.
    """
    tokens = tokenizer.encode(text) if isinstance(text, str) else list(text)
    begin = (
        [tokenizer.bos_token_id]
        if tokenizer.add_bos and isinstance(text, str) and tokenizer.bos_token_id is not None
        else []
    )
    if begin and tokens[:1] == begin:
        tokens = tokens[1:]
    return [begin, *(_piece(tokenizer, d, d.content, salt) for d in documents), tokens]


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    documents: Sequence[Document] = (),
    *,
    salt: str = "",
) -> Prompt:
    """The prompt of a conversation that the model is to answer.

    Documents stand where a message's content has a document part. Those given beside the messages
    stand where the chat template renders documents, or else before the text of the first user
    message, right after the system text. Their tokens are remembered, for prompts with the same
    ``salt``.

    Raises:
      RequestError: messages that are malformed or that the template refuses.
    """
    sentinels = _Sentinels()
    plain = [_flatten(message, i, sentinels) for i, message in enumerate(_checked(messages))]
    try:
        text = _render_documents(tokenizer, plain, documents, sentinels)
        if text is None:
            marks = "".join(sentinels.add(d, d.content) for d in documents)
            at = next(
                (i for i, m in enumerate(plain) if m["role"] == "user" and documents),
                len(plain) - 1,
            )
            content = plain[at]["content"]
            before = plain[at]["role"] == "user"
            plain[at]["content"] = marks + content if before else content + marks
            text = tokenizer.render_chat(plain, add_generation_prompt=True)
    except TemplateError as error:
        raise RequestError("messages", str(error)) from error
    return sentinels.cut(tokenizer, text, salt)


class _Sentinels:
    """Strings that stand for documents in rendered text. A fresh nonce makes them unguessable."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self._entries: list[tuple[Document, str]] = []

    def add(self, document: Document, content: str) -> str:
        self._entries.append((document, content))
        return f"D{self._nonce}N{len(self._entries) - 1}E"

    def cut(self, tokenizer: Tokenizer, text: str, salt: str) -> Prompt:
        pieces: list[Sequence[int] | DocumentPiece] = []
        parts = re.split(f"D{self._nonce}N([0-9]+)E", text)
        for i, part in enumerate(parts):
            if i % 2:
                pieces.append(_piece(tokenizer, *self._entries[int(part)], salt))
            elif part:
                pieces.append(tokenizer.encode(part))
        return pieces


def _render_documents(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    documents: Sequence[Document],
    sentinels: _Sentinels,
) -> str | None:
    """The text, if the chat template renders documents itself; each becomes one sentinel.

    A document's piece reaches from the first to the last of its fields as the template puts them.
    None, if the template does not put each document in one place.
    """
    source = tokenizer.chat_template
    if not documents or source is None or not _mentions_documents(source):
        return None
    nonce = secrets.token_hex(8)
    fields = [
        {
            "doc_id": document.id or str(i),
            "id": document.id or str(i),
            "title": f"T{nonce}N{i}E" if document.title else "",
            "text": f"X{nonce}N{i}E",
        }
        for i, document in enumerate(documents)
    ]
    text = tokenizer.render_chat(messages, add_generation_prompt=True, documents=fields)
    contents = []
    for document, field in zip(documents, fields, strict=True):
        marks = [field[name] for name in ("title", "text") if field[name] and field[name] in text]
        if field["text"] not in marks:
            return None
        start = min(text.find(mark) for mark in marks)
        end = max(text.rfind(mark) + len(mark) for mark in marks)
        content = text[start:end].replace(field["text"], document.text)
        if field["title"]:
            content = content.replace(field["title"], document.title)
        contents.append(content)
        text = text[:start] + sentinels.add(document, content) + text[end:]
    # A mark that is left: the template changed a field, or put one document's inside another's.
    return None if any(nonce in part.lower() for part in (text, *contents)) else text


@functools.lru_cache(maxsize=8)
def _mentions_documents(source: str) -> bool:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return "documents" in meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateError:  # tags that only the real environment knows
        return "documents" in source


def _checked(messages: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages", f"messages is {_shown(messages)}, must be a non-empty list")
    return messages


def _flatten(message: Any, place: int, sentinels: _Sentinels) -> dict[str, Any]:
    """The message with its content as one string, documents in it replaced by sentinels."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            "messages", f"messages[{place}] is {_shown(message)}, must be an object with a 'role'"
        )
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, Sequence) and not isinstance(content, str):
        parts = (_part(part, f"messages[{place}].content[{i}]") for i, part in enumerate(content))
        content = "".join(
            sentinels.add(part, part.content) if isinstance(part, Document) else part
            for part in parts
        )
    elif not isinstance(content, str):
        raise RequestError(
            "messages",
            f"messages[{place}].content is {_shown(content)}, must be a string or a list of parts",
        )
    return {**message, "content": content}


def _part(part: Any, where: str) -> str | Document:
    if isinstance(part, Document | str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "document":
        if isinstance(part.get("document"), str | Mapping):
            return Document.parse(part["document"])
        source = part.get("source")
        if isinstance(source, Mapping):  # Anthropic's form
            if source.get("type") != "text":
                raise RequestError(
                    "messages",
                    f"{where}: a document source of type {source.get('type')!r}; only 'text' works",
                )
            return Document.parse({**part, "text": source.get("data")})
        return Document.parse(part)
    raise RequestError(
        "messages",
        f"{where} is {_shown(part)}; parts are {{'type': 'text', 'text': ...}} and "
        "{'type': 'document', 'text': ..., 'title': ...}",
    )


def _piece(tokenizer: Tokenizer, document: Document, content: str, salt: str) -> DocumentPiece:
    tokens = tokenizer.encode_document(content, salt)
    return DocumentPiece(tokens, document.id or document.title, document.content_id)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
