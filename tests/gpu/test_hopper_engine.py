"""Whole models on a GPU: logits with the Hopper kernels against those with XLA's attention."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lazyattn_jax.bench.kernels import has_hopper
from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.models.load import load_model

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from attention_cases import error
from engine_helpers import EngineUnderTest, document, text

pytestmark = pytest.mark.skipif(not has_hopper(), reason="needs an NVIDIA Hopper GPU")

TOKENS = 6
"""Tokens that are generated for every prompt."""

A, B, C = document(1, 300), document(2, 65), document(3, 500)
PROMPTS = [
    [text(10, 20), A, B, C, text(11, 30)],
    [text(10, 20), C, A, text(12, 5)],
    [text(13, 7), B, text(14, 40), A, text(15, 9)],
    [text(16, 150)],
]


def logits_of(loaded, attention: str, reuse: str = "lazy") -> list[np.ndarray]:
    """Of every token of every prompt; a prompt alone, then all at once over cached documents."""
    config = EngineConfig(
        kv_pool_bytes=1 << 30,
        page_size=64,
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        prefill_buckets=(512,),  # few programs to compile: 8B ones take long
        decode_buckets=(4,),
        attention=attention,
        reuse=reuse,
        check_invariants=True,
    )
    engine = EngineUnderTest(loaded, config)
    # The same tokens whatever the logits: one near tie would part two engines.
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, logit_bias={7: 100.0}
    )
    requests = engine.run(PROMPTS[0], params=params) + engine.run(*PROMPTS, params=params)
    return [np.stack(engine.logits[request.id]) for request in requests]


@pytest.mark.parametrize("name", ["dummy:llama3-1b", "dummy:llama3-8b"])
def test_logits(name):
    """The kernels' rounding may not be worse than that of XLA's attention in the same dtype."""
    loaded = load_model(name, dtype=jnp.dtype(jnp.bfloat16))
    ours, xla = logits_of(loaded, "mosaic_gpu"), logits_of(loaded, "xla")
    block = logits_of(loaded, "mosaic_gpu", "block")
    exact = load_model(name, dtype=jnp.dtype(jnp.float32))
    weights = jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(loaded.model))
    nnx.update(exact.model, weights)
    with jax.default_matmul_precision("highest"):
        truth = logits_of(exact, "xla")
    for a, b, c, d in zip(ours, xla, truth, block, strict=True):
        assert a.shape == (TOKENS, loaded.config.vocab_size)
        print(f"{name}: mosaic_gpu {error(a, c):.4f}, xla {error(b, c):.4f}")
        print(f"{name}: documents copied: {error(d, c):.4f}")
        assert error(a, c) < 1.2 * error(b, c)
        # The copies' keys are rounded once more than those that are attended to where they are.
        assert error(d, c) < 1.5 * error(b, c)
