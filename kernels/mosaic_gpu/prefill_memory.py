"""The memory warpgroup of the Hopper prefill kernel."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lazyattn_jax.kernels.mosaic_gpu.prefill_shape import FREE, FULL, Shape


def bring(
    shape: Shape,
    q_ref,
    angles_ref,
    k_ref,
    v_ref,
    num_items_ref,
    items_ref,
    entries_ref,
    tiles_ref,
    *,
    k_ring,
    v_ring,
    queries,
    angles,
    scalars,
    k_full,
    v_full,
    k_free,
    v_free,
    entry_full,
    entry_free,
    query_barriers,
    **_unused,
):
    """Brings everything that the block's entries need, in order."""
    worker, workers = lax.axis_index("worker"), lax.axis_size("worker")
    pairs = num_items_ref[0] * shape.kv_heads
    rounds = lax.div(pairs + workers - 1, workers)

    some = shape.boxes if shape.boxes <= 4 else 1

    def pages_of(tile, first):
        """Page ids of a tile; of eight pages one at a time, since registers are few."""
        return [tiles_ref[tile, first + b] for b in range(some)]

    def fetch_pages(pages_ref, head, pages, ring, stage, full, first=0):
        for b, page in enumerate(pages):
            at = (first + b) * shape.page_size
            at = at if isinstance(at, int) else pl.multiple_of(at, shape.page_size)
            plgpu.copy_gmem_to_smem(
                pages_ref.at[page, head],
                ring.at[stage, pl.ds(at, shape.page_size)],
                full.at[stage],
            )

    def fetch_tile(pages_ref, head, tile, pages, ring, stage, full):
        fetch_pages(pages_ref, head, pages, ring, stage, full)
        if shape.boxes > some:

            @pl.loop(1, shape.boxes // some)
            def _(i):
                more = pages_of(tile, i * some)
                fetch_pages(pages_ref, head, more, ring, stage, full, i * some)

    def one_item(i, carry):
        # Every other round runs backwards, so that long and short items even out.
        place = jnp.where(lax.rem(i, 2) == 0, worker, workers - 1 - worker)
        pair = i * workers + place

        def go(items_done, entries_done, tiles_done):
            item, head = lax.div(pair, shape.kv_heads), lax.rem(pair, shape.kv_heads)
            row, num_rows, first_entry, num_entries = (items_ref[item, c] for c in range(4))

            @pl.when(items_done > 0)
            def _():
                plgpu.barrier_wait(query_barriers.at[FREE])

            for w in range(2):
                plgpu.copy_gmem_to_smem(
                    q_ref.at[
                        pl.ds(row + w * shape.tokens, shape.tokens),
                        pl.ds(head * shape.group, shape.group),
                    ],
                    queries.at[w],
                    query_barriers.at[FULL],
                )

            def one_entry(e, carry):
                entries_done, tiles_done = carry
                entry = first_entry + e
                first_tile, num_tiles, num_plain, limit, causal, skip, turn = (
                    entries_ref[entry, c] for c in range(7)
                )
                slot = lax.rem(entries_done, 2)

                @pl.when(entries_done >= 2)
                def _():
                    plgpu.barrier_wait(entry_free.at[slot])

                is_first = (e == 0).astype(jnp.int32)
                is_last = (e == num_entries - 1).astype(jnp.int32)
                values = (num_plain, is_first, is_last, num_tiles, limit, causal, skip)
                for c, value in enumerate((*values, row, num_rows, item, head)):
                    scalars[slot, c] = value
                plgpu.copy_gmem_to_smem(angles_ref.at[turn], angles.at[slot], entry_full.at[slot])
                plgpu.barrier_arrive(entry_full.at[slot])

                def one_tile(t, tiles_done):
                    # Looked up before the wait, which hides the latency.
                    tile = first_tile + t
                    pages = pages_of(tile, 0)
                    stage = lax.rem(tiles_done, shape.stages)

                    @pl.when(tiles_done >= shape.stages)
                    def _():
                        plgpu.barrier_wait(k_free.at[stage])

                    fetch_tile(k_ref, head, tile, pages, k_ring, stage, k_full)

                    @pl.when(tiles_done >= shape.stages)
                    def _():
                        plgpu.barrier_wait(v_free.at[stage])

                    fetch_tile(v_ref, head, tile, pages, v_ring, stage, v_full)
                    return tiles_done + 1

                tiles_done = lax.fori_loop(0, num_tiles, one_tile, tiles_done)
                return entries_done + 1, tiles_done

            entries_done, tiles_done = lax.fori_loop(
                0, num_entries, one_entry, (entries_done, tiles_done)
            )
            return items_done + 1, entries_done, tiles_done

        return lax.cond(pair < pairs, go, lambda *carry: carry, *carry)

    zero = jnp.int32(0)
    items, entries, tiles = lax.fori_loop(0, rounds, one_item, (zero, zero, zero))

    @pl.when(items > 0)
    def _():
        plgpu.barrier_wait(query_barriers.at[FREE])

    for back in range(2):

        @pl.when(entries > back)
        def _(back=back):
            plgpu.barrier_wait(entry_free.at[lax.rem(entries - 1 - back, 2)])

    for back in range(shape.stages):

        @pl.when(tiles > back)
        def _(back=back):
            stage = lax.rem(tiles - 1 - back, shape.stages)
            plgpu.barrier_wait(k_free.at[stage])
            plgpu.barrier_wait(v_free.at[stage])
