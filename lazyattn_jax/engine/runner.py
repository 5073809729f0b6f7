"""Runs the compiled programs: one per batch shape, all compiled ahead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lazyattn_jax.cache.pool import make_pool, put_pages, take_pages
from lazyattn_jax.engine.copies import empty_moves, make_moves
from lazyattn_jax.engine.inputs import empty_inputs, make_choices, occupant, step_inputs
from lazyattn_jax.engine.limits import Limits, work_lists
from lazyattn_jax.engine.params import Effort
from lazyattn_jax.engine.plan import Planner, StepPlan
from lazyattn_jax.engine.runs import Chunk, PageCopy, Request, TokenRun
from lazyattn_jax.engine.sampler import Logprobs
from lazyattn_jax.engine.seats import make_seats, padded, sit
from lazyattn_jax.engine.step import (
    SCORED_ROWS,
    choose,
    copy,
    rate,
    score,
    step,
    take_apart,
)
from lazyattn_jax.kernels import api
from lazyattn_jax.kernels.work import Turns
from lazyattn_jax.models.checkpoint import LoadedModel
from lazyattn_jax.models.rope import Rotations


class StepResult(NamedTuple):
    """What the host may want of a step that has been started.

    ``logprobs`` are there if a request of it wants them, ``hidden`` after a prefill step only. A
    token of -1 means that its row is not sound, or its logits not finite.

    The logits are not kept: memory that a step gives back at once is where the next step's results
    go, and the device's graph of a step runs as it is when nothing has moved.
    """

    tokens: Int[Array, "B"]
    logprobs: Logprobs | None
    sound: Bool[Array, "T"]
    hidden: Float[Array, "T D"] | None


type Programs = dict[tuple[str, int], Callable[..., Any]]
"""Compiled programs by what they do and their batch shape."""


class Runner:
    """Runs prefill and decode steps on one device.

    Args:
      loaded: the model.
      limits: batch shapes and pool size.
      attention: implementation of the attention, see ``kernels.api``.
      end_tokens: stop tokens that a request can have beside its own.
      share_reads: see ``EngineConfig``.
      check: check every plan before it runs.
      programs: those of another runner of the same model, attention and limits.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        limits: Limits,
        attention: str = "auto",
        *,
        end_tokens: int = 1,
        share_reads: bool = True,
        check: bool = False,
        programs: Programs | None = None,
    ) -> None:
        self._limits = limits
        self._config = loaded.config
        self._rebuild, self._weights = take_apart(loaded.model)
        self._dtype = loaded.model.embed.embedding.dtype
        rope = loaded.config.rope
        group = loaded.config.num_heads // loaded.config.num_kv_heads
        device = jax.devices()[0]
        attention = api.choose(
            attention,
            dtype=self._dtype,
            head_dim=loaded.config.head_dim,
            page_size=limits.page_size,
            group=group,
            device=device,
        )
        self._lists = work_lists(
            limits,
            attention,
            group=group,
            kv_heads=loaded.config.num_kv_heads,
            head_dim=loaded.config.head_dim,
            num_cores=getattr(device, "core_count", 0),
        )
        self._adapter = loaded.adapter_fingerprint is not None
        frequencies = rope.inverse_frequencies(loaded.config.head_dim)
        self._planner = Planner(
            limits,
            self._lists,
            frequencies,
            rope.attention_factor,
            share=share_reads,
            adapter=self._adapter,
            check=check,
        )
        self._rotations = Rotations(frequencies)
        self._pool = make_pool(
            loaded.config,
            limits.num_pages,
            limits.page_size,
            self._dtype,
            fused=api.wants_fused_pages(attention, loaded.config.head_dim),
        )
        vocab = loaded.config.vocab_size
        self._seats = make_seats(limits.max_num_seqs, vocab, end_tokens)
        self._occupant = partial(
            occupant, max_tokens=limits.max_model_len, vocab_size=vocab, end_tokens=end_tokens
        )
        scale = loaded.config.head_dim**-0.5
        self._step = jax.jit(
            partial(step, self._rebuild, attention=attention, scale=scale),
            donate_argnums=1,
            static_argnames="prefill",
        )
        self._choose = jax.jit(choose, donate_argnums=2, static_argnames="effort")
        self._turns: tuple[Turns, Turns] | None = (
            None  # those of the last decode step, and its copy
        )
        self._copy = jax.jit(partial(copy, implementation=attention), donate_argnums=0)
        self._home = self._pool[0].k.sharding
        self.programs: Programs = {} if programs is None else programs

    def compile(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles every batch shape.

        Args:
          progress: called with the number of shapes done and their total.
        """
        limits = self._limits
        shapes = [("decode", b) for b in limits.decode_buckets]
        shapes += [(kind, b) for b in limits.prefill_buckets for kind in ("prefill", "score")]
        shapes += [("copy", b) for b in limits.copy_buckets]
        shapes += [(kind, b) for b in limits.transfer_buckets for kind in ("take", "put")]
        sizes = {limits.choices(False, b) for b in limits.decode_buckets}
        sizes |= {limits.choices(True, b) for b in limits.prefill_buckets}
        kinds = [*(effort.name for effort in Effort), "rate"]
        shapes += [(kind, size) for kind in kinds for size in sorted(sizes)]
        shapes.append(("sit", 0))
        shapes = [shape for shape in shapes if shape not in self.programs]
        progress(0, len(shapes))
        # Tracing is Python and serial; compiling releases the interpreter lock.
        with ThreadPoolExecutor(max(2, min(8, (os.cpu_count() or 2) // 2))) as pool:
            lowered = ((shape, self._lower(*shape)) for shape in shapes)
            pending = [(shape, pool.submit(low.compile)) for shape, low in lowered]
            for done, (shape, future) in enumerate(pending, 1):
                self.programs[shape] = future.result()
                progress(done, len(shapes))

    def _lower(self, kind: str, bucket: int) -> jax.stages.Lowered:
        if kind == "sit":
            return jax.jit(sit, donate_argnums=0).lower(self._seats, self._occupant(None))
        if kind == "copy":
            moves = empty_moves(bucket, self._limits.num_pages, self._config.head_dim)
            return self._copy.lower(self._pool, moves)
        if kind in ("take", "put"):
            pages = np.zeros(bucket, np.int32)
            taken = jax.eval_shape(take_pages, self._pool, pages)
            if kind == "take":
                return jax.jit(take_pages).lower(self._pool, pages)
            return jax.jit(put_pages, donate_argnums=0).lower(self._pool, pages, taken)
        if kind == "score":
            hidden = jax.ShapeDtypeStruct((bucket, self._config.hidden_size), self._dtype)
            rows = np.zeros(SCORED_ROWS, np.int32)
            return jax.jit(partial(score, self._rebuild)).lower(self._weights, hidden, rows, rows)
        logits = jax.ShapeDtypeStruct((bucket, self._config.vocab_size), np.float32)
        if kind == "rate":
            return jax.jit(rate).lower(logits, jax.ShapeDtypeStruct((bucket,), np.int32))
        if kind in Effort.__members__:
            usable = jax.ShapeDtypeStruct((bucket,), bool)
            effort = Effort[kind]
            choices = make_choices(bucket, (), self._limits.max_num_seqs, effort)
            return self._choose.lower(logits, usable, self._seats, choices, effort=effort)
        prefill = kind == "prefill"
        inputs = empty_inputs(
            self._limits,
            self._lists,
            self._config.head_dim,
            prefill=prefill,
            bucket=bucket,
            adapter=self._adapter,
        )
        last = self._seats.token
        return self._step.lower(self._weights, self._pool, last, inputs, prefill=prefill)

    def sit(self, request: Request) -> None:
        """Sets up the seat of a request whose logits are adjusted."""
        self._seats = self.programs["sit", 0](self._seats, self._occupant(request))

    def prefill(self, chunks: Sequence[Chunk]) -> StepResult:
        """Starts to compute chunks; a token is chosen for each that ends its prompt, in order."""
        plan = self._planner.prefill(chunks)
        ends = np.cumsum([c.count for c in chunks]) - 1
        rows = [int(end) for c, end in zip(chunks, ends, strict=True) if c.samples]
        owners = [c.owner for c in chunks if c.samples and isinstance(c.owner, Request)]
        return self._run(True, plan, rows, owners)

    def decode(self, requests: Sequence[Request]) -> StepResult:
        """Starts to compute the last token of every request; the next ones are in order."""
        runs: list[TokenRun] = [r.run for r in requests]
        plan = self._planner.decode(runs)
        # While the batch is the same its turns are, and the device has them.
        if self._turns is None or self._turns[0] is not plan.turns:
            self._turns = plan.turns, jax.device_put(plan.turns)
        plan = plan._replace(turns=self._turns[1])
        return self._run(False, plan, range(len(runs)), requests)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Starts to copy pages, with their keys turned."""
        buckets = self._limits.copy_buckets
        for moves in make_moves(copies, buckets, self._limits.num_pages, self._rotations):
            self._pool = self.programs["copy", len(moves.source)](self._pool, moves)

    def store(self, pages: Sequence[int]) -> list[Array]:
        """Starts to copy pages to the host's memory; they may be written to at once."""
        host = self._home.with_memory_kind("pinned_host")
        return [
            jax.device_put(self.programs["take", len(some)](self._pool, some), host)
            for some in self._in_groups(pages)
        ]

    def send_for(self, stored: Sequence[Array]) -> list[Array]:
        """Starts to copy what ``store`` has stored to the device."""
        return [jax.device_put(part, self._home) for part in stored]

    def bring_back(self, parts: Sequence[Array], pages: Sequence[int]) -> None:
        """Starts to write what was sent for to pages; the device waits for what is on its way."""
        for part, some in zip(parts, self._in_groups(pages), strict=True):
            self._pool = self.programs["put", len(some)](self._pool, some, part)

    def moved_pages(self, count: int) -> int:
        """Pages that are stored for so many, which are moved in groups of a few fixed sizes."""
        return sum(map(len, self._in_groups(range(count))))

    def _in_groups(self, pages: Sequence[int]) -> Iterator[Int[np.ndarray, "n"]]:
        """Pages in groups, the last one filled up with pages past the pool."""
        smallest, *larger = self._limits.transfer_buckets
        at = 0
        while at < len(pages):
            size = max((s for s in larger if s <= len(pages) - at), default=smallest)
            group = np.full(size, self._limits.num_pages, np.int32)
            some = pages[at : at + size]
            group[: len(some)] = some
            yield group
            at += size

    def score(
        self, hidden: Float[Array, "T D"], rows: Sequence[int], targets: Sequence[int]
    ) -> list[Logprobs]:
        """Starts to compute the log-probabilities of tokens after rows of a prefill step.

        Args:
          hidden: of the step.
          rows: rows of the step.
          targets: the token that comes after each row.

        Returns:
          Those of ``SCORED_ROWS`` rows each, padded.
        """
        run = self.programs["score", len(hidden)]
        parts = []
        for at in range(0, len(rows), SCORED_ROWS):
            some = (padded(list(x[at : at + SCORED_ROWS]), SCORED_ROWS, 0) for x in (rows, targets))
            parts.append(run(self._weights, hidden, *some))
        return parts

    def _run(
        self, prefill: bool, plan: StepPlan, rows: Sequence[int], requests: Sequence[Request]
    ) -> StepResult:
        limits = self._limits
        size = limits.choices(prefill, plan.bucket)
        effort = max((r.params.effort for r in requests), default=Effort.GREEDY)
        choices = make_choices(size, requests, limits.max_num_seqs, effort)
        inputs = step_inputs(plan, padded(list(rows), size, 0), choices.adjustments.seat)
        run = self.programs["prefill" if prefill else "decode", plan.bucket]
        computed, self._pool = run(self._weights, self._pool, self._seats.token, inputs)
        run = self.programs[effort.name, size]
        tokens, self._seats = run(computed.logits, computed.usable, self._seats, choices)
        logprobs = None
        if any(r.params.logprobs is not None for r in requests):
            logprobs = self.programs["rate", size](computed.logits, tokens)
        hidden = computed.hidden if prefill else None
        return StepResult(tokens, logprobs, computed.sound, hidden)
