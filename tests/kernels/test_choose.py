"""Which implementation of the attention runs where."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from lazyattn_jax.engine.limits import Limits, work_lists
from lazyattn_jax.kernels.api import choose, lazy_decode
from lazyattn_jax.kernels.dense import DenseLists
from lazyattn_jax.kernels.mosaic_gpu.lists import HopperLists
from lazyattn_jax.kernels.work import References, Runs, Turns

HOPPER = SimpleNamespace(
    platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0", core_count=132
)
AMPERE = SimpleNamespace(
    platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0", core_count=108
)
V5E = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
V3 = SimpleNamespace(platform="tpu", device_kind="TPU v3")
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
LLAMA = {"dtype": jnp.bfloat16, "head_dim": 128, "page_size": 64, "group": 4}


def test_auto_takes_the_fastest_that_runs():
    assert choose("auto", **LLAMA, device=HOPPER) == "mosaic_gpu"
    assert choose("auto", **LLAMA, device=AMPERE) == "xla"
    assert choose("auto", **LLAMA, device=CPU) == "xla"
    assert choose("auto", **LLAMA, device=V5E) == "mosaic_tpu"
    assert choose("auto", **LLAMA | {"dtype": jnp.float32}, device=V5E) == "mosaic_tpu"
    assert choose("auto", **LLAMA, device=V3) == "xla"
    assert choose("auto", **LLAMA | {"dtype": jnp.float16}, device=V5E) == "xla"
    assert choose("auto", **LLAMA | {"head_dim": 96}, device=HOPPER) == "xla"
    assert choose("auto", **LLAMA | {"dtype": jnp.float32}, device=HOPPER) == "xla"


def test_a_named_implementation_is_kept():
    for name in ("xla", "reference"):
        assert choose(name, **LLAMA, device=HOPPER) == name
    assert choose("mosaic_gpu", **LLAMA, device=HOPPER) == "mosaic_gpu"
    assert choose("mosaic_tpu", **LLAMA, device=V5E) == "mosaic_tpu"


@pytest.mark.parametrize(
    ("name", "device", "change", "reason"),
    [
        ("mosaic_tpu", CPU, {}, "device cpu; runs on TPU v4 and later"),
        ("mosaic_tpu", V3, {}, "device TPU v3; runs on TPU v4 and later"),
        ("mosaic_tpu", V5E, {"dtype": jnp.float16}, "dtype float16; takes bfloat16 and float32"),
        ("mosaic_gpu", V5E, {}, "device TPU v5 lite; runs on NVIDIA Hopper"),
        ("mosaic_gpu", CPU, {}, "device cpu; runs on NVIDIA Hopper"),
        ("mosaic_gpu", AMPERE, {}, "NVIDIA A100, compute capability 8.0; runs on NVIDIA Hopper"),
        ("mosaic_gpu", HOPPER, {"dtype": jnp.float32}, "dtype float32; takes bfloat16 and float16"),
        ("mosaic_gpu", HOPPER, {"head_dim": 96}, "head_dim 96; takes 64 and 128"),
        ("mosaic_gpu", HOPPER, {"page_size": 8}, "page size 8; takes 16, 32, 64 and 128"),
        ("mosaic_gpu", HOPPER, {"group": 32}, "32 query heads a KV head; takes up to 16"),
    ],
)
def test_a_named_implementation_never_falls_back(name, device, change, reason):
    with pytest.raises(NotImplementedError, match=reason):
        choose(name, **LLAMA | change, device=device)


def test_unknown_names_are_refused():
    with pytest.raises(
        ValueError, match="'cuda'; choose auto or one of mosaic_gpu, mosaic_tpu, xla"
    ):
        choose("cuda", **LLAMA, device=CPU)


def lists(implementation):
    limits = Limits(
        page_size=16,
        num_pages=64,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        max_documents=8,
    )
    sizes = {"group": 4, "kv_heads": 2, "head_dim": 128, "num_cores": 132}
    return work_lists(limits, implementation, **sizes), limits


def test_each_implementation_has_its_lists():
    assert isinstance(lists("xla")[0], DenseLists)
    assert isinstance(lists("reference")[0], DenseLists)
    assert isinstance(lists("mosaic_gpu")[0], HopperLists)


@pytest.mark.parametrize(("made_for", "given_to"), [("mosaic_gpu", "xla"), ("xla", "mosaic_gpu")])
def test_lists_of_another_implementation_are_refused(made_for, given_to):
    works = lists(made_for)[0].empty(False, 4)
    pages = jnp.zeros((64, 2, 16, 128), jnp.bfloat16)
    q = jnp.zeros((4, 8, 128), jnp.bfloat16)
    turns = Turns(*(np.zeros((1, 64), np.float32) for _ in range(2)))
    with pytest.raises(NotImplementedError, match=r"takes those that .*Lists makes"):
        lazy_decode(q, pages, pages, turns, works, scale=1.0, implementation=given_to)


def batch(rows, lengths, causal):
    """Requests of ``rows[b]`` new tokens that see a run of their own and one document each."""
    n = len(rows)
    first = np.cumsum(rows) - rows
    lengths = np.concatenate([lengths, lengths])
    pages = -(-lengths // 16)
    run = np.arange(2 * n)
    references = References(
        np.tile(first, 2), np.tile(rows, 2), run, run + 1, np.append(causal, lengths[n:])
    )
    return references, Runs(np.arange(pages.sum()), np.cumsum(pages) - pages, lengths)


@pytest.mark.parametrize("rows", [1, 3, 64, 65])
def test_what_the_scheduler_admits_fits_the_hopper_lists(rows):
    """A step of as many chunks as there are items for has the shapes of an empty one."""
    made, dense, bucket = lists("mosaic_gpu")[0], lists("xla")[0], 512

    def step(chunks):
        return batch([rows] * chunks, [128] * chunks, [128 - rows] * chunks)

    chunks = bucket // rows
    while dense.prefill(*step(chunks), bucket) is None:
        chunks -= 1
    works = made.prefill(*step(chunks), bucket)
    assert works is not None
    for full, empty in zip(works[0], made.empty(True, bucket)[0], strict=True):
        assert full.shape == empty.shape
        assert full.dtype == empty.dtype == np.int32


@pytest.mark.parametrize("length", [1, 64, 900])
def test_decode_steps_that_fit_the_dense_lists_fit_the_hopper_lists(length):
    made, _ = lists("mosaic_gpu")
    args = batch([1] * 4, [length] * 4, [length] * 4)
    assert lists("xla")[0].decode(*args, 4) is not None
    works = made.decode(made.arrange(*args), args[1], 4)
    assert works is not None
    for full, empty in zip(works[0], made.empty(False, 4)[0], strict=True):
        assert full.shape == empty.shape
        assert full.dtype == empty.dtype == np.int32


def test_a_step_over_capacity_is_left_to_the_next_bucket():
    made, _ = lists("mosaic_gpu")
    references, runs = batch([1] * 4, [60_000] * 4, [60_000] * 4)
    assert made.decode(made.arrange(references, runs), runs, 4) is None
