"""Figures of a load test: arithmetic on known times, and a whole run on a small model."""

from __future__ import annotations

import json
import math
from array import array
from types import SimpleNamespace

import pytest

from lazyattn_jax.bench import __main__ as command
from lazyattn_jax.bench.serving_engine import Span, drive, is_correct, kv_pages, make_prompt
from lazyattn_jax.bench.serving_load import ClosedLoop
from lazyattn_jax.bench.serving_metrics import Limits, Record, summarise, throughput
from lazyattn_jax.bench.serving_plots import points
from lazyattn_jax.bench.workloads import Query
from lazyattn_jax.engine.engine import Output
from lazyattn_jax.engine.request import DocumentPiece
from lazyattn_jax.models.tokenizer import dummy_tokenizer

STEP = 0.01


class FakeEngine:
    """Every step takes ``STEP`` seconds and gives each request a token; ``clock`` says when."""

    def __init__(self) -> None:
        self.now = 0.0
        self.loaded = SimpleNamespace(tokenizer=None)
        self.limits = SimpleNamespace(num_pages=4)
        self.page_bytes = 100
        self.scheduler = SimpleNamespace(active=[], num_preemptions=3)
        self.stats = SimpleNamespace(
            steps=0, host_seconds=0.0, wait_seconds=0.0, compilations=0, restored_tokens=0
        )
        self.aborted: list[str] = []

    @property
    def has_work(self):
        return bool(self.scheduler.active)

    def add(self, prompt, params):
        documents = [p for p in prompt if hasattr(p, "tokens")]
        length = sum(len(getattr(p, "tokens", p)) for p in prompt)
        request = SimpleNamespace(
            id=f"r{len(self.scheduler.active)}-{self.now}-{params.max_tokens}",
            left=params.max_tokens,
            prompt_tokens=length,
            cached_tokens=10,
            cached_document_tokens=[len(documents[0].tokens), 0],
            layout=SimpleNamespace(documents=documents),
            run=SimpleNamespace(pages=array("i", [0, 1]), context=()),
        )
        self.scheduler.active.append(request)
        return request

    def abort(self, name):
        self.aborted.append(name)
        self.scheduler.active = [r for r in self.scheduler.active if r.id != name]

    def step(self):
        self.now += STEP
        self.stats.steps += 1
        self.stats.host_seconds += 0.002
        outputs = []
        for request in self.scheduler.active:
            request.left -= 1
            outputs.append(Output(request, "", (7,), None if request.left else "length"))
        self.scheduler.active = [r for r in self.scheduler.active if r.left]
        return outputs

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Arrivals:
    """Requests at given times."""

    def __init__(self, *times):
        self.times = list(times)

    def due(self, now, running):
        found = [t for t in self.times if t <= now]
        self.times = [t for t in self.times if t > now]
        return found

    def next_at(self):
        return min(self.times, default=math.inf)


def asked(*outputs):
    for count in outputs:
        yield Query((1,) * 5, ((2,) * 8, (3,) * 8), (4,) * 3, count)


def run(engine, load, span, *outputs):
    return drive(
        engine, asked(*outputs), lambda begin: load, span, clock=engine.clock, sleep=engine.sleep
    )


def test_latencies_from_known_arrivals():
    """A request that comes while a step runs waits for its end and for the next one."""
    engine = FakeEngine()
    outcome = run(engine, Arrivals(0.1, 0.105, 0.4), Span(requests=3), 3, 2, 1)
    assert [r.arrived for r in outcome.records] == [0.1, 0.105, 0.4]
    assert [r.ttft for r in outcome.records] == pytest.approx([0.01, 0.015, 0.01])
    assert outcome.records[0].times == pytest.approx([0.11, 0.12, 0.13])
    assert outcome.end == pytest.approx(0.41)
    found = summarise(outcome.records, outcome.begin, outcome.end, Limits())
    assert found["requests"] == 3
    assert found["ttft_ms"]["mean"] == pytest.approx(35 / 3)
    assert found["tpot_ms"] == pytest.approx({"mean": 10, "p50": 10, "p95": 10, "p99": 10})
    assert found["e2e_ms"]["p50"] == pytest.approx(25)  # of 30, 25 and 10
    assert found["requests_per_second"] == pytest.approx(3 / 0.41)
    assert found["output_tokens_per_second"] == pytest.approx(6 / 0.41)
    assert found["prompt_tokens_per_second"] == pytest.approx(3 * 24 / 0.41)
    assert found["document_hit_rate"] == 0.5
    assert found["token_hit_rate"] == pytest.approx(10 / 24)
    assert outcome.figures["steps"] == 4
    assert outcome.figures["host_ms_per_step"] == pytest.approx(2)
    assert outcome.figures["preemptions"] == 0


def test_what_is_under_way_at_the_end_counts_as_far_as_it_got():
    engine = FakeEngine()
    span = Span(warmup=0.045, duration=0.05)
    outcome = run(engine, ClosedLoop(2), span, 3, 100, 3, 3, 3, 3)
    assert len(engine.aborted) == 2
    assert not engine.has_work
    found = summarise(outcome.records, outcome.begin, outcome.end, Limits())
    # Steps end at 0.05 to 0.10; requests of 3 tokens begin at 0, 0.03, 0.06 and 0.09.
    assert found["seconds"] == pytest.approx(0.055)
    assert found["requests"] == 2
    assert found["output_tokens_per_second"] == pytest.approx(12 / 0.055)
    assert found["requests_begun"] == 2
    assert found["ttft_ms"]["p99"] == pytest.approx(10)
    assert outcome.figures["steps"] == 5  # counted from the first look in the window


def test_the_clients_of_a_closed_loop_come_one_after_another():
    """Four in the first 40 ms, one each 10 ms: with requests of one length they stay apart."""
    engine = FakeEngine()
    load = ClosedLoop(4, begin=0.0, ramp=4 * STEP)
    outcome = run(engine, load, Span(requests=8), *[8] * 8)
    first = [r.times[0] for r in outcome.records]
    assert first == pytest.approx([STEP * n for n in (1, 2, 3, 4, 9, 10, 11, 12)])


def test_documents_as_text_are_found_as_far_as_the_beginning_was():
    engine = FakeEngine()
    add = engine.add

    def as_text(prompt, params):
        request = add(prompt, params)
        request.layout.documents = []
        return request

    engine.add = as_text
    outcome = run(engine, Arrivals(0.0), Span(requests=1), 1)
    assert outcome.records[0].cached_document_tokens == 5  # of 10 found tokens 5 are system text


def record(arrived, *times, ended=True, error=None):
    return Record(arrived, list(times), [1] * len(times), times[-1] if ended else None, error=error)


def test_percentiles_and_goodput():
    records = [record(0.0, 1 + i / 1000, 2 + i / 1000) for i in range(101)]
    found = summarise(records, 0, 10, Limits(ttft=1.0205, tpot=2.0))
    assert found["ttft_ms"] == pytest.approx({"mean": 1050, "p50": 1050, "p95": 1095, "p99": 1099})
    assert found["tpot_ms"]["p99"] == pytest.approx(1000)
    assert found["goodput_requests_per_second"] == pytest.approx(2.1)
    slow = summarise(records, 0, 10, Limits(ttft=2.0, tpot=0.9))
    assert slow["goodput_requests_per_second"] == 0


@pytest.mark.parametrize(("begin", "end"), [(2, 29), (4.5, 33.5), (7, 38)])
def test_a_steady_rate_from_a_window_that_is_no_whole_number_of_rounds(begin, end):
    """In rounds of 10 s five prompts are computed, then their outputs: half a request a second."""
    records = []
    for k in range(5):
        for i in range(5):
            times = [10 * k + i, *(10 * k + 5 + i / 10 + n / 2 for n in range(9))]
            one = Record(0.0, times, [1] * 10, times[-1], output_tokens=10)
            records.append(one)
    found = summarise(records, begin, end, Limits())
    assert found["steady_requests_per_second"] == pytest.approx(0.5, rel=0.05)
    assert (end - begin) / 3 <= found["steady_seconds"] <= end - begin
    assert throughput(found) == found["steady_requests_per_second"]


def test_no_steady_rate():
    more = [Record(0.0, [t, t + 100], [1, 9], t + 100, output_tokens=10) for t in range(1, 30)]
    found = summarise(more, 0, 30, Limits())  # prompts alone: ever more is outstanding
    assert found["steady_requests_per_second"] is None
    assert throughput(found) == found["requests_per_second"] == 0
    unknown = [Record(0.0, [t, t + 1], [1, 9], t + 1) for t in range(1, 30)]
    assert summarise(unknown, 0, 30, Limits())["steady_requests_per_second"] is None


def test_the_window_and_errors():
    records = [
        record(0.0, 0.9, 1.1),  # began before the window
        record(0.5, 1.5, 1.9),
        record(1.0, 1.8, 2.1),  # ended after it
        record(1.0, 1.2, 1.4, error="lost"),
        Record(1.5),
    ]
    found = summarise(records, 1.0, 2.0, Limits())
    assert found["requests"] == 2
    assert found["errors"] == 1
    assert found["ttft_ms"]["mean"] == pytest.approx(900)
    assert found["itl_ms"]["mean"] == pytest.approx(300)  # 0.2 and 0.4; that at 2.1 is outside
    assert found["output_tokens_per_second"] == pytest.approx(4)
    assert found["document_hit_rate"] is None
    nothing = summarise([], 0, 1, Limits())
    assert nothing["ttft_ms"] is None
    assert nothing["requests_per_second"] == 0


def test_a_chunk_of_several_tokens():
    one = Record(0.0, [1.0, 2.0, 3.0], [1, 3, 2], 3.0)
    assert one.tpot == pytest.approx(2 / 5)
    assert record(0.0, 1.0).tpot is None


def test_pages_in_use():
    def request(own, *placed):
        context = tuple(SimpleNamespace(pages=pages) for pages in placed)
        return SimpleNamespace(run=SimpleNamespace(pages=array("i", own), context=context))

    requests = [request([0, 1], (4, 5), (6,)), request([2], (4, 5)), request([])]
    assert kv_pages(requests, 10) == (6, 8)
    assert kv_pages([], 10) == (0, 0)


def test_prompts_of_tokens_and_of_text():
    tokenizer = dummy_tokenizer(512)
    (query,) = asked(1)
    system, *documents, question = make_prompt(query, tokenizer)
    assert (system, question) == ((1,) * 5, (4,) * 3)
    assert [d.tokens for d in documents] == [(2,) * 8, (3,) * 8]
    text = make_prompt(Query("", ("One.", "Two."), "Which?", 1), tokenizer)
    pieces = [p for p in text if isinstance(p, DocumentPiece)]
    assert [tokenizer.decode(p.tokens).strip() for p in pieces] == ["One.", "Two."]
    assert "Which?" in tokenizer.decode(text[-1])


def test_answers():
    assert is_correct("It was PARIS.", ("London", "Paris"))
    assert not is_correct("Rome", ("London", "Paris"))


TINY = [
    *("--model", "dummy:tiny", "--pool", "6", "--documents", "2", "--document-tokens", "20"),
    *("--question-tokens", "8", "--system-tokens", "8", "--output-tokens", "4"),
    *("--kv-pool-bytes", "512KiB", "--max-model-len", "128", "--max-num-batched-tokens", "64"),
    *("--max-documents", "4", "--max-num-seqs", "2", "--page-size", "16"),
    *("--decode-buckets", "2"),
]


def bench(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    assert command.main() == 0


def test_all_ways_of_reuse_on_a_small_model(monkeypatch, tmp_path, capsys):
    path = tmp_path / "found.json"
    ways = ["lazy", "block", "prefix", "none", "lazy-unshared"]
    options = ["--reuse", ",".join(ways), "--concurrency", "2", "--requests", "8"]
    bench(monkeypatch, "serve", *TINY, *options, "--rate-share", "0.5", "--json", str(path))
    assert "time to first token" in capsys.readouterr().out
    kept = json.loads(path.read_text())
    rows = kept["results"]
    assert [r["reuse"] for r in rows] == ways * 2
    assert rows[5]["rate"] == pytest.approx(0.5 * throughput(rows[1]))
    for row in rows:
        assert (row["requests"], row["errors"], row["compilations"]) == (8, 0, 0)
        assert row["output_tokens_per_second"] == pytest.approx(32 / row["seconds"])
        assert row["prompt_tokens_per_second"] == pytest.approx(8 * 56 / row["seconds"])
    hits = {r["reuse"]: r["document_hit_rate"] for r in rows}
    # 8 requests for 2 of 6 documents each: at least 10 of 16 are found.
    assert hits["lazy"] >= 10 / 16
    assert hits["none"] == 0
    assert hits["lazy-unshared"] == hits["lazy"]
    assert kept["settings"]["page_size"] == 16
    assert rows[0]["workload"]["alpha"] == 1.0


def test_the_host_holds_what_the_pool_does_not(monkeypatch, tmp_path):
    """A pool of 16 pages for 40 documents of two: all others come back from the host."""
    path = tmp_path / "found.json"
    options = ["--concurrency", "2", "--requests", "8", "--preload", "--alpha", "0"]
    sizes = ["--pool", "40", "--kv-pool-bytes", "128KiB", "--json", str(path)]
    rows = []
    for host in ([], ["--host-kv-bytes", "2MiB"]):
        bench(monkeypatch, "serve", *TINY, *options, *sizes, *host)
        rows += json.loads(path.read_text())["results"]
    for row in rows:
        assert (row["requests"], row["errors"], row["compilations"]) == (8, 0, 0)
    assert rows[0]["document_hit_rate"] < 0.9
    assert rows[0]["restored_tokens"] == 0
    assert rows[1]["document_hit_rate"] == 1
    assert rows[1]["restored_tokens"] > 8 * 20


def test_points_of_a_plot_differ_in_one_setting_only():
    def row(reuse, concurrency, alpha=1.0, share=1.0):
        workload = {"name": "zipf", "alpha": alpha}
        return {
            "reuse": reuse,
            "rate": None,
            "concurrency": concurrency,
            "pool_share": share,
            "workload": workload,
        }

    rows = [row("lazy", 4), row("lazy", 1), row("lazy", 1, 2.0), row("lazy", 4, share=0.5)]
    assert points(rows, "concurrency") == [rows[1], rows[0]]
    assert points(rows, "alpha") == [rows[1], rows[2]]
    assert points(rows, "pool_share") == [rows[3], rows[0]]
    assert points(rows, "rate") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --concurrency or --rate"),
        (["--concurrency", "1"], "duration or requests must be given"),
        (["--rate", "1", "--requests", "1", "--rate-share", "1"], "needs a closed loop"),
        (["--concurrency", "1", "--requests", "1", "--documents", "7"], "the pool has 6"),
        (
            ["--concurrency", "1", "--requests", "1", "--document-context", "full"],
            "reuse 'lazy' needs",
        ),
    ],
)
def test_options_that_do_not_do(monkeypatch, options, message):
    with pytest.raises(SystemExit, match=message):
        bench(monkeypatch, "serve", *TINY, *options)
