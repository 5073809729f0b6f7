"""The quality benchmark from its command line, on random weights."""

from __future__ import annotations

import json
import sys

import pytest
from small_models import sharpen

from lazyattn_jax import llm
from lazyattn_jax.bench import __main__ as command
from lazyattn_jax.bench.quality_runs import Mode
from lazyattn_jax.engine.request import DocumentContext
from lazyattn_jax.models.load import load_model

ENGINE = ("--model", "dummy:tiny", "--max-num-seqs", "2", "--max-num-batched-tokens", "64")


def run(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "quality", *ENGINE, *map(str, arguments)])
    assert command.main() == 0


def load_sharp(name, **options):
    loaded = load_model(name, **options)
    sharpen(loaded.model)
    return loaded


def test_a_tiny_run(tmp_path, monkeypatch, capsys):
    """Repairing whole documents is full attention: the same answers, token by token."""
    data, output, answers = (tmp_path / n for n in ("d.jsonl", "out.json", "answers.jsonl"))
    lines = [
        {"question": f"q{i}?", "answers": [f"word{i}"], "title": "t", "text": f"Text {i} word{i}."}
        for i in range(4)
    ]
    data.write_text("\n".join(map(json.dumps, lines)))
    modes = "full,none:repair=1000,prefix:gap=5:temperature=0.9,none"
    options = ["--data", data, "--documents", 2, "--documents", 3, "--modes", modes]
    options += ["--limit", 3, "--orders", 2, "--max-tokens", 6, "--timed", 2]
    options += ["--perplexity", data, "--output", output, "--answers", answers]
    monkeypatch.setattr(llm, "load_model", load_sharp)
    run(monkeypatch, *options)

    record = json.loads(output.read_text())
    assert record["settings"]["modes"] == modes.split(",")
    assert [s["documents"] for s in record["sets"]] == [2, 3]
    mean, low, high = record["perplexity"]
    assert 1 < low <= mean <= high
    for rows in (s["modes"] for s in record["sets"]):
        full, repaired, prefix, none = rows
        assert {r["mode"]: r["questions"] for r in rows} == dict.fromkeys(modes.split(","), 3)
        assert full["match"] == repaired["match"]
        assert repaired["differences"]["full"]["match"] == [0, 0, 0]
        assert all(r["prompt_tokens"] == full["prompt_tokens"] for r in rows)
        assert none["computed_tokens"] == prefix["computed_tokens"] < full["computed_tokens"]
        assert all(r["first_token_ms"] > 0 for r in rows)
    texts: dict[str, list[str]] = {}
    for entry in map(json.loads, answers.read_text().splitlines()):
        texts.setdefault(entry["mode"], []).append(entry["text"])
    assert texts["full"] == texts["none:repair=1000"]
    assert len(texts["full"]) == 2 * 3 * 2
    assert texts["full"] != texts["none"]
    shown = capsys.readouterr().out
    assert "d.jsonl, 3 questions, 3 documents" in shown
    assert "Perplexity of 4 texts" in shown


def test_modes():
    assert Mode.parse("full").context is None
    assert Mode.parse("none").context == DocumentContext(False)
    assert Mode.parse("none:stock:repair=16").context == DocumentContext(
        False, repair=16, adapter=False
    )
    mode = Mode.parse("prefix:gap=600:repair=16:temperature=0.9")
    assert mode.context == DocumentContext(True, 600, 16, 0.9)
    assert Mode.parse("prefix:select=3").context == DocumentContext(True, select=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--modes", "half"), "not full, prefix or none"),
        (("--modes", "full,none,full"), "has a mode twice"),
        (("--modes", "full:gap=1"), "the option 'gap=1'"),
        (("--modes", "prefix:stock"), "the option 'stock'"),
        (("--modes", "none:size=1"), "the option 'size=1'"),
        (("--modes", "prefix:gap=x"), "gap is 'x', must be a number"),
        (("--modes", "prefix:repair=-1"), "document_repair is -1, must be 0 or more"),
        (("--modes", "prefix:select=-1"), "document_select is -1, must be 0 or more"),
        ((), "give --data or --perplexity"),
        (("--data", "absent"), "cannot read absent"),
        (("--data", "absent", "--limit", "0"), "--limit is 0, must be at least 1"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit) as raised:
        run(monkeypatch, *arguments)
    assert message in f"{raised.value.code} {capsys.readouterr().err}"


def test_full_attention_with_an_adapter_wants_one(tmp_path, monkeypatch):
    (tmp_path / "texts").write_text('{"text": "A text."}')
    with pytest.raises(SystemExit, match="'full:adapter' wants an adapter, and there is none"):
        run(monkeypatch, "--perplexity", tmp_path / "texts", "--modes", "full:adapter")
