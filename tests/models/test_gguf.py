"""GGUF files against the Hugging Face folders that they were converted from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf_writer import quantised, write_gguf
from model_helpers import (
    GOLDEN,
    TINY,
    assert_same_params,
    copy_golden,
    golden,
    logits_of,
    params_of,
    weights_of,
)

from lazyattn_jax.models.config import LlamaConfig
from lazyattn_jax.models.load import load_model

LLAMA3_CONFIG = json.loads((GOLDEN / "tiny_llama3" / "config.json").read_text("utf-8"))
# Rows of 256 hold whole blocks of every quantisation.
WIDE = LLAMA3_CONFIG | {
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
}
SHAPES = {
    "model.embed_tokens": (128, 256),
    "lm_head": (128, 256),
    "model.layers.0.self_attn.q_proj": (256, 256),
    "model.layers.0.self_attn.k_proj": (128, 256),
    "model.layers.0.self_attn.v_proj": (128, 256),
    "model.layers.0.self_attn.o_proj": (256, 256),
    "model.layers.0.mlp.gate_proj": (256, 256),
    "model.layers.0.mlp.up_proj": (256, 256),
    "model.layers.0.mlp.down_proj": (256, 256),
    "model.norm": (256,),
    "model.layers.0.input_layernorm": (256,),
    "model.layers.0.post_attention_layernorm": (256,),
}
PARAMS = {  # of matrices that have heads, and of some that have not
    "model.layers.0.self_attn.q_proj.weight": "layers.0.attention.q.kernel",
    "model.layers.0.self_attn.k_proj.weight": "layers.0.attention.k.kernel",
    "model.layers.0.self_attn.v_proj.weight": "layers.0.attention.v.kernel",
    "model.layers.0.mlp.down_proj.weight": "layers.0.mlp.down.kernel",
    "lm_head.weight": "head.kernel",
}
LLAMA_CPP_ONLY = """
    Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS
    TQ1_0 TQ2_0
"""


@pytest.fixture
def write(tmp_path):
    """Writes tiny_llama3, or other weights, as a GGUF file."""

    def write(config: dict[str, Any] = LLAMA3_CONFIG, weights: Any = None, **options: Any) -> str:
        weights = weights_of(GOLDEN / "tiny_llama3") if weights is None else weights
        return str(write_gguf(tmp_path / "model.gguf", config, weights, **options))

    return write


@pytest.mark.parametrize("name", TINY)
def test_same_model_as_the_hugging_face_folder(name, tmp_path):
    folder = copy_golden(name, tmp_path / name)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    kind = {"tiny_qwen2": "qwen2", "tiny_qwen3": "qwen3"}.get(name, "llama")  # Mistral is one
    path = write_gguf(tmp_path / "model.gguf", config, weights_of(folder), architecture=kind)
    ours = load_model(str(path))
    theirs = load_model(str(folder))
    assert_same_params(ours.model, theirs.model)
    tokens = golden()[name]["tokens"]
    np.testing.assert_allclose(
        logits_of(ours.model, ours.config, tokens),
        logits_of(theirs.model, theirs.config, tokens),
        # The file keeps the divisors of llama3's frequencies in float32.
        atol=1e-4 if name == "tiny_llama3" else 0,
        rtol=0,
    )
    for field in ("eos_token_ids", "bos_token_id", "rms_norm_eps", "head_dim", "vocab_size"):
        assert getattr(ours.config, field) == getattr(theirs.config, field)
    text = "Then the </s> cat\n"
    assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)
    assert ours.tokenizer.chat_template == theirs.tokenizer.chat_template


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_quantised_weights(write, kind):
    kind = GGMLQuantizationType[kind]
    weights = weights_of(GOLDEN / "tiny_llama3")
    params = params_of(load_model(write(encode=quantised(kind))).model)
    for name, param in PARAMS.items():
        # A row is quantised by itself, so the order of rows does not matter.
        want = gguf.quants.dequantize(gguf.quants.quantize(weights[name], kind), kind)
        np.testing.assert_array_equal(params[param], want.T, err_msg=name)
    np.testing.assert_array_equal(params["norm.scale"], weights["model.norm.weight"])


@pytest.mark.parametrize("kind", LLAMA_CPP_ONLY.split())
def test_quantisations_of_llama_cpp(write, kind):
    """Those that only llama.cpp can make: any bytes are valid ones, below infinity in float16."""
    kind = GGMLQuantizationType[kind]
    rng = np.random.default_rng(0)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    weights = {f"{name}.weight": np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    for name in PARAMS:
        rows, width = weights[name].shape
        weights[name] = rng.integers(0, 0x3C, (rows, width // block * size), np.uint8)

    def encode(value: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        return value, kind if value.dtype == np.uint8 else GGMLQuantizationType.F32

    params = params_of(load_model(write(WIDE, weights, encode=encode)).model)
    for name, param in PARAMS.items():
        want = gguf.quants.dequantize(weights[name], kind)
        assert np.isfinite(want).all()
        assert np.unique(want).size > 2
        np.testing.assert_array_equal(params[param], want.T, err_msg=name)


def test_quantisation_that_gguf_cannot_undo(write):
    def encode(value: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        if value.shape != (128, 32):
            return value, GGMLQuantizationType.F32
        return np.zeros((128, 40), np.uint8), GGMLQuantizationType.Q8_1

    with pytest.raises(ValueError, match=r"'token_embd\.weight' is quantised as Q8_1, which"):
        load_model(write(encode=encode))


def test_bfloat16(write):
    path = write()
    low = params_of(load_model(path, dtype=jnp.bfloat16).model)
    for name, value in params_of(load_model(path).model).items():
        np.testing.assert_array_equal(low[name], value.astype(jnp.bfloat16), err_msg=name)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "gemma", r"general\.architecture is 'gemma'; .*: llama, qwen2"),
        ("llama.block_count", None, r"has no metadata 'llama\.block_count'"),
        ("llama.attention.head_count", 0, "num_heads is 0, must be at least 1"),
        ("tokenizer.ggml.tokens", None, r"has no metadata 'tokenizer\.ggml\.tokens'"),
        ("tokenizer.ggml.merges", None, r"has no metadata 'tokenizer\.ggml\.merges'"),
        ("tokenizer.ggml.model", "t5", "tokenizer model 't5' cannot be rebuilt"),
        ("tokenizer.ggml.model", "llama", r"has no metadata 'tokenizer\.ggml\.scores'"),
        ("tokenizer.ggml.pre", "jais", "pre-tokenizer 'jais' is not one of gpt-2"),
    ],
)
def test_metadata_that_is_refused(write, key, value, message):
    with pytest.raises(ValueError, match=message):
        load_model(write(metadata={key: value}))


@pytest.mark.parametrize(("window", "want"), [(None, None), (0, None), (64, 64)])
def test_sliding_window(write, window, want):
    config = load_model(write(LLAMA3_CONFIG | {"sliding_window": window})).config
    assert config.sliding_window == want
    assert LlamaConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("pre", "flag", "added"),
    # As llama.cpp: without a flag, the Llama 3 family begins texts with the begin token.
    [("llama-bpe", None, True), ("smollm", None, False), ("smollm", True, True)],
)
def test_begin_token(write, pre, flag, added):
    metadata = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": flag}
    assert load_model(write(metadata=metadata)).tokenizer.add_bos is added


def test_types_of_tokens(write):
    """Both types are found in text as a whole; control tokens are not shown, words are."""
    tokenizer = load_model(write(user_defined=["<filler120>"])).tokenizer
    control, word, plain = (tokenizer.encode(t) for t in ("</s>", "<filler120>", "<filler121>"))
    assert (control, word) == ([2], [120])
    assert len(plain) == len("<filler121>")
    assert tokenizer.decode([*control, *word, *plain]) == "<filler120><filler121>"


def test_truncated_anywhere(write, tmp_path):
    whole = Path(write()).read_bytes()
    path = tmp_path / "cut.gguf"
    data_start = len(whole) - sum(w.nbytes for w in weights_of(GOLDEN / "tiny_llama3").values())
    header = [0, 3, 4, 7, 23, 24, *range(100, data_start, 997)]
    data = [data_start, data_start + 1, len(whole) // 2, len(whole) - 1]
    for length in (*header, *data):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf is not a GGUF file or is truncated"):
            load_model(str(path))
    path.write_bytes(whole)
    assert load_model(str(path)).config.num_layers == 2


def test_tensor_is_missing(write):
    weights = weights_of(GOLDEN / "tiny_llama3")
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks 1 of 21 tensors, among them 'blk\.1\.ffn_up\.w"):
        load_model(write(weights=weights))
