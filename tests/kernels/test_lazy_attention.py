"""Every implementation against plain rotated attention that knows no pages, turns or work lists.

The oracle works in float64 with the keys rotated at the places they stand at in the request, by
multiplication of complex numbers, and a block mask. Pool slots that no query may see hold NaN.
"""

from __future__ import annotations

import functools
from array import array
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyattn_jax.engine.limits import Limits, dense_lists
from lazyattn_jax.engine.plan import Planner
from lazyattn_jax.engine.runs import Chunk, EncodeJob, Placement, TokenRun
from lazyattn_jax.kernels.api import lazy_decode, lazy_prefill
from lazyattn_jax.kernels.dense import BLOCK_ROWS
from lazyattn_jax.models.rope import RopeConfig

NUM_PAGES = 160
ROPE = RopeConfig(theta=10_000.0)
TOLERANCE = 1e-5  # relative error in norm, float32


@dataclass
class Segment:
    """Raw keys and values with the positions they are rotated at, and where they are stored."""

    k: np.ndarray  # [n K H] float64, not rotated
    v: np.ndarray
    positions: np.ndarray
    pages: list[int]


class World:
    """A pool in which segments are stored the way the engine stores them."""

    def __init__(self, seed: int, head_dim: int, group: int, page_size: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.head_dim, self.group, self.kv_heads = head_dim, group, 2
        self.limits = Limits(
            page_size=page_size,
            num_pages=NUM_PAGES,
            max_model_len=256,
            max_num_seqs=12,
            max_num_batched_tokens=BLOCK_ROWS,
            max_documents=4,
        )
        self.frequencies = ROPE.inverse_frequencies(head_dim)
        shape = (NUM_PAGES, self.kv_heads, page_size, head_dim)
        self.k_pages = np.full(shape, np.nan, np.float32)
        self.v_pages = np.full(shape, np.nan, np.float32)
        self._free = list(self.rng.permutation(NUM_PAGES))

    def store(self, length: int, first_position: int) -> Segment:
        k, v = self.rng.normal(size=(2, length, self.kv_heads, self.head_dim))
        positions = first_position + np.arange(length)
        pages = [int(self._free.pop()) for _ in range(self.limits.pages_for(length))]
        rotated = turned(k, positions, self.frequencies)
        for slot in range(length):
            page, offset = pages[slot // self.limits.page_size], slot % self.limits.page_size
            self.k_pages[page, :, offset] = rotated[slot]
            self.v_pages[page, :, offset] = v[slot]
        return Segment(k, v, positions, pages)

    def queries(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Raw queries in float64, and the same rotated at their positions in float32."""
        heads = self.kv_heads * self.group
        q = self.rng.normal(size=(len(positions), heads, self.head_dim))
        return q, turned(q, positions, self.frequencies).astype(np.float32)


def turned(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = np.exp(1j * positions[:, None] * frequencies)[:, None, :]
    z = (x[..., :half] + 1j * x[..., half:]) * angle
    return np.concatenate([z.real, z.imag], axis=-1)


def plain_attention(
    world: World,
    q: np.ndarray,
    q_position: int,
    seen: list[tuple[Segment, int, int]],
) -> np.ndarray:
    """Output of one query row over (segment, shift of its positions, tokens of it that it sees)."""
    k = np.concatenate(
        [turned(s.k, s.positions + shift, world.frequencies)[:n] for s, shift, n in seen]
    )
    v = np.concatenate([s.v[:n] for s, _, n in seen])
    rotated = turned(q[None], np.array([q_position]), world.frequencies)[0]
    rotated = rotated.reshape(world.kv_heads, world.group, world.head_dim)
    scores = np.einsum("kgh,nkh->kgn", rotated, k) * world.head_dim**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("kgn,nkh->kgh", weights, v).reshape(q.shape)


def error(out: np.ndarray, expected: np.ndarray) -> float:
    assert np.isfinite(out).all()
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


@functools.cache
def prefill_function(implementation: str):
    return jax.jit(
        lambda q, k, v, turns, work: lazy_prefill(
            q,
            k,
            v,
            turns,
            work,
            block_rows=BLOCK_ROWS,
            scale=q.shape[-1] ** -0.5,
            implementation=implementation,
        )
    )


@functools.cache
def decode_function(implementation: str):
    return jax.jit(
        lambda q, k, v, turns, works: lazy_decode(
            q, k, v, turns, works, scale=q.shape[-1] ** -0.5, implementation=implementation
        )
    )


SHAPES = pytest.mark.parametrize(
    ("head_dim", "page_size"), [(64, 16), (80, 8), (96, 32), (128, 16)]
)
seeds = st.integers(0, 2**32 - 1)
deltas = st.one_of(st.integers(-10_000, 1_000_000), st.integers(-3, 3))
documents = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 3000), deltas, st.integers(0, 90)), max_size=4
)


@SHAPES
@settings(max_examples=25, deadline=None)
@given(
    seed=seeds,
    group=st.integers(1, 8),
    leading=st.integers(0, 40),
    documents=documents,
    stream=st.integers(1, 90),
    data=st.data(),
)
def test_prefill(head_dim, page_size, seed, group, leading, documents, stream, data):
    """A chunk of any stream over leading text and documents at any places, in any order."""
    world = World(seed, head_dim, group, page_size)
    start = data.draw(st.integers(max(0, stream - BLOCK_ROWS), stream - 1), label="start")
    first_position = data.draw(st.integers(0, 1_000_000), label="first position")
    own = world.store(stream, first_position)
    run = run_of(own)
    others = [(world.store(leading, 0), 0, 0)] if leading else []
    for length, encoded_at, delta, insert_at in documents:
        others.append((world.store(length, encoded_at), delta, min(insert_at, stream - 1)))
    run.context = tuple(
        Placement(tuple(s.pages), len(s.k), delta, insert_at) for s, delta, insert_at in others
    )
    chunk = Chunk(run, start, stream - start, EncodeJob(b"", run))
    plan = planner(world).prefill([chunk])

    rows = np.arange(start, stream)
    q, q_rotated = world.queries(own.positions[rows])
    padded = np.zeros((plan.bucket, *q.shape[1:]), np.float32)
    padded[: len(rows)] = q_rotated
    expected = np.stack(
        [
            plain_attention(
                world,
                q[i],
                own.positions[row],
                [(own, 0, row + 1)]
                + [(s, delta, len(s.k)) for s, delta, insert_at in others if row >= insert_at],
            )
            for i, row in enumerate(rows)
        ]
    )
    for implementation in ("xla", "reference"):
        f = prefill_function(implementation)
        out = np.asarray(f(padded, world.k_pages, world.v_pages, plan.turns, *plan.works))
        assert error(out[: len(rows)], expected) < TOLERANCE, implementation
        assert not out[len(rows) :].any(), "padding rows must come out as zeros"


@SHAPES
@settings(max_examples=25, deadline=None)
@given(
    seed=seeds,
    group=st.integers(1, 8),
    documents=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3000)), min_size=1, max_size=4),
    streams=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    data=st.data(),
)
def test_decode(head_dim, page_size, seed, group, documents, streams, data):
    """Requests that hold the same documents at different places, some of them twice."""
    world = World(seed, head_dim, group, page_size)
    stored = [world.store(length, encoded_at) for length, encoded_at in documents]
    runs, seen, positions = [], [], []
    for length in streams:
        own = world.store(length, data.draw(st.integers(0, 1_000_000), label="first position"))
        held = data.draw(
            st.lists(st.tuples(st.sampled_from(range(len(stored))), deltas), max_size=4),
            label="documents held",
        )
        run = run_of(own)
        run.context = tuple(
            Placement(tuple(stored[i].pages), len(stored[i].k), delta) for i, delta in held
        )
        runs.append(run)
        positions.append(own.positions[-1])
        seen.append(
            [(own, 0, length)] + [(stored[i], delta, len(stored[i].k)) for i, delta in held]
        )
    plan = planner(world).decode(runs)
    q, q_rotated = world.queries(np.array(positions))
    padded = np.zeros((plan.bucket, *q.shape[1:]), np.float32)
    padded[: len(runs)] = q_rotated
    expected = np.stack(
        [plain_attention(world, q[i], positions[i], seen[i]) for i in range(len(runs))]
    )
    for implementation in ("xla", "reference"):
        f = decode_function(implementation)
        out = np.asarray(f(padded, world.k_pages, world.v_pages, plan.turns, plan.works))
        assert error(out[: len(runs)], expected) < TOLERANCE, implementation
        assert not out[len(runs) :].any(), "padding rows must come out as zeros"


def planner(world: World) -> Planner:
    return Planner(world.limits, dense_lists(world.limits), world.frequencies)


def run_of(segment: Segment) -> TokenRun:
    run = TokenRun([0] * len(segment.k), segment.positions.tolist())
    run.pages = array("i", segment.pages)
    run.private = set(segment.pages)
    return run


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    """Rounding inputs to 8 (11) bits and weights once more costs about 2^-8 (2^-11) in norm."""
    world = World(0, 64, 4, 16)
    own, document = world.store(40, 5000), world.store(37, 0)
    run = run_of(own)
    run.context = (Placement(tuple(document.pages), 37, 4900),)
    plan = planner(world).decode([run])
    q, q_rotated = world.queries(own.positions[-1:])
    seen = [(own, 0, 40), (document, 4900, 37)]
    expected = plain_attention(world, q[0], own.positions[-1], seen)[None]
    bound = {"bfloat16": 2**-6, "float16": 2**-9}[dtype]
    for implementation in ("xla", "reference"):
        inputs = [jax.numpy.asarray(x, dtype) for x in (q_rotated, world.k_pages, world.v_pages)]
        out = decode_function(implementation)(*inputs, plan.turns, plan.works)
        assert out.dtype == dtype
        assert error(np.asarray(out, np.float64), expected) < bound


def inputs(**changes):
    shapes = {"q": (1, 4, 16), "k": (8, 2, 16, 16), "v": (8, 2, 16, 16)} | changes
    world = World(0, 16, 2, 16)
    plan = planner(world).decode([run_of(world.store(3, 0))])
    arrays = [np.zeros(shapes[name], np.float32) for name in ("q", "k", "v")]
    return [*arrays, plan.turns, plan.works]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": (8, 2, 16, 32)}, r"\(8, 2, 16, 16\).*\(8, 2, 16, 32\)"),
        ({"q": (1, 4, 32)}, r"\(1, 4, 32\).*16"),
        ({"q": (1, 3, 16)}, "3 query heads.*2 KV heads"),
        ({"k": (8, 2, 16, 32), "v": (8, 2, 16, 32), "q": (1, 4, 32)}, "8 angles.*head_dim 32"),
    ],
)
def test_shapes_that_disagree_are_named(implementation, changes, message):
    with pytest.raises(ValueError, match=message):
        lazy_decode(*inputs(**changes), scale=1.0, implementation=implementation)


def test_dtypes_that_disagree_are_named():
    q, *rest = inputs()
    with pytest.raises(ValueError, match=r"q is float16.*float32"):
        lazy_decode(q.astype(np.float16), *rest, scale=1.0)


def test_unknown_implementation():
    with pytest.raises(
        ValueError, match=r"unknown attention implementation 'cuda'.*xla.*reference"
    ):
        lazy_decode(*inputs(), scale=1.0, implementation="cuda")
