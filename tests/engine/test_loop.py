"""The loop: steps are started ahead, take turns, compile nothing, and give up what ends early."""

from __future__ import annotations

import itertools

import jax
import pytest
from engine_helpers import GREEDY, assert_matches_oracle, document, text

from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.runs import State

SYSTEM, QUESTION, OTHER = text(1, 13), text(2, 9), text(3, 21)
A, B = document(10, 17), document(11, 30)
PROMPT = [SYSTEM, A, B, QUESTION]
MANY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture
def watched(make_engine):
    """An engine, and what it does in order: ``prefill N`` tokens, ``decode N`` rows, ``read``."""
    engine, log = make_engine(), []
    runner, read = engine._runner, engine._read
    prefill, decode = runner.prefill, runner.decode
    runner.prefill = lambda chunks: (
        log.append(f"prefill {sum(c.count for c in chunks)}") or prefill(chunks)
    )
    runner.decode = lambda requests: log.append(f"decode {len(requests)}") or decode(requests)
    engine._read = lambda step: log.append("read") or read(step)
    yield engine, log
    del runner.prefill, runner.decode, engine._read


def test_a_step_is_started_before_the_last_one_is_read(watched):
    engine, log = watched
    (request,) = engine.run(PROMPT)
    assert_matches_oracle(engine, request, PROMPT)
    first = log.index("decode 1")
    for part in (log[:first], log[first:]):
        starts = [i for i, event in enumerate(part) if event != "read"]
        reads = [i for i, event in enumerate(part) if event == "read"]
        assert len(starts) == len(reads)
        for started_next, read in zip(starts[1:], reads, strict=False):
            assert started_next < read
        assert starts[2] > reads[0], "no more than two steps are under way"


def test_first_tokens_are_read_at_once_if_nobody_has_another(watched):
    engine, log = watched
    engine.run([SYSTEM, A, B, OTHER])
    log.clear()
    one, two = engine.add(PROMPT, MANY), engine.add([SYSTEM, B, A, QUESTION], MANY)
    engine.step()
    assert log == ["prefill 18", "read"]
    assert one.num_generated == two.num_generated == 1
    log.clear()
    late = engine.add([SYSTEM, A, QUESTION], MANY)
    engine.step()
    engine.step()
    assert log == ["decode 2", "prefill 9", "read"]
    engine.step()
    assert log[3:] == ["decode 3", "read"]
    assert late.num_generated == 1
    engine.drain()
    assert_matches_oracle(engine, one, PROMPT)


def test_first_tokens_can_wait_while_others_are_in_line(watched):
    engine, log = watched
    engine.run([SYSTEM, A, B, OTHER])
    log.clear()
    engine.add(PROMPT, MANY, leader=engine.add(PROMPT, MANY))
    engine.step()
    assert log == ["prefill 9"]
    engine.drain()


def test_a_document_alone_is_not_waited_for(watched):
    engine, log = watched
    engine.run([SYSTEM, B, OTHER])
    log.clear()
    engine.add([SYSTEM, document(44, 20)], GREEDY, encode_only=True)
    (output,) = engine.step()
    assert output.finish_reason == "stop"
    assert log == ["prefill 20"]
    engine.drain()


def test_a_long_document_does_not_stall_a_stream(watched):
    """Between two decode steps there is one prefill step, of no more than the token budget."""
    engine, log = watched
    stream = engine.add([SYSTEM, QUESTION], MANY)
    while not stream.num_generated:
        engine.step()
    log.clear()
    late = engine.add([SYSTEM, document(40, 300), OTHER], GREEDY)
    before = stream.num_generated
    while not late.num_generated:
        engine.step()
    starts = [event for event in log if event != "read"]
    prefills = [event for event in starts if event.startswith("prefill")]
    assert len(prefills) >= 300 // 64
    assert all(int(event.split()[1]) <= 64 for event in prefills)
    for first, second in itertools.pairwise(starts):
        assert not (first.startswith("prefill") and second.startswith("prefill"))
    assert stream.num_generated - before >= len(prefills) - 2
    engine.drain()
    assert_matches_oracle(engine, stream, [SYSTEM, QUESTION])


def test_a_request_waits_for_its_own_documents_only(make_engine):
    """Not for those that somebody else's long document is still encoded with."""
    engine = make_engine()
    short = [SYSTEM, document(41, 20), QUESTION]
    first, second = (
        engine.add(short, GREEDY),
        engine.add([SYSTEM, document(42, 300), OTHER], GREEDY),
    )
    while not first.num_generated:
        engine.step()
    assert second.state is State.ENCODING
    third = engine.add(short, GREEDY)  # finds its document while the second waits for one
    engine.drain()
    assert third.cached_document_tokens == [20]
    for request in (first, third):
        assert_matches_oracle(engine, request, short)


def test_what_ends_early_leaves_a_row_that_is_thrown_away(make_engine):
    """The step that was started before the end was known changes nothing for anybody."""
    engine = make_engine()
    tokens = engine.ask(PROMPT)
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(tokens[3],))
    first = engine.add(PROMPT, params)
    company = engine.add([SYSTEM, OTHER], GREEDY)
    waiting = [engine.add([SYSTEM, A, text(70 + i, 5)], GREEDY) for i in range(5)]
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [t for o in outputs if o.request is first for t in o.token_ids] == first.generated
    assert first.generated == tokens[: tokens.index(tokens[3]) + 1]
    assert_matches_oracle(engine, company, [SYSTEM, OTHER])
    for i, request in enumerate(waiting):  # they got the pages and the seat of the first one
        assert_matches_oracle(engine, request, [SYSTEM, A, text(70 + i, 5)])


def test_nothing_is_compiled_after_start_up(make_engine):
    """Whatever requests ask for: the engine says so, and jax's own events agree."""
    engine = make_engine()
    compiled: list[str] = []

    def note(event: str, duration: float, **_: object) -> None:
        if "compile" in event:
            compiled.append(event)

    everything = {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "logit_bias": {5: 1.0},
        "seed": 1,
        "min_tokens": 2,
        "stop_token_ids": (7,),
        "logprobs": 3,
        "prompt_logprobs": 1,
    }
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        before = engine.stats.compilations
        for params in (GREEDY, SamplingParams(**everything, max_tokens=5)):
            engine.scheduler.index.clear()
            prompts = [[SYSTEM, A, QUESTION], [text(5, 150)], [B, OTHER], PROMPT, [text(4, 1)]]
            requests = [engine.add(p, params, timeout=600) for p in prompts]
            engine.add(prompts[0], params, leader=requests[0])
            engine.step()
            engine.abort(requests[1].id)
            while engine.has_work:
                engine.step()
        assert not compiled
        assert engine.stats.compilations == before
        jax.jit(lambda x: x + 41)(1)
        assert compiled, "the listener must notice compilations"
        assert engine.stats.compilations > before
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_the_time_of_the_host_is_counted(make_engine):
    engine = make_engine()
    steps, host, waited = (
        engine.stats.steps,
        engine.stats.host_seconds,
        engine.stats.wait_seconds,
    )
    engine.ask(PROMPT)
    # Leading text, documents, question, and a token for each step after the prompt's last.
    assert engine.stats.steps - steps == 3 + 11
    assert engine.stats.host_seconds > host
    assert engine.stats.wait_seconds > waited
    assert engine.stats.host_ms_per_step == pytest.approx(
        1000 * engine.stats.host_seconds / engine.stats.steps
    )


@pytest.mark.parametrize("steps", range(9))
def test_a_timeout_at_any_stage_gives_everything_back(make_engine, steps):
    engine = make_engine()
    request = engine.add(PROMPT, MANY, timeout=600)
    other = engine.add([SYSTEM, B, OTHER], GREEDY)
    for _ in range(steps):
        engine.step()
    engine._deadlines = [(0.0, n, r) for _, n, r in engine._deadlines if r is request]
    (timeout,) = [o for o in engine.step() if o.finish_reason]
    assert (timeout.request, timeout.finish_reason, timeout.text) == (request, "timeout", "")
    assert request.state is State.FINISHED
    engine.drain()
    assert_matches_oracle(engine, other, [SYSTEM, B, OTHER])


def test_answers_to_one_prompt_wait_for_it_and_share_it(make_engine):
    """Pages, and tokens computed; the line goes on behind them."""
    engine = make_engine()
    prompt = [SYSTEM, A, text(6, 50)]
    params = [SamplingParams(temperature=1, seed=i, max_tokens=8, ignore_eos=True) for i in (1, 2)]
    alone = [engine.ask(prompt, params=p) for p in params]
    engine.scheduler.index.clear()
    leader = engine.add(prompt, params[0])
    follower = engine.add(prompt, params[1], leader=leader)
    later = engine.add([SYSTEM, OTHER], GREEDY)
    engine.step()
    assert (leader.state, follower.state) == (State.ENCODING, State.WAITING)
    assert later.state is not State.WAITING
    assert engine.num_waiting == 1
    while not follower.num_generated:
        engine.step()
    assert follower.run.pages[:6] == leader.run.pages[:6]
    engine.drain()
    assert [leader.generated, follower.generated] == alone
    assert follower.cached_tokens == 13 + 17 + 48


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_leader_that_goes_lets_the_others_go_on(make_engine, steps):
    engine = make_engine()
    prompt = [SYSTEM, A, text(6, 50)]
    leader = engine.add(prompt, GREEDY)
    followers = [engine.add(prompt, GREEDY, leader=leader) for _ in range(2)]
    for _ in range(steps):
        engine.step()
    engine.abort(followers[0].id)
    engine.abort(leader.id)
    engine.drain()
    assert followers[0].num_generated == 0
    assert_matches_oracle(engine, followers[1], prompt)


def test_turns_are_sent_to_the_device_once_for_a_batch(make_engine):
    engine, seen = make_engine(), []
    programs = engine._runner.programs

    def watched(run):
        return lambda *args: seen.append(args[-1].turns) or run(*args)

    engine._runner.programs = programs | {
        key: watched(run) for key, run in programs.items() if key[0] == "decode"
    }
    first = engine.add(PROMPT, MANY)
    while first.num_generated < 5:
        engine.step()
    assert len(seen) > 4
    assert all(turns is seen[0] for turns in seen)
    assert all(isinstance(angles, jax.Array) for angles in seen[0])
    second = engine.add([SYSTEM, B, A, OTHER], GREEDY)
    engine.drain()
    assert len({id(turns) for turns in seen}) == 3  # alone, with the second, alone again
    assert_matches_oracle(engine, first, PROMPT)
    assert_matches_oracle(engine, second, [SYSTEM, B, A, OTHER])
