"""Schedules as libtpu writes them, and how often the loops of the TPU kernels run."""

from __future__ import annotations

import numpy as np
import pytest

from lazyattn_jax.kernels.model_shapes import decode_step, prefill_step
from lazyattn_jax.kernels.mosaic_tpu import decode, loops, prefill
from lazyattn_jax.kernels.mosaic_tpu.plan import (
    PREFILL_OTHERS,
    PREFILL_TILE,
    block_rows,
    plan_decode,
    plan_prefill,
)
from lazyattn_jax.kernels.mosaic_tpu.schedule import Loop, Part, cycles, parse
from lazyattn_jax.kernels.mosaic_tpu.stream import records
from lazyattn_jax.kernels.work import References, Runs

# A loop of bundles 1 to 13; in it a load of numbers that may be skipped (4), and a loop (8 to 10)
# that is skipped where it has no trips. One delay slot.
SCHEDULE = """
LB: loop body
= control target key end

     0   :  { %s1 = smov.u32 0 } /* End region 3 */
   0x1 LB: > { %s2 = sphi %s1, %s9 } /* Start region 5 */
   0x2   : > { %7 = sbr.rel (%p0) target = $region7  ;;  %s3 = sadd.s32 1, %s2 }
   0x3   : > {}
   0x4   : > { %8 = dma.hbm_to_smem /*hbm=*/%s3 /* BoundsCheck 2 for dma
hlo: kernel.1
 */ } /* Start region 6 :: End region 6 */
   0x5 PF: > { %p1 = scmp.le.s32.totalorder %s4, 0 } /* Start/End empty region 7 */
   0x6   : > { %9 = sbr.rel (%p1) target = $region9 }
   0x7   : > {}
   0x8 LB: >> { %s5 = sphi %s4, %s6 } /* Start region 8 */
   0x9   : >  { %10 = sbr.rel (!%p2) target = $region8 }
   0xa   :  {}
   0xb PF: > { %s9 = sadd.s32 1, %s2 } /* Start/End empty region 9 */
   0xc   :   { %11 = sbr.rel (!%p3) target = $region5 }
   0xd   :  {}
   0xe   :  { %12 = sbr.rel (%p4) target = $region99 }
   0xf   :  {}
  0x10   :  { %s10 = smov.u32 0 }
"""


def test_a_schedule_is_read():
    inner = Part(True, 3)
    outer = Part(True, 9, True, [Part(False, 1, True), Part(False, 0, False, [inner])])
    # A region that starts nowhere is the end.
    assert parse(SCHEDULE, 1) == Part(False, 3, False, [outer, Part(False, 1)])


def test_bundles_times_trips():
    schedule = parse(SCHEDULE, 1)
    loop = Loop("inner", 4, 20)
    assert cycles(schedule, [Loop("outer", 1, 10, (loop,))]) == 3 + 10 * 9 + 20 * 3 + 1
    # What surrounds a loop runs as often as the loop is begun.
    guarded = Part(False, 1, False, [Part(False, 7, False, [Part(True, 2)])])
    assert cycles(guarded, [Loop("inner", 0, 0)]) == 1
    assert cycles(guarded, [Loop("inner", 1, 5)]) == 1 + 7 + 10
    assert cycles(Part(False, 1, False, [Part(False, 7)]), []) == 8


def test_other_loops_are_refused():
    schedule = parse(SCHEDULE, 1)
    with pytest.raises(ValueError, match="outer has 1 loops in the schedule, expected 0: none"):
        cycles(schedule, [Loop("outer", 1, 10)])
    with pytest.raises(ValueError, match=r"the kernel has 1 loops .* expected 2: a, b"):
        cycles(schedule, [Loop("a", 1, 1), Loop("b", 1, 1)])
    with pytest.raises(ValueError, match="no bundles"):
        parse("= control target key end", 4)


def shape_of(module, num_rows, num_heads, kv_heads, head_dim, page_size):
    q = np.broadcast_to(np.float32(0), (num_rows, num_heads, head_dim))
    pages = np.broadcast_to(np.float32(0), (1, kv_heads, page_size, head_dim))
    return module.kernel_shape(q, pages, pages, interpret=True)[0]


def trips(found, name):
    """Trips of all loops of a name, wherever they are."""
    return sum((loop.trips if loop.name == name else 0) + trips(loop.inner, name) for loop in found)


@pytest.mark.parametrize("page_size", [16, 64])
def test_decode_trips(page_size):
    references, runs = decode_step(page_size, requests=20, documents=3)
    work = plan_decode(references, runs, page_size=page_size)
    shape = shape_of(decode, 20, 8, 2, 128, page_size)
    found = loops.decode_loops(shape, 1, work)
    # Three documents of 512, two entries of 10 rows each; 20 tails of 100, a row each.
    places, pages = 256 // page_size, -(-100 // page_size)
    assert trips(found, "turns to bring") == trips(found, "results to add") == 20 * 4
    assert trips(found, "queries to turn") == 20 * 4
    assert trips(found, "entries") == 26
    assert trips(found, "tiles of 16 rows") == 6 * 2
    assert trips(found, "tiles of 4 rows") == trips(found, "tiles in 2 pieces") == 0
    assert trips(found, "tiles of 1 rows") == 20
    # The tiles of documents are full and wait once; those of tails are not.
    assert trips(found, "pages to bring") == (6 * 2 * 4 if page_size == 16 else 0)
    assert trips(found, "pages to bring, if any") == 20 * places
    assert trips(found, "pages to wait for") == 20 * pages
    # Slots 100 to 111, or to 127: 32 at once, or a page of 16.
    assert trips(found, "slots to silence") == 20
    twice = loops.decode_loops(shape, 2, work)
    assert trips(twice, "entries") == 2 * 26


def test_decode_trips_over_short_documents():
    """One request of five documents of 100: two tiles of two, and one of one."""
    runs = Runs(np.arange(10), 2 * np.arange(5), np.full(5, 100))
    zeros = np.zeros(5, int)
    references = References(zeros, zeros + 1, np.arange(5), zeros, zeros + 100)
    work = plan_decode(references, runs, page_size=64)
    found = loops.decode_loops(shape_of(decode, 1, 8, 2, 128, 64), 1, work)
    assert trips(found, "entries") == 2
    assert trips(found, "tiles in 2 pieces") == 2
    assert trips(found, "tiles of 1 rows") == 1
    assert trips(found, "turns to bring") == 5
    assert trips(found, "queries to turn") == 1  # without a loop in the others
    assert trips(found, "pages to bring, if any") == 4
    assert trips(found, "slots to silence") == 5


def test_prefill_trips():
    references, runs = prefill_step(64, requests=3, tokens=150, documents=2)
    work = plan_prefill(references, runs, num_rows=512, page_size=64, group=4)
    shape = shape_of(prefill, 512, 8, 2, 128, 64)
    found = loops.prefill_loops(shape, 1, work)
    size, tile, seen = block_rows(4), PREFILL_TILE, dict.fromkeys(KINDS, 0)
    turned = 0
    for record in records(work.stream, PREFILL_OTHERS, tile // 64):
        used, slots, _, first, end, left, causal = record.others[:7]
        rows = {
            row
            for row in range(first // size * size, -(-end // size) * size)
            if causal + row >= 0 or used > 1
        }
        blocks = len({row // size for row in rows})
        turned += len(record.turns) * len({row // size for row in range(first, end)})
        sees_all = causal + first + 1 >= left
        if slots < tile:
            kind = f"tiles in {tile // slots} pieces"
        elif sees_all and first % size == end % size == 0 and left == tile:
            kind = "whole tiles"
        else:
            width = min(slots for slots in (128, 256, 512) if slots >= left)
            kind = f"{'' if sees_all else 'causal '}tiles of {width} slots"
        seen[kind] += blocks
    assert seen["whole tiles"] > 0
    assert seen["tiles of 512 slots"] > 0
    assert seen["causal tiles of 128 slots"] + seen["causal tiles of 256 slots"] > 0
    for kind, blocks in seen.items():
        assert trips(found, kind) == 2 * blocks
    assert trips(found, "queries to turn") == 2 * turned
    assert trips(found, "windows") == 4


KINDS = (
    "whole tiles",
    *(f"{kind}tiles of {slots} slots" for kind in ("", "causal ") for slots in (128, 256, 512)),
    "tiles in 2 pieces",
    "tiles in 4 pieces",
)
