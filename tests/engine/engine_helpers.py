"""An engine that records logits, and an oracle that computes the same prompt without a pool."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import DocumentPiece
from lazyattn_jax.engine.runs import Request, State
from lazyattn_jax.kernels.rotary import rotate
from lazyattn_jax.models.checkpoint import LoadedModel
from lazyattn_jax.models.rope import Rotations

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class EngineUnderTest(Engine):
    """Records the logits that every token was sampled from, by request."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.logits: dict[str, list[np.ndarray]] = {}

    def _read(self, step):
        logits = np.asarray(step.result.computed.logits)
        for i, request in enumerate(step.requests):
            if request.state is not State.FINISHED:
                self.logits.setdefault(request.id, []).append(logits[i])
        return super()._read(step)

    def run(self, *prompts, params=GREEDY, **options) -> list[Request]:
        """Computes prompts as one batch, to the end."""
        requests = [self.add(prompt, params, **options) for prompt in prompts]
        self.drain()
        return requests

    def drain(self, most: int = 2000) -> None:
        for _ in range(most):
            if not self.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {most} steps")

    def ask(self, prompt, **options) -> list[int]:
        """Greedy tokens of one prompt."""
        return self.run(prompt, **options)[0].generated

    def pages_of(self, pages) -> list[np.ndarray]:
        """What the pool holds in some pages."""
        return [np.asarray(x[np.asarray(pages)]) for kv in self._runner._pool for x in kv]

    def assert_idle(self) -> None:
        """Nothing runs, and free + cached pages are all pages."""
        assert not self.has_work
        assert not self.scheduler.jobs
        self.scheduler.check_integrity()
        index = self.scheduler.index
        assert index.num_available == self.limits.num_pages
        assert all(segment.pins == 0 for segment in index.segments())


def adjusted_logits(logits, prompt, output, bias, repetition, presence, frequency, banned):
    """Adjusted logits of one request in float64, rule by rule and token by token."""
    out = logits.astype(np.float64)
    for token, value in bias.items():
        out[token] += value
    for token in {*prompt, *output}:
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(output):
        out[token] -= presence
    for token in output:
        out[token] -= frequency
    for token in banned:
        out[token] = -np.inf
    return out


def document(seed: int, length: int) -> DocumentPiece:
    return DocumentPiece(text(seed, length), f"document {seed}")


def text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(2, 500, length).tolist())


def oracle_logits(
    loaded: LoadedModel, prompt, generated=(), *, prefix=True, gap=200, repair=0, temperature=1.0
):
    """Logits of every token, computed at once, without a pool, segments or chunks.

    Where a token sees a document, the document's keys are turned to the place it stands at (as
    Block-Attention does), not the queries back. The first ``repair`` tokens of a document are there
    twice: as text before it, and in the document, where only it sees them.
    """
    pieces = [*prompt, tuple(generated)]
    first = next((i for i, p in enumerate(pieces) if isinstance(p, DocumentPiece)), None)
    lead = sum(len(p) for p in pieces[: first or 0])
    encoded_at = (lead + gap) if prefix and lead else 0
    tokens, positions, owner, shift, hidden = [], [], [], [], []
    at = 0
    for i, piece in enumerate(pieces):
        is_document = isinstance(piece, DocumentPiece)
        piece_tokens = piece.tokens if is_document else piece
        repaired = min(repair, len(piece_tokens)) if is_document else 0
        tokens += piece_tokens[:repaired]
        positions += range(at, at + repaired)
        owner += [-1] * repaired
        shift += [0] * repaired
        hidden += [False] * repaired + [j < repaired for j in range(len(piece_tokens))]
        start = encoded_at if is_document else at
        tokens += piece_tokens
        positions += range(start, start + len(piece_tokens))
        owner += [i if is_document else -1] * len(piece_tokens)
        shift += [at - encoded_at if is_document else 0] * len(piece_tokens)
        at += len(piece_tokens)
    owner, shift, hidden = np.array(owner), np.array(shift), np.array(hidden)
    n = len(tokens)
    sees = np.tril(np.ones((n, n), bool))
    for row in range(n):
        if owner[row] >= 0:
            leading = (np.arange(n) < lead) & prefix
            sees[row] &= (owner == owner[row]) | leading
        else:
            sees[row] &= ~hidden
    config = loaded.config
    frequencies = config.rope.inverse_frequencies(config.head_dim)
    cos, sin = Rotations(frequencies).rows(np.array(positions))
    turn_cos, turn_sin = Rotations(frequencies).rows(shift)
    in_document = (owner[:, None] >= 0) & (owner[:, None] == owner[None, :])
    of_text = (owner[:, None] < 0) & (owner[None, :] >= 0)
    scale = np.where(of_text, np.float32(1 / temperature), np.float32(1))

    def attend(cache, q, k, v):
        group = q.shape[1] // k.shape[1]
        as_encoded, as_placed = k, rotate(k, turn_cos, turn_sin)
        scores = [
            jnp.einsum("ikgh,jkh->kgij", q.reshape(n, -1, group, q.shape[-1]), keys)
            for keys in (as_encoded, as_placed)
        ]
        s = jnp.where(in_document[None, None], *scores) * scale[None, None] * q.shape[-1] ** -0.5
        s = jnp.where(sees[None, None], s, -jnp.inf)
        p = jnp.exp(s - s.max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)
        return jnp.einsum("kgij,jkh->ikgh", p, v).reshape(q.shape), cache

    caches = [None] * config.num_layers
    hidden, _ = loaded.model(jnp.asarray(tokens), cos, sin, caches, attend)
    return np.asarray(loaded.model.logits(hidden))


def assert_matches_oracle(engine: EngineUnderTest, request: Request, prompt, **context) -> None:
    """Logits within float32 rounding of the oracle's, and tokens the oracle's best."""
    generated = request.generated
    expected = oracle_logits(engine.loaded, prompt, generated[:-1], **context)[-len(generated) :]
    got = np.stack(engine.logits[request.id][-len(generated) :])
    np.testing.assert_allclose(got, expected, atol=2e-4, rtol=0)
    assert generated == expected.argmax(-1).tolist()
