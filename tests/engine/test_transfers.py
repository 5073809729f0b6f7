"""Documents that go to the host's memory and come back: the same KV, and nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from engine_helpers import GREEDY, ONE_SHAPE, EngineUnderTest, assert_matches_oracle, document, text

from lazyattn_jax.cache.pool import make_pool, put_pages, take_pages
from lazyattn_jax.engine.config import EngineConfig
from lazyattn_jax.engine.runner import Runner
from lazyattn_jax.engine.runs import State
from lazyattn_jax.models.config import NAMED_SHAPES
from lazyattn_jax.server.metrics import Metrics, engine_state

PAGE_BYTES = 8 * 512
SMALL = {
    "kv_pool_bytes": 40 * PAGE_BYTES,
    "host_kv_bytes": 200 * PAGE_BYTES,
    "max_model_len": 200,
    **ONE_SHAPE,
}
DOCUMENTS = [document(i, 30 + i) for i in range(12)]  # four to six pages, of 40
LEAD = text(10, 11)


def prompt(*numbers: int):
    return [LEAD, *(DOCUMENTS[i] for i in numbers), text(20 + numbers[0], 9)]


def fill(engine: EngineUnderTest) -> None:
    """Every document has been in the pool; most have been evicted."""
    for first in range(0, 12, 3):
        engine.run(prompt(first, first + 1, first + 2))


@dataclass
class Late:
    """An array that does not say that it is there until it is told to."""

    array: Any
    arrived: list[bool]

    def is_ready(self) -> bool:
        return bool(self.arrived)


@pytest.fixture
def arrive(monkeypatch):
    """Nothing comes back before this is called."""
    arrived, send_for, bring_back = [], Runner.send_for, Runner.bring_back
    monkeypatch.setattr(
        Runner, "send_for", lambda *args: [Late(part, arrived) for part in send_for(*args)]
    )
    monkeypatch.setattr(
        Runner,
        "bring_back",
        lambda self, parts, pages: bring_back(self, [p.array for p in parts], pages),
    )
    return lambda: arrived.append(True)


@pytest.fixture
def busy(make_engine):
    """An engine that has stored documents 4 and 5, evicted them, and generates for somebody."""
    engine = make_engine(**SMALL)
    for numbers in ((4, 5), (6, 7), (8, 9), (10, 11)):
        engine.run(prompt(*numbers))
    running = engine.add(prompt(0), replace(GREEDY, max_tokens=60))
    while running.state is not State.DECODE:
        engine.step()
    for number in (4, 5):
        assert document_key(engine, number) not in engine.scheduler.index
    yield engine
    engine.drain()
    assert_matches_oracle(engine, running, prompt(0))


@pytest.mark.parametrize("options", [{}, {"reuse": "block"}, {"document_context": "none"}])
def test_what_comes_back_is_what_was_evicted(make_engine, options):
    engine = make_engine(**SMALL | options)
    fill(engine)
    requests, compilations = {}, engine.stats.compilations
    before = first = engine.stats.restored_tokens
    for numbers in ((2, 0, 1), (5, 7, 11), (3, 0, 8)):
        evicted = [i for i in numbers if document_key(engine, i) not in engine.scheduler.index]
        steps = engine.stats.steps
        request = requests[numbers] = engine.run(prompt(*numbers))[0]
        lengths = [len(DOCUMENTS[i].tokens) for i in numbers]
        assert request.cached_document_tokens == lengths
        before += sum(len(DOCUMENTS[i].tokens) for i in evicted)
        assert engine.stats.restored_tokens == before
        # The question and eleven tokens more, and nothing else.
        assert engine.stats.steps - steps == 12
    assert before > first + 100
    assert engine.stats.compilations == compilations
    for numbers, request in requests.items():
        prefix = options.get("document_context") != "none"
        assert_matches_oracle(engine, request, prompt(*numbers), prefix=prefix)


def document_key(engine: EngineUnderTest, number: int) -> bytes:
    layout = engine._lay_out(prompt(number), salt="", context=engine.context, encode_only=False)
    return layout.documents[0].key


@pytest.mark.parametrize("reuse", ["prefix", "none"])
def test_nothing_is_stored_where_nothing_could_be_found(make_engine, reuse):
    engine = make_engine(**SMALL | {"reuse": reuse})
    fill(engine)
    assert engine.scheduler.index.num_evicted > 0
    assert engine.scheduler.index.store.capacity == 0
    assert engine.scheduler.index.store.num_pages == 0


def test_the_rest_goes_on_until_documents_arrive(busy, arrive):
    (running,) = busy.scheduler.active
    waits, before = busy.add(prompt(4, 5), GREEDY), running.num_sampled
    for _ in range(10):
        busy.step()
    assert running.num_sampled == before + 10
    assert waits.state is State.ENCODING
    arrive()
    busy.drain()
    assert waits.cached_document_tokens == [34, 35]
    assert_matches_oracle(busy, waits, prompt(4, 5))


def test_who_is_alone_need_not_be_told_what_has_arrived(busy, arrive):
    """The device waits, and the host does not."""
    busy.drain()
    request = busy.run(prompt(4, 5))[0]
    assert request.cached_document_tokens == [34, 35]
    assert_matches_oracle(busy, request, prompt(4, 5))


def test_pages_that_were_given_up_are_not_written_to(busy, arrive):
    gone, restored = busy.add(prompt(4, 5), GREEDY), busy.stats.restored_tokens
    busy.step()
    pages = [p for job in busy.scheduler.jobs.values() for p in job.run.pages]
    busy.abort(gone.id)
    other = busy.add([LEAD, document(99, 70), text(5, 5)], GREEDY)
    for _ in range(6):
        busy.step()
    assert set(pages) & {p for placement in other.run.context for p in placement.pages}
    arrive()
    busy.drain()
    assert busy.stats.restored_tokens == restored
    assert_matches_oracle(busy, other, [LEAD, document(99, 70), text(5, 5)])


def test_all_who_need_a_document_wait_for_the_same(busy, arrive):
    restored = busy.stats.restored_tokens
    prompts = [[LEAD, DOCUMENTS[4], text(i, 7)] for i in (1, 2)]
    both = [busy.add(each, GREEDY) for each in prompts]
    for _ in range(3):
        busy.step()
    assert [r.state for r in both] == [State.ENCODING] * 2
    assert len(busy.scheduler.jobs) == 1
    arrive()
    busy.drain()
    assert busy.stats.restored_tokens == restored + 34
    for each, request in zip(prompts, both, strict=True):
        assert_matches_oracle(busy, request, each)


def test_only_so_much_is_on_its_way(make_engine, monkeypatch):
    """Of 40 pages 32 may be, in groups of eight: other evicted documents are encoded again."""
    store, send_for, arrived = Runner.store, Runner.send_for, []
    monkeypatch.setattr(
        Runner, "store", lambda *args: [Late(part, arrived) for part in store(*args)]
    )
    monkeypatch.setattr(
        Runner, "send_for", lambda self, parts: send_for(self, [p.array for p in parts])
    )
    engine = make_engine(**SMALL)
    assert engine.limits.transferred_pages == 32
    fill(engine)
    assert engine.scheduler.index.num_evicted > 4
    assert engine.scheduler.index.store.num_pages == 32
    arrived.append(True)
    fill(engine)
    assert engine.scheduler.index.store.num_pages > 32


def test_a_discarded_document_is_encoded_again(make_engine):
    engine = make_engine(**SMALL)
    fill(engine)
    key = document_key(engine, 0)
    assert key in engine.scheduler.index.store
    engine.scheduler.index.discard(key)
    assert key not in engine.scheduler.index.store
    assert engine.run(prompt(0, 5))[0].cached_document_tokens == [0, 35]


def test_metrics(make_engine):
    engine = make_engine(**SMALL)
    fill(engine)
    evicted = [i for i in range(12) if document_key(engine, i) not in engine.scheduler.index]
    before = engine.stats.restored_tokens
    engine.run(prompt(evicted[0]), prompt(evicted[1]))
    lines = Metrics().text(engine_state(engine)).decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    # One group of eight pages for each.
    assert float(values["lazyattn:kv_host_bytes"]) >= len(evicted) * 8 * PAGE_BYTES
    tokens = sum(len(DOCUMENTS[i].tokens) for i in evicted[:2])
    assert float(values["lazyattn:document_restored_tokens_total"]) == before + tokens


@pytest.mark.parametrize("fused", [False, True])
def test_pages_are_taken_from_every_layer_and_put_where_they_are_told(fused):
    config = NAMED_SHAPES["tiny"]
    rng = np.random.default_rng(0)
    pools = [make_pool(config, 9, 4, np.dtype("float32"), fused=fused) for _ in range(2)]
    filled = [
        type(kv)(*(x if x is None else np.float32(rng.normal(size=x.shape)) for x in kv))
        for kv in pools[0]
    ]
    taken = jax.jit(take_pages)(filled, np.array([7, 2, 5, 9]))  # the last one is past the pool
    put = jax.jit(put_pages)(pools[1], np.array([0, 8, 2, 9]), taken)
    assert len(put) == config.num_layers
    for before, after in zip(filled, put, strict=True):
        for x, y in zip(before, after, strict=True):
            if x is None:
                assert y is None
                continue
            np.testing.assert_array_equal(y[np.array([0, 8, 2])], x[np.array([7, 2, 5])])
            assert not np.any(y[np.array([1, 3, 4, 5, 6, 7])])


def test_options():
    with pytest.raises(ValueError, match="host_kv_bytes is -1, must be at least 0"):
        EngineConfig(host_kv_bytes=-1)
