"""The model against logits that Hugging Face transformers computed (tests/golden)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from model_helpers import GOLDEN, SCALED, TINY, copy_golden, edit_json, golden, logits_of

from lazyattn_jax.models import hf
from lazyattn_jax.models.checkpoint import LoadedModel
from lazyattn_jax.models.config import NAMED_SHAPES, LlamaConfig
from lazyattn_jax.models.load import load_model

# Float32 and float64 differ by at most 4e-5 on these models.
TOLERANCE = 1e-3
PROMPTS = ("english", "chatml", "mixed")


def assert_golden(logits: np.ndarray, facts: dict) -> None:
    assert logits.argmax(-1).tolist() == facts["argmax"]
    for position, row in facts["rows"].items():
        got = logits[int(position)].astype(np.float64)
        best = np.argsort(-got)[: len(row["top_ids"])]
        assert best.tolist() == row["top_ids"]
        np.testing.assert_allclose(got[best], row["top_logits"], rtol=0, atol=TOLERANCE)
        logsumexp = np.logaddexp.reduce(got)
        np.testing.assert_allclose(logsumexp, row["logsumexp"], rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2-135m")


@pytest.mark.parametrize("name", TINY)
def test_logits_of_tiny_models(name, tmp_path):
    loaded = load_model(str(copy_golden(name, tmp_path / name)))
    facts = golden()[name]
    assert_golden(logits_of(loaded.model, loaded.config, facts["tokens"]), facts)


@pytest.mark.parametrize("name", SCALED)
def test_rope_scaling_is_used(name, tmp_path):
    folder = copy_golden(name, tmp_path / name)
    theta = hf.load_config(folder).rope.theta
    edit_json(folder / "config.json", "rope_scaling", "rope_parameters", rope_theta=theta)
    loaded = load_model(str(folder))
    logits = logits_of(loaded.model, loaded.config, golden()[name]["tokens"])
    row = golden()[name]["rows"]["79"]
    assert np.abs(logits[79][row["top_ids"]] - row["top_logits"]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_of_smollm2(smollm2, prompt):
    facts = golden()["smollm2"]["prompts"][prompt]
    assert_golden(logits_of(smollm2.model, smollm2.config, facts["tokens"]), facts)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_of_smollm2(smollm2, prompt):
    facts = golden()["smollm2"]["prompts"][prompt]
    assert smollm2.tokenizer.encode(facts["text"]) == facts["tokens"]
    shown = facts["text"]
    for control in ("<|im_start|>", "<|im_end|>"):
        shown = shown.replace(control, "")
    assert smollm2.tokenizer.decode(facts["tokens"]) == shown


def test_shape_of_smollm2(smollm2):
    assert smollm2.config == NAMED_SHAPES["smollm2-135m"]
    assert not smollm2.tokenizer.add_bos
    assert smollm2.tokenizer.eos_token_id == 2


@pytest.mark.parametrize("name", TINY)
def test_config_round_trip(name):
    config = hf.load_config(GOLDEN / name)
    assert LlamaConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("name", "tied", "biases", "head_dim", "eos", "eps"),
    [
        ("tiny_llama3", False, "", 16, (2, 5), 1e-5),
        ("tiny_yarn", True, "", 8, (2,), 1e-5),
        ("tiny_linear", False, "qkv o mlp", 8, (2,), 1e-3),
        ("tiny_mistral", False, "", 16, (2,), 1e-6),
        ("tiny_qwen2", True, "qkv", 8, (2,), 1e-6),
        ("tiny_qwen3", False, "qkv o", 16, (2,), 1e-6),
    ],
)
def test_config_is_read(name, tied, biases, head_dim, eos, eps):
    config = hf.load_config(GOLDEN / name)
    assert config.tie_word_embeddings == tied
    found = (config.attention_bias, config.attention_output_bias, config.mlp_bias)
    assert found == tuple(part in biases.split() for part in ("qkv", "o", "mlp"))
    assert (config.head_dim, config.eos_token_ids, config.rms_norm_eps) == (head_dim, eos, eps)
    assert config.max_position_embeddings == 256


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("name", "changes", "drop", "want"),
    [
        ("tiny_mistral", {}, (), 80),
        ("tiny_mistral", {"sliding_window": None}, (), None),
        ("tiny_mistral", {}, ("sliding_window",), 4096),  # as transformers takes it
        ("tiny_llama3", {"sliding_window": 64}, (), None),
        ("tiny_qwen2", {"sliding_window": 64}, (), None),
        ("tiny_qwen2", QWEN_WINDOW, (), 64),
        ("tiny_qwen2", QWEN_WINDOW | {"max_window_layers": 2}, (), None),
        ("tiny_qwen2", QWEN_WINDOW, ("max_window_layers",), None),  # 28 of 2
        ("tiny_qwen3", {}, (), None),
        ("tiny_qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, (), 32),
        ("tiny_qwen3", {"max_window_layers": 1}, ("layer_types",), 32),
    ],
)
def test_sliding_window_is_read(name, changes, drop, want, tmp_path):
    folder = copy_golden(name, tmp_path / name)
    edit_json(folder / "config.json", *drop, **changes)
    config = hf.load_config(folder)
    assert config.sliding_window == want
    assert LlamaConfig.from_hf(config.to_hf()) == config


def test_head_dim_of_a_qwen3_that_does_not_say(tmp_path):
    edit_json(copy_golden("tiny_qwen3", tmp_path / "model") / "config.json", "head_dim")
    assert hf.load_config(tmp_path / "model").head_dim == 128


def test_the_norm_of_query_and_key_heads_is_used(tmp_path: Path):
    """Without it the logits of a Qwen3 are others: the golden ones tell."""
    loaded = load_model(str(copy_golden("tiny_qwen3", tmp_path / "model")))
    for layer in loaded.model.layers:
        layer.attention.qk_norm = False
    facts = golden()["tiny_qwen3"]
    row = facts["rows"]["79"]
    logits = logits_of(loaded.model, loaded.config, facts["tokens"])
    assert np.abs(logits[79][row["top_ids"]] - row["top_logits"]).max() > 100 * TOLERANCE
