"""Makes ``sentencepiece.json``: a small vocabulary, and what SentencePiece makes of texts with it.

Run it in a virtual environment of its own (Python 3.12), from the root of the repository::

    pip install sentencepiece==0.2.3
    python tests/golden/make_sentencepiece.py

The vocabulary has the form of Llama 2's: BPE with a byte for every character that it lacks. It is
trained on the documentation as it stands, so another day gives another file, and on runs of one
character and beginnings of a control token's name, which can be cut in several ways.
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import sentencepiece

ROOT = Path(__file__).parents[2]
SPECIAL = ("<s>", "</s>", "<unk>", "<0x0A>", "[INST]")
ALPHABET = [*"aabcdeeehiinoorsttt   \n\t.,-=0123éß日🦊▁<>", "  ", "the", "ing", *SPECIAL]


def main() -> None:
    """Trains the vocabulary and writes the file."""
    pages = [
        path.read_text("utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
    ]
    lines = [line for page in pages for line in page.splitlines() if line]
    lines += ["<s<s<s", *("x" + " " * k + "y" + "=" * k for k in range(1, 40))] * 30
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        character_coverage=0.9999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        control_symbols=["[INST]"],
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    rng = random.Random(0)
    texts = ["", " ", "\n", *(" " * k + "=" * k for k in range(2, 40, 3)), "I'm 12 é日🦊", *SPECIAL]
    texts += rng.sample([p for page in pages for p in page.split("\n\n") if len(p) < 200], 12)
    texts += ["".join(rng.choices(ALPHABET, k=rng.randrange(30))) for _ in range(60)]
    kinds = {
        "control": processor.is_control,
        "unknown": processor.is_unknown,
        "byte": processor.is_byte,
    }
    ids = range(processor.vocab_size())
    values = {
        "pieces": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "kinds": {name: [i for i in ids if test(i)] for name, test in kinds.items()},
        "texts": [
            {"text": t, "ids": (found := processor.encode(t)), "shown": processor.decode(found)}
            for t in texts
        ],
    }
    text = json.dumps(values, ensure_ascii=False)
    (ROOT / "tests/golden/sentencepiece.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
