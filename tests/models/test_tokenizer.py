"""Round trips, control tokens, streams, chat templates and tokenizer files."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import edit_json, small_tokenizer
from tokenizers import pre_tokenizers, processors

from lazyattn_jax.models.tokenizer import (
    TemplateError,
    Tokenizer,
    byte_level_bpe,
    dummy_tokenizer,
)

DUMMY = dummy_tokenizer(300)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # no lone surrogates: not valid text


def with_template(source: str) -> Tokenizer:
    return Tokenizer(
        DUMMY.backend, bos_token="<|begin|>", eos_token="<|end|>", chat_template=source
    )


def render(source: str, content: object = "Hi", **variables: object) -> str:
    messages = [{"role": "user", "content": content}]
    return with_template(source).render_chat(messages, **variables)


# Ids and text.


@settings(deadline=None)
@given(TEXT)
def test_byte_level_round_trip(text):
    ids = DUMMY.encode(text, literal=True)
    assert len(ids) == len(text.encode())
    assert DUMMY.decode(ids) == text


def test_dummy_vocabulary():
    assert (DUMMY.eos_token_id, DUMMY.bos_token_id, DUMMY.add_bos) == (0, 1, False)
    assert DUMMY.decode([0, 1, 299]) == " t299"
    with pytest.raises(ValueError, match="needs 258 tokens, not 257"):
        dummy_tokenizer(257)


@pytest.mark.parametrize("name", ["<|end|>", "<|begin|>"])
def test_literal_makes_control_tokens_ordinary(name):
    control = DUMMY.backend.token_to_id(name)
    text = f"a{name}b{name}"
    assert DUMMY.encode(name) == [control]
    assert DUMMY.encode(text).count(control) == 2
    assert control not in DUMMY.encode(text, literal=True)
    assert DUMMY.decode(DUMMY.encode(text)) == "ab"
    assert DUMMY.decode(DUMMY.encode(text, literal=True)) == text
    # Asking for literal text once changes nothing for later calls.
    assert DUMMY.encode(name) == [control]


# Streams.


@settings(deadline=None)
@given(TEXT)
def test_stream_gives_whole_characters(text):
    """A byte a token: every character beyond ASCII is split."""
    stream = DUMMY.stream()
    steps = [stream.step(token) for token in DUMMY.encode(text, literal=True)]
    shown = "".join(steps)
    # A real U+FFFD at the end looks like an unfinished character.
    assert shown == text.rstrip("\ufffd")
    assert all("\ufffd" not in step or "\ufffd" in text for step in steps)


@pytest.mark.parametrize("text", ["😀", "a👩‍💻b", "½é日", "x😀"])
def test_stream_holds_the_bytes_of_an_unfinished_character(text):
    stream, seen = DUMMY.stream(), b""
    for byte, token in zip(text.encode(), DUMMY.encode(text), strict=True):
        seen += bytes([byte])
        step = stream.step(token)
        finished = seen.decode(errors="ignore")
        assert step == (finished[-1] if seen == finished.encode() else "")


@settings(deadline=None)
@given(st.lists(st.integers(0, 299), max_size=30))
def test_stream_of_any_tokens(ids):
    """Random weights give bytes that are no text: the stream still is the decoded text."""
    stream = DUMMY.stream()
    shown = "".join(map(stream.step, ids))
    assert shown == DUMMY.decode(ids).rstrip("\ufffd")


# The begin token.


@pytest.mark.parametrize(
    ("template", "flag", "added"),
    [
        ("<s> $A", None, True),
        ("$A </s>", None, False),
        ("<s> $A", False, False),
        ("$A", True, True),
    ],
)
def test_begin_token_is_added_as_the_post_processor_does(template, flag, added):
    backend = small_tokenizer().backend
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = Tokenizer(backend, bos_token="<s>", add_bos=flag)
    assert (tokenizer.add_bos, tokenizer.bos_token_id) == (added, 1)
    # The caller puts it where it belongs: before documents.
    assert tokenizer.encode("Hi") == [backend.token_to_id("H"), backend.token_to_id("i")]


def test_no_begin_token_without_a_name():
    assert not Tokenizer(small_tokenizer().backend, add_bos=True).add_bos


# Chat templates.


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("{{ bos_token }}|{{ messages[0]['content'] }}|{{ eos_token }}", "<|begin|>|Hi|<|end|>"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}"
         "{% if i == 4 %}{% break %}{% endif %}{% endfor %}", "0134"),
        ("  {% if true %}\nyes\n  {% endif %}\nno", "yes\nno"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
        ("{{ {'b': 'é<', 'a': 1} | tojson }}", '{"b": "é<", "a": 1}'),
        ("{{ ['é'] | tojson(indent=1) }}", '[\n "é"\n]'),
        ("{{ ['é'] | tojson(ensure_ascii=true) }}", '["\\u00e9"]'),
        ("{{ missing or 'default' }}", "default"),
        ("{{ messages[0].content }}{{ '<b>' }}", "Hi<b>"),
    ],
)  # fmt: skip
def test_chat_template(source, want):
    assert render(source) == want


def test_chat_template_variables():
    source = "{% if tools is not none %}{{ tools[0] }}{% endif %}{{ documents }}"
    assert render(source) == "None"
    assert render(source, tools=["t"], documents=[1]) == "t[1]"


def test_strftime_now(monkeypatch):
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 7, 3)

    monkeypatch.setattr(datetime, "datetime", Clock)
    assert render("{{ strftime_now('%d %b %Y') }}") == "03 Jul 2024"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused .*: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "refused"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused"),
        ("{{ messages.append(1) }}", "refused .*unsafe"),
        ("{{ messages[0].nothing.more }}", "refused .*'nothing'"),
        ("{{ messages[0].content + 1 }}", "failed on the messages"),
        ("{{ 1 // (messages | length - 1) }}", "failed on the messages"),
        ("{{ range(10 ** 9) | list }}", "failed on the messages"),
    ],
)
def test_template_that_fails(source, message):
    with pytest.raises(TemplateError, match=message):
        render(source)


def test_model_without_a_template():
    with pytest.raises(TemplateError, match="has no chat template; use plain prompts"):
        Tokenizer(DUMMY.backend).render_chat([])


def test_template_that_is_not_jinja():
    with pytest.raises(ValueError, match=r"template is not valid Jinja: .*'endfor'"):
        with_template("{% for m in messages %}{{ m }}")


# Files.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_tokenizer().save(tmp_path)
    return tmp_path


def test_save_and_load(folder):
    loaded, saved = Tokenizer.load(folder), small_tokenizer()
    assert loaded.encode("the </s> é!") == saved.encode("the </s> é!")
    for name in ("bos_token_id", "eos_token_id", "add_bos", "chat_template"):
        assert getattr(loaded, name) == getattr(saved, name)


def test_chat_template_files(folder):
    config = folder / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit_json(config, chat_template=named)
    assert Tokenizer.load(folder).chat_template == "D"
    edit_json(config, chat_template=named[:1])
    assert Tokenizer.load(folder).chat_template == "T"
    edit_json(config, "chat_template")
    assert Tokenizer.load(folder).chat_template is None
    (folder / "chat_template.jinja").write_text("{{ 'é' }}", "utf-8")
    assert Tokenizer.load(folder).render_chat([]) == "é"


def test_token_names_may_be_objects(folder):
    token = {"__type": "AddedToken", "content": "<s>", "lstrip": False}
    edit_json(folder / "tokenizer_config.json", "add_bos_token", bos_token=token, eos_token=None)
    loaded = Tokenizer.load(folder)
    assert (loaded.bos_token, loaded.bos_token_id, loaded.eos_token_id) == ("<s>", 1, None)


def test_tokenizer_json_alone_is_enough(folder):
    (folder / "tokenizer_config.json").unlink()
    loaded = Tokenizer.load(folder)
    assert loaded.encode("the") == small_tokenizer().encode("the")
    assert (loaded.bos_token, loaded.add_bos, loaded.chat_template) == (None, False, None)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, r"has no tokenizer\.json \(a 'fast' tokenizer is needed\)"),
        ("tokenizer.json", "{", r"tokenizer\.json is damaged"),
        ("tokenizer.json", json.dumps({"model": {"type": "New"}}), r"tokenizer\.json is damaged"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json holds a JSON list"),
        ("chat_template.jinja", "{% if %}", "not valid Jinja"),
    ],
)
def test_damaged_files(folder, file, content, message):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content, "utf-8")
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(folder)


# How GGUF vocabularies cut text. Each piece here is a run of byte tokens between borders.


def pieces(pre: str, text: str) -> list[str]:
    """The pieces of a text, spaces shown."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    cutter = byte_level_bpe(alphabet, [], [], pre).pre_tokenizer
    return [
        piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in cutter.pre_tokenize_str(text)
    ]


@pytest.mark.parametrize(
    ("pre", "text", "want"),
    [
        ("llama-bpe", "I'm 12345 ok\n\nHi", ["I", "'m", " ", "123", "45", " ok", "\n\n", "Hi"]),
        ("qwen2", "I'm 12345 ok\n\nHi",
         ["I", "'m", " ", "1", "2", "3", "4", "5", " ok", "\n\n", "Hi"]),
        ("smollm", "I'm 123 ok\n\nHi", ["I", "'m", " ", "1", "2", "3", " ok", "\n", "\n", "Hi"]),
        ("gpt-2", "I'm 12345 ok\n\nHi", ["I", "'m", " 12345", " ok", "\n", "\n", "Hi"]),
        # Upper-case contractions, punctuation that takes a line break along, runs of spaces.
        ("llama-bpe", "I'LL (go).\n  Now", ["I", "'LL", " (", "go", ").\n", " ", " Now"]),
        ("gpt-2", "I'LL (go).\n  Now", ["I", "'", "LL", " (", "go", ").", "\n ", " Now"]),
    ],
)  # fmt: skip
def test_pre_tokenizers(pre, text, want):
    assert pieces(pre, text) == want


def test_unknown_pre_tokenizer():
    with pytest.raises(ValueError, match="'jais' is not one of gpt-2, default, smollm, llama-bpe"):
        byte_level_bpe(["a"], [], [], "jais")


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("gpt-2", False)])
def test_llama3_takes_words_of_the_vocabulary_whole(pre, whole):
    """Even if no merge leads to them (``ignore_merges``)."""
    backend = byte_level_bpe(["h", "i", "hi"], [], [], pre)
    assert backend.encode("hi").ids == ([2] if whole else [0, 1])


def test_merges_are_applied_best_first():
    backend = byte_level_bpe(["a", "b", "c", "ab", "bc"], ["b c", "a b"], [])
    assert backend.encode("abc").ids == [0, 4]
    assert backend.decode([0, 4]) == "abc"
