"""Steps that have been started: what the host still has to read of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Array, Bool, Int

from lazyattn_jax.engine.runs import Chunk, EncodeJob, Request, TokenLogprobs
from lazyattn_jax.engine.sampler import Logprobs


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of prompt tokens: whose they are, where in the prompt, and which token."""

    parts: list[Logprobs]
    places: list[tuple[Request, int]]
    tokens: list[int]

    def note(self) -> None:
        """Waits for them and hands them to their requests."""
        read = read_logprobs(self.parts, self.tokens)
        for (request, place), logprobs in zip(self.places, read, strict=True):
            assert request.prompt_logprobs is not None
            request.prompt_logprobs[place] = logprobs.first(request.params.prompt_logprobs)


@dataclass(frozen=True)
class Step:
    """A step, what it computes, the requests that it chooses a token for, and what it scores.

    ``tokens``, ``logprobs`` and ``sound`` are on the device and may not be there yet.
    """

    tokens: Int[Array, "B"]
    logprobs: Logprobs | None
    sound: Bool[Array, "T"]
    chunks: list[Chunk]
    requests: list[Request]
    scores: Scores | None = None

    def unsound(self) -> list[tuple[EncodeJob | Request, int]]:
        """Whose tokens came out unusable, with the first of them. Waits for the step."""
        sound = np.asarray(self.sound)
        if sound.all():
            return []
        found, row = [], 0
        for chunk in self.chunks:
            (bad,) = np.nonzero(~sound[row : row + chunk.count])
            if len(bad):
                found.append((chunk.owner, chunk.start + int(bad[0])))
            row += chunk.count
        return found


def read_logprobs(parts: Sequence[Logprobs], tokens: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of some tokens, on the host; ``parts`` may be padded."""
    host = [tuple(map(np.asarray, part)) for part in parts]
    columns = map(np.concatenate, zip(*host, strict=True))
    chosen, best, values = (column[: len(tokens)].tolist() for column in columns)
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids, ranked, strict=True)))
        for token, logprob, ids, ranked in zip(tokens, chosen, best, values, strict=True)
    ]
