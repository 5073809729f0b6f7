"""Measures single steps of an engine; what each is, ``steps.py`` says."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
from flax import nnx

from lazyattn_jax.bench.timing import read_ceiling
from lazyattn_jax.bench.workloads import Workload, token_maker
from lazyattn_jax.engine.engine import Engine
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.request import DocumentPiece, Prompt
from lazyattn_jax.engine.runs import Request, State

NAMES = ("alone", "decode", "host", "text", "prefill")


@dataclass(frozen=True)
class Sizes:
    """What is measured: requests, documents of each, tokens of each, and decode steps timed."""

    document_tokens: int = 512
    question_tokens: int = 64
    alone_documents: int = 20
    decode_requests: int = 64
    decode_documents: int = 10
    host_document_tokens: int = 128
    host_requests: int = 256
    host_pool: int = 100
    steps: int = 40


def measure_steps(engine: Engine, sizes: Sizes, only: Sequence[str] = NAMES) -> dict[str, Any]:
    """What was measured of each, and what of the machine and the model it is compared with.

    Args:
      engine: idle.
      sizes: of what is measured.
      only: of ``NAMES``.

    Raises:
      ValueError: requests that do not run at once.
    """
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(engine.loaded.model)))
    ceiling = read_ceiling(1 << 32 if jax.default_backend() == "gpu" else 1 << 26)
    steps = Steps(engine, sizes, weights, ceiling)
    return {
        "read_ceiling": ceiling,
        "weight_bytes": weights,
        "token_bytes": steps.token_bytes,
        "results": {name: getattr(steps, name)() for name in only},
    }


class Steps:
    """Measures steps of one engine, whose pool is emptied before each measurement.

    Args:
      engine: idle.
      sizes: of what is measured.
      weight_bytes: of the model.
      ceiling: bytes a second that the memory can be read with.
    """

    def __init__(self, engine: Engine, sizes: Sizes, weight_bytes: int, ceiling: float) -> None:
        self._engine = engine
        self._sizes = sizes
        self._weights = weight_bytes
        self._ceiling = ceiling
        self.token_bytes = engine.page_bytes // engine.limits.page_size

    def alone(self) -> dict[str, float]:
        """Time to first token of one request with cached documents in another order each time."""
        prompts = self._prompts("permute", self._sizes.alone_documents, count=12)
        times = []
        for prompt in prompts:
            begin = time.perf_counter()
            request = self._engine.add(prompt, _params(2))
            while not request.num_generated:
                self._engine.step()
            times.append(time.perf_counter() - begin)
            self._finish([request])
        return self._result(statistics.median(times[2:]), self._weights)

    def decode(self) -> dict[str, float]:
        """A decode step of requests that share no document."""
        sizes = self._sizes
        prompts = self._prompts("unique", sizes.decode_documents, count=sizes.decode_requests)
        requests = self._decoding(prompts)
        seconds, _ = self._step()
        tokens = sum(len(r.run.tokens) + _context_tokens(r) for r in requests)
        self._finish(requests)
        found = self._result(seconds, self._weights + tokens * self.token_bytes)
        return found | {"kv_tokens": tokens, "requests": len(requests)}

    def host(self) -> dict[str, float]:
        """The host's work for a decode step of many requests, and the device's."""
        sizes = self._sizes
        prompts = self._prompts(
            "zipf",
            sizes.decode_documents,
            count=sizes.host_requests,
            pool=sizes.host_pool,
            document_tokens=sizes.host_document_tokens,
        )
        requests = self._decoding(prompts)
        seconds, host = self._step()
        device = self._device_seconds()
        self._finish(requests)
        return {
            "seconds": seconds,
            "host_seconds": host,
            "device_seconds": device,
            "not_hidden_seconds": max(0.0, seconds - device),
            "requests": len(requests),
        }

    def text(self) -> dict[str, float]:
        """Decode steps without documents, of one request and of many."""
        count = self._sizes.host_requests
        found: dict[str, float] = {"requests": count}
        for name, some in (("one", 1), ("all", count)):
            prompts = self._prompts("unique", 1, count=some)
            requests = self._decoding([[p[0], p[-1]] for p in prompts])
            found[f"{name}_seconds"], _ = self._step()
            found[f"{name}_kv_tokens"] = sum(len(r.run.tokens) for r in requests)
            self._finish(requests)
        return found

    def prefill(self) -> dict[str, float]:
        """Documents being encoded, some full steps of them."""
        length = self._sizes.document_tokens
        documents = max(1, 4 * self._engine.limits.max_num_batched_tokens // length)
        times = []
        for _ in range(3):
            prompts = self._prompts("unique", 1, count=documents)
            begin = time.perf_counter()
            for prompt in prompts:
                self._engine.add(prompt[:-1], _params(1), encode_only=True)
            while self._engine.has_work:
                self._engine.step()
            times.append(time.perf_counter() - begin)
        seconds, tokens = min(times[1:]), documents * length
        return {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}

    def _decoding(self, prompts: Sequence[Prompt]) -> list[Request]:
        """Requests that all decode, and go on for as long as is measured."""
        engine, steps = self._engine, self._sizes.steps
        requests = [engine.add(p, _params(4 * steps + 4 * len(prompts) + 16)) for p in prompts]
        while not all(r.num_generated for r in requests):
            engine.step()
            if any(r.state is State.FINISHED for r in requests):
                raise ValueError(
                    f"{len(requests)} requests do not run at once; raise kv_pool_bytes (now "
                    f"{engine.limits.num_pages * engine.page_bytes:,}) or max_num_seqs (now "
                    f"{engine.limits.max_num_seqs})"
                )
        for _ in range(4):
            engine.step()
        return requests

    def _step(self) -> tuple[float, float]:
        """Seconds of a step, the next being prepared while the device is busy, and the host's."""
        stats, times, host = self._engine.stats, [], []
        for _ in range(self._sizes.steps):
            begin, before = time.perf_counter(), stats.host_seconds
            self._engine.step()
            times.append(time.perf_counter() - begin)
            host.append(stats.host_seconds - before)
        return statistics.median(times), statistics.median(host)

    def _device_seconds(self) -> float:
        """What the device takes for a step's programs, each from its launch until it is done."""
        programs = self._engine.programs
        times: list[float] = []
        plain = dict(programs)

        def timed(program: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                jax.block_until_ready(args)
                result = program(*args)
                begin = time.perf_counter()
                jax.block_until_ready(result)
                times[-1] += time.perf_counter() - begin
                return result

            return call

        programs.update((key, timed(program)) for key, program in plain.items())
        try:
            for _ in range(10):
                times.append(0.0)
                self._engine.step()
        finally:
            programs.update(plain)
        return statistics.median(times)

    def _prompts(self, name: str, documents: int, *, count: int, **lengths: int) -> list[Prompt]:
        self._engine.scheduler.index.clear()
        lengths = {"document_tokens": self._sizes.document_tokens} | lengths
        lengths["question_tokens"] = self._sizes.question_tokens
        workload = Workload(name, documents=documents, **lengths)  # type: ignore[arg-type]
        queries = workload.queries(token_maker(self._engine.loaded.config.vocab_size))
        prompts: list[Prompt] = []
        for query in islice(queries, count):
            pieces = [DocumentPiece(tuple(d)) for d in query.documents]  # type: ignore[arg-type]
            prompts.append([query.system, *pieces, query.question])  # type: ignore[list-item]
        return prompts

    def _finish(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._engine.abort(request.id)
        while self._engine.has_work:
            self._engine.step()

    def _result(self, seconds: float, num_bytes: int) -> dict[str, float]:
        best = num_bytes / self._ceiling
        return {"seconds": seconds, "best_seconds": best, "to_best": seconds / best}


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def _context_tokens(request: Request) -> int:
    return sum(placement.num_tokens for placement in request.run.context)
