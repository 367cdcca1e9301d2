"""Whatever tasks a policy launches: each unit of each row runs once, slots have one owner, all queries end."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.lifecycle import TaskState
from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Decision, Drop, DropRule, Expansion, PolicySpec, Snapshot, Start
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.types import Query, Tenant
from cotenant.work import Machine, Share, Work
from task_books import Books

MACHINE = Machine.of({"cpu": (0, 1, 2), "cuda:0": (0, 1)})
TENANTS = {
    "deep": Tenant("deep", 10**6, cuts=(0, 1, 3, 4, 6), max_batch=4, splits=((0, 1, 3, 4, 6),)),
    "flat": Tenant("flat", 10**6, max_batch=2, splits=((0, 1),)),
}
TABLES = {name: LatencyTable((LatencyRow(0, 1, 1, 9),), (1.0,) * each.unit_count) for name, each in TENANTS.items()}
SEEN: Counter[str] = Counter()


class Wild:
    """Decides at random, but never wrongly: whole batches, halves of rows, stretches of units side by side, all of it
    on slots that are free or will be when those before have ended."""

    lanes = tuple(Share((core,), each.device, each.first) for each in MACHINE.devices for core in each.cores)
    spec = PolicySpec(name="wild", lanes=lanes, shares=lanes, drop=DropRule.NONE, preempt=True)

    def __init__(self, random: Random) -> None:
        self.random = random

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
        return (query.id,)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        random = self.random
        if random.random() < 0.1:
            waiting = [query for queue in snapshot.queues.values() for query in queue.queries]
            inside = [query for run in snapshot.running.values() for query in run.batch.queries]
            if waiting or inside:
                return Decision(drops=(Drop(random.choice([*waiting, *inside]).id, "no more"),))
        self.free = snapshot.free_mask
        self.last: dict[int, int] = {}
        for number in sorted([*snapshot.running, *snapshot.waiting]):
            run = snapshot.running.get(number)
            self.claim(snapshot.waiting[number].share if run is None else run.launch.share, number)
        starts: list[Start] = []
        for work, queries, batch in self.candidates(snapshot):
            if random.random() < 0.8:
                starts += self.split(snapshot, len(starts), work, queries, batch)
        return Decision(tuple(starts), expansions=tuple(self.expansions(snapshot)))

    def candidates(self, snapshot: Snapshot) -> list[tuple[Work, tuple[Query, ...], int | None]]:
        found: list[tuple[Work, tuple[Query, ...], int | None]] = [
            (batch.tenant.work(batch.shape, batch.items, batch.next_unit), (), batch.id) for batch in snapshot.paused
        ]
        for queue in snapshot.queues.values():
            chosen: list[Query] = []
            for query in queue.queries:
                rows = sum(each.items for each in chosen) + query.items
                if chosen and (rows > queue.tenant.max_batch or query.merge_key != chosen[0].merge_key):
                    break
                chosen.append(query)
            if chosen:
                found.append((queue.tenant.work(0, sum(each.items for each in chosen)), tuple(chosen), None))
        return found

    def split(
        self, snapshot: Snapshot, before: int, work: Work, queries: tuple[Query, ...], batch: int | None
    ) -> list[Start]:
        """The starts of one batch: some rectangles that tile its rows and units up to a cut, in any order of waits."""
        random, first = self.random, snapshot.next_launch + before
        cuts = [cut for cut in TENANTS[work.tenant].cuts if cut >= work.start]
        work = work.until(random.choice(cuts[1:]))
        stretches = [work]
        inside = [cut for cut in cuts if work.start < cut < work.end]
        for cut in inside:
            if random.random() < 0.5:
                stretches = [*stretches[:-1], stretches[-1].until(cut), stretches[-1].since(cut)]
        pieces: list[Work] = []
        for each in stretches:
            if each.items > 1 and random.random() < 0.5:
                at = random.randrange(1, each.items)
                pieces += [each.part(0, at), each.part(at, each.items)]
            else:
                pieces.append(each)
        made: list[Start] = []
        for piece in pieces:
            share = random.choice(self.lanes)
            after = {self.last[slot] for slot in _slots(share) if not self.free >> slot & 1}
            if random.random() < 0.3 and self.last:
                after.add(random.choice(sorted(self.last.values())))
            number = first + len(made)
            self.claim(share, number)
            made.append(Start(piece, queries, share, 5, batch, tuple(sorted(after - {number})), random.random() < 0.5))
        return made

    def expansions(self, snapshot: Snapshot) -> list[Expansion]:
        found: list[Expansion] = []
        for number, run in snapshot.running.items():
            had = run.launch.share
            more = [
                lane.cores[0]
                for lane in self.lanes
                if lane.device == had.device and self.free & lane.mask and not had.mask & lane.mask
            ]
            if run.launch.stops and run.state is TaskState.RUNNING and more and self.random.random() < 0.7:
                share = Share((*had.cores, *self.random.sample(more, self.random.randint(1, len(more)))), *_place(had))
                self.free &= ~share.mask
                found.append(Expansion(number, share, 5))
        return found

    def claim(self, share: Share, number: int) -> None:
        self.free &= ~share.mask
        for slot in _slots(share):
            self.last[slot] = number


def _place(share: Share) -> tuple[str, int]:
    return share.device, share.first


def _slots(share: Share) -> list[int]:
    return [share.first + core for core in share.cores]


def walk(random: Random, steps: int) -> None:
    books = Books(random, lambda: Wild(random), TENANTS, TablePredictor(TABLES), MACHINE, SEEN)
    moves: list[Any] = [books.arrive] * 6 + [books.end] * 6 + [books.expand] * 2 + [books.cancel, books.disturb]
    for _ in range(steps):
        random.choice(moves)()
    books.drain()


@settings(max_examples=40, deadline=None)
@given(random=st.randoms(use_true_random=False), steps=st.integers(1, 60))
def test_any_tasks_keep_the_contract(random: Random, steps: int) -> None:
    walk(random, steps)


def test_long_walks_keep_it_too_and_get_everywhere() -> None:
    SEEN.clear()
    for seed in range(60):
        walk(Random(seed), 300)
    for seed in range(1000):
        walk(Random(-seed), seed % 80)
    floors = {
        "waited": 200,
        "beside others of its batch": 200,
        "rows": 200,
        "expanded": 50,
        "ended before it expanded": 20,
        "a part failed beside others": 20,
        "never ran, as nobody waited for it": 50,
        "suspended while launches waited": 10,
        "another policy while launches waited": 10,
        "removed while launches waited": 1,
        "answered in parts": 100,
        "enqueued, then released": 50,
        "ran for fewer than it was enqueued for": 20,
        "again while parts of before run": 1,
    }
    assert {name: SEEN[name] for name, floor in floors.items() if SEEN[name] < floor} == {}
