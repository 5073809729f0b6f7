"""Work lists of the Hopper kernels against what the references say, slot by slot."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_steps import SHAPE, Step, decode_step, decode_steps, prefill_steps, step_of, stored

from lazyattn_jax.kernels.mosaic_gpu import plan as decode_plan
from lazyattn_jax.kernels.mosaic_gpu import prefill_plan
from lazyattn_jax.kernels.mosaic_gpu.plan import (
    arrange,
    lay_out,
    plan_decode,
    rows_per_entry,
    tile_slots,
)
from lazyattn_jax.kernels.mosaic_gpu.prefill_plan import plan_prefill, rows_per_block
from lazyattn_jax.kernels.work import Runs


def item_tiles(work, item):
    """(entry's columns, tile of the entry, pages) of an item, in order."""
    first, count = work.items[item, 2:]
    for entry in work.entries[first : first + count]:
        for tile in range(entry[1]):
            yield entry, tile, work.tiles[entry[0] + tile]


def prefill_listed(step: Step, work) -> np.ndarray:
    """The same as ``Step.named``, by what the kernel does with the work list."""
    seen, valid = np.zeros_like(step.named()), step.valid()
    for item in range(int(work.num_items[0])):
        row, num_rows = work.items[item, :2]
        for (_, _, plain, limit, causal, skip, turn), tile, pages in item_tiles(work, item):
            slots = (pages[:, None] * step.page_size + np.arange(step.page_size)).reshape(-1)
            assert slots.shape == (prefill_plan.TILE,)
            left = limit - tile * prefill_plan.TILE
            # Whatever is not silenced must hold something: a weight of 0 does not silence a NaN.
            assert valid[slots[: left if tile >= plain else None]].all()
            for token in range(num_rows):
                visible = min(left, causal - tile * prefill_plan.TILE + token - skip + 1)
                if tile < plain:
                    visible = prefill_plan.TILE
                elif token < skip:
                    visible = 0
                seen[turn, row + token, slots[: max(0, visible)]] += 1
    return seen


def entries_by_worker(work, kv_heads: int, workers: int) -> np.ndarray:
    """Entries of each worker, by walking the line of items and KV heads as the kernel does."""
    entries = np.zeros(workers, int)
    taken = np.zeros((int(work.num_items[0]), kv_heads), int)
    for worker in range(workers):
        for i in range(-(-taken.size // workers)):
            pair = i * workers + (worker if i % 2 == 0 else workers - 1 - worker)
            if pair < taken.size:
                item = pair // kv_heads
                taken[item, pair % kv_heads] += 1
                entries[worker] += work.items[item, 3]
    assert (taken == 1).all()
    return entries


def shape_of(step: Step) -> dict[str, int]:
    return {"num_rows": step.num_rows, "page_size": step.page_size, "group": step.group}


LAYOUT = (st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 5, 132]))


def check_prefill(step: Step, kv_heads: int, workers: int, most_pieces: int) -> None:
    work = plan_prefill(
        step.references,
        step.runs,
        **shape_of(step),
        kv_heads=kv_heads,
        workers=workers,
        most_pieces=most_pieces,
    )
    assert all(table.dtype == np.int32 for table in work)
    np.testing.assert_array_equal(prefill_listed(step, work), step.named())

    items = work.items[: work.num_items[0]]
    row, num_rows, first, count = items.T
    size = rows_per_block(step.group)
    assert ((num_rows >= 1) & (num_rows <= size)).all()
    # The kernel goes through the entries of an item one after the other, at least one.
    assert (count >= 1).all()
    np.testing.assert_array_equal(first, np.cumsum(count) - count)
    np.testing.assert_array_equal(work.worker_entries, entries_by_worker(work, kv_heads, workers))
    tiles = np.array([work.entries[a : a + n, 1].sum() for a, n in zip(first, count, strict=True)])
    assert (np.diff(tiles) <= 0).all()

    made = [[] for _ in range(step.num_rows)]
    group = prefill_plan.padded_group(step.group)
    for item, (a, n) in enumerate(zip(row, num_rows, strict=True)):
        for r in range(n):
            made[a + r].append(item * prefill_plan.PACKED + r * group)
    pieces = np.array([len(x) for x in made])
    if most_pieces == 1:
        assert (pieces == 1).all()
        assert work.part_at.shape == (0, 2)
    else:
        assert ((pieces >= 1) & (pieces <= most_pieces)).all()
        np.testing.assert_array_equal(work.first_part, np.append(0, np.cumsum(pieces)))
        # Results and their log-sum-exps are numbered alike.
        np.testing.assert_array_equal(work.part_at[:, 0], work.part_at[:, 1])
        listed = np.split(work.part_at[:, 0], work.first_part[1:-1])
        assert [sorted(x) for x in listed] == [sorted(x) for x in made]
        for block in np.unique(row):
            assert np.ptp(tiles[row == block]) <= 1


@settings(max_examples=150, deadline=None)
@given(prefill_steps(), *LAYOUT, st.sampled_from([1, 2, 6]))
def test_prefill_covers_what_references_name(step, kv_heads, workers, most_pieces):
    check_prefill(step, kv_heads, workers, most_pieces)


@pytest.mark.parametrize("most_pieces", [1, 2, 6])
@pytest.mark.parametrize("seed", range(12))
def test_large_prefill(seed, most_pieces):
    """Steps that have a bit of everything, and enough workers that most blocks are cut."""
    rng = np.random.default_rng(seed)
    rows, lengths, row = [], [], 0
    for _ in range(3):
        new, before = int(rng.integers(1, 80)), int(rng.integers(0, 300))
        rows.append((row, new, len(lengths), before))
        lengths.append(before + new)
        for _ in range(rng.integers(0, 4)):
            skip, length = int(rng.choice([0, rng.integers(0, new)])), int(rng.integers(0, 500))
            rows.append((row + skip, new - skip, len(lengths), length))
            lengths.append(length)
        row += new + int(rng.integers(0, 3))
    shape = {"page_size": int(rng.choice([16, 32, 64, 128])), "group": int(rng.integers(1, 17))}
    step = step_of(rows, lengths, num_rows=row + 4, seed=seed, **shape)
    check_prefill(step, int(rng.choice([1, 2, 8])), 132, most_pieces)


@pytest.mark.parametrize("most_pieces", [2, 3, 6])
@pytest.mark.parametrize("skip", [0, 7])
def test_pieces_of_a_document(skip, most_pieces):
    """Tiles that all rows see in full, and a ragged one, in pieces of their own."""
    rows = [(0, 10, 0, 0), (skip, 10 - skip, 1, 300)]
    step = step_of(rows, [10, 300], num_rows=10, **SHAPE)
    check_prefill(step, 2, 132, most_pieces)


def test_few_rows_are_split_to_fill_the_chip():
    """One question of 10 rows over 40 tiles, 2 KV heads, 132 workers: as many pieces as allowed."""
    step = step_of([(0, 10, 0, 0), (0, 10, 1, 5000)], [10, 5000], num_rows=10, **SHAPE)
    for most in (1, 6):
        work = plan_prefill(
            step.references, step.runs, **shape_of(step), kv_heads=2, most_pieces=most
        )
        assert work.num_items[0] == most
        assert work.items[0, 1] == 10
    many = step_of([(128 * i, 128, i, 0) for i in range(40)], [128] * 40, num_rows=5120, **SHAPE)
    work = plan_prefill(many.references, many.runs, **shape_of(many), kv_heads=8, most_pieces=6)
    assert work.num_items[0] == 5120 // rows_per_block(4)


def just_fits(plan, capacity_type, needed: dict[str, int]) -> None:
    """Sizes of just what is needed are fine; one less names the value and the limit."""
    roomy = capacity_type(**{name: n + 7 for name, n in needed.items()})
    exact, padded = plan(capacity=capacity_type(**needed)), plan(capacity=roomy)
    for table, wide in zip(exact, padded, strict=True):
        if table.ndim:
            np.testing.assert_array_equal(table, wide[: len(table)])
    assert set(needed) == {field.name for field in fields(capacity_type)}
    for name, n in needed.items():
        with pytest.raises(ValueError, match=f"takes {n} {name}, Capacity.{name} is {n - 1}"):
            plan(capacity=capacity_type(**{**needed, name: n - 1}))


@pytest.mark.parametrize("most_pieces", [1, 6])
def test_prefill_capacity(most_pieces):
    step = step_of(
        [(0, 70, 0, 0), (0, 70, 1, 500), (70, 5, 2, 30)], [70, 500, 35], num_rows=80, **SHAPE
    )

    def plan(capacity=None):
        return plan_prefill(
            step.references,
            step.runs,
            **shape_of(step),
            kv_heads=2,
            most_pieces=most_pieces,
            capacity=capacity,
        )

    work = plan()
    sizes = {"items": work.items, "entries": work.entries, "tiles": work.tiles}
    needed = {name: len(table) for name, table in sizes.items()}
    if most_pieces == 1:
        # Results go to their rows: no room for parts is needed.
        assert plan(prefill_plan.Capacity(**needed, parts=0)).part_at.shape == (0, 2)
    else:
        just_fits(plan, prefill_plan.Capacity, {**needed, "parts": len(work.part_at)})


def test_prefill_of_nothing():
    step = step_of([], [], num_rows=40, **SHAPE)
    work = plan_prefill(step.references, step.runs, **shape_of(step), kv_heads=2, workers=3)
    assert work.items[: work.num_items[0], :2].tolist() == [[0, 32], [32, 8]]
    assert work.worker_entries.sum() == 2 * 2
    assert not work.entries[:, 1].any()


TILES = st.sampled_from([tile_slots(128), tile_slots(64)])


def decode_listed(step: Step, work, tile: int = 64) -> np.ndarray:
    """The same as ``Step.named``, by what the kernel does with the work list.

    A softmax starts anew, goes on over further entries of the same rows, and is written out once.
    """
    seen, valid = np.zeros_like(step.named()), step.valid()
    width, box = rows_per_entry(step.group), min(tile, step.page_size)
    written: dict[tuple[int, int], int] = {}
    taken = set()
    check_starts(work)
    for (begin, at_tile), (end, stop) in zip(work.workers[:-1], work.workers[1:], strict=True):
        running = None
        for entry in range(begin, end):
            columns = work.entries[entry]
            first_tile, num_tiles, last_valid, first_reference, num_rows, flush, fresh, results = (
                columns
            )
            assert first_tile == at_tile
            assert 1 <= num_rows <= width
            # The kernel reads as many references as an entry can have.
            assert first_reference + width <= len(work.references)
            rows, turns = work.references[first_reference:][:num_rows].T
            assert fresh == (running is None)
            assert fresh or running == rows.tolist()
            for i in range(num_tiles):
                boxes = work.tiles[at_tile + i]
                slots = (boxes[:, None] * box + np.arange(box)).reshape(-1)
                assert slots.shape == (tile,)
                slots = slots[: last_valid if i == num_tiles - 1 else None]
                assert valid[slots].all()
                for row, turn in zip(rows, turns, strict=True):
                    seen[turn, row, slots] += 1
            at_tile += num_tiles
            running = rows.tolist()
            if flush:
                running = None
                # Written in eights, which no other entry may touch.
                eights = set(range(results, results + num_rows * step.group, 8))
                assert results % 8 == 0
                assert not eights & taken
                taken |= eights
                for r, row in enumerate(rows.tolist()):
                    at = r * step.group
                    written[results + at, entry * decode_plan.PACKED + at] = row
        assert running is None
        assert at_tile == stop
    made = np.diff(work.first_part)
    listed = [tuple(place) for place in work.part_at[: made.sum()].tolist()]
    assert [written.pop(place) for place in listed] == np.repeat(range(len(made)), made).tolist()
    assert not written
    most = len(work.part_at) * -(-step.group // 8) * 8
    assert max(taken, default=0) + 8 <= most or not taken
    return seen


def check_starts(work) -> None:
    """What a worker starts with is what its first entry, references and tiles say."""
    boxes = work.tiles.shape[1]
    for worker, start in enumerate(work.starts):
        begin, tile = work.workers[worker]
        end, stop = work.workers[worker + 1]
        if begin == end:
            continue
        first_reference, num_rows = work.entries[begin, 3:5]
        assert start[0] == num_rows
        references = start[1 : 1 + 2 * decode_plan.ROWS].reshape(-1, 2)
        expected = work.references[first_reference : first_reference + num_rows]
        np.testing.assert_array_equal(references[:num_rows], expected)
        pages = start[1 + 2 * decode_plan.ROWS :].reshape(-1, boxes)
        count = min(len(pages), stop - tile)
        np.testing.assert_array_equal(pages[:count], work.tiles[tile : tile + count])


def tiles_of(step: Step, tile: int = 64) -> np.ndarray:
    return -(-step.runs.length // tile)


def check_decode(step: Step, workers: int, share: bool, tile: int) -> None:
    options = {**shape_of(step), "tile": tile, "workers": workers, "share": share}
    work = plan_decode(step.references, step.runs, **options)
    assert all(table.dtype == np.int32 for table in work)
    np.testing.assert_array_equal(decode_listed(step, work, tile), step.named())

    assert work.workers[0].tolist() == [0, 0]
    total = work.workers[-1, 1]
    assert np.ptp(np.diff(work.workers[:, 1])) <= 1
    tiles, held = tiles_of(step, tile), step.references.run
    apart = tiles[held].sum()
    holders = np.bincount(held, minlength=len(tiles))
    if share:
        assert (tiles * -(-holders // rows_per_entry(step.group))).sum() <= total <= apart
    else:
        assert total == apart

    rows, references = step.num_rows, len(held)
    capacity = decode_plan.Capacity.of(rows, references, int(apart), workers)
    padded = plan_decode(step.references, step.runs, **options, capacity=capacity)
    for table, wide in zip(work, padded, strict=True):
        assert not wide[len(table) :].any()
    np.testing.assert_array_equal(decode_listed(step, padded, tile), step.named())


@settings(max_examples=150, deadline=None)
@given(decode_steps(), st.sampled_from([1, 2, 5, 33]), st.booleans(), TILES)
def test_decode_covers_what_references_name(step, workers, share, tile):
    check_decode(step, workers, share, tile)


@settings(max_examples=60, deadline=None)
@given(decode_steps(), st.integers(1, 200), st.booleans(), TILES)
def test_what_is_arranged_stays_while_runs_of_one_row_grow(step, grown, share, tile):
    sizes = {**shape_of(step), "tile": tile, "workers": 5}
    arranged = arrange(step.references, step.runs, group=step.group, tile=tile, share=share)
    held = np.bincount(step.references.run, minlength=len(step.runs.length))
    grows = (held == 1) & (step.runs.length > 0)
    lengths = step.runs.length + np.where(grows, grown, 0)
    runs = stored(lengths.tolist(), step.page_size, seed=1)
    anew = plan_decode(step.references, runs, share=share, **sizes)
    for table, other in zip(lay_out(arranged, runs, **sizes), anew, strict=True):
        np.testing.assert_array_equal(table, other, strict=True)


def filled(step: Step, first: int, together: int) -> Runs:
    """The runs of a step, those from number ``first`` on as ``Runs.filled`` says."""
    pages, starts = [], step.runs.start.copy()
    for run in range(first, len(starts)):
        begin, count = starts[run], -(-step.runs.length[run] // step.page_size)
        held = step.runs.pages[begin : begin + count].tolist()
        starts[run] = len(pages)
        pages += held + held[-1:] * (-count % together)
    starts[:first] += len(pages)
    pages = np.append(pages, step.runs.pages).astype(np.int32)
    return Runs(pages, starts, step.runs.length, filled=first)


@settings(max_examples=100, deadline=None)
@given(decode_steps(), st.integers(0, 9), TILES)
def test_how_pages_are_listed_changes_no_plan(step, first, tile):
    sizes = {**shape_of(step), "tile": tile, "workers": 5}
    runs = filled(step, min(first, len(step.runs.length)), max(1, tile // step.page_size))
    work = plan_decode(step.references, step.runs, **sizes)
    for table, other in zip(plan_decode(step.references, runs, **sizes), work, strict=True):
        np.testing.assert_array_equal(table, other, strict=True)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_large_decode(seed, share):
    """Some documents that most rows hold, others that few do, and tails."""
    rng = np.random.default_rng(seed)
    documents, requests = int(rng.integers(1, 12)), int(rng.integers(1, 40))
    lengths = rng.integers(0, 500, documents + requests).tolist()
    weights = 1 / np.arange(1, documents + 1) ** 1.5
    holds = [
        [*rng.choice(documents, rng.integers(0, 6), p=weights / weights.sum()), documents + b]
        for b in range(requests)
    ]
    shape = {"page_size": int(rng.choice([16, 32, 64, 128])), "group": int(rng.integers(1, 17))}
    step = decode_step(holds, lengths, seed=seed, **shape)
    check_decode(step, int(rng.choice([1, 3, 33])), share, int(rng.choice([64, 128])))


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_a_shared_tile_is_read_once(page_size):
    """Documents of 5 to 7 tiles, held by up to 16 rows that all have a turn of their own."""
    holds = [[b % 3, 3, 4 + b] for b in range(16)]
    shape = {**SHAPE, "page_size": page_size}
    step = decode_step(holds, [300, 350, 400, 420, *[30] * 16], **shape)
    work = plan_decode(step.references, step.runs, **shape_of(step), tile=64, workers=7)
    total = work.workers[-1, 1]
    assert total == tiles_of(step).sum() == 5 + 6 + 7 + 7 + 16
    assert len(np.unique(work.tiles[:total, 0])) == total
    np.testing.assert_array_equal(decode_listed(step, work), step.named())


def test_more_rows_than_an_entry_takes_share_in_equal_items():
    """9 rows of 16 heads a KV head, 4 rows an entry: 3 items of 3 rows rather than 4, 4 and 1."""
    step = decode_step([[0]] * 9, [640], **{**SHAPE, "group": 16})
    work = plan_decode(step.references, step.runs, **shape_of(step), tile=64, workers=1)
    assert work.workers[-1, 1] == 3 * 10
    assert work.entries[:, 4].tolist() == [3, 3, 3]


def test_what_is_not_worth_sharing_is_read_by_each_row():
    step = decode_step([[0], [0], [1], [1]], [64, 640], **SHAPE)
    work = plan_decode(step.references, step.runs, **shape_of(step), tile=64, workers=1)
    assert work.workers[-1, 1] == 2 * 1 + 10


def test_a_row_has_few_shared_runs():
    """Beyond these, the runs that save least are read for the row alone."""
    most, lengths = decode_plan.MOST_SHARED, [64 * n for n in range(11, 31)]
    step = decode_step([list(range(20))] * 2, lengths, **SHAPE)
    work = plan_decode(step.references, step.runs, **shape_of(step), tile=64, workers=1)
    assert np.diff(work.first_part).tolist() == [most + 1] * 2
    assert work.workers[-1, 1] == sum(range(11, 31)) + sum(range(11, 31 - most))
    np.testing.assert_array_equal(decode_listed(step, work), step.named())


def test_decode_capacity():
    step = decode_step([[0, 1], [0], [0, 2], []], [500, 70, 35], **SHAPE)

    def plan(capacity=None):
        options = {**shape_of(step), "tile": 64, "workers": 3}
        return plan_decode(step.references, step.runs, **options, capacity=capacity)

    work = plan()
    needed = {
        "entries": len(work.entries),
        "references": len(work.references) - decode_plan.ROWS,
        "tiles": len(work.tiles),
        "parts": len(work.part_at),
    }
    just_fits(plan, decode_plan.Capacity, needed)


def test_decode_of_nothing():
    step = decode_step([[], [0]], [0], **SHAPE)
    work = plan_decode(step.references, step.runs, **shape_of(step), tile=64, workers=4)
    assert not work.workers.any()
    assert not work.first_part.any()
