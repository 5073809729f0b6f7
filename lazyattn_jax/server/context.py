"""The fields of requests that say how documents are treated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from lazyattn_jax.engine.request import DocumentContext, RequestError


class ContextFields(BaseModel):
    """What a request has differently than the server. Null is the same as absent."""

    document_context: str | None = None
    document_gap: int | None = None
    document_repair: int | None = None
    document_temperature: float | None = None
    document_select: int | None = None

    def context(self, default: DocumentContext) -> DocumentContext:
        """How the request's documents are treated.

        Raises:
          RequestError: a value out of range.
        """
        kind = self.document_context
        if kind not in (None, "prefix", "none"):
            raise RequestError(
                "document_context", f"document_context is {kind!r}, must be 'prefix' or 'none'"
            )
        given: dict[str, Any] = {
            "prefix": None if kind is None else kind == "prefix",
            "gap": self.document_gap,
            "repair": self.document_repair,
            "temperature": self.document_temperature,
            "select": self.document_select,
        }
        return replace(default, **{k: v for k, v in given.items() if v is not None})
