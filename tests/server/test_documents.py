"""/v1/documents: documents that are loaded ahead of the requests that use them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_helpers import MODEL, Gate, RunningServer, chat_body, wait_until

from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.models.token_cache import TokenCache
from lazyattn_jax.server import documents as module

FROG = {"title": "Frogs", "text": "The glass frog lives in cloud forests."}
CLOCK = {"id": "my clock", "title": "Clocks", "text": "The comet clock was built by Jonas Weir."}
MESSAGES = chat_body("")["messages"]


def load(server: RunningServer, documents: Any, **fields: Any) -> Any:
    answer = server.http.post("/v1/documents", json={"documents": documents, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["object"] == "list"
    return answer.json()["data"]


def listed(server: RunningServer, salt: str) -> Any:
    answer = server.http.get("/v1/documents", params={"cache_salt": salt})
    assert answer.status_code == 200
    return answer.json()["data"]


def delete(server: RunningServer, document: str, salt: str) -> Any:
    return server.http.delete(f"/v1/documents/{document}", params={"cache_salt": salt})


def ask(server: RunningServer, documents: Any, salt: str, **fields: Any) -> Any:
    body = chat_body("What is it?", documents=documents, cache_salt=salt, **fields)
    answer = server.post("chat/completions", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_document_is_cut_into_tokens_once_for_each_salt(
    server: RunningServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, cut = engine.loaded.tokenizer, []

    def encode(text: str) -> list[int]:
        cut.append(text)
        return tokenizer.encode(text, literal=True)

    monkeypatch.setattr(tokenizer, "encode_document", TokenCache(encode))
    for salt in ("one", "two"):
        given: dict[str, Any] = {"documents": [FROG], "cache_salt": salt}
        [card] = load(server, **given)
        ask(server, [FROG], salt)
        for path, body in (
            ("/v1/completions", {"prompt": "What?", "max_tokens": 1}),
            ("/tokenize", {"prompt": "What?"}),
            ("/tokenize", chat_body("What?")),
        ):
            answer = server.http.post(path, json=given | {"model": MODEL} | body)
            assert answer.status_code == 200, answer.text
        delete(server, card["id"], salt)
    assert cut == [f"Title: {FROG['title']}\n{FROG['text']}\n\n"] * 2


def test_loaded_documents_are_found_by_their_ids(server: RunningServer) -> None:
    salt = "ids"
    frog, clock = load(server, [FROG, CLOCK], messages=MESSAGES, cache_salt=salt)
    for card, source in ((frog, FROG), (clock, CLOCK)):
        assert card["object"] == "document"
        assert card["title"] == source["title"]
        assert card["tokens"] == card["bytes"]  # the tokenizer's tokens are bytes
        assert card["bytes"] == len(f"Title: {source['title']}\n{source['text']}\n\n")
        assert card["kv_bytes"] == -(-card["tokens"] // 16) * 16 * token_bytes(server)
        assert card["hits"] == 0
        assert card["last_used_at"] is None
        assert card["pinned"] is False
    # In another order than they were loaded in, and beside one that was not.
    answer = ask(server, [{"id": clock["id"]}, "Something else.", {"id": frog["id"]}], salt)
    first, other, second = answer["usage"]["prompt_tokens_details"]["documents"]
    assert [d["id"] for d in (first, second)] == [clock["id"], frog["id"]]
    assert first["cached_tokens"] == first["tokens"] == clock["tokens"]
    assert second["cached_tokens"] == second["tokens"] == frog["tokens"]
    assert other["cached_tokens"] == 0
    # The same as with the texts.
    texts = ask(server, [CLOCK, "Something else.", FROG], salt)
    assert texts["choices"] == answer["choices"]
    cards = listed(server, salt)
    assert [c["id"] for c in cards] == [frog["id"], clock["id"]]
    assert all(card["hits"] == 2 for card in cards)
    assert all(card["last_used_at"] >= card["created_at"] > 1.6e9 for card in cards)
    one = server.http.get(f"/v1/documents/{frog['id']}", params={"cache_salt": salt})
    assert one.json() == cards[0]
    for card in cards:
        assert delete(server, card["id"], salt).status_code == 200


def token_bytes(server: RunningServer) -> int:
    config = server.engine.ready().loaded.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4


def test_loading_again_is_harmless(server: RunningServer) -> None:
    salt = "again"
    [first] = load(server, [FROG], cache_salt=salt)
    [again] = load(server, [FROG], cache_salt=salt)
    assert again == first
    # What is loaded can be loaded by its id, after another text too: one document, two segments.
    [more] = load(server, [{"id": first["id"]}], messages=MESSAGES, cache_salt=salt)
    assert more["kv_bytes"] == 2 * first["kv_bytes"]
    assert len(listed(server, salt)) == 1
    assert delete(server, first["id"], salt).json() == {
        "id": first["id"],
        "object": "document",
        "deleted": True,
    }


def test_completions_use_them_too(server: RunningServer) -> None:
    [frog] = load(server, [FROG], cache_salt="completions")
    body = {"prompt": "a", "max_tokens": 2, "temperature": 0, "cache_salt": "completions"}
    by_id = server.post("completions", documents=[{"id": frog["id"]}], **body).json()
    by_text = server.post("completions", documents=[FROG], **body).json()
    assert by_id["choices"] == by_text["choices"]
    delete(server, frog["id"], "completions")


def test_deleting_frees_the_pool(server: RunningServer) -> None:
    salt = "delete"
    [frog] = load(server, [FROG], cache_salt=salt)
    cached = server.call(lambda e: e.scheduler.index.num_cached)
    assert delete(server, frog["id"], salt).status_code == 200
    freed = cached - server.call(lambda e: e.scheduler.index.num_cached)
    assert freed == -(-frog["tokens"] // 16)
    assert listed(server, salt) == []
    assert delete(server, frog["id"], salt).status_code == 404
    gone = server.post(
        "chat/completions", **chat_body("a", documents=[{"id": frog["id"]}], cache_salt=salt)
    )
    assert gone.status_code == 400
    assert frog["id"] in gone.json()["error"]["message"]
    [again] = load(server, [FROG], cache_salt=salt)
    assert again["id"] == frog["id"]
    assert again["hits"] == 0
    delete(server, frog["id"], salt)


def test_deleting_what_is_in_use(server: RunningServer, engine: Engine) -> None:
    salt = "in use"
    [frog] = load(server, [FROG], messages=MESSAGES, cache_salt=salt)
    alone = ask(server, [FROG], salt)
    body = chat_body("What is it?", documents=[{"id": frog["id"]}], cache_salt=salt, stream=True)
    with Gate(engine) as gate:
        gate.allow(3)  # each step is read a step later
        with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            text = next(lines)
            gate.open()
            assert delete(server, frog["id"], salt).status_code == 200
            text += "".join(lines)
    assert alone["usage"]["completion_tokens"] == 12
    assert text.count('"finish_reason":"length"') == 1


def test_tenants_do_not_see_each_others_documents(server: RunningServer) -> None:
    [mine] = load(server, [FROG], messages=MESSAGES, cache_salt="mine")
    assert listed(server, "other") == []
    assert listed(server, "") == []
    assert delete(server, mine["id"], "other").status_code == 404
    params = {"cache_salt": "other"}
    assert server.http.get(f"/v1/documents/{mine['id']}", params=params).status_code == 404
    refused = server.post(
        "chat/completions", **chat_body("a", documents=[{"id": mine["id"]}], **params)
    )
    assert refused.status_code == 400
    [theirs] = load(server, [FROG], messages=MESSAGES, cache_salt="other")
    usage = ask(server, [FROG], "third")["usage"]["prompt_tokens_details"]
    assert usage["cached_tokens"] == 0
    # What one deletes the other keeps.
    assert delete(server, theirs["id"], "other").status_code == 200
    [card] = listed(server, "mine")
    assert card["kv_bytes"] > 0
    assert delete(server, mine["id"], "mine").status_code == 200


def test_pinned_documents_survive_a_full_pool(server: RunningServer, engine: Engine) -> None:
    salt = "pinned"
    [frog] = load(server, [FROG], messages=MESSAGES, cache_salt=salt, pinned=True)
    [clock] = load(server, [CLOCK], messages=MESSAGES, cache_salt=salt)
    assert (frog["pinned"], clock["pinned"]) == (True, False)
    for i in range(24):  # each takes 13 of the 128 pages
        ask(server, [f"{i:3} {'x' * 180}"], salt)
    cards = {card["id"]: card for card in listed(server, salt)}
    assert cards[frog["id"]]["kv_bytes"] == frog["kv_bytes"]
    assert cards[clock["id"]]["kv_bytes"] == 0
    # An evicted one is computed again from what is stored.
    details = ask(server, [{"id": clock["id"]}, {"id": frog["id"]}], salt)["usage"]
    first, second = details["prompt_tokens_details"]["documents"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] == second["tokens"]
    server.call(lambda e: e.scheduler.check_integrity())
    for card in (frog, clock):
        assert delete(server, card["id"], salt).status_code == 200
    assert server.call(lambda e: e.scheduler.index.num_kept) == 0


def test_the_limit_of_pins(server: RunningServer, engine: Engine) -> None:
    """The longest request must fit beside them: 32 pages, and 10 for pages partly filled."""
    assert engine.limits.max_kept_pages == min(128 // 2, 128 - 32 - 10)
    salt = "pin limit"
    texts = [f"{i} {'y' * 180}" for i in range(6)]  # 12 pages each
    pages = -(-(len(texts[0]) + 2) // 16)
    assert 5 * pages <= engine.limits.max_kept_pages < 6 * pages
    refused = server.http.post(
        "/v1/documents", json={"documents": texts, "cache_salt": salt, "pinned": True}
    )
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "pinned"
    assert f"{6 * pages} pages" in error["message"]
    assert "at most 64 of the pool's 128" in error["message"]
    assert listed(server, salt) == []  # all or nothing
    assert server.call(lambda e: e.scheduler.index.num_kept) == 0
    cards = load(server, texts[:5], cache_salt=salt, pinned=True)
    load(server, texts[:5], cache_salt=salt, pinned=True)  # takes no more
    # The longest request runs beside them.
    longest = {"prompt": "z" * 480, "max_tokens": 32, "ignore_eos": True}
    assert server.post("completions", **longest).status_code == 200
    for card in cards:
        assert delete(server, card["id"], salt).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({}, "documents", "is missing"),
        ({"documents": []}, "documents", "no documents are given"),
        ({"documents": None}, "documents", "no documents are given"),
        ({"documents": "text"}, "documents", "must be a list"),
        ({"documents": [{"id": "x"}]}, "documents", "'x'"),
        ({"documents": [{"id": ["x"]}]}, "documents", "['x']"),
        ({"documents": [" "]}, "documents", "is empty"),
        ({"documents": ["x" * 600]}, "prompt", "max_model_len"),
        ({"documents": ["x"], "messages": "hello"}, "messages", "non-empty list"),
        ({"documents": ["x"], "pinned": "yes"}, "pinned", "true or false"),
        ({"documents": ["x"], "cache_salt": 5}, "cache_salt", "must be a string"),
    ],
)
def test_what_cannot_be_loaded(
    server: RunningServer, fields: dict[str, Any], param: str, part: str
) -> None:
    answer = server.http.post("/v1/documents", json=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert part in answer.json()["error"]["message"]


def test_one_bad_document_of_several(server: RunningServer) -> None:
    body = {"documents": ["fine", "x" * 600], "cache_salt": "bad", "pinned": True}
    assert server.http.post("/v1/documents", json=body).status_code == 400
    assert listed(server, "bad") == []
    server.check_idle()


def test_unknown_documents_and_methods(server: RunningServer) -> None:
    missing = server.http.get("/v1/documents/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "document_not_found"
    wrong = server.http.put("/v1/documents")
    assert wrong.status_code == 405
    assert set(wrong.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}
    assert server.http.post("/v1/documents", content=b"{").status_code == 400


def test_storage_is_bounded(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STORED", 2)
    salt = "bounded"
    cards = load(server, ["one", "two"], cache_salt=salt)
    full = server.http.post("/v1/documents", json={"documents": ["three"], "cache_salt": salt})
    assert full.status_code == 400
    assert "at most 2" in full.json()["error"]["message"]
    load(server, ["two"], cache_salt=salt)  # is there already
    delete(server, cards[0]["id"], salt)
    load(server, ["three"], cache_salt=salt)
    for card in listed(server, salt):
        delete(server, card["id"], salt)


def test_pool(server: RunningServer, engine: Engine) -> None:
    salt = "pool"

    def pool() -> Any:
        return server.http.get("/v1/pool", params={"cache_salt": salt}).json()

    empty = pool()
    assert empty["documents"] == []
    assert sum(empty["pages"][k] for k in empty["pages"] if k != "total") == 128
    [frog] = load(server, [FROG], messages=MESSAGES, cache_salt=salt, pinned=True)
    body = chat_body(
        "What is it?", documents=[{"id": frog["id"]}, CLOCK], cache_salt=salt, stream=True, n=2
    )
    with Gate(engine) as gate:
        gate.allow(8)  # enough for the clock, the question and a token, not for all twelve
        with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            name = next(lines).split('"id":"')[1].split('"')[0]
            # Asked for while the engine waits for leave to take a step, answered after that step.
            answer = ThreadPoolExecutor(1).submit(pool)
            wait_until(lambda: server.engine._commands.qsize() or answer.done())
            gate.allow(1)
            during = answer.result()
            gate.open()
            list(lines)
    assert (during["running"], during["waiting"]) == (2, 0)
    assert [d["users"] for d in during["documents"]] == [[f"{name}-0", f"{name}-1"]] * 2
    assert during["pages"]["private"] > 0
    after = pool()
    assert [d["name"] for d in after["documents"]] == ["Frogs", "my clock"]
    assert [d["pinned"] for d in after["documents"]] == [True, False]
    assert [d["users"] for d in after["documents"]] == [[], []]
    assert [d["hits"] for d in after["documents"]] == [2, 1]  # the clock: once for both choices
    for document in after["documents"]:
        assert document["pages"] == -(-document["tokens"] // 16)
        assert document["last_used_at"] > 1.6e9
    assert after["pages"]["documents"] == sum(d["pages"] for d in after["documents"])
    assert after["pages"]["private"] == 0
    assert sum(after["pages"][k] for k in after["pages"] if k != "total") == 128
    others = server.http.get("/v1/pool", params={"cache_salt": "nobody"}).json()
    assert others["documents"] == []
    assert others["pages"]["other_documents"] >= after["pages"]["documents"]
    delete(server, frog["id"], salt)


def test_a_request_says_how_its_documents_are_treated(server: RunningServer) -> None:
    """What is repaired is computed again, the rest is found; another context is another segment."""
    salt = "contexts"
    frog, clock = load(server, [FROG, CLOCK], messages=MESSAGES, cache_salt=salt)
    expected = [
        ({}, [frog["tokens"], clock["tokens"]]),
        ({"document_repair": 16}, [frog["tokens"] - 16, clock["tokens"] - 16]),
        ({"document_repair": 20}, [frog["tokens"] - 32, clock["tokens"] - 32]),
        ({"document_repair": 999}, [0, 0]),
        ({"document_temperature": 0.5}, [frog["tokens"], clock["tokens"]]),
        ({"document_context": "none"}, [0, 0]),
        ({"document_gap": 3}, [0, 0]),
        ({"document_gap": 3}, [frog["tokens"], clock["tokens"]]),
    ]
    for fields, cached in expected:
        answer = ask(server, [FROG, CLOCK], salt, **fields)
        documents = answer["usage"]["prompt_tokens_details"]["documents"]
        assert [d["cached_tokens"] for d in documents] == cached, fields
        assert [d["tokens"] for d in documents] == [frog["tokens"], clock["tokens"]]
    load(server, [FROG], messages=MESSAGES, cache_salt=salt, document_gap=4)
    answer = ask(server, [FROG], salt, document_gap=4)
    (document,) = answer["usage"]["prompt_tokens_details"]["documents"]
    assert document["cached_tokens"] == frog["tokens"]
    for card in (frog, clock):
        assert delete(server, card["id"], salt).status_code == 200
