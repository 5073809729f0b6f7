"""Runs of tokens being computed: what scheduler, plan and engine pass to each other."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from lazyattn_jax.cache.segments import Segment
from lazyattn_jax.engine.request import Layout, SamplingParams


@dataclass(frozen=True)
class Placement:
    """A finished segment (or leading text) as one run sees it.

    Its tokens are seen, from ``delta`` back, by every token of the run from ``insert_at`` on. Its
    last page says which tokens these are: no other document or leading text ends with that page.
    """

    pages: tuple[int, ...]
    num_tokens: int
    delta: int = 0
    insert_at: int = 0


class TokenRun:
    """Tokens whose KV goes to consecutive slots of ``pages``, each seeing those before it.

    Only pages in ``private`` are ever written; the others were found in the index or have been
    published. ``computed`` counts the tokens whose KV is in the pool. ``pages`` holds C integers,
    so that a plan can take those of a whole batch at once.
    """

    def __init__(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.positions = list(positions)
        self.pages = array("i")
        self.private: set[int] = set()
        self.computed = 0
        self.context: tuple[Placement, ...] = ()

    @property
    def remaining(self) -> int:
        """Tokens still to compute."""
        return len(self.tokens) - self.computed

    def append(self, token: int) -> None:
        """Adds a token at the next position."""
        self.tokens.append(token)
        self.positions.append(self.positions[-1] + 1)

    def start_with(self, shared: Sequence[Segment], new_pages: Sequence[int]) -> None:
        """Places the run on found pages, which count as computed, and on new private ones."""
        self.pages = array("i", chain(*(segment.pages for segment in shared), new_pages))
        self.private = set(new_pages)
        self.computed = sum(segment.num_tokens for segment in shared)


class EncodeJob:
    """A document, or leading text, on its way into the index for everyone who waits for it.

    Args:
      key: what it will be found under (for leading text: the key of its last page).
      run: its tokens.
      page_keys: for leading text the keys of all its pages; empty for a document.
      prefix_keys: the leading text that must be in the index before a document can be encoded.
    """

    def __init__(
        self,
        key: bytes,
        run: TokenRun,
        *,
        page_keys: Sequence[bytes] = (),
        prefix_keys: Sequence[bytes] = (),
    ) -> None:
        self.key = key
        self.run = run
        self.page_keys = page_keys
        self.prefix_keys = prefix_keys
        self.pinned: list[Segment] = []
        self.waiters: list[Request] = []


class State(Enum):
    """Where a request is."""

    WAITING = "waiting"  # holds nothing
    ENCODING = "encoding"  # admitted; its leading text or documents are being computed
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Request:
    """One prompt on its way to an output. The scheduler owns its state."""

    def __init__(
        self,
        request_id: str,
        layout: Layout,
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
    ) -> None:
        self.id = request_id
        self.layout = layout
        self.params = params
        self.max_tokens = max_tokens
        self.seed = seed
        self.state = State.WAITING
        self.num_generated = 0
        self.num_preemptions = 0
        self.arrived_at = time.monotonic()
        self.first_token_at: float | None = None
        # Set on first admission: what of the prompt did not have to be computed for this request.
        self.cached_tokens: int | None = None
        self.cached_document_tokens: list[int] = [0] * len(layout.documents)
        self.run = TokenRun(layout.stream, layout.stream_positions)
        self.stream_keys: list[bytes] = []
        self.pending: list[EncodeJob] = []
        self.leading_pins: list[Segment] = []
        self.document_pins: list[Segment] = []
        self.stream_pins: list[Segment] = []

    @property
    def prompt_tokens(self) -> int:
        """Prompt length, documents included."""
        return self.layout.num_tokens

    @property
    def generated(self) -> list[int]:
        """Generated token ids."""
        return self.run.tokens[len(self.layout.stream) :]

    def pins(self) -> list[Segment]:
        """All pins held, in the order to give them back: what others share least comes first."""
        return self.stream_pins[::-1] + self.document_pins[::-1] + self.leading_pins[::-1]

    def reset(self) -> None:
        """Forgets what was computed; tokens stay, so a preempted request resumes where it was."""
        self.run = TokenRun(self.run.tokens, self.run.positions)
        self.stream_keys = []
        self.pending, self.leading_pins, self.document_pins, self.stream_pins = [], [], [], []


@dataclass(frozen=True)
class Chunk:
    """Some consecutive tokens of a run, computed in one step."""

    run: TokenRun
    start: int
    count: int
    owner: EncodeJob | Request

    @property
    def samples(self) -> bool:
        """Whether a token is sampled after this chunk."""
        return isinstance(self.owner, Request) and self.start + self.count == len(self.run.tokens)
