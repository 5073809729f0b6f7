"""How the KV of earlier requests is reused: ours, and what it is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Reuse:
    """What a way of reusing KV comes to.

    Attributes:
      shared: requests find the segments that others have computed.
      independent: documents are segments of their own, encoded apart from what precedes them in a
        request; else they are text like any other, and everything sees all that precedes it.
      copied: a request's documents are turned to their place and copied into pages of its own.
    """

    shared: bool = True
    independent: bool = True
    copied: bool = False


MODES = MappingProxyType(
    {
        "lazy": Reuse(),
        "block": Reuse(copied=True),
        "prefix": Reuse(independent=False),
        "none": Reuse(shared=False),
    }
)
"""``lazy`` attends to documents where they are, ``block`` copies them (Block-Attention, arXiv
2409.15355), ``prefix`` reuses equal beginnings of prompts, ``none`` computes everything anew."""
