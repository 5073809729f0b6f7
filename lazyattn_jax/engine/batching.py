"""What goes into the next step: as much as the step's capacities hold, oldest request first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lazyattn_jax.engine.limits import Limits
from lazyattn_jax.engine.runs import Chunk, EncodeJob, Request, State, TokenRun
from lazyattn_jax.kernels.dense import BLOCK_ROWS


def prefill_chunks(
    requests: Sequence[Request], limits: Limits, can_run: Callable[[EncodeJob], bool]
) -> list[Chunk]:
    """Chunks of prompts and of what they wait for, as many tokens as are worth their padding.

    Args:
      requests: that have been admitted, oldest first.
      limits: of a step.
      can_run: whether an encode job can be computed now.
    """
    tokens, bucket = limits.max_num_batched_tokens, limits.prefill_buckets[-1]
    chunks = _chunks(requests, limits, can_run, tokens, bucket)
    count = sum(chunk.count for chunk in chunks)
    worth = limits.worth_computing(count)
    if worth == count:
        return chunks
    # The smaller shape also has room for fewer items, turns and prompts that end.
    fewer = _chunks(requests, limits, can_run, worth, worth)
    return fewer if 4 * sum(chunk.count for chunk in fewer) >= 3 * worth else chunks


def _chunks(
    requests: Sequence[Request],
    limits: Limits,
    can_run: Callable[[EncodeJob], bool],
    tokens: int,
    bucket: int,
) -> list[Chunk]:
    """Chunks of at most so many tokens that a step of a shape has room for."""
    items, samples = limits.prefill_items(bucket), limits.prefill_samples(bucket)
    turns = limits.turns(True, bucket) - 1
    chunks: list[Chunk] = []
    scheduled: set[EncodeJob] = set()
    for request in requests:
        if request.state is State.DECODE:
            continue
        owners: list[EncodeJob | Request] = [
            job for job in request.pending if job not in scheduled and can_run(job)
        ]
        scheduled.update(job for job in owners if isinstance(job, EncodeJob))
        if request.state is State.PREFILL:
            owners.append(request)
        for owner in owners:
            run = owner.run
            per_block = _items_of(run, limits)
            blocks = items // per_block
            count = min(run.remaining, tokens, blocks * BLOCK_ROWS)
            chunk = Chunk(run, run.computed, count, owner)
            if count < 1 or (chunk.samples and not samples) or turns < run.context_turns:
                continue
            chunks.append(chunk)
            tokens -= count
            items -= per_block * -(-count // BLOCK_ROWS)
            turns -= run.context_turns
            samples -= chunk.samples
    return chunks


def decode_batch(ready: Sequence[Request], limits: Limits) -> list[Request]:
    """As many of the requests, from the first on, as fit in a decode step."""
    bucket = limits.decode_buckets[-1]
    items, turns = limits.decode_items(bucket), limits.turns(False, bucket) - 1
    batch: list[Request] = []
    for request in ready:
        items -= _items_of(request.run, limits)
        turns -= request.run.context_turns
        if items < 0 or turns < 0:
            break
        batch.append(request)
    return batch


def _items_of(run: TokenRun, limits: Limits) -> int:
    return limits.items_for(len(run.pages)) + run.context_items
