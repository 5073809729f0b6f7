"""Token ids of texts that come again in request after request."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock


class TokenCache:
    """Cuts texts into tokens, and remembers those of the texts that it was last asked for.

    Threads may share it. What it gives is shared as well, and must not be written to.

    Args:
      encode: gives the token ids of a text.
      capacity: tokens to remember, at 4 bytes each. A text counts ``OVERHEAD`` more, about what its
        entry takes besides.
    """

    OVERHEAD = 64

    def __init__(self, encode: Callable[[str], Sequence[int]], capacity: int = 1 << 22) -> None:
        self._encode = encode
        self._capacity = capacity
        self._size = 0
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = Lock()

    def __call__(self, text: str, salt: str = "") -> array[int]:
        """Token ids of a text.

        Args:
          text: any text.
          salt: nobody can tell from the time it takes whether others have asked for a text with
            another salt.
        """
        digest = hashlib.sha256(len(salt).to_bytes(8, "little"))
        for part in (salt, text):
            digest.update(part.encode(errors="surrogatepass"))
        key = digest.digest()
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        tokens = array("i", self._encode(text))
        with self._lock:
            if key not in self._kept:
                self._kept[key] = tokens
                self._size += self.OVERHEAD + len(tokens)
            while self._size > self._capacity:
                _, oldest = self._kept.popitem(last=False)
                self._size -= self.OVERHEAD + len(oldest)
        return tokens
