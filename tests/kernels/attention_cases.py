"""Random steps over a poisoned pool, and their float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from lazyattn_jax.kernels.work import References, Runs, Turns


@dataclass
class Case:
    """One step. Every slot past the end of a run, and every page that no run has, is NaN."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    deltas: np.ndarray
    temperature: float
    turns: Turns
    references: References
    runs: Runs

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k_pages.shape[1]

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.k_pages.shape[1]

    def pool(self, run: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values ``[K, length, H]`` of a run, float64."""
        n, first = int(self.runs.length[run]), int(self.runs.start[run])
        pages = self.runs.pages[first : first - (-n // self.page_size)]
        return tuple(
            np.asarray(x[pages], np.float64)
            .swapaxes(0, 1)
            .reshape(x.shape[1], -1, x.shape[3])[:, :n]
            for x in (self.k_pages, self.v_pages)
        )

    def oracle(self) -> np.ndarray:
        """Attention in float64, by rotating complex numbers; rows that see nothing are zeros."""
        q = np.asarray(self.q, np.float64)
        half = q.shape[-1] // 2
        top = np.full(q.shape[:2], -np.inf)
        total, out = np.zeros(q.shape[:2]), np.zeros(q.shape)
        for row, num_rows, run, turn, causal in zip(*self.references, strict=True):
            k, v = self.pool(run)
            if not k.shape[1]:
                continue
            rows = slice(row, row + num_rows)
            angle = -float(self.deltas[turn]) * inverse_frequencies(q.shape[-1])
            z = (q[rows, :, :half] + 1j * q[rows, :, half:]) * np.exp(1j * angle)
            z = np.concatenate([z.real, z.imag], -1).reshape(num_rows, len(k), self.group, -1)
            z /= self.temperature
            s = np.einsum("rkgh,knh->rkgn", z, k, optimize=True) * q.shape[-1] ** -0.5
            seen = np.arange(k.shape[1]) <= causal + np.arange(num_rows)[:, None]
            s = np.where(seen[:, None, None], s, -np.inf).reshape(num_rows, q.shape[1], -1)
            above = np.maximum(top[rows], s.max(-1))
            p, keep = np.exp(s - above[..., None]), np.exp(top[rows] - above)
            p4 = p.reshape(num_rows, len(k), self.group, -1)
            value = np.einsum("rkgn,knh->rkgh", p4, v, optimize=True).reshape(out[rows].shape)
            out[rows] = out[rows] * keep[..., None] + value
            total[rows] = total[rows] * keep + p.sum(-1)
            top[rows] = above
        return out / np.where(total == 0, 1, total)[..., None]


def inverse_frequencies(head_dim: int) -> np.ndarray:
    return 500_000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))


def make_case(
    seed: int,
    references: Sequence[tuple[int, int, int, int]],
    lengths: Sequence[int],
    *,
    num_rows: int,
    kv_heads: int = 1,
    group: int = 4,
    head_dim: int = 128,
    page_size: int = 64,
    dtype=jnp.bfloat16,
    largest_delta: int = 1_000_000,
    temperature: float = 1.0,
) -> Case:
    """References are (row, num_rows, run, causal), each with a turn of its own.

    Turns also divide by the temperature.
    """
    rng = np.random.default_rng(seed)
    pages = [-(-n // page_size) for n in lengths]
    num_pages = sum(pages) + 2
    ids = rng.permutation(num_pages)[: sum(pages)]
    start = np.cumsum(pages, dtype=int) - np.array(pages, int)
    shape = (num_pages, kv_heads, page_size, head_dim)
    k_pages, v_pages = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    for first, count, n in zip(start, pages, lengths, strict=True):
        for i, page in enumerate(ids[first : first + count]):
            seen = min(page_size, n - i * page_size)
            for x in (k_pages, v_pages):
                x[page, :, :seen] = rng.normal(size=(kv_heads, seen, head_dim))
    row, rows, run, causal = np.array(references, int).reshape(-1, 4).T
    deltas = np.append(0, rng.integers(-largest_delta, largest_delta, len(row)))
    angle = -deltas[:, None].astype(np.float64) * inverse_frequencies(head_dim)
    return Case(
        np.asarray(jnp.asarray(rng.normal(size=(num_rows, kv_heads * group, head_dim)), dtype)),
        np.asarray(jnp.asarray(k_pages, dtype)),
        np.asarray(jnp.asarray(v_pages, dtype)),
        deltas,
        temperature,
        Turns(*((x / temperature).astype(np.float32) for x in (np.cos(angle), np.sin(angle)))),
        References(row, rows, run, 1 + np.arange(len(row)), causal),
        Runs(ids, start, np.array(lengths, int)),
    )


def decode_case(
    seed: int, holds: Sequence[Sequence[int]], lengths: Sequence[int], **options
) -> Case:
    """Request ``b`` holds the runs ``holds[b]``; run ``s`` has ``lengths[s]`` slots."""
    references = [(b, 1, s, lengths[s]) for b, held in enumerate(holds) for s in held]
    return make_case(seed, references, lengths, num_rows=len(holds), **options)


def prefill_case(
    seed: int,
    requests: Sequence[tuple[int, int, Sequence[tuple[int, int]]]],
    *,
    padding: int = 0,
    **options,
) -> Case:
    """Requests are (new tokens, tokens before them in their own run, documents).

    A document is (its length, the first of the new tokens that sees it).
    """
    references, lengths, row = [], [], 0
    for new, before, documents in requests:
        references.append((row, new, len(lengths), before))
        lengths.append(before + new)
        for length, skip in documents:
            references.append((row + skip, new - skip, len(lengths), length))
            lengths.append(length)
        row += new
    return make_case(seed, references, lengths, num_rows=row + padding, **options)


def random_decode(seed: int, **options) -> Case:
    """Requests that hold some of the same documents, of ragged lengths, and a tail each."""
    rng = np.random.default_rng(seed)
    requests, documents = int(rng.integers(1, 24)), int(rng.integers(1, 30))
    lengths = rng.integers(0, 700, documents + requests).tolist()
    held = [
        [
            *rng.choice(documents, rng.integers(0, min(10, documents) + 1), replace=False).tolist(),
            documents + b,
        ]
        for b in range(requests)
    ]
    return decode_case(seed, held, lengths, **options)


def random_prefill(seed: int, **options) -> Case:
    """Documents being encoded, chunks, and questions over documents, of ragged lengths."""
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(int(rng.integers(1, 8))):
        new = int(rng.integers(1, 300))
        documents = [
            (int(rng.integers(0, 500)), int(rng.choice([0, rng.integers(0, new)])))
            for _ in range(int(rng.choice([0, rng.integers(1, 6)])))
        ]
        requests.append((new, int(rng.choice([0, rng.integers(0, 400)])), documents))
    return prefill_case(seed, requests, padding=int(rng.integers(0, 400)), **options)


def error(out, expected) -> float:
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all()
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


DECODE = {
    "shared": {"holds": [[0, 1], [0], [0, 2]], "lengths": [300, 70, 64]},
    "ragged": {
        "holds": [[0], [1], [2, 3, 4]],
        "lengths": [1, 17, 63, 65, 100],
        "group": 3,
        "head_dim": 64,
        "page_size": 16,
    },
    "far": {
        "holds": [[0, 1], [0]],
        "lengths": [150, 33],
        "group": 1,
        "page_size": 32,
        "largest_delta": 10**9,
    },
    "sharpened": {"holds": [[0, 1], [0]], "lengths": [70, 33], "temperature": 0.7},
    "one row": {"holds": [[0]], "lengths": [70], "group": 16, "page_size": 128},
    "twice": {"holds": [[0, 1, 0]], "lengths": [130, 20], "head_dim": 64, "page_size": 128},
    "two rows twice": {
        "holds": [[0, 0], [1, 0, 0]],
        "lengths": [140, 20],
        "group": 2,
        "page_size": 32,
    },
    "hold nothing": {
        "holds": [[], [0], [], [1], []],
        "lengths": [40, 80],
        "head_dim": 64,
        "page_size": 16,
    },
    "empty run": {
        "holds": [[0], [1, 0, 2], [0, 2]],
        "lengths": [0, 40, 64],
        "group": 3,
        "page_size": 32,
    },
    "nothing": {"holds": [[], []], "lengths": []},
    "many heads": {"holds": [[0]] * 6, "lengths": [200], "group": 16, "head_dim": 64},
    "many rows": {
        "holds": [[0]] * 17,
        "lengths": [70],
        "group": 1,
        "head_dim": 64,
        "page_size": 128,
    },
    "heads": {
        "holds": [[0, 1], [0]],
        "lengths": [130, 10],
        "kv_heads": 3,
        "group": 3,
        "head_dim": 64,
    },
    "merged in chunks": {"holds": [[b % 2] for b in range(32)] + [[0, 1]], "lengths": [70, 90]},
}
"""Decode steps of every kind, as arguments of ``decode_case``."""

PREFILL = {
    "encoded": {"requests": [(40, 0, [])]},
    "encoded over tiles": {"requests": [(140, 0, [])], "group": 1, "head_dim": 64, "page_size": 16},
    "question": {
        "requests": [(10, 30, [(200, 0), (50, 0)])],
        "group": 3,
        "head_dim": 64,
        "page_size": 32,
    },
    "inserted": {"requests": [(40, 20, [(70, 25)])], "head_dim": 64, "page_size": 128},
    "inserted late": {"requests": [(70, 0, [(130, 66), (40, 69)])], "head_dim": 64, "group": 4},
    "inserted in one row": {"requests": [(9, 0, [(30, 8)])], "group": 8, "page_size": 16},
    "chunk": {"requests": [(20, 150, [])], "group": 8, "head_dim": 64, "page_size": 64},
    "chunk at a tile": {"requests": [(20, 128, [(128, 0)])], "group": 4, "page_size": 64},
    "padding": {"requests": [(3, 0, [(20, 0)]), (1, 9, [])], "padding": 37, "head_dim": 64},
    "only padding": {"requests": [], "padding": 5, "head_dim": 64},
    "empty document": {"requests": [(6, 0, [(0, 0), (17, 2), (0, 5)])], "head_dim": 64},
    "far": {"requests": [(8, 8, [(150, 0), (20, 3)])], "group": 1, "largest_delta": 10**9},
    "sharpened": {"requests": [(8, 8, [(50, 0), (20, 3)])], "head_dim": 64, "temperature": 0.7},
    "requests": {
        "requests": [(5, 0, []), (20, 130, [(40, 0)]), (1, 0, [(140, 0)]), (33, 3, [])],
        "kv_heads": 2,
        "head_dim": 64,
        "page_size": 32,
    },
    "many heads": {"requests": [(11, 20, [(40, 3)])], "group": 16, "head_dim": 64},
}
"""Prefill steps of every kind, as arguments of ``prefill_case``."""
