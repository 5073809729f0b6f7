"""Scheduler, cache and plan without a device: a fake model that knows what each slot must hold.

Every computed token is written to a dictionary of slots as the hash of all that its KV depends on;
every step is checked to read exactly the slots it should, with the values they should have. The
fake device chooses tokens when a step is started and tells them when it is read, some steps later.

    .venv/bin/python tests/engine/simulation.py --steps 1000000 --seed 0

runs it for long.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary, WeakSet

from rich.progress import track

from lazyattn_jax.cache.eviction import POLICIES
from lazyattn_jax.engine.limits import Limits, dense_lists
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.engine.plan import Planner
from lazyattn_jax.engine.request import DocumentContext, DocumentPiece, lay_out
from lazyattn_jax.engine.runs import EncodeJob, PageCopy, Request, State
from lazyattn_jax.engine.scheduler import Scheduler
from lazyattn_jax.engine.transfers import Transfers
from lazyattn_jax.kernels.dense import BLOCK_ROWS
from lazyattn_jax.models.rope import RopeConfig

END = 3  # a token that ends the output
MOST_STEPS = 3000  # that any request may take, from its arrival to its end


class FakeTransfer:
    """What some pages held when they were copied; it arrives sooner or later."""

    def __init__(self, pages: list[dict[int, tuple]], rng: random.Random) -> None:
        self.pages = pages
        self._rng = rng
        self._has_arrived = False

    def is_ready(self) -> bool:
        self._has_arrived = self._has_arrived or self._rng.random() < 0.3
        return self._has_arrived


class FakeDevice:
    """Slots of a pool; a token's KV is identified by its text, place and what it attends to."""

    def __init__(self, limits: Limits, rng: random.Random) -> None:
        self.limits = limits
        self.rng = rng
        self.planner = Planner(
            limits, dense_lists(limits), RopeConfig(theta=1e4).inverse_frequencies(16)
        )
        self.slots: dict[tuple[int, int], tuple] = {}
        # Of the streams, as the device knows them.
        self.tokens: WeakKeyDictionary[Request, list[int]] = WeakKeyDictionary()

    def write(self, plan, count: int, values: list[tuple]) -> None:
        for row in range(count):
            self.slots[int(plan.page[row]), int(plan.offset[row])] = values[row]
        assert (plan.page[count:] == self.limits.num_pages).all(), "padding is stored nowhere"

    def read(self, pages, count: int) -> list[tuple]:
        size = self.limits.page_size
        return [self.slots[int(pages[i // size]), i % size] for i in range(count)]

    def copy(self, copies: list[PageCopy]) -> None:
        """Copies whole pages; reading from one that is written as well would be a race."""
        written = [page for copy in copies for page in copy.target]
        assert len(set(written)) == len(written)
        assert not set(written) & {page for copy in copies for page in copy.source}
        for copy in copies:
            for source, target in zip(copy.source, copy.target, strict=True):
                for offset in range(self.limits.page_size):
                    self.slots[target, offset] = self.slots.get((source, offset), ())

    def moved_pages(self, count: int) -> int:
        return count

    def store(self, pages) -> list[FakeTransfer]:
        offsets = range(self.limits.page_size)
        held = [{o: self.slots[p, o] for o in offsets if (p, o) in self.slots} for p in pages]
        return [FakeTransfer(held, self.rng)]

    def send_for(self, stored: list[FakeTransfer]) -> list[FakeTransfer]:
        return [FakeTransfer(part.pages, self.rng) for part in stored]

    def bring_back(self, parts: list[FakeTransfer], pages) -> None:
        (part,) = parts
        for page, held in zip(pages, part.pages, strict=True):
            self.slots.update({(page, offset): value for offset, value in held.items()})

    def attended(self, plan, rows: int) -> list[list[tuple]]:
        """For every row the identities of the slots that its work items let it see."""
        seen: list[list[tuple]] = [[] for _ in range(rows)]
        for work in plan.works:
            for i in range(int(work.num_items)):
                kv = int(work.kv_len[i])
                if hasattr(work, "causal"):
                    for r in range(int(work.num_rows[i])):
                        visible = max(0, min(kv, int(work.causal[i]) + r + 1))
                        seen[int(work.row[i]) + r] += self.read(work.pages[i], visible)
                else:
                    for row in work.rows[i]:
                        if row < plan.bucket:
                            seen[int(row)] += self.read(work.pages[i], kv)
        return seen


@dataclass
class Counts:
    """What a simulation has been through."""

    finished: int = 0
    cancelled: int = 0
    spoiled: int = 0  # requests that ended because of KV that was not finite
    thrown_away: int = 0  # tokens chosen for requests that had ended
    copied: int = 0  # documents
    overtaken: int = 0  # requests, by others that came later
    restored: int = 0  # tokens of documents that were stored
    by_stage: dict[str, int] = field(default_factory=dict)  # cancellations


type Span = tuple[EncodeJob | Request, int, int]
"""Whose run, from which token on, and how many."""


@dataclass
class Started:
    """A step: the tokens that it chooses, and what it computes."""

    chosen: list[tuple[Request, int]]
    spans: list[Span]


class Simulation:
    """Random traffic over a scheduler, with every step's reads and writes checked."""

    def __init__(
        self,
        seed: int,
        num_pages: int,
        context: DocumentContext,
        eviction: str = "gdsf",
        *,
        copies: bool = False,
        host_pages: int = 0,
        max_overtaken: int = 0,
    ) -> None:
        self.rng = random.Random(seed)
        self.context = context
        self.limits = Limits(
            page_size=4,
            num_pages=num_pages,
            max_model_len=100,
            max_num_seqs=5,
            max_num_batched_tokens=BLOCK_ROWS,
            max_documents=6,
            copies_documents=copies,
            host_pages=host_pages,
        )
        self.scheduler = Scheduler(self.limits, POLICIES[eviction], max_overtaken=max_overtaken)
        self.device = FakeDevice(self.limits, self.rng)
        self.transfers = Transfers(self.scheduler, self.device, most_pages=9)
        self.documents = [tuple(self.rng.choices(range(50), k=n)) for n in (1, 3, 4, 5, 9, 21)]
        self.started: deque[Started] = deque()
        self.live: dict[Request, int] = {}  # with the step they came at
        self.followers: WeakSet[Request] = WeakSet()
        self.counts = Counts()
        self.now = 0
        self.arrived = 0
        self.max_overtaken = max_overtaken
        self.overtaken: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def add(self) -> None:
        """A request with a random prompt, or several that share one."""
        rng = self.rng
        system = [(), (7,), (7, 8, 9, 10), tuple(range(11))][rng.randrange(4)]
        prompt: list = [system] if system else []
        for _ in range(rng.randrange(4)):
            prompt.append(DocumentPiece(rng.choice(self.documents)))
            if rng.random() < 0.3:
                prompt.append(tuple(rng.choices(range(3), k=rng.randrange(1, 4))))
        prompt.append(tuple(rng.choices(range(3), k=rng.randrange(1, 12))))
        layout = lay_out(
            prompt,
            page_size=4,
            fingerprint=b"",
            salt=rng.choice(["", "s"]),
            context=replace(self.context, repair=rng.choice([0, 0, 3, 8])),
            encode_only=rng.random() < 0.05,
        )
        scored = 0 if rng.random() < 0.1 else None
        leader = None
        for _ in range(rng.choice([1, 1, 1, 3])):
            request = Request(
                str(self.arrived),
                layout,
                SamplingParams(temperature=0, prompt_logprobs=scored),
                max_tokens=rng.randrange(1, 25),
                seed=0,
            )
            if not self._fits(request):
                return
            self.scheduler.add(request, leader)
            if request.leader:
                self.followers.add(request)
            leader = leader or request
            self.device.tokens[request] = list(layout.stream)
            self.live[request] = self.now
            self.arrived += 1

    def _fits(self, request: Request) -> bool:
        layout, limits = request.layout, self.limits
        pages = len(layout.leading_keys)
        pages += limits.pages_for(len(layout.stream) + request.max_tokens)
        distinct = {d.piece.tokens for d in layout.documents}
        pages += sum(limits.pages_for(len(tokens)) for tokens in distinct)
        pages += limits.copied_pages(layout)
        room = layout.num_tokens + request.max_tokens <= limits.max_model_len
        return room and pages <= limits.num_pages and bool(layout.stream or layout.documents)

    def cancel(self) -> None:
        """Some request's client goes."""
        request = self.rng.choice(list(self.live))
        stage = "follower" if request.leader else request.state.value
        self.counts.by_stage[stage] = self.counts.by_stage.get(stage, 0) + 1
        self.counts.cancelled += 1
        self.end(request)

    def end(self, request: Request) -> None:
        """Ends a request, which must not leave anything behind."""
        self.scheduler.finish(request)
        assert self.now - self.live.pop(request) < MOST_STEPS
        self.check()

    def check(self) -> None:
        """All pages, pins and seats are accounted for."""
        self.scheduler.check_integrity()

    def start_prefill(self) -> bool:
        """Starts a prefill step if there is something to compute."""
        self.scheduler.admit(self._seated)
        self.transfers.store_evicted()
        self.counts.restored += self.transfers.bring_back()
        self._copy()
        chunks = self.scheduler.schedule_prefill()
        assert sum(c.count for c in chunks) <= self.limits.max_num_batched_tokens
        if chunks:
            spans = [(c.owner, c.start, c.count) for c in chunks]
            self._compute(self.device.planner.prefill(chunks), spans)
            self._choose([c.owner for c in chunks if c.samples], spans)
            self.scheduler.finish_prefill(chunks)
        for request in self.scheduler.encoded:
            self.end(request)
            self.counts.finished += 1
        self.scheduler.encoded.clear()
        return bool(chunks)

    def start_decode(self) -> bool:
        """Starts a decode step if a request can go on."""
        self._copy()
        batch = self.scheduler.schedule_decode()
        self.transfers.store_evicted()
        if batch:
            for request in batch:
                assert len(self.device.tokens[request]) == len(request.run.tokens)
            spans = [(r, len(r.run.tokens) - 1, 1) for r in batch]
            self._compute(self.device.planner.decode([r.run for r in batch]), spans)
            self._choose(batch, spans)
            self.scheduler.finish_decode(batch)
        return bool(batch)

    def _copy(self) -> None:
        copies = self.scheduler.take_copies()
        self.counts.copied += len(copies)
        self.device.copy(copies)
        self.check()

    def read(self) -> bool:
        """Reads the oldest step that has been started, if there is one."""
        if not self.started:
            return False
        step = self.started.popleft()
        if step.spans and self.rng.random() < 0.01:
            self._spoil(*self.rng.choice(step.spans))
        for request, token in step.chosen:
            if request.state is State.FINISHED:
                self.counts.thrown_away += 1
                continue
            self.scheduler.fill(request, token)
            known = self.device.tokens[request]
            assert request.run.tokens[: request.run.num_known] == known[: request.run.num_known]
            if token == END or request.num_generated >= request.max_tokens:
                self.end(request)
                self.counts.finished += 1
        return True

    def _spoil(self, owner: EncodeJob | Request, at: int, count: int) -> None:
        """Some token's KV turns out not to be finite: nobody may go on with it, or find it."""
        at += self.rng.randrange(count)
        concerned = {r for r in self.live if self._sees(r, owner, at)}
        ended = set(self.scheduler.spoil(owner, at))
        assert concerned <= ended
        for request in ended:
            del self.live[request]
        self.counts.spoiled += len(ended)
        self.check()

    def _sees(self, request: Request, owner: EncodeJob | Request, at: int) -> bool:
        """Whether a token is part of what an admitted request has to attend to."""
        if request.state is State.WAITING:
            return False
        if isinstance(owner, Request):
            return request is owner
        layout = request.layout
        if owner.page_keys:
            page = at // self.limits.page_size
            return owner.page_keys[page] in layout.leading_keys
        return any(d.key == owner.key and d.reused for d in layout.documents)

    def _seated(self, request: Request) -> None:
        """Nobody is overtaken too often, but by who was preempted or waited for a leader."""
        if request.num_preemptions or request in self.followers:
            return
        for other in self.scheduler.waiting:
            if int(other.id) < int(request.id) and not other.num_preemptions:
                self.overtaken[other] = self.overtaken.get(other, 0) + 1
                self.counts.overtaken += 1
                assert self.overtaken[other] <= self.max_overtaken

    def _choose(self, requests: list[Request], spans: list[Span]) -> None:
        chosen = [(r, END if self.rng.random() < 0.03 else self.rng.randrange(3)) for r in requests]
        for request, token in chosen:
            self.device.tokens[request].append(token)
        self.started.append(Started(chosen, spans))

    def _compute(self, plan, spans) -> None:
        values, expected = [], []
        for owner, start, count in spans:
            identities = self.identities(owner)
            for at in range(start, start + count):
                values.append(identities[at][0])
                expected.append(identities[at][1])
        self.device.write(plan, len(values), values)
        seen = self.device.attended(plan, len(values))
        for row, (got, want) in enumerate(zip(seen, expected, strict=True)):
            assert sorted(got) == sorted(want), f"row {row} reads the wrong slots"

    def identities(self, owner) -> list[tuple[tuple, list[tuple]]]:
        """Per token of a run: its own identity, and those of all it must attend to."""
        request = owner.waiters[0] if isinstance(owner, EncodeJob) else owner
        layout = request.layout
        leading = [
            ("text", layout.root, layout.leading[: i + 1]) for i in range(len(layout.leading))
        ]

        def of_document(d) -> list[tuple]:
            prefix = layout.leading if d.after_prefix else None
            return [
                ("document", layout.root, prefix, d.encoded_at, d.piece.tokens[: i + 1])
                for i in range(len(d.piece.tokens))
            ]

        if isinstance(owner, EncodeJob):
            if owner.page_keys:
                return [(x, leading[: i + 1]) for i, x in enumerate(leading)]
            d = next(d for d in layout.documents if d.key == owner.key)
            own = of_document(d)
            before = leading if d.after_prefix else []
            return [(x, before + own[: i + 1]) for i, x in enumerate(own)]
        history, own, result, documents = tuple(layout.leading), [], [], []
        waiting = [d for d in layout.documents if d.repaired < len(d.piece.tokens)]
        for i, token in enumerate(self.device.tokens[owner]):
            while waiting and waiting[0].insert_at <= i:
                d = waiting.pop(0)
                documents += of_document(d)[d.repaired :]
                history += (("document", d.key, d.repaired),)
            history += (token,)
            own.append(("text", layout.root, history))
            result.append((own[-1], leading + documents + own))
            own = list(own)
        return result

    def step(self) -> None:
        """Something happens: mostly what an engine does, sometimes an arrival or a cancellation."""
        rng = self.rng
        self.now += 1
        if rng.random() < 0.25 and len(self.live) < 12:
            self.add()
        if self.live and rng.random() < 0.02:
            self.cancel()
        self.turn()

    def turn(self) -> None:
        """Starts a step, or reads one; never lets more than three wait to be read."""
        actions = [self.start_prefill, self.start_decode, self.read]
        self.rng.shuffle(actions)
        if len(self.started) == 3:
            actions = [self.read]
        if not any(action() for action in actions):
            self.counts.restored += self.transfers.bring_back(wait=True)
        self.check()

    def drain(self) -> None:
        """Runs until nothing is left, and looks for what has not been given back."""
        for _ in range(MOST_STEPS):
            if not (self.scheduler.has_work or self.started):
                break
            self.now += 1
            self.turn()
        assert not self.live
        assert not self.scheduler.jobs
        assert not self.scheduler.index.num_wanted
        self.scheduler.index.clear()
        assert self.scheduler.index.num_available == self.limits.num_pages
        assert len(self.scheduler.index) == 0


def main() -> None:
    """A long run: every 10,000 steps another pool, context and policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    total = Counts()
    preempted = evicted = 0
    for part in track(range(-(-args.steps // 10_000)), description="Simulating"):
        rng = random.Random(f"{args.seed} {part}")
        context = rng.choice([DocumentContext(False, 0), DocumentContext(True, 5)])
        seed, num_pages = rng.randrange(2**32), rng.choice([26, 45, 200])
        simulation = Simulation(
            seed,
            num_pages,
            context,
            rng.choice(list(POLICIES)),
            copies=part % 4 == 3,
            host_pages=rng.choice([0, 20, 1000]),
            max_overtaken=rng.choice([0, 3]),
        )
        for _ in range(min(10_000, args.steps - part * 10_000)):
            simulation.step()
        simulation.drain()
        preempted += simulation.scheduler.num_preemptions
        evicted += simulation.scheduler.index.num_evicted
        total.finished += simulation.counts.finished
        total.cancelled += simulation.counts.cancelled
        total.thrown_away += simulation.counts.thrown_away
        total.spoiled += simulation.counts.spoiled
        total.restored += simulation.counts.restored
    print(
        f"{args.steps} steps with seed {args.seed}: {total.finished} requests finished, "
        f"{total.cancelled} cancelled, {preempted} preemptions, {evicted} segments evicted, "
        f"{total.restored} tokens brought back, "
        f"{total.spoiled} ended by unusable KV, {total.thrown_away} tokens thrown away"
    )


if __name__ == "__main__":
    main()
