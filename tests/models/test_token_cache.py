"""Remembered tokens: cut once, forgotten in the order of their last use, and apart by salt."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from lazyattn_jax.models.token_cache import TokenCache


class Cutter:
    """Cuts a text into its characters' numbers, and notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.asked.append(text)
        return [ord(c) for c in text]


def room_for(*texts: str) -> int:
    return sum(TokenCache.OVERHEAD + len(text) for text in texts)


def test_a_text_is_cut_once():
    cutter = Cutter()
    cache = TokenCache(cutter)
    first, second = cache("ab"), cache("ab")
    assert list(first) == list(second) == [97, 98]
    assert cutter.asked == ["ab"]
    assert list(cache("")) == list(cache("")) == []
    assert cutter.asked == ["ab", ""]


def test_what_was_used_last_stays():
    cutter = Cutter()
    cache = TokenCache(cutter, capacity=room_for("aa", "bb"))
    for text in ("aa", "bb", "aa", "cc"):  # for which bb has to go
        cache(text)
    assert cutter.asked == ["aa", "bb", "cc"]
    cache("aa")
    cache("bb")
    assert cutter.asked == ["aa", "bb", "cc", "bb"]


def test_a_text_that_is_too_long_is_given_and_not_kept():
    cutter = Cutter()
    cache = TokenCache(cutter, capacity=room_for("aa") + 1)
    cache("aa")
    for _ in range(2):
        assert len(cache("long" * 100)) == 400
    assert cutter.asked == ["aa", "long" * 100, "long" * 100]
    cache("bbb")  # there is all the room again
    cache("bbb")
    assert cutter.asked[3:] == ["bbb"]


def test_salts_are_apart_and_cannot_be_mixed_up_with_texts():
    cutter = Cutter()
    cache = TokenCache(cutter)
    for _ in range(2):
        for text, salt in (("ab", ""), ("ab", "s"), ("b", "a"), ("", "ab"), ("ab", "s2")):
            assert list(cache(text, salt)) == [ord(c) for c in text]
    assert cutter.asked == ["ab", "ab", "b", "", "ab"]


def test_threads_keep_the_count():
    texts = [str(i) * (1 + i % 7) for i in range(40)]
    cache = TokenCache(Cutter(), capacity=room_for(*texts[:10]))
    with ThreadPoolExecutor(8) as pool:
        given = list(pool.map(cache, texts * 50))
    assert [list(tokens) for tokens in given] == [[ord(c) for c in t] for t in texts * 50]
    held = sum(TokenCache.OVERHEAD + len(tokens) for tokens in cache._kept.values())
    assert held == cache._size <= room_for(*texts[:10])
