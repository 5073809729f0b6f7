"""A short soak over a tiny model, and that a soak notices what is wrong."""

from __future__ import annotations

import asyncio
import json
import random
import sys

import httpx
import pytest

from lazyattn_jax.bench import __main__ as command
from lazyattn_jax.bench.soak import _growth
from lazyattn_jax.bench.soak_traffic import Corpus, Traffic


def test_some_seconds_of_mixed_traffic(tmp_path, monkeypatch):
    path = tmp_path / "soak.json"
    arguments = ["--model", "dummy:tiny", "--minutes", "0.1", "--questions", "6"]
    arguments += ["--document-words", "14", "--pool-bytes", str(1 << 19), "--clients", "8"]
    monkeypatch.setattr(sys, "argv", ["bench", "soak", *arguments, "--output", str(path)])
    assert command.main() == 0
    results = json.loads(path.read_text())["results"]
    assert results["problems"] == []
    assert results["working_set"] >= 8
    assert results["greedy_answers_compared"] > 0
    assert results["evictions"] > 0


def meet(answer: httpx.Response, *kinds: str) -> list[str]:
    """What clients say of a server that answers everything with this."""

    async def talk() -> list[str]:
        transport = httpx.MockTransport(lambda _: answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            corpus = Corpus([{"title": t, "text": t} for t in "abc"], [1, 1, 1], 0, 0, 8)
            traffic = Traffic(http, corpus, random.Random(0))
            traffic._alone.append(({"messages": []}, "right"))
            for kind in kinds:
                await getattr(traffic, kind)()
            return traffic.problems

    return asyncio.run(talk())


def chat(content: str) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"content": content}}]})


def events(*data: object) -> httpx.Response:
    lines = [f"data: {d if isinstance(d, str) else json.dumps(d)}\n\n" for d in data]
    return httpx.Response(200, text="".join(lines))


def piece(text: str) -> object:
    return {"choices": [{"delta": {"content": text}}]}


@pytest.mark.parametrize(
    ("answer", "kind", "problem"),
    [
        (chat("right"), "greedy", None),
        (chat("wrong"), "greedy", "'wrong' instead of 'right'"),
        (httpx.Response(500, text="oh"), "greedy", "greedy: 500 oh"),
        (events(piece("ri"), piece("ght"), "[DONE]"), "stream", None),
        (events(piece("ri"), "[DONE]"), "stream", "'ri' instead of 'right'"),
        (events(piece("ri"), piece("ght")), "stream", "without"),
        (events(piece("ri"), {"error": {"message": "oh"}}), "stream", "oh"),
        (chat("x"), "sampled", "sampled"),  # one choice, not two
        (chat("x"), "nonsense", "nonsense: 200"),
        (chat("x"), "too_long", "too long: 200"),
        (httpx.Response(504), "deadline", None),
        (httpx.Response(503, text="gone"), "deadline", "deadline: 503 gone"),
        (httpx.Response(400, text="full"), "pinned", "pinned: 400 full"),
    ],
)
def test_wrong_answers_are_noticed(answer, kind, problem):
    problems = meet(answer, kind)
    assert bool(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


def test_memory_that_grows_is_noticed():
    mib = 1 << 20
    assert _growth([50 * mib, *[100 * mib] * 6, 104 * mib]) == []  # the first quarter is warm-up
    (problem,) = _growth([100 * mib] * 6 + [107 * mib] * 2)
    assert "100 to 107 MiB" in problem
