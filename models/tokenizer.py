"""Text to token ids and back, and the chat template that goes with a vocabulary."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from lazyattn_jax.models.config import read_json
from lazyattn_jax.models.token_cache import TokenCache

# How the vocabularies that GGUF files name cut text before merging: a regular expression whose
# matches are isolated, or a flag for the two built-in cutters.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": _LETTERS + r"\p{N}{1,3}" + _REST,
    "qwen2": _LETTERS + r"\p{N}" + _REST,
}


class TemplateError(ValueError):
    """A chat template refused its messages or could not be rendered."""


class Tokenizer:
    """A vocabulary (``tokenizers``) with its special tokens and chat template.

    Args:
      backend: the tokenizer proper.
      bos_token: text of the begin-of-text token.
      eos_token: text of the end-of-text token.
      add_bos: whether plain prompts start with the begin-of-text token; by default what the
        backend's post-processor does.
      chat_template: Jinja source, or none for models without one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos: bool | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.backend = backend
        # Document text must not be able to spell control tokens such as <|im_end|>.
        self._literal = tokenizers.Tokenizer.from_str(backend.to_str())
        self._literal.encode_special_tokens = True
        self.bos_token, self.eos_token = bos_token, eos_token
        self.bos_token_id = None if bos_token is None else backend.token_to_id(bos_token)
        self.eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
        if add_bos is None:
            add_bos = self.bos_token_id in backend.encode("", add_special_tokens=True).ids
        self.add_bos = add_bos and self.bos_token_id is not None
        self.encode_document = TokenCache(functools.partial(self.encode, literal=True))
        """Token ids of a document's text, remembered; see ``TokenCache``."""
        self.chat_template = chat_template
        self._template = None if chat_template is None else _compile(chat_template)

    def encode(self, text: str, *, literal: bool = False) -> list[int]:
        """Token ids of a text, without a begin-of-text token.

        Args:
          text: any text.
          literal: take names of control tokens in the text as ordinary characters.
        """
        backend = self._literal if literal else self.backend
        return backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, control: bool = False) -> str:
        """Text of some token ids, control tokens left out or, with ``control``, by their names."""
        return self.backend.decode(list(ids), skip_special_tokens=not control)

    def name(self, token: int) -> str:
        """A token as the vocabulary spells it; empty for ids that it leaves out."""
        return self.backend.id_to_token(token) or ""

    def show(self, token: int) -> str:
        """Text of one token, control tokens by their names; U+FFFD for parts of characters."""
        text = self.backend.decode([token], skip_special_tokens=False)
        return text or self.name(token)

    def stream(self) -> DecodeStream:
        """An incremental decoder that never cuts a character in two."""
        return DecodeStream(self.backend)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt text of a conversation.

        Raises:
          TemplateError: the model has no chat template, or it refused the messages.
        """
        if self._template is None:
            raise TemplateError("this model has no chat template; use plain prompts")
        try:
            return self._template.render(
                messages=messages,
                bos_token=self.bos_token or "",
                eos_token=self.eos_token or "",
                # Templates are written for transformers, where both are always defined.
                **{"tools": None, "documents": None, **variables},
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refused the messages: {error}") from error
        except Exception as error:  # whatever the model's own code runs into
            raise TemplateError(f"the chat template failed on the messages: {error}") from error

    def save(self, folder: Path) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_config.json``."""
        self.backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "bos_token": self.bos_token,
                    "eos_token": self.eos_token,
                    "add_bos_token": self.add_bos,
                    "chat_template": self.chat_template,
                },
                indent=2,
                ensure_ascii=False,
            ),
            encoding="utf-8",
        )

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads the tokenizer files of a model folder.

        Raises:
          ValueError: ``tokenizer.json`` is missing or damaged, or the chat template is.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{folder} has no tokenizer.json (a 'fast' tokenizer is needed)")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} is damaged: {error}") from None
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        template = config.get("chat_template")
        if isinstance(template, list):  # several named templates
            named = {t["name"]: t["template"] for t in template}
            template = named.get("default", next(iter(named.values()), None))
        if (file := folder / "chat_template.jinja").exists():
            template = file.read_text("utf-8")
        return cls(
            backend,
            bos_token=_token_text(config.get("bos_token")),
            eos_token=_token_text(config.get("eos_token")),
            add_bos=config.get("add_bos_token"),
            chat_template=template,
        )


class DecodeStream:
    """Text of token ids as they come; bytes of unfinished characters are held back."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._stream = decoders.DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str:
        """The text that this token completes, possibly none."""
        return self._stream.step(self._backend, token) or ""


def byte_level_bpe(
    tokens: Sequence[str],
    merges: Sequence[str],
    special: Sequence[str],
    pre: str = "gpt-2",
    *,
    whole: Sequence[str] = (),
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer from its parts, as GGUF files list them.

    Args:
      tokens: the vocabulary; a token's id is its place.
      merges: pairs joined by a space, best first.
      special: control tokens.
      pre: llama.cpp's name of how text is cut before merging.
      whole: tokens that are never cut in text, but are text: decoding keeps them.

    Raises:
      ValueError: an unknown ``pre``.
    """
    cutter: pre_tokenizers.PreTokenizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
    if pre in _SPLITS:
        split = pre_tokenizers.Split(tokenizers.Regex(_SPLITS[pre]), "isolated")
        cutter = pre_tokenizers.Sequence([split, byte_level])
    elif pre == "smollm":
        cutter = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        )
    elif pre in ("gpt-2", "default"):
        cutter = byte_level
    else:
        known = ("gpt-2", "default", "smollm", *_SPLITS)
        raise ValueError(f"pre-tokenizer {pre!r} is not one of {', '.join(known)}")
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(left, right) for left, _, right in (m.partition(" ") for m in merges)],
            # A word that is in the vocabulary stays whole even where no merge leads to it.
            ignore_merges=pre == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = cutter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in whole])
    return tokenizer


def dummy_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte tokenizer for random weights: ids 0 and 1 end and begin, then the 256 bytes.

    Further ids decode to a made-up word each, so that random output is visible text.
    """
    special = ["<|end|>", "<|begin|>"]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(tokens):
        raise ValueError(f"a dummy vocabulary needs {len(tokens)} tokens, not {vocab_size}")
    tokens += [f"Ġt{i}" for i in range(len(tokens), vocab_size)]
    return Tokenizer(
        byte_level_bpe(tokens, [], special),
        bos_token="<|begin|>",
        eos_token="<|end|>",
        add_bos=False,
        chat_template=(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        ),
    )


class _GenerationBlock(Extension):
    """Accepts ``{% generation %}``, which marks training targets and renders its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the model's chat template is not valid Jinja: {error}") from None


def _token_text(token: Any) -> str | None:
    return token["content"] if isinstance(token, dict) else token
