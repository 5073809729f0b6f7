"""The fields of requests that say how documents are treated."""

from __future__ import annotations

from pydantic import BaseModel

from lazyattn_jax.engine.request import DocumentContext, RequestError


class ContextFields(BaseModel):
    """What a request has differently than the server. Null is the same as absent."""

    document_context: str | None = None
    document_gap: int | None = None
    document_repair: int | None = None
    document_temperature: float | None = None

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
        return DocumentContext(
            default.prefix if kind is None else kind == "prefix",
            default.gap if self.document_gap is None else self.document_gap,
            default.repair if self.document_repair is None else self.document_repair,
            default.temperature if self.document_temperature is None else self.document_temperature,
        )
