"""The model on paper: against simulated draws, and where the answer is known."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from lazyattn_jax.bench import __main__ as command
from lazyattn_jax.bench.scale import BEGIN, END, large_of, machine_of
from lazyattn_jax.bench.scale_fleet import fleet_hits
from lazyattn_jax.bench.scale_model import (
    Machine,
    Traffic,
    break_even_output,
    rate,
    step_seconds,
)
from lazyattn_jax.bench.workloads import draw_distinct
from lazyattn_jax.engine.scheduler import HEADROOM

MACHINE = Machine(
    weight_bytes=16e9,
    token_bytes=1e5,
    pool_bytes=2e10,
    read=4e12,
    copy=3e12,
    prefill=2e4,
    turn=0.01,
)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.1])
def test_inclusion_and_distinct_documents_against_draws(alpha):
    traffic = Traffic(pool=50, documents=5, alpha=alpha)
    rng = np.random.default_rng(0)
    draws = [draw_distinct(rng, 50, 5, alpha) for _ in range(4000)]
    share = np.bincount(np.concatenate(draws), minlength=50) / len(draws)
    # The number of clocks that have rung is fixed in a request, but not in the model: off by a few
    # hundredths for the first ranks. Noise of 4000 draws: below 4.5 * 0.5 / 63 = 0.036.
    assert np.abs(traffic.inclusion() - share).max() < 0.036 + 0.05
    assert traffic.inclusion().sum() == pytest.approx(5)
    distinct = [len({*itertools.chain(*draws[i : i + 8])}) for i in range(0, 4000, 8)]
    assert traffic.distinct(8) == pytest.approx(np.mean(distinct), rel=0.04)


def test_hit_rate_against_a_cache():
    traffic = Traffic(pool=200, documents=4, alpha=1.0)
    rng = np.random.default_rng(1)
    cache: dict[int, None] = {}
    hits = asked = 0
    for i in range(6000):
        for document in draw_distinct(rng, 200, 4, 1.0):
            if i > 1000:
                hits, asked = hits + (document in cache), asked + 1
            cache.pop(document, None)
            cache[document] = None
            if len(cache) > 60:
                del cache[next(iter(cache))]
    assert traffic.hit_rate(60) == pytest.approx(hits / asked, abs=0.02)
    assert traffic.hit_rate(200) == 1
    assert traffic.hit_rate(0) == 0
    uniform = replace(traffic, alpha=0.0)
    assert uniform.hit_rate(50) == pytest.approx(0.25)


def test_hit_rate_of_a_line_by_hand():
    """What is asked for most, next to what requests hold anyway: no more than there is room for."""
    traffic = Traffic(pool=4, documents=1, alpha=1.0)
    p = traffic.inclusion()
    assert traffic.hit_rate_of_line(2, 0) == pytest.approx(p[:2].sum())
    assert traffic.hit_rate_of_line(0, 0) == 0
    assert traffic.hit_rate_of_line(4, 0) == pytest.approx(1)
    held = 1 - (1 - p) ** 3
    # Room for the first document and what three requests hold of the others, not for the second.
    room = 1 + held[1:].sum()
    assert 1 - held[1] > 0.1
    assert traffic.hit_rate_of_line(room + 0.1, 3) == pytest.approx(p[0] + (p * held)[1:].sum())


def test_steps_by_hand():
    traffic = Traffic(pool=100, documents=10, alpha=0.0, text_tokens=100, output_tokens=200)
    own, held = 8 * 200 * 1e5, 8 * 10 * 512 * 1e5
    assert step_seconds(MACHINE, traffic, "block", 8) == pytest.approx((16e9 + own + held) / 4e12)
    distinct = 100 * (1 - 0.9**8)
    shared = 1.01 * distinct * 512 * 1e5
    assert step_seconds(MACHINE, traffic, "lazy", 8) == pytest.approx((16e9 + own + shared) / 4e12)


def test_rates_by_hand():
    """A pool of 200,000 tokens: copies of 10 documents let 35 requests in, or 33."""
    traffic = Traffic(pool=100, text_tokens=90, output_tokens=100, alpha=0.0)
    block = rate(MACHINE, traffic, "block")
    # Besides the copies there is room for what two are made of, a fifth of all documents.
    assert block.requests == pytest.approx((200_000 - 2 * 5120) / (190 + 5120))
    assert block.hits == pytest.approx(0.2)
    assert block.prefill_seconds == pytest.approx((90 + 0.8 * 5120) / 2e4)
    assert block.copy_seconds == pytest.approx(2 * 5120 * 1e5 / 3e12)
    lazy = rate(MACHINE, traffic, "lazy")
    assert lazy.requests == 256  # 100 documents and 256 x 190 tokens fit
    assert lazy.hits == 1
    assert lazy.copy_seconds == 0
    none = rate(MACHINE, traffic, "none")
    assert none.requests == pytest.approx(200_000 / (190 + 5120))
    assert none.prefill_seconds == pytest.approx((90 + 5120) / 2e4)
    roomy = replace(MACHINE, headroom=0.1)
    block = rate(roomy, traffic, "block")
    assert block.requests == pytest.approx((180_000 - 2 * 5120) / (190 + 5120))
    assert block.cached == pytest.approx((20_000 + 2 * 5120) / 512)
    few = rate(roomy, replace(traffic, alpha=1.0), "block", most=16)  # nobody waits
    assert few.hits == pytest.approx(replace(traffic, alpha=1.0).hit_rate(few.cached))


def test_nothing_shared_comes_down_to_copying_against_turning():
    """Documents that never come again: what differs is one copy, and the turns of every token."""
    outputs = break_even_output(MACHINE)
    assert outputs == pytest.approx(2 * 4 / (3 * 0.01))
    for tokens, lazy_wins in ((round(outputs * 0.9), True), (round(outputs * 1.1), False)):
        traffic = Traffic(pool=10**5, alpha=0.0, output_tokens=tokens)
        machine = replace(MACHINE, pool_bytes=1e11)
        lazy, block = (rate(machine, traffic, reuse, most=16) for reuse in ("lazy", "block"))
        ours = lazy.copy_seconds + lazy.decode_seconds
        theirs = block.copy_seconds + block.decode_seconds
        assert (ours < theirs) == lazy_wins


def test_a_fleet_of_one_is_a_cache_and_a_router_makes_more_of_it():
    traffic = Traffic(pool=400, documents=4, alpha=0.8)
    for aware in (False, True):
        alone = fleet_hits(traffic, 1, 60, aware=aware)
        # Noise of 2 x 4 x 280 draws or more, not independent: a few hundredths.
        assert alone == pytest.approx(traffic.hit_rate(60), abs=0.04)
    turns, router = (fleet_hits(traffic, 4, 60, aware=aware) for aware in (False, True))
    assert turns == pytest.approx(traffic.hit_rate(60), abs=0.04)
    assert router > turns + 0.05


def test_replicas_with_a_topic_each_find_what_one_with_its_documents_would():
    traffic = Traffic(pool=400, documents=4, alpha=0.8)
    router = fleet_hits(traffic, 4, 100, aware=True, topics=4)
    assert router > 0.8  # all of a topic's 100 documents, but for those sent elsewhere for balance
    turns = fleet_hits(traffic, 4, 100, aware=False, topics=4)
    assert turns < 0.6


def kept(machine, requests=64, tokens=5000, many=256, text=100):
    """What the benchmarks would write on such a machine."""

    def seconds(count, kv):
        read = machine.weight_bytes + machine.token_bytes * kv
        return read / machine.read + machine.row * count

    steps = {
        "decode": {
            "seconds": seconds(requests, requests * tokens),
            "requests": requests,
            "kv_tokens": requests * tokens,
        },
        "text": {
            "requests": many,
            "one_seconds": seconds(1, text),
            "one_kv_tokens": text,
            "all_seconds": seconds(many, many * text),
            "all_kv_tokens": many * text,
        },
        "prefill": {"tokens_per_second": machine.prefill},
    }
    workload = {"pool": 1000, "documents": 10, "alpha": 1.0, "document_tokens": 512}
    workload |= {"output_tokens": 128, "system_tokens": 32, "question_tokens": 64}
    row = {
        "part": "closed",
        "reuse": "lazy",
        "workload": workload,
        "concurrency": 256,
        "kv_pool_bytes": machine.pool_bytes,
        "steady_requests_per_second": 1.0,
    }
    load = {
        "date": "today",
        "device": "some GPU",
        "commit": "abc",
        "results": [row],
        "steps": {
            "weight_bytes": machine.weight_bytes,
            "token_bytes": machine.token_bytes,
            "results": steps,
        },
    }
    kernels = [
        {"table": "copy", "case": "C", "variant": "mosaic_gpu", "bytes": 3e9, "seconds": 1e-3},
        {"table": "copy", "case": "C", "variant": "xla", "bytes": 3e9, "seconds": 1e-2},
        {"table": "decode", "case": "D", "variant": "", "seconds": 1.01e-4},
        {"table": "decode", "case": "D", "variant": "no rotation", "seconds": 1e-4},
    ]
    return load, kernels


def test_a_machine_from_what_was_measured_of_it():
    machine = replace(MACHINE, row=2e-5, headroom=HEADROOM)
    found = machine_of(*kept(machine))
    for name, value in vars(machine).items():
        assert getattr(found, name) == pytest.approx(value), name
    with pytest.raises(KeyError, match="copies"):
        machine_of(kept(machine)[0], [])


def test_eight_gpus_by_hand():
    large = large_of(replace(MACHINE, row=2e-5))
    assert large.pool_bytes == pytest.approx(8 * 141e9 * 0.9 - 141e9)
    assert large.prefill == pytest.approx(2e4 * 8 * 16 / 141)
    traffic = Traffic(alpha=0.0, pool=10**6)
    read = 141e9 + 327_680 * 64 * (10 * 512 + 96 + 64)
    by_hand = read / 32e12 + 64 * 2e-5 * 141 / 16 / 8 + 2e-3
    assert step_seconds(large, traffic, "block", 64) == pytest.approx(by_hand)


def test_the_command_writes_into_the_docs(monkeypatch, tmp_path):
    load, kernels = kept(MACHINE)
    paths = [tmp_path / name for name in ("load.json", "kernels.json", "docs.md")]
    paths[0].write_text(json.dumps(load))
    paths[1].write_text(json.dumps({"results": kernels}))
    paths[2].write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    arguments = ["bench", "scale", str(paths[0]), str(paths[1]), "--into", str(paths[2])]
    for _ in range(2):  # the second time over what the first has written
        monkeypatch.setattr("sys.argv", arguments)
        assert command.main() == 0
    text = paths[2].read_text()
    assert text.startswith("before\n" + BEGIN)
    assert text.endswith(END + "\nafter\n")
    assert "old" not in text
    on_paper = rate(replace(MACHINE, headroom=HEADROOM), Traffic(), "lazy").per_second
    assert f"|  lazy | {on_paper:.2f} |     1.00 |" in text
    assert "lazy is ahead of block up to 267 output tokens" in text
    del load["steps"]["results"]["prefill"]
    paths[0].write_text(json.dumps(load))
    with pytest.raises(SystemExit, match="lack 'prefill'"):
        command.main()
