"""What is shown of a text with stop strings, against a search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lazyattn_jax.engine.output import TextStream
from lazyattn_jax.models.tokenizer import dummy_tokenizer

# Few letters, so that stop strings are met, nearly met and overlap.
CHUNKS = st.lists(st.text("abc", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


class Chunks:
    """A tokenizer whose token i stands for the i-th chunk of a text."""

    def __init__(self, chunks: list[str]) -> None:
        self.chunks = chunks

    def stream(self) -> Chunks:
        return self

    def step(self, token: int) -> str:
        return self.chunks[token]


def run(chunks: list[str], stops: list[str]) -> tuple[list[str], bool, TextStream]:
    """What every token shows, until a stop string is met."""
    stream, shown = TextStream(Chunks(chunks), stops), []
    for token in range(len(chunks)):
        text, stopped = stream.push(token)
        shown.append(text)
        if stopped:
            return shown, True, stream
    return shown, False, stream


def whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first; of several, the longest."""
    for end in range(1, len(text) + 1):
        met = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(met)], True
    return text, False


@settings(deadline=None)
@given(CHUNKS, STOPS)
# The longer one ends later, though it begins first; cut otherwise, both would be there at once.
@example(["abab"], ["abab", "ba"])
@example(["a", "b", "a", "b"], ["abab", "ba"])
@example(["ab"], ["b", "ab"])
def test_text_ends_before_the_first_stop_string(chunks, stops):
    shown, stopped, stream = run(chunks, stops)
    want, found = whole("".join(chunks), stops)
    assert stopped == found
    # After a stop string nothing is left to show.
    assert "".join(shown) + stream.flush() == want
    assert stream.flush() == ""


@settings(deadline=None)
@given(CHUNKS, STOPS)
def test_only_what_may_begin_a_stop_string_is_held(chunks, stops):
    shown, stopped, stream = run(chunks, stops)
    beginnings = {stop[:n] for stop in stops for n in range(len(stop))} | {""}
    seen = ""
    for i in range(len(shown) - stopped):
        seen += chunks[i]
        held = max((b for b in beginnings if seen.endswith(b)), key=len)
        assert "".join(shown[: i + 1]) == seen[: len(seen) - len(held)]
    assert stopped or "".join(shown) + stream.flush() == seen


@settings(deadline=None)
@given(st.data(), CHUNKS, STOPS)
def test_cut_into_tokens_in_another_way(data, chunks, stops):
    text = "".join(chunks)
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    other = [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]
    results = []
    for cut in (chunks, other):
        shown, stopped, stream = run(cut, stops)
        results.append(("".join(shown) + stream.flush(), stopped))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("text", "stops", "want", "stopped"),
    [
        ("one\n\ntwo", ["\n\n"], "one", True),
        ("one\ntwo", ["\n\n"], "one\ntwo", False),
        ("the end", ["end"], "the ", True),
        ("prix: 3 €.", ["€"], "prix: 3 ", True),
        ("日本語です", ["本語"], "日", True),
        ("a👩‍💻b", ["👩‍💻"], "a", True),
        ("café", ["fé!"], "café", False),
        ("stop", ["stop"], "", True),
    ],
)
def test_with_a_byte_a_token(text, stops, want, stopped):
    tokenizer = dummy_tokenizer(258)
    stream, shown, met = TextStream(tokenizer, stops), "", False
    for token in tokenizer.encode(text):
        step, met = stream.push(token)
        shown += step
        if met:
            break
    assert (shown + stream.flush(), met) == (want, stopped)


def test_control_tokens_show_nothing():
    stream = TextStream(dummy_tokenizer(258), ["<|end|>"])
    assert [stream.push(token) for token in (0, 1)] == [("", False)] * 2
