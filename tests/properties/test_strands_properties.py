"""Whatever strands a policy launches: each unit of each row runs once, slots have one owner, all queries end."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cotenant.core.actions import Action, Enqueue, Grow, Launch, Release, Respond
from cotenant.core.engine import Engine
from cotenant.core.events import (
    Event,
    LaunchEnded,
    LaunchGrew,
    PolicyChanged,
    QueryArrived,
    QueryCancelled,
    TenantRemoved,
    TenantResumed,
    TenantSuspended,
)
from cotenant.core.lifecycle import StrandState
from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Decision, Drop, DropRule, Growth, Snapshot, Start
from cotenant.predict.table import TablePredictor
from cotenant.profile.latency_table import LatencyRow, LatencyTable
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share, Work

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

    name, drop, preempt, cautious, grouped = "wild", DropRule.NONE, True, False, False
    lanes = shares = tuple(Share((core,), each.device, each.first) for each in MACHINE.devices for core in each.cores)

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
        return Decision(tuple(starts), grows=tuple(self.growths(snapshot)))

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

    def growths(self, snapshot: Snapshot) -> list[Growth]:
        found: list[Growth] = []
        for number, run in snapshot.running.items():
            had = run.launch.share
            more = [
                lane.cores[0]
                for lane in self.lanes
                if lane.device == had.device and self.free & lane.mask and not had.mask & lane.mask
            ]
            if run.launch.stops and run.state is StrandState.RUNNING and more and self.random.random() < 0.7:
                share = Share((*had.cores, *self.random.sample(more, self.random.randint(1, len(more)))), *_place(had))
                self.free &= ~share.mask
                found.append(Growth(number, share, 5))
        return found

    def claim(self, share: Share, number: int) -> None:
        self.free &= ~share.mask
        for slot in _slots(share):
            self.last[slot] = number


def _place(share: Share) -> tuple[str, int]:
    return share.device, share.first


def _slots(share: Share) -> list[int]:
    return [share.first + core for core in share.cores]


class Books:
    """The world around an engine, and what has to hold whatever it does."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.engine = Engine(TENANTS.values(), Wild(random), TablePredictor(TABLES), MACHINE)
        self.now = 0
        self.live: dict[int, Query] = {}
        self.running: dict[int, Launch] = {}
        self.growing: dict[int, Share] = {}
        self.ended: set[int] = set()
        self.gone: set[int] = set()
        self.waited: dict[int, Launch] = {}
        self.enqueued: dict[int, Launch] = {}
        """Those of which neither Launch nor Release has come yet."""
        self.ran: dict[int, list[Work]] = {}
        self.members: dict[int, tuple[int, ...]] = {}
        self.broken: set[int] = set()
        self.released: set[int] = set()
        self.count = 0

    def arrive(self) -> None:
        tenant = self.random.choice(list(TENANTS))
        if tenant in {each.name for each in self.engine.tenants}:
            items = self.random.choice((1, 1, 2, 3))
            query = Query(self.count, tenant, self.now, self.now + 10**6, items=items)
            self.count += 1
            self.live[query.id] = query
            self.tell(QueryArrived(query))

    def end(self) -> None:
        if self.running:
            number = self.random.choice(list(self.running))
            fault = "it broke" if self.random.random() < 0.15 else None
            self.tell(LaunchEnded(number, fault))

    def grow(self) -> None:
        if self.growing:
            number = self.random.choice(list(self.growing))
            share = self.growing.pop(number)
            assert share.mask & self.running[number].share.mask == self.running[number].share.mask
            SEEN["grew"] += 1
            self.tell(LaunchGrew(number))

    def cancel(self) -> None:
        if self.live:
            self.tell(QueryCancelled(self.random.choice(list(self.live))))

    def disturb(self) -> None:
        what = self.random.random()
        tenant = self.random.choice(list(TENANTS))
        waits = bool(self.engine.snapshot(self.now).waiting)
        if what < 0.4:
            SEEN["suspended while launches waited"] += waits
            self.tell(TenantSuspended(tenant, "its worker died"))
            self.tell(TenantResumed(tenant))
        elif what < 0.8:
            SEEN["another policy while launches waited"] += waits
            self.tell(PolicyChanged(Wild(self.random)))
        elif what < 0.85 and tenant in {each.name for each in self.engine.tenants}:
            SEEN["removed while launches waited"] += waits
            self.tell(TenantRemoved(tenant, "unloaded"))

    def tell(self, event: Event) -> None:
        self.now += 1
        before = set(self.engine.snapshot(self.now).waiting)
        if isinstance(event, LaunchEnded):
            launch = self.running.pop(event.launch)
            self.ended.add(event.launch)
            SEEN["ended before it grew"] += self.growing.pop(event.launch, None) is not None
            siblings = [each for each in self.running.values() if each.batch == launch.batch]
            if event.error is None:
                self.ran.setdefault(launch.batch, []).append(launch.work)
            else:
                self.broken.add(launch.batch)
                SEEN["a part failed beside others"] += bool(siblings)
        actions = self.engine.handle(event, self.now)
        snapshot = self.engine.snapshot(self.now)
        gone = before - snapshot.waiting.keys() - {action.id for action in actions if isinstance(action, Launch)}
        SEEN["never ran, as nobody waited for it"] += len(gone)
        self.ended |= gone
        self.gone |= gone
        for action in actions:
            self.carry_out(action)
        self.check(snapshot)

    def carry_out(self, action: Action) -> None:
        match action:
            case Enqueue(launch):
                assert launch.id not in self.waited, "twice"
                assert launch.queries
                assert launch.batch not in self.released
                assert set(launch.after) & (self.running.keys() | self.enqueued.keys()), "behind nothing"
                assert set(launch.after) <= self.running.keys() | self.enqueued.keys() | self.ended, "before these"
                self.check_told(launch)
                self.waited[launch.id] = self.enqueued[launch.id] = launch
            case Launch():
                enqueued = self.enqueued.pop(action.id, None)
                if enqueued is None:
                    assert action.id not in self.waited, "enqueued and over"
                    assert set(action.after) <= self.ended, "it waits, and nobody was told"
                    self.check_told(action)
                else:
                    assert action == structs.replace(enqueued, queries=action.queries)
                    SEEN["ran for fewer than it was enqueued for"] += len(action.queries) < len(enqueued.queries)
                assert self.blockers(action) <= self.ended, "it did not wait"
                assert action.queries, "for nobody"
                assert set(action.queries) <= self.live.keys()
                if action.batch not in self.members and not action.part:
                    assert action.work.items == sum(self.live[each].items for each in action.queries), (
                        "rows are missing"
                    )
                assert self.members.setdefault(action.batch, action.queries)[:1]
                assert set(action.queries) <= set(self.members[action.batch])
                assert action.batch not in self.released
                SEEN["waited"] += bool(action.after)
                SEEN["beside others of its batch"] += any(e.batch == action.batch for e in self.running.values())
                SEEN["rows"] += bool(action.work.rows)
                self.running[action.id] = action
            case Grow():
                self.growing[action.launch] = action.share
            case Respond():
                query = self.live.pop(action.query)
                if action.outcome is Outcome.ANSWERED:
                    *_, batch = [b for b, each in self.members.items() if query.id in each and self.is_whole(b)]
                    SEEN["answered in parts"] += len(self.ran[batch]) > 1
            case Release():
                assert action.batch not in self.released, "twice"
                assert all(launch.batch != action.batch for launch in self.running.values())
                self.released.add(action.batch)
                for number in [each.id for each in self.enqueued.values() if each.batch == action.batch]:
                    assert number in self.gone
                    del self.enqueued[number]
                    SEEN["enqueued, then released"] += 1

    def check_told(self, launch: Launch) -> None:
        """Queries are in no other batch that was enqueued, but in one that has to wait for its own launches to end."""
        for other in self.enqueued.values():
            if other.batch != launch.batch and set(other.queries) & set(launch.queries):
                assert any(each.batch == other.batch for each in self.running.values()), "not released before"
                SEEN["again while parts of before run"] += 1

    def is_whole(self, batch: int) -> bool:
        """Whether each unit of each row has run once."""
        works = self.ran.get(batch, [])
        if batch in self.broken or not works:
            return False
        tenant = TENANTS[works[0].tenant]
        rows = max(max(work.rows[1:], default=work.items) for work in works)
        cells = Counter(
            (row, unit)
            for work in works
            for row in range(*(work.rows or (0, rows)))
            for unit in range(work.start, work.end)
        )
        return set(cells.values()) == {1} and len(cells) == rows * tenant.unit_count

    def check(self, snapshot: Snapshot) -> None:
        assert snapshot.running.keys() == self.running.keys()
        held = 0
        for number, run in snapshot.running.items():
            assert held & run.launch.share.mask == 0, "two launches on one slot"
            held |= run.launch.share.mask
            assert (run.state is StrandState.GROWING) == (number in self.growing)
        assert held & snapshot.free_mask == 0
        assert snapshot.waiting.keys() == self.enqueued.keys() - self.gone
        for launch in snapshot.waiting.values():
            assert launch.share.mask & snapshot.free_mask == 0, "its slots are not kept for it"
            assert not self.blockers(launch) <= self.ended, "it waits for nothing"
            held |= launch.share.mask
        assert held | snapshot.free_mask == MACHINE.mask, "a slot is lost"
        assert self.engine.live == len(self.live)

    def blockers(self, launch: Launch) -> set[int]:
        """What it waits for; in place of those that never ran, what they waited for."""
        found: set[int] = set()
        for other in launch.after:
            found |= self.blockers(self.waited[other]) if other in self.gone else {other}
        return found

    def drain(self) -> None:
        """Let everything end."""
        for _ in range(2000):
            if not self.running:
                break
            self.tell(LaunchEnded(next(iter(self.running))))
        for number in list(self.live):
            if number in self.live:
                self.tell(QueryCancelled(number))
        while self.running:
            self.tell(LaunchEnded(next(iter(self.running))))
        assert not self.live
        assert not self.enqueued, "neither launched nor released"
        snapshot = self.engine.snapshot(self.now)
        assert (snapshot.free_mask, len(snapshot.waiting), len(snapshot.paused)) == (MACHINE.mask, 0, 0)
        kept = {batch for batch, works in self.ran.items() if not self.is_whole(batch)}
        assert kept <= self.released, "what is kept of a batch is never let go of"


def walk(random: Random, steps: int) -> None:
    books = Books(random)
    moves: list[Any] = [books.arrive] * 6 + [books.end] * 6 + [books.grow] * 2 + [books.cancel, books.disturb]
    for _ in range(steps):
        random.choice(moves)()
    books.drain()


@settings(max_examples=40, deadline=None)
@given(random=st.randoms(use_true_random=False), steps=st.integers(1, 60))
def test_any_strands_keep_the_contract(random: Random, steps: int) -> None:
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
        "grew": 50,
        "ended before it grew": 20,
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
