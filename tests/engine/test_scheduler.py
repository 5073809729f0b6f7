"""Scheduler, cache and plan without a device (see ``simulation.py``), and cases by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulation import Simulation

from lazyattn_jax.engine.limits import Limits, dense_lists
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.plan import Planner
from lazyattn_jax.engine.request import DocumentContext, DocumentPiece, lay_out
from lazyattn_jax.engine.runs import Request, State
from lazyattn_jax.engine.scheduler import Scheduler

PARAMS = SamplingParams(temperature=0)


@pytest.mark.parametrize("context", [DocumentContext(False, 0), DocumentContext(True, 5)])
@pytest.mark.parametrize("num_pages", [26, 45, 200])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(seed, num_pages, context):
    """Arrivals, cancellations, evictions and preemptions; every read and write is the right one."""
    simulation = Simulation(seed, num_pages, context)
    for _ in range(1000):
        simulation.step()
    simulation.drain()
    assert simulation.counts.finished > 40
    assert simulation.counts.thrown_away > 0
    if num_pages == 26:
        assert simulation.scheduler.num_preemptions > 0
        assert simulation.scheduler.index.num_evicted > 0


@pytest.mark.parametrize("num_pages", [45, 200])
@pytest.mark.parametrize("seed", range(2))
def test_random_traffic_with_copies(seed, num_pages):
    """Requests read their own copies of documents, which may have been evicted since."""
    simulation = Simulation(seed, num_pages, DocumentContext(True, 5), copies=True)
    for _ in range(1000):
        simulation.step()
    simulation.drain()
    assert simulation.counts.finished > 40
    assert simulation.counts.copied > 40
    if num_pages == 45:
        assert simulation.scheduler.num_preemptions > 0
        assert simulation.scheduler.index.num_evicted > 0


@pytest.mark.parametrize("seed", range(2))
def test_random_traffic_with_overtaking(seed):
    """Nobody is overtaken more than three times; see ``Simulation._seated``."""
    simulation = Simulation(seed, 26, DocumentContext(True, 5), max_overtaken=3)
    for _ in range(1000):
        simulation.step()
    simulation.drain()
    assert simulation.counts.finished > 40
    assert simulation.counts.overtaken > 5


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("host_pages", [12, 1000])
@pytest.mark.parametrize("seed", range(2))
def test_random_traffic_with_a_host_store(seed, host_pages, copies):
    """Evicted documents come back some time after they are sent for, or are encoded again."""
    context = DocumentContext(True, 5)
    simulation = Simulation(seed, 45, context, copies=copies, host_pages=host_pages)
    for _ in range(1000):
        simulation.step()
        assert simulation.scheduler.index.store.num_pages <= host_pages
    simulation.drain()
    assert simulation.counts.finished > 40
    assert simulation.counts.restored > 20


class SchedulerMachine(RuleBasedStateMachine):
    """The same with orders of events that hypothesis thinks of, and makes short when one fails."""

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        num_pages=st.sampled_from([26, 45]),
        prefix=st.booleans(),
        copies=st.booleans(),
        host_pages=st.sampled_from([0, 12, 1000]),
    )
    def start(self, seed, num_pages, prefix, copies, host_pages):
        context = DocumentContext(prefix, 5 if prefix else 0)
        options = {"copies": copies, "host_pages": host_pages}
        self.simulation = Simulation(seed, num_pages, context, **options)

    @rule()
    def arrival(self):
        if len(self.simulation.live) < 12:
            self.simulation.add()

    @rule()
    def cancellation(self):
        if self.simulation.live:
            self.simulation.cancel()

    @rule()
    def prefill(self):
        self.simulation.start_prefill()

    @rule()
    def decode(self):
        self.simulation.start_decode()

    @rule()
    def read(self):
        self.simulation.read()

    @invariant()
    def sound(self):
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self):
        if hasattr(self, "simulation"):
            self.simulation.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)


def request_of(limits: Limits, *prompt) -> Request:
    layout = lay_out(
        prompt,
        page_size=limits.page_size,
        fingerprint=b"",
        salt="",
        context=DocumentContext(False, 0),
    )
    return Request("r", layout, PARAMS, max_tokens=4, seed=0)


def chunk_request(limits: Limits, *prompt) -> tuple[Scheduler, Request]:
    scheduler, request = Scheduler(limits), request_of(limits, *prompt)
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


def test_preempted_with_tokens_on_their_way():
    """Two answers of one prompt: the page in which they part is found by neither from the other."""
    limits = replace(LIMITS, page_size=4)
    scheduler, one = chunk_request(limits, range(6))
    other = request_of(limits, range(6))
    scheduler.add(other)
    scheduler.admit()
    scheduler.finish_prefill(scheduler.schedule_prefill())
    for _ in range(2):
        scheduler.finish_decode(scheduler.schedule_decode())
    for request in (other, one):
        assert request.run.pending == 3
        scheduler._preempt(request)
    for request, tokens in ((one, (7, 8, 9)), (other, (7, 6, 5))):
        for token in tokens:
            scheduler.fill(request, token)
        scheduler.admit()
        assert scheduler.active[-1] is request
        assert [s.num_tokens for s in request.stream_pins] == [4]
        scheduler.finish_prefill(scheduler.schedule_prefill())


def test_a_large_request_is_not_overtaken():
    """What does not fit yet keeps its place in line, also against small ones that would fit."""
    scheduler, first = chunk_request(LIMITS, range(500))  # 32 of 64 pages
    scheduler.admit()
    large, small = (request_of(LIMITS, prompt) for prompt in (range(590), range(5)))
    for request in (large, small):
        scheduler.add(request)
    scheduler.admit()
    assert scheduler.active == [first]
    assert list(scheduler.waiting) == [large, small]
    scheduler.finish(first)
    scheduler.admit()
    assert scheduler.active == [large, small]


def test_who_has_documents_in_the_pool_goes_first():
    """So far as nobody is overtaken more than twice."""
    scheduler = Scheduler(replace(LIMITS, max_num_seqs=1), max_overtaken=2)
    a, b, c = (DocumentPiece((i,) * 32) for i in range(3))
    first = request_of(LIMITS, a, (1,))
    scheduler.add(first)
    scheduler.admit()
    while scheduler.jobs:
        scheduler.finish_prefill(scheduler.schedule_prefill())
    later = [request_of(LIMITS, *x, (1,)) for x in ((b,), (b, c), (a, c), (a,), (a,), (a,))]
    for request in later:
        scheduler.add(request)
    order = []
    while scheduler.waiting:
        scheduler.finish(scheduler.active[0])
        scheduler.admit()
        (active,) = scheduler.active
        order.append(later.index(active))
    assert order == [3, 4, 0, 1, 2, 5]
    assert not scheduler.index.num_wanted


def test_what_others_in_line_need_is_evicted_last():
    """Of three documents, used often, twice and once, the one that is needed stays."""
    limits = replace(LIMITS, max_num_seqs=1, num_pages=16)
    scheduler = Scheduler(limits)
    a, b, c, new = (DocumentPiece((i,) * 64) for i in range(4))
    for documents in ((a, b, c), (a, b), (a,)):
        scheduler.add(request := request_of(limits, *documents, (1,)))
        scheduler.admit()
        while chunks := scheduler.schedule_prefill():
            scheduler.finish_prefill(chunks)
        scheduler.finish(request)
    assert len(scheduler.index) == 3
    for documents in ((new,), (c,)):
        scheduler.add(request_of(limits, *documents, (2,)))
    scheduler.admit()
    keys = [d.key for d in request_of(limits, a, b, c, (1,)).layout.reused]
    assert [key in scheduler.index for key in keys] == [True, False, True]


def test_an_admission_leaves_some_of_the_pool():
    """A twentieth of 64 pages is 3: 16 and 45 are too many, unless there is nobody else."""
    scheduler, first = chunk_request(LIMITS, range(250))
    scheduler.admit()
    second, third = (request_of(LIMITS, range(n)) for n in (45 * 16 + 16, 45 * 16))
    for large, fits in ((second, False), (third, True)):
        scheduler.add(large)
        scheduler.admit()
        assert (large in scheduler.active) == fits
        scheduler.finish(large)
    scheduler.finish(first)
    scheduler.add(whole := request_of(LIMITS, range(64 * 16)))
    scheduler.admit()
    assert scheduler.active == [whole]


def test_prefill_steps_are_not_padded_by_more_than_a_quarter():
    """Where their time grows with their tokens: what is over is computed in the next step."""
    limits = replace(LIMITS, num_pages=400, max_model_len=3000, max_num_batched_tokens=2000)
    limits = replace(limits, given_prefill_buckets=(64, 512, 1024, 2000))

    def steps(tokens: int) -> list[int]:
        scheduler, _ = chunk_request(limits, range(tokens))
        scheduler.admit()
        found = []
        while chunks := scheduler.schedule_prefill():
            found.append(sum(chunk.count for chunk in chunks))
            scheduler.finish_prefill(chunks)
        return found

    assert steps(100) == [100]  # a step of 512 takes no longer with 100 tokens than with 64
    assert steps(767) == [512, 255]
    assert steps(768) == [768]
    assert steps(1499) == [1024, 475]
    assert steps(1500) == [1500]
    assert steps(2600) == [2000, 512, 88]


@pytest.mark.parametrize(
    ("documents", "tokens", "steps"),
    [
        (0, 15, [(480, 512), (120, 512)]),  # 40 of 15 tokens: 32 prompts may end in 512
        (8, 20, [(420, 512), (380, 512)]),  # 21 prompts with 8 documents can be turned for
        (8, 16, [(592, 1024), (48, 64)]),  # that would be 336 tokens, and leave more room empty
    ],
)
def test_a_smaller_step_has_room_for_all_that_is_in_it(documents, tokens, steps):
    limits = replace(LIMITS, num_pages=1000, max_num_seqs=64, max_documents=8, max_model_len=3000)
    limits = replace(limits, max_num_batched_tokens=1024, given_prefill_buckets=(64, 512, 1024))
    planner, scheduler = Planner(limits, dense_lists(limits), np.ones(8)), Scheduler(limits)
    pieces = [DocumentPiece((i,) * 3) for i in range(documents)]
    for i in range(40):
        leading = ((99,),) if pieces else ()
        scheduler.add(request_of(limits, *leading, *pieces, (i,) * tokens))
    scheduler.admit()
    while scheduler.jobs:
        scheduler.finish_prefill(scheduler.schedule_prefill())
    found = []
    while chunks := scheduler.schedule_prefill():
        found.append((sum(chunk.count for chunk in chunks), planner.prefill(chunks).bucket))
        scheduler.finish_prefill(chunks)
    assert found == steps


def test_decode_shares_a_document_between_requests():
    """Two rows with different deltas in one item; each stream has items of its own."""
    scheduler = Scheduler(LIMITS)
    document, other = DocumentPiece(tuple(range(150))), DocumentPiece((9, 9))
    for prompt in [(document, (1, 2)), (other, document, (1, 2, 3))]:
        scheduler.add(request_of(LIMITS, *prompt))
    scheduler.admit()
    while chunks := scheduler.schedule_prefill():
        scheduler.finish_prefill(chunks)
    batch = scheduler.schedule_decode()
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
    run.append_pending()
    frequency = 0.7071
    plan = Planner(LIMITS, dense_lists(LIMITS), np.full(8, frequency)).decode([run])
    assert plan_chunks
    turn = plan.works[0].turns[1, 0]
    exact = np.cos(np.longdouble(frequency) * 1_000_003)
    assert abs(float(plan.turns.cos[turn, 0]) - float(exact)) < 1e-7
