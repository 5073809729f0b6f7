"""/tokenize and /detokenize."""

from __future__ import annotations

import re
from typing import Any

import pytest
from server_helpers import MAX_LEN, MODEL, RunningServer, chat_body

from lazyattn_jax.models.tokenizer import Tokenizer, dummy_tokenizer
from lazyattn_jax.prompt import Document
from lazyattn_jax.server.tokens_api import TokenizeRequest, prompt_tokens

BACKEND = dummy_tokenizer(300).backend
BEGIN = 1


def post(server: RunningServer, path: str, **body: Any) -> Any:
    answer = server.http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_prompt_there_and_back(server: RunningServer) -> None:
    text = "naïve <|end|> 日本"
    answer = post(server, "/tokenize", prompt=text, return_token_strs=True)
    tokens = answer["tokens"]
    assert tokens == server.engine.engine.loaded.tokenizer.encode(text)
    assert answer["count"] == len(tokens) == len(text.encode()) - len("<|end|>") + 1
    assert answer["max_model_len"] == MAX_LEN
    assert answer["token_strs"][:4] == ["n", "a", "Ã", "¯"]  # as the vocabulary spells bytes
    assert answer["token_strs"][tokens.index(0)] == "<|end|>"
    assert post(server, "/detokenize", tokens=tokens) == {"prompt": text}


def test_token_strings_only_where_asked_for(server: RunningServer) -> None:
    assert post(server, "/tokenize", prompt="")["token_strs"] is None
    assert post(server, "/tokenize", prompt="") | {"max_model_len": 0} == {
        "count": 0, "max_model_len": 0, "tokens": [], "token_strs": None,
    }  # fmt: skip


@pytest.mark.parametrize("documents", [None, ["Frogs call.", {"title": "T", "text": "Bread."}]])
def test_as_many_tokens_as_the_prompt_is_computed_with(server: RunningServer, documents) -> None:
    body = {**chat_body("hello", max_tokens=1), "documents": documents}
    usage = server.post("chat/completions", **body).json()["usage"]
    answer = post(server, "/tokenize", messages=body["messages"], documents=documents)
    assert answer["count"] == usage["prompt_tokens"]
    text = post(server, "/detokenize", tokens=answer["tokens"])["prompt"]
    assert text.startswith("system: Be brief.\nuser: ")
    assert text.endswith("hello\nassistant: ")
    assert ("Title: T\nBread.\n\nhello" in text) == (documents is not None)


def test_a_stored_document(server: RunningServer) -> None:
    loaded = server.http.post("/v1/documents", json={"documents": ["Frogs."], "cache_salt": "t"})
    name = loaded.json()["data"][0]["id"]
    options = {"prompt": "x", "documents": [{"id": name}]}
    assert post(server, "/tokenize", cache_salt="t", **options)["count"] == len("Frogs.\n\nx")
    answer = server.http.post("/tokenize", json=options)  # of another salt
    assert answer.status_code == 400
    assert server.http.delete(f"/v1/documents/{name}?cache_salt=t").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "part"),
    [
        ("/tokenize", {}, 400, "prompt", "prompt or messages is missing"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt", "are both given"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt", "must be a string"),
        ("/tokenize", {"messages": []}, 400, "messages", "must be a non-empty list"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens", "true"),
        (
            "/tokenize",
            {"messages": [{"role": "user"}], "add_generation_prompt": False},
            400,
            "add_generation_prompt",
            "not supported",
        ),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model", "does not exist"),
        ("/tokenize", {"prompt": "a", "documents": [""]}, 400, "documents", "is empty"),
        ("/detokenize", {}, 400, "tokens", "is missing"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens", "valid list"),
        ("/detokenize", {"tokens": [1, 512]}, 400, "tokens", "id 512 is not in .* of 512"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens", "token id -1"),
        ("/detokenize", {"tokens": [], "model": "x"}, 404, "model", "does not exist"),
    ],
)
def test_refused(
    server: RunningServer, path: str, body: Any, status: int, param: str, part: str
) -> None:
    answer = server.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    assert re.search(part, answer.json()["error"]["message"])


@pytest.mark.parametrize(
    ("fields", "template", "count"),
    [
        ({"prompt": "ab"}, "", 1),
        ({"prompt": "ab", "add_special_tokens": True}, "", 1),
        ({"prompt": "ab", "add_special_tokens": False}, "", 0),
        ({"prompt": "<|begin|>ab"}, "", 1),
        ({"messages": []}, "ab", 0),
        ({"messages": []}, "{{ bos_token }}ab", 1),
        ({"messages": [], "add_special_tokens": True}, "ab", 1),
        ({"messages": [], "add_special_tokens": True}, "{{ bos_token }}ab", 1),
    ],
)
def test_the_begin_token_of_models_that_have_one(fields: Any, template: str, count: int) -> None:
    tokenizer = Tokenizer(BACKEND, bos_token="<|begin|>", add_bos=True, chat_template=template)
    if "messages" in fields:
        fields = {**fields, "messages": [{"role": "user", "content": "x"}]}
    documents = [Document("Frogs.")] if "prompt" in fields else []
    tokens = prompt_tokens(TokenizeRequest(**fields), documents, tokenizer)
    text = "Frogs.\n\nab" if documents else "ab"
    assert tokens == [BEGIN] * count + tokenizer.encode(text)
