"""From token ids to text as it may be shown: whole characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from lazyattn_jax.models.tokenizer import Tokenizer


class TextStream:
    """Decodes a request's tokens; holds text back while it may be the start of a stop string.

    Output ends before the stop string that is complete first, the longest of those that end
    together, so what is shown does not depend on how the text is cut into tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._decoder = tokenizer.stream()
        self._stop = stop
        self._held = ""

    def push(self, token: int, *, may_stop: bool = True) -> tuple[str, bool]:
        """The text that may be shown after one more token, and whether a stop string was met.

        Text of tokens that may not stop the output is no part of any stop string.
        """
        self._held += self._decoder.step(token)
        if not (may_stop and self._stop):
            return self.flush(), False
        starts = ((self._held.find(stop), stop) for stop in self._stop)
        found = [(at + len(stop), at) for at, stop in starts if at >= 0]
        if found:
            shown, self._held = self._held[: min(found)[1]], ""
            return shown, True
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """What was held back when the output ends for another reason."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
