"""Choosing which of its documents a request is answered over."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import DocumentPiece, Layout, Prompt
from lazyattn_jax.engine.runs import Request, State

TRIAL = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, seed=0)
"""How a trial is computed: its prompt is what matters."""


class Selection:
    """The documents of one prompt, each tried alone, and who waits for the choice.

    A document's score is the log-probability, in nats, of the text after the prompt's last document
    (but for its first token) where that document is the only one. By Bayes' rule, if nothing else
    is known: the likelier a document makes the question, the likelier it is what the question is
    about (superposition prompting, arXiv 2404.06910). Equal documents are tried once, and the first
    of them stands for all.

    Args:
      prompt: with all its documents.
      count: how many to keep.
      lay_out: of the prompt and the context of those who wait.
    """

    def __init__(self, prompt: Prompt, count: int, lay_out: Callable[[Prompt], Layout]) -> None:
        self.prompt = prompt
        self.count = count
        self.lay_out = lay_out
        self.documents = [p for p in prompt if isinstance(p, DocumentPiece)]
        first: dict[tuple[int, ...], int] = {}
        self._same_as = [first.setdefault(tuple(d.tokens), i) for i, d in enumerate(self.documents)]
        self.candidates = list(first.values())
        self._tail = 0
        for piece in reversed(prompt):
            if isinstance(piece, DocumentPiece):
                break
            self._tail += len(piece)
        self.trials: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.kept: tuple[int, ...] = ()

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to choose."""
        return 0 < self.count < len(self.candidates)

    def largest(self) -> Layout:
        """The prompt with the longest documents: whatever is chosen takes no more room."""
        by_length = sorted(self.candidates, key=lambda i: -len(self.documents[i].tokens))
        return self.lay_out(self.with_only(by_length[: self.count]))

    def join(self, request: Request) -> None:
        """A request of this prompt waits for the choice."""
        request.selection = self
        request.state = State.SELECTING
        self.waiting.append(request)

    def with_only(self, kept: Collection[int]) -> Prompt:
        """The prompt with all other documents dropped."""
        numbers = iter(range(len(self.documents)))
        return [
            replace(piece, dropped=next(numbers) not in kept)
            if isinstance(piece, DocumentPiece)
            else piece
            for piece in self.prompt
        ]

    def trial(self, document: int) -> Request:
        """The trial of a document, or of the one that it equals."""
        return self.trials[self._same_as[document]]

    def score(self, document: int) -> float | None:
        """How likely a document makes the text after it; none before that has been computed."""
        trial = self.trial(document)
        known = (trial.prompt_logprobs or [])[trial.prompt_tokens - self._tail + 1 :]
        scores = [entry.logprob for entry in known if entry is not None]
        return sum(scores) if len(scores) == len(known) else None

    def cached_tokens(self, document: int) -> int:
        """Tokens of a document that were found, not computed, when it was tried."""
        if document not in self.candidates:  # it equals one that was
            return len(self.documents[document].tokens)
        return sum(self.trials[document].cached_document_tokens)

    @property
    def computed_tokens(self) -> int:
        """Tokens that were computed to choose."""
        return sum(t.prompt_tokens - (t.cached_tokens or 0) for t in self.trials.values())

    @property
    def decided(self) -> bool:
        """Whether all trials have been computed."""
        return all(trial.num_generated for trial in self.trials.values())

    def decide(self) -> Layout:
        """The prompt with the documents of the highest scores, in order; of equals the first."""
        best = sorted(self.candidates, key=lambda i: -(self.score(i) or 0.0))[: self.count]
        self.kept = tuple(sorted(best))
        return self.lay_out(self.with_only(self.kept))
