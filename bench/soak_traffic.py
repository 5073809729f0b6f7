"""The documents and the clients of a soak: what they send, and what they have to get."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

_WORDS = [
    "harbour", "lighthouse", "bread", "clock", "moss", "tin", "frog", "river", "baker", "museum",
    "copper", "bridge", "winter", "painter", "school", "valley", "engine", "market", "garden",
    "stone", "north", "island", "captain", "festival", "library", "music", "glass",
]  # fmt: skip
_SYSTEM = "You answer questions using the documents."
_LEAST_MARGIN = 1e-3
"""Between the two best tokens of an answer, in log-probability.

Batches of other shapes add up float32 in other orders, which moves logits of SmolLM2 by some 1e-5:
where the best two are nearer than this, another answer is none that is wrong.
"""


@dataclass(frozen=True)
class Corpus:
    """Documents with Zipf's weights, and the pool they have to share. Tokens are counts."""

    documents: list[dict[str, str]]
    weights: list[float]
    tokens: int
    pool_tokens: int
    max_len: int

    @classmethod
    async def fill(
        cls, http: httpx.AsyncClient, rng: random.Random, words: int, max_len: int
    ) -> Corpus:
        """Makes documents until their KV is eight times the pool."""
        pages = (await http.get("/v1/pool")).json()["pages"]["total"]
        documents: list[dict[str, str]] = []
        tokens = 0
        while tokens < 8 * 16 * pages:
            text = " ".join(rng.choices(_WORDS, k=rng.randrange(words // 2, words + words // 2)))
            documents.append({"title": f"Report {len(documents)}", "text": f"{text}."})
            body = {"prompt": "", "documents": documents[-1:], "add_special_tokens": False}
            count = (await http.post("/tokenize", json=body)).json()["count"]
            tokens += -(-count // 16) * 16
        weights = [1 / rank for rank in range(1, len(documents) + 1)]
        return cls(documents, weights, tokens, 16 * pages, max_len)

    def draw(self, rng: random.Random, count: int) -> list[dict[str, str]]:
        """Different documents, popular ones more often, in a random order."""
        chosen: dict[str, dict[str, str]] = {}
        while len(chosen) < count:
            document = rng.choices(self.documents, self.weights)[0]
            chosen[document["title"]] = document
        return rng.sample(list(chosen.values()), count)


@dataclass
class Traffic:
    """Clients, and what they have met. ``problems`` are answers that should not have come."""

    http: httpx.AsyncClient
    corpus: Corpus
    rng: random.Random
    salts: tuple[str, ...] = ("", "other")
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    compared: int = 0
    _alone: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    async def ask_alone(self, count: int) -> None:
        """Asks questions one by one, and keeps the answers that do not hang on a tie."""
        for _ in range(4 * count):
            body = self._question(max_tokens=8, temperature=0, ignore_eos=True)
            answer = await self._chat(body | {"logprobs": True, "top_logprobs": 2})
            choice = answer.json()["choices"][0]
            margins = [
                token["top_logprobs"][0]["logprob"] - token["top_logprobs"][1]["logprob"]
                for token in choice["logprobs"]["content"]
            ]
            if min(margins) > _LEAST_MARGIN:
                self._alone.append((body, choice["message"]["content"]))
            if len(self._alone) == count:
                return
        raise RuntimeError(f"{len(self._alone)} of {4 * count} questions have a clear answer")

    async def client(self, end: float) -> None:
        """Sends one request after the other until the time is up."""
        kinds: dict[Callable[[], Awaitable[None]], int] = {
            self.greedy: 6, self.stream: 6, self.slow_reader: 2, self.sampled: 3, self.leaves: 4,
            self.deadline: 2, self.pinned: 1, self.nonsense: 4, self.too_long: 1, self.looks: 1,
        }  # fmt: skip
        while time.monotonic() < end:
            act = self.rng.choices(list(kinds), list(kinds.values()))[0]
            name = getattr(act, "__name__", "")
            try:
                await act()
            except httpx.HTTPError as error:  # a hang, or a connection that the server broke
                self.problems.append(f"{name}: {error!r}")
            self.counts[name] += 1

    # Kinds of requests ----------------------------------------------------------------------------

    async def greedy(self) -> None:
        """The answer is the same as alone."""
        body, want = self.rng.choice(self._alone)
        answer = await self._chat({**body, "cache_salt": self.rng.choice(self.salts)})
        if self._expect("greedy", answer, 200):
            self._compare("greedy", answer.json()["choices"][0]["message"]["content"], want)

    async def stream(self) -> None:
        """So is a stream's."""
        body, want = self.rng.choice(self._alone)
        self._compare("stream", await self._read(body), want)

    async def slow_reader(self) -> None:
        """And one that is read late."""
        body, want = self.rng.choice(self._alone)
        self._compare("slow reader", await self._read(body, pause=0.3), want)

    async def sampled(self) -> None:
        """Two answers with everything that changes logits."""
        body = self._question(
            n=2, max_tokens=self.rng.randrange(1, 17), min_tokens=1, temperature=0.8, top_k=40,
            top_p=0.95, min_p=0.01, presence_penalty=0.5, repetition_penalty=1.1, logprobs=True,
            top_logprobs=3, logit_bias={"5": -1}, seed=self.rng.randrange(9), stop=["?"],
        )  # fmt: skip
        body["cache_salt"] = self.rng.choice(self.salts)
        answer = await self._chat(body)
        if self._expect("sampled", answer, 200) and len(answer.json()["choices"]) != 2:
            self.problems.append(f"sampled: {answer.text}")

    async def leaves(self) -> None:
        """A client that goes after a few events, or before any answer."""
        body = self._question(max_tokens=60, ignore_eos=True, n=self.rng.choice([1, 3]))
        if self.rng.random() < 0.3:
            task = asyncio.create_task(self._chat(body))
            await asyncio.sleep(self.rng.random())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await self._read(body, most=self.rng.randrange(1, 6))

    async def deadline(self) -> None:
        """Ends in time, or with the error that says so."""
        body = self._question(max_tokens=30, ignore_eos=True, timeout=self.rng.choice([0.01, 1.0]))
        self._expect("deadline", await self._chat(body), 200, 504)

    async def pinned(self) -> None:
        """Loads a document, pins it, asks about it by its id, and deletes it."""
        salt = self.rng.choice(self.salts)
        # A text of its own: others may delete what they have loaded.
        document = {"title": "Own", "text": f"{self.rng.random()} {self.rng.choice(_WORDS)}."}
        body = {"documents": [document], "pinned": True, "cache_salt": salt}
        loaded = await self.http.post("/v1/documents", json=body)
        if not self._expect("pinned", loaded, 200):
            return
        name = loaded.json()["data"][0]["id"]
        body = self._question(max_tokens=2) | {"documents": [{"id": name}], "cache_salt": salt}
        self._expect("pinned", await self._chat(body), 200)
        path = f"/v1/documents/{name}"
        self._expect("pinned", await self.http.delete(path, params={"cache_salt": salt}), 200)

    async def nonsense(self) -> None:
        """Bodies that cannot be meant, each refused."""
        bad: Any = self.rng.choice(
            [b"{", b"[]", b"\xff", {}, {"messages": []}, {"messages": "x"}, {"temperature": 9},
             {"n": 1000}, {"max_tokens": 10**6}, {"documents": [""]}, {"documents": [{"id": "x"}]},
             {"stop": [""]}, {"logit_bias": {"x": 1}}, {"model": "other"}, {"tools": [1]}]
        )  # fmt: skip
        if isinstance(bad, bytes):
            answer = await self.http.post("/v1/chat/completions", content=bad)
        else:
            fields = self._question() if bad else {}
            answer = await self._chat({**fields, **bad})
        self._expect("nonsense", answer, 400, 404)

    async def too_long(self) -> None:
        """A prompt that the context does not hold."""
        body = self._question()
        body["messages"][1]["content"] = "word " * (2 * self.corpus.max_len)
        self._expect("too long", await self._chat(body), 400)

    async def looks(self) -> None:
        """What a dashboard and the page ask for."""
        for path in ("/metrics", "/v1/pool", "/v1/documents", "/v1/models", "/health", "/"):
            self._expect("looks", await self.http.get(path), 200)

    # ----------------------------------------------------------------------------------------------

    def _question(self, **fields: Any) -> dict[str, Any]:
        text = f"What is said about the {self.rng.choice(_WORDS)}?"
        system = {"role": "system", "content": _SYSTEM}
        return {
            "messages": [system, {"role": "user", "content": text}],
            "documents": self.corpus.draw(self.rng, self.rng.randrange(1, 4)),
            **fields,
        }

    async def _chat(self, body: dict[str, Any]) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=body)

    async def _read(self, body: dict[str, Any], *, pause: float = 0, most: int = 10**6) -> str:
        """The text of a stream, or of its first events."""
        text, ended = [], False
        path, body = "/v1/chat/completions", {**body, "stream": True}
        async with self.http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                self._expect("stream", response, 200)
                return ""
            events = (line async for line in response.aiter_lines() if line)
            async for line in events:
                if line == "data: [DONE]":
                    ended = True
                    break
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.problems.append(f"stream: {event}")
                    return ""
                text += [choice["delta"].get("content") or "" for choice in event["choices"]]
                if len(text) >= most:
                    return "".join(text)
                await asyncio.sleep(pause)
        if not ended:
            self.problems.append("stream: it ended without [DONE]")
        return "".join(text)

    def _expect(self, kind: str, answer: httpx.Response, *statuses: int) -> bool:
        if answer.status_code not in statuses:
            self.problems.append(f"{kind}: {answer.status_code} {answer.text[:300]}")
        return answer.status_code == 200

    def _compare(self, kind: str, text: str, want: str) -> None:
        self.compared += 1
        if text != want:
            self.problems.append(f"{kind}: {text!r} instead of {want!r}, as alone")
