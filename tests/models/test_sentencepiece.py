"""Vocabularies of SentencePiece give its ids; those in ``golden`` are what its own code gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import TokenType
from model_helpers import GOLDEN

from lazyattn_jax.models.gguf_file import GGUFSource, read_tokenizer
from lazyattn_jax.models.sentencepiece import sentencepiece_bpe
from lazyattn_jax.models.tokenizer import Tokenizer

KNOWN = json.loads((GOLDEN / "sentencepiece.json").read_text("utf-8"))
KINDS = {"control": TokenType.CONTROL, "unknown": TokenType.UNKNOWN, "byte": TokenType.BYTE}
PIECES: list[str] = KNOWN["pieces"]


def write(path: Path, *, prefix: bool | None = None, whole: str | None = None) -> Tokenizer:
    """The tokenizer of a GGUF file with this vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_scores(KNOWN["scores"])
    kinds = {i: KINDS[name] for name, ids in KNOWN["kinds"].items() for i in ids}
    if whole is not None:
        kinds[PIECES.index(whole)] = TokenType.USER_DEFINED
    writer.add_token_types([kinds.get(i, TokenType.NORMAL) for i in range(len(PIECES))])
    writer.add_bos_token_id(PIECES.index("<s>"))
    writer.add_eos_token_id(PIECES.index("</s>"))
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_tokenizer(GGUFSource(path))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.mark.parametrize("known", KNOWN["texts"], ids=lambda known: repr(known["text"][:20]))
def test_ids_and_text_of_sentencepiece(tokenizer, known: dict[str, Any]):
    assert tokenizer.encode(known["text"], literal=True) == known["ids"]
    assert tokenizer.decode(known["ids"]) == known["shown"]
    stream = tokenizer.stream()
    assert "".join(map(stream.step, known["ids"])) == known["shown"]


def test_control_tokens(tokenizer):
    begin, end, instruct = (PIECES.index(name) for name in ("<s>", "</s>", "[INST]"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.add_bos) == (begin, end, True)
    ids = tokenizer.encode("<s>[INST]the</s>")
    assert ids == [begin, instruct, PIECES.index("▁the"), end]
    assert tokenizer.decode(ids) == "the"


def test_text_does_not_become_a_control_token():
    """Nor a byte, where its name could be made of other tokens."""
    tokens = ["<s>", "<0x0A>", *"<s>0xA", "<s", "<0", "<0x", "<0x0", "<0x0A"]
    backend = sentencepiece_bpe(
        tokens,
        [0.0] * 8 + [-1.0, -2.0, -3.0, -4.0, -5.0],
        ordinary=[False] * 2 + [True] * 11,
        special=["<s>"],
        unknown=None,
        prefix=False,
    )
    tokenizer = Tokenizer(backend, bos_token="<s>")
    ids = tokenizer.encode("<s><0x0A>", literal=True)
    assert [tokens[i] for i in ids] == ["<s", ">", "<0x0A", ">"]
    assert tokenizer.encode("<s>") == [0]


def test_text_without_a_space_before_it(tmp_path):
    tokenizer = write(tmp_path / "model.gguf", prefix=False)
    ids = tokenizer.encode("he the")
    assert ids == [PIECES.index("he"), PIECES.index("▁the")]
    assert tokenizer.decode(ids) == "he the"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_text_that_is_never_cut(tmp_path):
    """Nor joined with what stands beside it; and shown, as control tokens are not."""
    tokenizer = write(tmp_path / "model.gguf", whole="he", prefix=False)
    ids = tokenizer.encode("the")
    assert [PIECES[i] for i in ids] == ["t", "he"]
    assert tokenizer.decode(ids) == "the"
