"""How documents are treated where a request says it, and where it does not."""

from __future__ import annotations

import pytest

from lazyattn_jax.engine.request import DocumentContext
from lazyattn_jax.server.context import ContextFields

DEFAULT = DocumentContext(False, 100, 16, 0.9, adapter=False)


@pytest.mark.parametrize(
    ("given", "context"),
    [
        ({}, DEFAULT),
        ({"document_gap": None}, DEFAULT),
        ({"document_gap": 0}, DocumentContext(False, 0, 16, 0.9, adapter=False)),
        ({"document_context": "prefix"}, DocumentContext(True, 100, 16, 0.9, adapter=False)),
        ({"document_repair": 0}, DocumentContext(False, 100, 0, 0.9, adapter=False)),
        ({"document_temperature": 2}, DocumentContext(False, 100, 16, 2.0, adapter=False)),
        ({"document_select": 2}, DocumentContext(False, 100, 16, 0.9, adapter=False, select=2)),
    ],
)
def test_a_request_changes_what_it_names(given: dict[str, object], context: DocumentContext):
    assert ContextFields(**given).context(DEFAULT) == context
