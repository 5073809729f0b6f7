"""Runs of tokens being computed: what scheduler, plan and engine pass to each other."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from lazyattn_jax.cache.segments import Segment
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import Layout

if TYPE_CHECKING:
    from lazyattn_jax.engine.selection import Selection

PENDING = -1
"""Stands for a token that is not known yet."""


@dataclass(frozen=True)
class Placement:
    """Finished leading text or a document, maybe without its first pages, as one run sees it.

    Its tokens are seen, from ``delta`` back, by every token of the run from ``insert_at`` on, with
    scores divided by ``temperature``.
    """

    pages: tuple[int, ...]
    num_tokens: int
    delta: int = 0
    insert_at: int = 0
    temperature: float = 1.0
    is_leading: bool = False

    @classmethod
    def of_leading(cls, segments: Sequence[Segment]) -> Placement:
        """Leading text, which everything behind it sees where it is."""
        pages = tuple(page for s in segments for page in s.pages)
        return cls(pages, sum(s.num_tokens for s in segments), is_leading=True)

    @property
    def mark(self) -> int:
        """The page that says which tokens these are.

        Leading texts can begin alike, but no other one ends with that page; documents can end
        alike, if they are one document with more or less of it repaired, but do not begin so.
        """
        return self.pages[-1 if self.is_leading else 0]


@dataclass(frozen=True)
class PageCopy:
    """Pages of a document that are copied for one request, with the keys turned ``delta`` on."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    delta: int


class TokenRun:
    """Tokens whose KV goes to consecutive slots of ``pages``, each seeing those before it.

    Only pages in ``private`` are ever written; the others were found in the index or have been
    published. ``computed`` counts the tokens whose KV is in the pool, or will be when the steps
    that have been started are done. The last ``pending`` tokens are not known yet: a step that has
    been started chooses them. ``pages`` holds C integers, so that a plan can take those of a whole
    batch at once. ``context_items`` and ``context_turns`` are the work items and turns of the
    context. ``adapted`` says whether the tokens are computed with the model's adapter. ``planned``
    is what the planner keeps of the context.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        pending: int = 0,
        *,
        adapted: bool = False,
    ) -> None:
        self.adapted = adapted
        self.tokens = list(tokens)
        self.positions = list(positions)
        self.pending = pending
        self.pages = array("i")
        self.private: set[int] = set()
        self.computed = 0
        self.context: tuple[Placement, ...] = ()
        self.context_items = 0
        self.context_turns = 0
        self.planned: Any = None

    @property
    def remaining(self) -> int:
        """Tokens still to compute."""
        return len(self.tokens) - self.computed

    @property
    def num_known(self) -> int:
        """Tokens that are known."""
        return len(self.tokens) - self.pending

    def append_pending(self) -> None:
        """Adds a token at the next position that a step has yet to choose."""
        self.tokens.append(PENDING)
        self.positions.append(self.positions[-1] + 1)
        self.pending += 1

    def fill(self, token: int) -> None:
        """Says what the first pending token is."""
        self.tokens[-self.pending] = token
        self.pending -= 1

    def start_with(self, shared: Sequence[Segment], new_pages: Sequence[int]) -> None:
        """Places the run on found pages, which count as computed, and on new private ones."""
        self.pages = array("i", chain(*(segment.pages for segment in shared), new_pages))
        self.private = set(new_pages)
        self.computed = sum(segment.num_tokens for segment in shared)

    def see(self, context: tuple[Placement, ...], items_for: Callable[[int], int]) -> None:
        """Says what is seen beside the run; ``items_for`` counts the work items of pages."""
        self.context = context
        self.context_items = sum(items_for(len(p.pages)) for p in context)
        self.context_turns = sum(p.delta != 0 or p.temperature != 1 for p in context)


class EncodeJob:
    """A document, or leading text, on its way into the index for everyone who waits for it.

    Args:
      key: what it will be found under (for leading text: the key of its last page).
      run: its tokens.
      page_keys: for leading text the keys of all its pages; empty for a document.
      prefix_keys: the leading text that must be in the index before a document can be encoded.
      stored: a document's KV in the host's memory, to be brought back instead of computed.
    """

    def __init__(
        self,
        key: bytes,
        run: TokenRun,
        *,
        page_keys: Sequence[bytes] = (),
        prefix_keys: Sequence[bytes] = (),
        stored: Any = None,
    ) -> None:
        self.key = key
        self.run = run
        self.page_keys = page_keys
        self.prefix_keys = prefix_keys
        self.stored = stored
        self.pinned: list[Segment] = []
        self.waiters: list[Request] = []

    def wait(self, request: Request) -> None:
        """A request cannot go on before this is done."""
        self.waiters.append(request)
        request.pending.append(self)


class State(Enum):
    """Where a request is."""

    SELECTING = "selecting"  # not in line yet: its documents are being chosen
    WAITING = "waiting"  # holds nothing
    ENCODING = "encoding"  # admitted; its leading text or documents are being computed
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's log-probability, and the most likely tokens in its place with theirs."""

    token: int
    logprob: float
    best: tuple[tuple[int, float], ...]

    def first(self, count: int | None) -> TokenLogprobs:
        """With only so many of the most likely tokens."""
        return replace(self, best=self.best[:count])


class Request:
    """One prompt on its way to an output. The scheduler owns its state.

    Args:
      request_id: names it.
      layout: its prompt.
      params: how tokens are chosen.
      max_tokens: tokens to generate at most.
      seed: of its random numbers.
      stop_tokens: tokens that end its output.
      timeout: seconds from now on in which it has to be finished.
    """

    def __init__(
        self,
        request_id: str,
        layout: Layout,
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        stop_tokens: frozenset[int] = frozenset(),
        timeout: float = math.inf,
    ) -> None:
        self.id = request_id
        self.params = params
        self.seed = seed
        self.stop_tokens = stop_tokens
        self.state = State.WAITING
        self.seat = -1  # on the device, while it is admitted
        # Other answers to the same prompt: they wait until its text is there to be shared.
        self.followers: list[Request] = []
        self.leader: Request | None = None
        self.num_generated = 0
        self.num_preemptions = 0
        self.arrived_at = time.monotonic()
        self.timeout = timeout
        self.first_token_at: float | None = None
        # Set on first admission: what of the prompt did not have to be computed for this request.
        self.cached_tokens: int | None = None
        # Which documents it is answered over, if that is chosen; or which choice it is there for.
        self.selection: Selection | None = None
        self.trial_of: Selection | None = None
        self.lay(layout, max_tokens)
        self.stream_keys: list[bytes] = []
        self.pending: list[EncodeJob] = []
        self.leading_pins: list[Segment] = []
        self.document_pins: list[Segment] = []
        self.stream_pins: list[Segment] = []
        self.copy_pages: list[int] = []  # private, for copies of its documents

    def lay(self, layout: Layout, max_tokens: int) -> None:
        """Sets the prompt and how many tokens may follow it, before anything is computed."""
        self.layout = layout
        self.max_tokens = max_tokens
        self.cached_document_tokens: list[int] = [0] * len(layout.documents)
        # In reading order, with what is not computed for this request left out.
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * layout.num_tokens
        self.run = TokenRun(layout.stream, layout.stream_positions, adapted=layout.adapted)

    @property
    def prompt_tokens(self) -> int:
        """Prompt length, documents included."""
        return self.layout.num_tokens

    @property
    def generated(self) -> list[int]:
        """Generated token ids, as far as they are known."""
        return self.run.tokens[len(self.layout.stream) : self.run.num_known]

    @property
    def num_sampled(self) -> int:
        """Generated tokens, with those that are not known yet."""
        return self.num_generated + self.run.pending

    @cached_property
    def choice_row(self) -> tuple[float, ...]:
        """All that says how its tokens are chosen, as numbers that a batch makes a table of.

        Temperature, top_p, min_p, the three penalties, top_k, the two words of the seed, whether
        logits are adjusted, and min_tokens.
        """
        p = self.params
        penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
        words = self.seed >> 32 & 0xFFFFFFFF, self.seed & 0xFFFFFFFF
        filters = p.temperature, p.top_p, p.min_p, *penalties, p.top_k
        return *filters, *words, p.adjusts_logits, p.min_tokens

    @property
    def deadline(self) -> float:
        """When it has to be finished, by ``time.monotonic``."""
        return self.arrived_at + self.timeout

    def pins(self) -> list[Segment]:
        """All pins held, in the order to give them back: what others share least comes first."""
        return self.stream_pins[::-1] + self.document_pins[::-1] + self.leading_pins[::-1]

    def reset(self) -> None:
        """Forgets what was computed; tokens stay, so a preempted request resumes where it was."""
        run = self.run
        self.run = TokenRun(run.tokens, run.positions, run.pending, adapted=run.adapted)
        self.stream_keys = []
        self.pending, self.leading_pins, self.document_pins, self.stream_pins = [], [], [], []
        self.copy_pages = []


@dataclass(frozen=True)
class Chunk:
    """Some consecutive tokens of a run, computed in one step."""

    run: TokenRun
    start: int
    count: int
    owner: EncodeJob | Request

    @property
    def samples(self) -> bool:
        """Whether a token is chosen after this chunk."""
        return isinstance(self.owner, Request) and self.start + self.count == len(self.run.tokens)
