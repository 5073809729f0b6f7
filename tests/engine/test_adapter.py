"""An adapter beside the base weights: for requests with documents, and for no others."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import GREEDY, EngineUnderTest, document, oracle_logits, text
from flax import nnx
from small_models import small_model

from lazyattn_jax.bench.quality_runs import Mode
from lazyattn_jax.engine import runner
from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.engine.inputs import step_inputs
from lazyattn_jax.engine.request import DocumentContext, as_text
from lazyattn_jax.llm import load_for
from lazyattn_jax.models import load
from lazyattn_jax.models.checkpoint import LoadedModel
from lazyattn_jax.models.lora import linears, read_adapter, save_adapter, with_adapter

RANK = 3
OPTIONS = {
    "page_size": 8,
    "kv_pool_bytes": 200 * 8 * 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "max_documents": 8,
    "check_invariants": True,
}


def random_adapter(loaded: LoadedModel) -> dict[str, jax.Array]:
    """An adapter that changes every layer by about as much as its weights are large."""
    rng = np.random.default_rng(5)
    adapter = {}
    for name, _ in linears(loaded.config):
        layer = functools.reduce(
            lambda part, step: part[int(step)] if step.isdigit() else getattr(part, step),
            name.split("."),
            loaded.model,
        )
        size_in, size_out = layer.kernel.shape
        a, b = rng.normal(0, 0.3, (size_in, RANK)), rng.normal(0, 0.3, (RANK, size_out))
        adapter |= {f"{name}.lora_a": jnp.asarray(a, jnp.float32)}
        adapter |= {f"{name}.lora_b": jnp.asarray(b, jnp.float32)}
    return adapter


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapter") / "adapter.safetensors"
    save_adapter(random_adapter(small_model()), small_model().config, path)
    return path


@pytest.fixture(scope="module")
def merged(file) -> LoadedModel:
    """The same model with the adapter added to its weights, layer by layer in numpy."""
    loaded = small_model()
    adapter = read_adapter(file, loaded.config)
    copy = nnx.clone(loaded.model)
    for i, layer in enumerate(copy.layers):
        for block, names in ((layer.attention, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
            kind = "attention" if block is layer.attention else "mlp"
            for name in names:
                linear = getattr(block, name)
                a, b = (
                    np.asarray(adapter[f"layers.{i}.{kind}.{name}.{part}"], np.float64)
                    for part in ("lora_a", "lora_b")
                )
                kernel = np.asarray(linear.kernel[...], np.float64) + a @ b
                linear.kernel[...] = jnp.asarray(kernel, jnp.float32)
    return dataclasses.replace(loaded, model=copy)


@pytest.fixture(scope="module")
def engine(file) -> EngineUnderTest:
    return EngineUnderTest(with_adapter(small_model(), file), EngineConfig(**OPTIONS))


QUESTION = [text(1, 11), document(2, 20), document(3, 13), text(4, 6)]
TURNED = [text(1, 11), document(3, 13), document(2, 20), text(4, 6)]
PLAIN = [text(1, 11) + text(4, 6)]


def logits_of(engine: EngineUnderTest, request) -> np.ndarray:
    return np.stack(engine.logits[request.id])


def test_requests_with_documents_get_the_adapter_and_others_do_not(engine, merged):
    """In one batch, from the first token to the last; documents are encoded with it as well."""
    prompts = [QUESTION, PLAIN, TURNED]
    requests = engine.run(*prompts)
    engine.assert_idle()
    for request, prompt, loaded in zip(
        requests, prompts, (merged, small_model(), merged), strict=True
    ):
        got = logits_of(engine, request)
        want = oracle_logits(loaded, prompt, request.generated[:-1], prefix=False)[-len(got) :]
        np.testing.assert_allclose(got, want, atol=5e-4, rtol=0)
    other = oracle_logits(small_model(), QUESTION, requests[0].generated[:-1], prefix=False)
    assert np.abs(logits_of(engine, requests[0])[-1] - other[-1]).max() > 1


def test_full_attention_with_it_and_documents_encoded_alone_without(engine, merged):
    """What tells what it brings from what the mask costs; nothing is shared between the ways."""
    ways = {
        "none": (DocumentContext(False), merged, QUESTION),
        "none:stock": (DocumentContext(False, adapter=False), small_model(), QUESTION),
        "full:adapter": (Mode.parse("full:adapter").context, merged, as_text(QUESTION)),
    }
    requests = {n: engine.add(QUESTION, GREEDY, context=way[0]) for n, way in ways.items()}
    engine.drain()
    for name, (_, loaded, prompt) in ways.items():
        request = requests[name]
        got = logits_of(engine, request)
        want = oracle_logits(loaded, prompt, request.generated[:-1], prefix=False)[-len(got) :]
        np.testing.assert_allclose(got, want, atol=5e-4, rtol=0)


def test_nothing_is_shared_between_adapted_and_stock(engine):
    """The same leading text is computed once with the adapter and once without."""
    engine.scheduler.index.clear()
    lead = text(1, 16)
    first, second = [lead, document(2, 20), text(4, 6)], [lead + text(7, 9)]
    (adapted,) = engine.run(first)
    (stock,) = engine.run(second)
    (stock_again,) = engine.run(second)
    (adapted_again,) = engine.run(first)
    assert (adapted.cached_tokens, stock.cached_tokens) == (0, 0)
    assert stock_again.cached_tokens == 24  # all full pages but the last token's
    assert adapted_again.cached_tokens == 16 + 20
    assert adapted_again.generated == adapted.generated
    assert stock_again.generated == stock.generated


def test_without_an_adapter_nothing_of_it_is_in_a_step(make_engine, engine, monkeypatch):
    stock = make_engine(document_context="none")
    seen = []

    def watched(*args):
        seen.append(step_inputs(*args))
        return seen[-1]

    monkeypatch.setattr(runner, "step_inputs", watched)
    stock.run([text(1, 9)])
    assert seen
    assert all(inputs.adapted is None for inputs in seen)
    assert len(jax.tree.leaves(stock._runner._weights)) < len(
        jax.tree.leaves(engine._runner._weights)
    )
    assert stock.context.prefix is False
    assert make_engine().context.prefix is True
    assert engine.context.prefix is False  # what documents are encoded after follows the adapter


def test_which_adapter_a_model_is_loaded_with(file, tmp_path, monkeypatch):
    """The one that is named; else one that is shipped, but not for documents with a prefix."""
    auto, prefix = EngineConfig(), EngineConfig(document_context="prefix")
    assert load_for(auto, "dummy:tiny", "auto").adapter_fingerprint is None
    named = load_for(auto, "dummy:tiny", str(file))
    assert named.adapter_fingerprint is not None
    assert named.fingerprint == load_for(auto, "dummy:tiny", "none").fingerprint
    monkeypatch.setattr(load, "EMBEDDED", "dummy:tiny")
    monkeypatch.setattr(load.importlib.resources, "files", lambda name: tmp_path)
    assert load_for(auto, "dummy:tiny", "auto").adapter_fingerprint is None  # nothing is there
    shipped = tmp_path / "adapters" / "smollm2-135m-instruct" / "adapter.safetensors"
    shipped.parent.mkdir(parents=True)
    shipped.write_bytes(file.read_bytes())
    fingerprint = load_for(auto, "dummy:tiny", "auto").adapter_fingerprint
    assert fingerprint == named.adapter_fingerprint
    assert load_for(auto, "dummy:tiny", "none").adapter_fingerprint is None
    assert load_for(prefix, "dummy:tiny", "auto").adapter_fingerprint is None


def test_an_adapter_for_another_model_is_refused(file, tmp_path):
    loaded = small_model()
    fewer = dataclasses.replace(loaded.config, num_layers=1)
    with pytest.raises(ValueError, match=r"14 tensors that are no part .* 'base_model"):
        read_adapter(file, fewer)
    with pytest.raises(ValueError, match=r"none.safetensors' is no file"):
        read_adapter(tmp_path / "none.safetensors", loaded.config)
    (tmp_path / "bad").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="damaged or no safetensors"):
        read_adapter(tmp_path / "bad", loaded.config)
    adapter = random_adapter(loaded) | {"layers.0.mlp.up.lora_a": jnp.zeros((7, RANK))}
    save_adapter(adapter, loaded.config, tmp_path / "shape")
    with pytest.raises(ValueError, match=r"layers.0.mlp.up are \(7, 3\) .* 64 x 128"):
        with_adapter(loaded, tmp_path / "shape")
