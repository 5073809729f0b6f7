"""What the benchmarks say of kernels and steps that are compiled for a TPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from lazyattn_jax.bench import __main__ as command
from lazyattn_jax.bench import kernels, tpu_anchor, tpu_steps
from lazyattn_jax.bench.kernel_cases import CASES, HEADLINE
from lazyattn_jax.bench.tpu_kernels import Compared, Compiled, table_of
from lazyattn_jax.engine.limits import Limits
from lazyattn_jax.kernels.mosaic_tpu.ahead import HBM, is_installed, kernels_of
from lazyattn_jax.models.config import NAMED_SHAPES

pytestmark = pytest.mark.usefixtures("compiled_afresh")
needs_libtpu = pytest.mark.skipif(
    not is_installed(), reason="needs libtpu: pip install 'lazyattn-jax[ahead]'"
)


def printed(table):
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@needs_libtpu
def test_cycles_of_a_kernel():
    """In a process of its own: libtpu writes schedules if told to before it is first used."""
    arguments = ["kernels", "--aot", "v5e", "--only", "D3", "--quick"]
    done = subprocess.run(
        [sys.executable, "-m", "lazyattn_jax.bench", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "120"},
    )
    row = next(line for line in done.stdout.splitlines() if "D3" in line)
    numbers = [float(n.replace(",", "")) for n in re.findall(r"[\d,.]+", row.replace("D3", ""))]
    _, vmem, cycles, _, anchor_vmem, anchor_cycles, ratio = numbers
    # 64 documents in two tiles each, of 8 heads: at least 144 multiplications of 8 x 128 x 128.
    assert cycles > 128 * 144
    assert 4 < vmem < 16
    assert 4 < anchor_vmem < 16
    assert ratio == pytest.approx(cycles / anchor_cycles, abs=0.006)
    assert ratio <= 1.15


@pytest.mark.parametrize(
    ("name", "rows", "blocks", "requests", "tiles"),
    [
        ("D2", 1, 8, 8, 8 * 5),  # 5120 slots a request, 1024 at once
        ("S3", 1, 256, 256, 256 * 5),  # 2560: 512 at once
        ("P1", 64, 8, 8, 8 * 6),  # 5184
        ("P1", 32, 16, 16, 16 * 6),
        ("P4", 64, 64, 64, 64 * 6),
        ("E2", 64, 128, 128, 128 * 8),  # also the slots that no row sees
    ],
)
def test_trips_of_the_anchor(monkeypatch, name, rows, blocks, requests, tiles):
    info = type("Info", (), {"vmem_capacity_bytes": 2**27})()
    monkeypatch.setattr(tpu_anchor.pltpu, "get_tpu_info", lambda: info)
    monkeypatch.setattr(tpu_anchor, "PREFILL_ROWS", (rows,))
    [case] = [case for case in CASES if case.name == name]
    anchor = tpu_anchor.anchors(case, HEADLINE)[0]
    [outer] = anchor.loops
    [middle] = outer.inner
    [inner] = middle.inner
    assert (outer.trips, middle.trips, inner.trips) == (blocks, requests, tiles)
    assert (middle.begun, inner.begun) == (blocks, requests)


def test_a_failed_kernel_costs_its_row_only():
    good, bad = Compiled(1.25, 3 << 20, 1000), Compiled(problem="ValueError: no")
    rows = [Compared("D1", "", good, replace(good, cycles=800)), Compared("P1", "x", good, bad)]
    text = printed(table_of("v5e", rows))
    assert re.search(r"D1 .* 1\.2 .* 3\.0 .* 1,000 .* 800 .* 1\.25", text)
    assert re.search(r"P1 .* x .* 1,000 .* failed", text)


@pytest.mark.parametrize("is_good", [True, False])
def test_aot_fails_if_a_kernel_does(monkeypatch, is_good):
    asked = []

    def compile_all(generation, names, quick, json, console):
        asked.append((generation, list(names), quick, json))
        return is_good

    monkeypatch.setattr(kernels.tpu_kernels, "compile_all", compile_all)
    monkeypatch.setattr(
        sys, "argv", ["bench", "kernels", "--aot", "v6e", "--only", "D1", "--quick"]
    )
    if is_good:
        assert command.main() == 0
    else:
        with pytest.raises(SystemExit) as stopped:
            command.main()
        assert stopped.value.code == 1
    assert asked == [("v6e", ["D1"], True, None)]


@pytest.mark.parametrize(("prefill", "bucket"), [(False, 16), (True, 4096)])
@needs_libtpu
def test_the_pool_is_updated_in_place(prefill, bucket):
    """A whole step of an engine: had the pool to be copied, no large one would fit."""
    config = replace(NAMED_SHAPES["llama3-1b"], num_layers=2, vocab_size=1024)
    limits = Limits(
        page_size=64,
        num_pages=2000,
        max_model_len=2048,
        max_num_seqs=16,
        max_num_batched_tokens=4096,
        max_documents=16,
    )
    program = tpu_steps.compile_step("v5e", config, limits, prefill=prefill, bucket=bucket)
    assert len(kernels_of(program)) == config.num_layers
    pool = 2 * 2000 * 64 * 2 * 8 * 64 * 2
    assert program.memory_analysis().alias_size_in_bytes >= pool
    # Nor is any layer's part of it laid out in another way and back.
    assert "bf16[2000,8,64,128]" in program.as_text()
    assert not re.search(r"= bf16\[2000,\S+ copy\(", program.as_text())


@needs_libtpu
def test_choosing_tokens_takes_a_few_times_the_logits():
    """In place where it notes tokens in the seats, which are as large as the logits."""
    config = replace(NAMED_SHAPES["llama3-1b"], vocab_size=8192)
    limits = tpu_steps.limits_for("v5e", config)
    memory = tpu_steps.compile_choice("v5e", config, limits).memory_analysis()
    logits = 256 * 8192 * 4
    assert memory.alias_size_in_bytes >= logits
    assert 2 * logits <= memory.argument_size_in_bytes < 2.3 * logits
    assert memory.temp_size_in_bytes < 12 * logits


def test_the_pool_has_its_share_of_what_weights_leave():
    limits = tpu_steps.limits_for("v5e", NAMED_SHAPES["llama3-1b"])
    page = 64 * 16 * 8 * 64 * 2 * 2  # slots, layers, heads, head_dim, keys and values, bytes
    weights = 1_235_814_400 * 2
    assert limits.num_pages == int((HBM["v5e"] - weights) * 0.9) // page
    with pytest.raises(ValueError, match=r"the weights take \d+\.\d\d GiB more than there are"):
        tpu_steps.limits_for("v5e", replace(NAMED_SHAPES["llama3-8b"], num_layers=64))


def test_whether_a_step_fits_is_told():
    limits = tpu_steps.limits_for("v5e", NAMED_SHAPES["llama3-1b"])
    gib = 2**30
    step = tpu_steps.Taken("decode 256", 3.0, 2 * gib, 3 * gib, 0, gib, 0, gib // 2, 5 << 20)
    assert step.total == 6.5 * gib
    assert re.search(
        r"256 .* 3 .* 2\.00 .* 3\.00 .* 0\.00 .* 1\.00 .* 0\.50 .* 6\.50 .* yes .* 5\.0",
        printed(tpu_steps.table_of("", [step], limits, 7 * gib)),
    )
    assert " no " in printed(tpu_steps.table_of("", [step], limits, 6 * gib))
    failed = tpu_steps.Taken("decode 256", 3.0, problem="no memory")
    assert " no " in printed(tpu_steps.table_of("", [failed], limits, 7 * gib))
