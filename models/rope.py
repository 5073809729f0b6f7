"""RoPE frequencies and their published scalings, in float64 on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Complex128, Float, Float64, Int

_SCALINGS = ("default", "linear", "llama3", "yarn", "divisors")


@dataclass(frozen=True)
class RopeConfig:
    """RoPE base and scaling.

    ``scaling`` is ``default``, ``linear`` (positions divided by ``factor``; arXiv 2306.15595),
    ``llama3`` (low frequencies divided by ``factor``, as Llama 3.1 was trained) or ``yarn``
    (arXiv 2309.00071). GGUF files spell the outcome of llama3 scaling out as one divisor per
    frequency (scaling ``divisors``). ``original_max_positions`` is the context length before
    scaling, in tokens. ``attention_factor`` multiplies the rotated queries and keys (YaRN's
    temperature).
    """

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads ``rope_theta`` with ``rope_scaling``, or the newer ``rope_parameters``.

        Raises:
          ValueError: a scaling this engine does not do, or an entry it lacks.
        """
        params = {
            **(config.get("rope_scaling") or {}),
            **(config.get("rope_parameters") or {}),
        }
        theta = float(params.get("rope_theta", config.get("rope_theta", 10_000.0)))
        kind = params.get("rope_type", params.get("type", "default"))
        if kind == "dynamic":
            raise ValueError(
                "rope scaling 'dynamic' changes the frequencies with the length of the prompt, so "
                "keys stored for one length are wrong at another and cannot be reused"
            )
        if kind not in _SCALINGS:
            raise ValueError(f"rope scaling {kind!r} is not one of {', '.join(_SCALINGS)}")
        if kind == "default":
            return cls(theta)
        if kind == "divisors":
            return cls(theta, kind, divisors=tuple(params["divisors"]))
        names = {"linear": (), "llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ()}[kind]
        for name in ("factor", *names):
            if name not in params:
                raise ValueError(f"rope scaling {kind!r} needs {name!r} in the model's config")
        factor = float(params["factor"])
        if factor < 1:
            raise ValueError(f"rope scaling factor is {factor}, must be at least 1")
        if kind == "linear":
            return cls(theta, kind, factor)
        return cls(
            theta,
            kind,
            factor,
            original_max_positions=int(
                params.get("original_max_position_embeddings")
                or config.get("original_max_position_embeddings")
                or config.get("max_position_embeddings", 2048)
            ),
            low_freq_factor=float(params.get("low_freq_factor", 1.0)),
            high_freq_factor=float(params.get("high_freq_factor", 4.0)),
            beta_fast=float(params.get("beta_fast") or 32.0),
            beta_slow=float(params.get("beta_slow") or 1.0),
            truncate=bool(params.get("truncate", True)),
            attention_factor=_yarn_attention_factor(params, factor) if kind == "yarn" else 1.0,
        )

    def to_hf(self) -> dict[str, Any]:
        """The entries of ``config.json`` that ``from_hf`` reads."""
        entries: dict[str, Any] = {"rope_theta": self.theta}
        if self.scaling == "divisors":
            entries["rope_scaling"] = {"rope_type": "divisors", "divisors": list(self.divisors)}
        elif self.scaling != "default":
            scaling: dict[str, Any] = {"rope_type": self.scaling, "factor": self.factor}
            if self.scaling != "linear":
                scaling["original_max_position_embeddings"] = self.original_max_positions
            if self.scaling == "llama3":
                scaling["low_freq_factor"] = self.low_freq_factor
                scaling["high_freq_factor"] = self.high_freq_factor
            if self.scaling == "yarn":
                scaling |= {
                    "beta_fast": self.beta_fast,
                    "beta_slow": self.beta_slow,
                    "truncate": self.truncate,
                    "attention_factor": self.attention_factor,
                }
            entries["rope_scaling"] = scaling
        return entries

    def inverse_frequencies(self, head_dim: int) -> Float64[np.ndarray, "H//2"]:
        """Radians per position of each pair of elements."""
        base = self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.scaling == "linear":
            return base / self.factor
        if self.scaling == "divisors":
            return base / np.asarray(self.divisors)
        if self.scaling == "llama3":
            # How many times a pair turns within the original context decides: many times, keep;
            # less than low_freq_factor times, stretch; between, blend.
            cycles = self.original_max_positions * base / (2 * math.pi)
            span = self.high_freq_factor - self.low_freq_factor
            keep = np.clip((cycles - self.low_freq_factor) / span, 0, 1)
            return keep * base + (1 - keep) * base / self.factor
        if self.scaling == "yarn":
            low, high = (
                head_dim
                * math.log(self.original_max_positions / (beta * 2 * math.pi))
                / (2 * math.log(self.theta))
                for beta in (self.beta_fast, self.beta_slow)
            )
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)
            span = high - low or 0.001
            stretch = np.clip((np.arange(head_dim // 2) - low) / span, 0, 1)
            return (1 - stretch) * base + stretch * base / self.factor
        return base


class Rotations:
    """Cosines and sines of the angles at any position, made in float64 on the host.

    A block of 256 consecutive positions is made when one of them is first asked for, and kept from
    then on as float32: 64 MiB for 131,072 positions of head_dim 128. Those from ``FAR`` on are made
    each time, so that no request makes the host keep more than twice that. An angle is the sum of
    that of the block's first position and that of the place in it, and
    ``exp(i (a + b)) = exp(i a) exp(i b)``: several times faster than cosines, and as exact once
    rounded to float32.
    """

    FAR = 1 << 18
    _BLOCK = 256

    def __init__(self, inverse_frequencies: Float64[np.ndarray, "H//2"]) -> None:
        self._frequencies = inverse_frequencies
        self._place = self._turned(np.arange(self._BLOCK))
        # Where each block is among those made, -1 if it has not been.
        self._made_at = np.full(self.FAR // self._BLOCK, -1)
        self._num_made = 0
        self._cos, self._sin = np.zeros((2, 0, len(inverse_frequencies)), np.float32)

    def rows(
        self, positions: Int[np.ndarray, "T"], factor: float = 1.0
    ) -> tuple[Float[np.ndarray, "T H//2"], Float[np.ndarray, "T H//2"]]:
        """Cosines and sines (float32) of the angles at some positions, times ``factor``.

        Angles are good to float64: at position 1,000,000 a float32 angle is off by 0.03 radians.
        """
        distance = near = np.abs(positions)
        far = np.zeros(0, np.int64)
        if distance.max(initial=0) >= self.FAR:
            far = np.flatnonzero(distance >= self.FAR)
            near = distance.copy()
            near[far] = 0
        block, place = near // self._BLOCK, near % self._BLOCK
        made_at = self._made_at[block]
        if made_at.min(initial=0) < 0:
            for missing in np.unique(block[made_at < 0]).tolist():
                self._make(missing)
            made_at = self._made_at[block]
        row = made_at * self._BLOCK + place
        cos, sin = self._cos.take(row, axis=0), self._sin.take(row, axis=0)
        if len(far):
            z = self._turned(distance[far])
            cos[far], sin[far] = z.real, z.imag
        if positions.min(initial=0) < 0:
            sin *= np.where(positions < 0, np.float32(-1), np.float32(1))[:, None]
        if factor != 1:  # rounded once more, but itself in float64
            cos, sin = ((x * np.float64(factor)).astype(np.float32) for x in (cos, sin))
        return cos, sin

    def _make(self, block: int) -> None:
        at = self._num_made * self._BLOCK
        if at == len(self._cos):
            room = np.zeros_like(self._cos, shape=(max(at, self._BLOCK), self._cos.shape[1]))
            self._cos, self._sin = (np.concatenate([x, room]) for x in (self._cos, self._sin))
        z = self._place * self._turned(np.array([block * self._BLOCK]))
        self._cos[at : at + self._BLOCK], self._sin[at : at + self._BLOCK] = z.real, z.imag
        self._made_at[block] = self._num_made
        self._num_made += 1

    def _turned(self, positions: Int[np.ndarray, "n"]) -> Complex128[np.ndarray, "n H//2"]:
        return np.exp(1j * positions[:, None] * self._frequencies)


def _yarn_attention_factor(params: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)
