"""The kernel benchmark with a stand-in for the kernels: checks, tables, record, messages."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from lazyattn_jax.bench import __main__ as command
from lazyattn_jax.bench import (
    kernel_ahead,
    kernel_copies,
    kernel_extra,
    kernel_runs,
    kernels,
    timing,
)
from lazyattn_jax.bench.kernel_cases import HEADLINE, Case, Variant, make_step
from lazyattn_jax.bench.kernel_report import is_met, save_plot, tables
from lazyattn_jax.bench.kernel_runs import Result
from lazyattn_jax.kernels import dense, xla
from lazyattn_jax.kernels.model_shapes import ModelShape
from lazyattn_jax.kernels.mosaic_gpu.ahead import Usage

DECODE = Case("D1", 3, 2, tokens=40, documents=4, zipf=1.0, goal=0.9)
PREFILL = Case("P1", 2, 2, tokens=40, new=9, goal=0.6)
ENCODE = Case("E1", 2, 0, new=70, goal=1.0)


def stand_in(case, variant, step):
    """The XLA path in place of a Hopper kernel."""
    lists = dense.DenseLists(step.page_size, {step.num_rows: 64}, {step.num_rows: 64})
    make = lists.prefill if case.new else lists.decode
    works = make(step.references, step.runs, step.num_rows)
    assert works is not None
    rows = step.num_rows + dense.BLOCK_ROWS  # a prefill item may reach past the last row

    def attention(q, k_pages, v_pages, turns, works):
        if not variant.rotate:
            turns = turns._replace(cos=jnp.ones_like(turns.cos), sin=jnp.zeros_like(turns.sin))
        q = jnp.pad(q, ((0, rows - len(q)), (0, 0), (0, 0))) if case.new else q
        out = xla.lazy_attention(
            q,
            k_pages,
            v_pages,
            turns,
            works,
            block_rows=dense.BLOCK_ROWS if case.new else 1,
            scale=variant.head_dim**-0.5,
        )
        return out[: step.num_rows]

    return attention, works


@pytest.fixture
def on_cpu(monkeypatch):
    """Small cases, few calls, no GPU."""
    monkeypatch.setattr(kernel_runs, "attention_of", stand_in)
    monkeypatch.setattr(kernels, "CASES", (DECODE, PREFILL, ENCODE))
    monkeypatch.setattr(kernels, "has_hopper", lambda: True)
    monkeypatch.setattr(kernels, "read_ceiling", lambda: 1e12)
    monkeypatch.setattr(kernel_runs, "Chain", partial(timing.Chain, calls=1))
    monkeypatch.setattr(
        timing.Chain, "time", lambda *_: timing.Timing(2e-6, (("some_kernel", 1e-6),))
    )
    monkeypatch.setattr(kernel_runs, "time_cudnn", lambda case, head_dim: timing.Timing(4e-6))


@pytest.mark.parametrize("case", [DECODE, PREFILL, ENCODE], ids=lambda case: case.name)
@pytest.mark.parametrize(
    "variant", [HEADLINE, Variant(head_dim=64, page_size=16), Variant(rotate=False)]
)
def test_check_takes_what_is_right_and_nothing_else(case, variant):
    step = make_step(case, variant.page_size)
    data = kernel_runs.make_data(step, variant.head_dim)
    attention, works = stand_in(case, variant, step)
    out = jax.jit(attention)(*data, works)
    error = kernel_runs.error_of(out, step, data, rotate=variant.rotate)
    assert error < kernel_runs.MAX_ERROR
    wrong = [out * 1.02, out.at[-1].set(jnp.nan)]
    if case.held:
        other = jax.jit(stand_in(case, replace(variant, rotate=not variant.rotate), step)[0])
        wrong.append(other(*data, works))
    for each in wrong:
        assert not kernel_runs.error_of(each, step, data, rotate=variant.rotate) < 1e-2


def test_a_run_prints_tables_and_writes_a_stamped_record(on_cpu, monkeypatch, tmp_path, capsys):
    path, plot = tmp_path / "results" / "kernels.json", tmp_path / "plot.svg"
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["kernels", "--only", "D1", "P1", "E1", "--json", str(path), "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    both = [HEADLINE, Variant(head_dim=64)]
    more = [*both, Variant(rotate=False), Variant(share=False)]
    monkeypatch.setattr(kernels, "variants", lambda case, quick: both if case.new else more)
    assert command.main() == 0
    record = json.loads(path.read_text())
    assert record["command"].startswith("python -m lazyattn_jax.bench kernels --only D1")
    assert {"date", "device", "jax", "commit"} <= set(record)
    assert record["read_ceiling"] == 1e12
    assert len(record["results"]) == 8
    by_name = {(r["case"], r["variant"]): r for r in record["results"]}
    headline = by_name["D1", ""]
    assert headline["seconds"] == 2e-6
    assert headline["kernels"] == [["some_kernel", 1e-6]]
    assert headline["value"] == headline["bytes"] / 2e-6 / 1e12
    assert headline["goal"] == 0.9
    assert headline["headline"] is None
    assert by_name["D1", "no rotation"]["headline"] == 1
    assert by_name["D1", "no rotation"]["headline_goal"] == 1.03
    assert by_name["D1", "unshared plan"]["headline_goal"] == 1.02
    assert by_name["P1", ""]["value"] == 0.5
    assert by_name["P1", "head_dim 64"]["goal"] == 0.65
    printed = capsys.readouterr().out
    for text in ("D1", "no rotation", "2.0 µs", "1.00 TB/s", "≤ 0.60", "TFLOP/s"):
        assert text in printed
    assert plot.read_text().startswith("<?xml")


def test_a_wrong_kernel_gets_no_time_and_fails_the_command(on_cpu, monkeypatch, tmp_path, capsys):
    def wrong(case, variant, step):
        attention, works = stand_in(case, variant, step)
        return lambda *args: attention(*args) * 2, works

    path = tmp_path / "kernels.json"
    monkeypatch.setattr(kernel_runs, "attention_of", wrong)
    arguments = ["kernels", "--only", "D1", "--quick", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit, match="wrong or failed: D1"):
        command.main()
    (result,) = json.loads(path.read_text())["results"]
    assert result["seconds"] is None
    assert result["problem"].startswith("wrong: relative error 1")
    assert "wrong" in capsys.readouterr().out


def test_a_kernel_that_fails_does_not_cost_the_others(on_cpu, monkeypatch):
    def failing(case, variant, step):
        if not variant.rotate:
            raise NotImplementedError("not this one\nand more")
        return stand_in(case, variant, step)

    monkeypatch.setattr(kernel_runs, "attention_of", failing)
    variants = [HEADLINE, Variant(rotate=False), Variant(head_dim=64)]
    first, second, third = kernel_runs.measure_case(DECODE, variants, 1e12)
    assert second.problem == "NotImplementedError: not this one"
    assert first.seconds == third.seconds == 2e-6


def test_a_baseline_that_fails_leaves_the_time(on_cpu, monkeypatch):
    def failing(case, head_dim):
        raise RuntimeError("no cuDNN")

    monkeypatch.setattr(kernel_runs, "time_cudnn", failing)
    (result,) = kernel_runs.measure_case(PREFILL, [HEADLINE], 1e12)
    assert result.seconds == 2e-6
    assert result.value is None
    assert result.baseline_problem == "RuntimeError: no cuDNN"
    assert is_met(result) is None


def test_goals_are_met_from_above_or_below():
    assert is_met(Result("decode", "D1", value=0.94, goal=0.93))
    assert not is_met(Result("decode", "D1", value=0.92, goal=0.93))
    assert is_met(Result("prefill", "P1", value=0.5, goal=0.6))
    assert not is_met(Result("prefill", "P1", value=0.7, goal=0.6))


@pytest.mark.parametrize("tokens", [40, 128])
def test_written_and_moved_bytes(monkeypatch, tokens):
    monkeypatch.setattr(kernel_extra, "WRITES", (tokens,))
    monkeypatch.setattr(timing.Chain, "seconds", lambda *_: 3e-6)
    monkeypatch.setattr(kernel_extra, "HEADLINE", Variant(page_size=8))
    (result,) = kernel_extra.measure_writes(num_pages=64, implementation="xla")
    assert result.problem is None
    assert result.bytes == 4096 * tokens
    assert result.value == 1
    slots = kernel_extra.make_slots(tokens, 64, 8)
    assert len(set(zip(*(x.tolist() for x in slots), strict=True))) == tokens
    assert len(set(slots.page.tolist())) == (tokens if tokens <= 64 else tokens // 8)


def test_copied_bytes_and_their_share_of_the_stream(monkeypatch):
    monkeypatch.setattr(timing.Chain, "seconds", lambda chain, carry, *_: 3e-6)
    monkeypatch.setattr(kernel_copies, "_TOKENS", 64)
    (result,) = kernel_copies.measure_copies(("C2",), ("xla",), (16,), pool_tokens=2048)
    assert result.problem is None
    size = 2 * 12 * 64 * 8 * 128 * 2  # keys and values of 12 x 64 tokens, bfloat16
    assert result.bytes == 2 * size
    assert result.value == pytest.approx(size / (1 << 28))  # of a stream of 1 << 28 bytes
    assert is_met(Result("copy", "C1", value=0.61, goal=0.6))
    assert not is_met(Result("copy", "C1", value=0.59, goal=0.6))


def test_moves_never_read_what_they_write():
    moves = kernel_copies.make_moves(50, 128, 16)
    assert not set(moves.source.tolist()) & set(moves.target.tolist())
    assert len(set(moves.target.tolist())) == 50
    k = jnp.arange(128.0, dtype=jnp.bfloat16)[:, None, None, None] * jnp.ones(
        (1, 1, 2, 16), jnp.bfloat16
    )
    _, v, shift = kernel_copies.copy_step((k, k, jnp.int32(4)), moves, implementation="xla")
    expected = np.arange(128)
    expected[(np.asarray(moves.target) + 4) % 128] = (np.asarray(moves.source) + 4) % 128
    assert v[:, 0, 0, 0].tolist() == expected.tolist()
    assert shift == 6


@pytest.mark.parametrize("donate", [False, True])
def test_chain_passes_results_on(donate):
    chain = timing.Chain(lambda total, x: 2 * total + x, calls=3, donate=donate)
    first, last = chain(jnp.ones(2), jnp.ones(2))
    assert (first is None) if donate else (first.tolist() == [3, 3])
    assert last.tolist() == [15, 15]
    assert chain.seconds(jnp.zeros(2), jnp.ones(2), programs=2, repeats=2) > 0


def test_no_cupti_no_kernel_times():
    chain = timing.Chain(lambda x: x + 1)
    assert chain.kernels(np.ones(3, np.float32)) is None


def test_kernels_of_a_call_are_told_from_what_calls_have_in_common():
    program = [("angles", 0.4), *[("attention", 2.0), ("merge", 0.1)] * 4]
    other = [(name, 3 * ms) for name, ms in program]
    found = timing.per_call([program, program, other], calls=4)
    assert [name for name, _ in found] == ["angles", "attention", "merge"]
    assert [seconds for _, seconds in found] == pytest.approx([1e-4, 2e-3, 1e-4])
    uneven = [("a", 1.0), ("b", 2.0), ("b", 2.0), ("a", 1.0)]
    assert timing.per_call([uneven], calls=2) == (("a", 1e-3), ("b", 2e-3))
    assert timing.per_call([[("a", 1.0)]], calls=2) == (("a", 5e-4),)


def test_ceiling_and_host_times_are_had():
    assert timing.read_ceiling(1 << 12) > 0
    assert timing.host_seconds(lambda: None, repeats=3) >= 0


def test_plans_are_timed(monkeypatch):
    monkeypatch.setattr(kernel_extra, "host_seconds", lambda plan: plan() and 1e-3)
    decode, prefill = kernel_extra.measure_plans()
    assert decode.variant == "S2, 256 rows, 2560 references"
    assert prefill.variant == "S2, 16384 rows, 2816 references"
    (table,) = tables([decode, prefill], None)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    assert "plan_prefill" in capture.get()


def test_says_what_to_do_without_a_gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "kernels"])
    with pytest.raises(SystemExit, match="needs an NVIDIA Hopper GPU; without one use --aot h200"):
        command.main()


def test_says_what_to_install_for_a_plot(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"pip install 'lazyattn-jax\[bench\]'"):
        save_plot(tmp_path / "plot.svg", [], "cpu")


def test_registers_and_spills_are_reported(monkeypatch):
    usages = {
        16: [Usage("k", 168, 8, 16, 8), Usage("m", 56, 0, 0, 0)],
        64: [Usage("k", 252, 0, 0, 0)],
    }
    monkeypatch.setattr(kernel_ahead, "PAGE_SIZES", (16, 64, 128))
    monkeypatch.setattr(kernel_ahead, "MODEL_SHAPES", (ModelShape("model", 4, 1, 128),))

    def usage_on_h200(call, q, k_pages, *_):
        if k_pages.shape[2] == 128:
            raise NotImplementedError("page size [128]")
        return usages[k_pages.shape[2]]

    monkeypatch.setattr(kernel_ahead, "usage_on_h200", usage_on_h200)
    console = Console(width=200)
    with console.capture() as capture:
        assert not kernel_ahead.compile_all(console)
    for text in ("168, 56; spills 24 B", "252", "NotImplementedError: page size [128]"):
        assert text in capture.get()
    monkeypatch.setattr(kernel_ahead, "PAGE_SIZES", (64,))
    assert kernel_ahead.compile_all(console)


@pytest.mark.parametrize(("good", "code"), [(True, 0), (False, 1)])
def test_aot_fails_on_a_spill(monkeypatch, good, code):
    monkeypatch.setattr(kernels, "compile_all", lambda console: good)
    monkeypatch.setattr(sys, "argv", ["bench", "kernels", "--aot", "h200"])
    if code:
        with pytest.raises(SystemExit) as stopped:
            command.main()
        assert stopped.value.code == code
    else:
        assert command.main() == 0
