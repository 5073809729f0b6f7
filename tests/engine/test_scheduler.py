"""Scheduler, cache and plan without a device: a fake model that knows what each slot must hold.

Every computed token is written to a dictionary of slots as the hash of all that its KV depends on;
every step is checked to read exactly the slots it should, with the values they should have.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from lazyattn_jax.engine.limits import Limits, dense_lists
from lazyattn_jax.engine.plan import Planner
from lazyattn_jax.engine.request import DocumentContext, DocumentPiece, SamplingParams, lay_out
from lazyattn_jax.engine.runs import EncodeJob, Request, State
from lazyattn_jax.engine.scheduler import Scheduler
from lazyattn_jax.kernels.dense import BLOCK_ROWS
from lazyattn_jax.models.rope import RopeConfig

PARAMS = SamplingParams(temperature=0)


class FakeDevice:
    """Slots of a pool; a token's KV is identified by its text, place and what it attends to."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.planner = Planner(
            limits, dense_lists(limits), RopeConfig(theta=1e4).inverse_frequencies(16)
        )
        self.slots: dict[tuple[int, int], tuple] = {}

    def write(self, plan, count: int, values: list[tuple]) -> None:
        for row in range(count):
            self.slots[int(plan.page[row]), int(plan.offset[row])] = values[row]
        assert (plan.page[count:] == self.limits.num_pages).all(), "padding is stored nowhere"

    def read(self, pages, count: int) -> list[tuple]:
        size = self.limits.page_size
        return [self.slots[int(pages[i // size]), i % size] for i in range(count)]

    def attended(self, plan, rows: int) -> list[list[tuple]]:
        """For every row the identities of the slots that its work items let it see."""
        seen: list[list[tuple]] = [[] for _ in range(rows)]
        for work in plan.works:
            for i in range(int(work.num_items)):
                kv = int(work.kv_len[i])
                if hasattr(work, "causal"):
                    for r in range(int(work.num_rows[i])):
                        visible = max(0, min(kv, int(work.causal[i]) + r + 1))
                        seen[int(work.row[i]) + r] += self.read(work.pages[i], visible)
                else:
                    for row in work.rows[i]:
                        if row < plan.bucket:
                            seen[int(row)] += self.read(work.pages[i], kv)
        return seen


class Simulation:
    """Random traffic over a scheduler, with every step's reads and writes checked."""

    def __init__(self, seed: int, num_pages: int, context: DocumentContext) -> None:
        self.rng = random.Random(seed)
        self.context = context
        self.limits = Limits(
            page_size=4,
            num_pages=num_pages,
            max_model_len=100,
            max_num_seqs=5,
            max_num_batched_tokens=BLOCK_ROWS,
            max_documents=6,
        )
        self.scheduler = Scheduler(self.limits)
        self.device = FakeDevice(self.limits)
        self.documents = [tuple(self.rng.choices(range(50), k=n)) for n in (1, 3, 4, 5, 9, 21)]
        self.live: list[Request] = []
        self.finished = 0

    def add(self) -> None:
        rng = self.rng
        system = [(), (7,), (7, 8, 9, 10), tuple(range(11))][rng.randrange(4)]
        prompt: list = [system] if system else []
        for _ in range(rng.randrange(4)):
            prompt.append(DocumentPiece(rng.choice(self.documents)))
            if rng.random() < 0.3:
                prompt.append(tuple(rng.choices(range(3), k=rng.randrange(1, 4))))
        prompt.append(tuple(rng.choices(range(3), k=rng.randrange(1, 12))))
        layout = lay_out(
            prompt,
            page_size=4,
            fingerprint=b"",
            salt=rng.choice(["", "s"]),
            context=self.context,
        )
        request = Request(
            str(self.finished), layout, PARAMS, max_tokens=rng.randrange(1, 25), seed=0
        )
        pages = len(layout.leading_keys) + self.limits.pages_for(
            len(layout.stream) + request.max_tokens
        )
        pages += sum(
            self.limits.pages_for(len(t)) for t in {d.piece.tokens for d in layout.documents}
        )
        if pages <= self.limits.num_pages and layout.num_tokens + request.max_tokens <= 100:
            self.scheduler.add(request)
            self.live.append(request)

    def step(self) -> None:
        scheduler = self.scheduler
        scheduler.admit()
        if chunks := scheduler.schedule_prefill():
            spans = [(c.owner, c.start, c.count) for c in chunks]
            self.compute(self.device.planner.prefill(chunks), spans)
            sampling = [c.owner for c in chunks if c.samples]
            scheduler.finish_prefill(chunks)
            self.sample(sampling)
        for request in scheduler.encoded:
            scheduler.finish(request)
        scheduler.encoded.clear()
        if batch := scheduler.schedule_decode():
            spans = [(r, len(r.run.tokens) - 1, 1) for r in batch]
            self.compute(self.device.planner.decode([r.run for r in batch]), spans)
            scheduler.finish_decode(batch)
            self.sample(batch)
        scheduler.check_integrity()

    def compute(self, plan, spans) -> None:
        values, expected = [], []
        for owner, start, count in spans:
            identities = self.identities(owner)
            for at in range(start, start + count):
                values.append(identities[at][0])
                expected.append(identities[at][1])
        self.device.write(plan, len(values), values)
        seen = self.device.attended(plan, len(values))
        for row, (got, want) in enumerate(zip(seen, expected, strict=True)):
            assert sorted(got) == sorted(want), f"row {row} reads the wrong slots"

    def identities(self, owner) -> list[tuple[tuple, list[tuple]]]:
        """Per token of a run: its own identity, and those of all it must attend to."""
        request = owner.waiters[0] if isinstance(owner, EncodeJob) else owner
        layout = request.layout
        leading = [
            ("text", layout.root, layout.leading[: i + 1]) for i in range(len(layout.leading))
        ]

        def of_document(d) -> list[tuple]:
            prefix = layout.leading if d.after_prefix else None
            return [
                ("document", layout.root, prefix, d.encoded_at, d.piece.tokens[: i + 1])
                for i in range(len(d.piece.tokens))
            ]

        if isinstance(owner, EncodeJob):
            if owner.page_keys:
                return [(x, leading[: i + 1]) for i, x in enumerate(leading)]
            d = next(d for d in layout.documents if d.key == owner.key)
            own = of_document(d)
            before = leading if d.after_prefix else []
            return [(x, before + own[: i + 1]) for i, x in enumerate(own)]
        history, own, result, documents = tuple(layout.leading), [], [], []
        waiting = list(layout.documents)
        for i, token in enumerate(owner.run.tokens):
            while waiting and waiting[0].insert_at <= i:
                d = waiting.pop(0)
                documents += of_document(d)
                history += (("document", d.key),)
            history += (token,)
            own.append(("text", layout.root, history))
            result.append((own[-1], leading + documents + own))
            own = list(own)
        return result

    def sample(self, requests) -> None:
        for request in requests:
            request.run.append(self.rng.randrange(3))
            request.num_generated += 1
            if request.num_generated >= request.max_tokens:
                self.finish(request)

    def finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.live.remove(request)
        self.finished += 1

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.rng.random() < 0.4 and len(self.live) < 12:
                self.add()
            if self.live and self.rng.random() < 0.03:
                self.finish(self.rng.choice(self.live))
            self.step()
        for _ in range(5000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.live
        assert not self.scheduler.jobs


@pytest.mark.parametrize("context", [DocumentContext(False, 0), DocumentContext(True, 5)])
@pytest.mark.parametrize("num_pages", [26, 45, 200])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(seed, num_pages, context):
    """Arrivals, cancellations, evictions and preemptions; every read and write is the right one."""
    simulation = Simulation(seed, num_pages, context)
    simulation.run(400)
    scheduler = simulation.scheduler
    assert simulation.finished > 40
    scheduler.index.clear()
    assert scheduler.index.num_available == num_pages
    assert len(scheduler.index) == 0
    if num_pages == 26:
        assert scheduler.num_preemptions > 0
        assert scheduler.index.num_evicted > 0


def chunk_request(limits: Limits, *prompt) -> tuple[Scheduler, Request]:
    scheduler = Scheduler(limits)
    layout = lay_out(
        prompt,
        page_size=limits.page_size,
        fingerprint=b"",
        salt="",
        context=DocumentContext(False, 0),
    )
    request = Request("r", layout, PARAMS, max_tokens=4, seed=0)
    scheduler.add(request)
    return scheduler, request


LIMITS = Limits(
    page_size=16,
    num_pages=64,
    max_model_len=600,
    max_num_seqs=4,
    max_num_batched_tokens=128,
    max_documents=4,
)


def test_states_and_chunks_of_one_request():
    """200 document tokens under a budget of 128: two encode steps, then the question."""
    scheduler, request = chunk_request(LIMITS, DocumentPiece(tuple(range(200))), (1, 2, 3))
    counts = []
    scheduler.admit()
    assert request.state is State.ENCODING
    for _ in range(3):
        chunks = scheduler.schedule_prefill()
        counts.append([c.count for c in chunks])
        scheduler.finish_prefill(chunks)
    assert counts == [[128], [72], [3]]
    assert request.state is State.DECODE


def test_decode_shares_a_document_between_requests():
    """Two rows with different deltas in one item; each stream has items of its own."""
    scheduler = Scheduler(LIMITS)
    document, other = DocumentPiece(tuple(range(150))), DocumentPiece((9, 9))
    for i, prompt in enumerate([(document, (1, 2)), (other, document, (1, 2, 3))]):
        layout = lay_out(
            prompt,
            page_size=16,
            fingerprint=b"",
            salt="",
            context=DocumentContext(False, 0),
        )
        scheduler.add(Request(str(i), layout, PARAMS, max_tokens=4, seed=0))
    scheduler.admit()
    while chunks := scheduler.schedule_prefill():
        scheduler.finish_prefill(chunks)
    batch = scheduler.schedule_decode()
    for request in batch:
        request.run.append(0)
    planner = Planner(LIMITS, dense_lists(LIMITS), np.ones(8))
    plan = planner.decode([r.run for r in batch])
    narrow, wide = plan.works
    assert int(wide.num_items) == 2  # 150 tokens in items of 128
    assert wide.rows[:2].tolist() == [[0, 1] + [plan.bucket] * 6] * 2
    assert wide.kv_len[:2].tolist() == [128, 22]
    assert int(narrow.num_items) == 3  # two streams, and the document that only one holds
    np.testing.assert_allclose(plan.turns.cos[wide.turns[0, :2], 0], np.cos([0.0, 2.0]), atol=1e-6)
    np.testing.assert_allclose(plan.turns.sin[wide.turns[0, :2], 0], -np.sin([0.0, 2.0]), atol=1e-6)


def test_turns_are_exact_at_a_million_positions():
    """Angles are made in float64: within float32 rounding of the exact cosine."""
    scheduler, request = chunk_request(LIMITS, (1, 2), DocumentPiece((5,)), (1,))
    scheduler.admit()
    while chunks := scheduler.schedule_prefill():
        plan_chunks = chunks
        scheduler.finish_prefill(chunks)
    run = request.run
    placement = run.context[-1]
    run.context = (type(placement)(placement.pages, 1, 1_000_003),)
    run.append(0)
    run.append(0)
    frequency = 0.7071
    plan = Planner(LIMITS, dense_lists(LIMITS), np.full(8, frequency)).decode([run])
    assert plan_chunks
    turn = plan.works[0].turns[1, 0]
    exact = np.cos(np.longdouble(frequency) * 1_000_003)
    assert abs(float(plan.turns.cos[turn, 0]) - float(exact)) < 1e-7
