"""The world around an engine whose policy launches strands, at random, and what has to hold whatever it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

from msgspec import structs

from cotenant.core.actions import Action, Enqueue, Expand, Launch, Release, Respond
from cotenant.core.events import (
    Event,
    LaunchEnded,
    LaunchExpanded,
    PolicyChanged,
    QueryArrived,
    QueryCancelled,
    TenantRemoved,
    TenantResumed,
    TenantSuspended,
)
from cotenant.core.lifecycle import TaskState
from cotenant.core.snapshot import Policy, Snapshot
from cotenant.predict.table import TablePredictor
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share, Work
from strict_engine import StrictEngine as Engine


class Books:
    """See above. `make` gives a policy; `seen` counts the reached states.

    Queries bring a number of rows that is drawn from `rows`, and have `slo_ns`."""

    rows: tuple[int, ...] = (1, 1, 2, 3)
    slo_ns: tuple[int, ...] = (10**6,)

    def __init__(
        self,
        random: Random,
        make: Callable[[], Policy],
        tenants: Mapping[str, Tenant],
        believed: TablePredictor,
        machine: Machine,
        seen: Counter[str],
    ) -> None:
        self.random = random
        self.make = make
        self.tenants = tenants
        self.machine = machine
        self.seen = seen
        self.engine = Engine(tenants.values(), make(), believed, machine)
        self.now = 0
        self.live: dict[int, Query] = {}
        self.running: dict[int, Launch] = {}
        self.expanding: dict[int, Share] = {}
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
        tenant = self.random.choice(list(self.tenants))
        if tenant in {each.name for each in self.engine.tenants}:
            query = self.query(tenant)
            self.tell(QueryArrived(query))

    def query(self, tenant: str) -> Query:
        """A new one of a tenant."""
        slo_ns = self.slo_ns[0] if len(self.slo_ns) == 1 else self.random.choice(self.slo_ns)
        query = Query(self.count, tenant, self.now, self.now + slo_ns, items=self.random.choice(self.rows))
        self.count += 1
        return query

    def end(self) -> None:
        if self.running:
            number = self.random.choice(list(self.running))
            fault = "it broke" if self.random.random() < 0.15 else None
            self.tell(LaunchEnded(number, fault))

    def expand(self) -> None:
        if self.expanding:
            number = self.random.choice(list(self.expanding))
            share = self.expanding.pop(number)
            assert share.mask & self.running[number].share.mask == self.running[number].share.mask
            self.seen["expanded"] += 1
            self.tell(LaunchExpanded(number))

    def cancel(self) -> None:
        if self.live:
            self.tell(QueryCancelled(self.random.choice(list(self.live))))

    def disturb(self) -> None:
        what = self.random.random()
        tenant = self.random.choice(list(self.tenants))
        waits = bool(self.engine.snapshot(self.now).waiting)
        if what < 0.4:
            self.seen["suspended while launches waited"] += waits
            self.tell(TenantSuspended(tenant, "its worker died"))
            self.tell(TenantResumed(tenant))
        elif what < 0.8:
            self.seen["another policy while launches waited"] += waits
            self.tell(PolicyChanged(self.make()))
        elif what < 0.85 and tenant in {each.name for each in self.engine.tenants}:
            self.seen["removed while launches waited"] += waits
            self.tell(TenantRemoved(tenant, "unloaded"))

    def tell(self, event: Event) -> None:
        self.now += 1
        before = set(self.engine.snapshot(self.now).waiting)
        if isinstance(event, QueryArrived):
            self.live[event.query.id] = event.query
        if isinstance(event, LaunchEnded):
            launch = self.running.pop(event.launch)
            self.ended.add(event.launch)
            self.seen["ended before it expanded"] += self.expanding.pop(event.launch, None) is not None
            siblings = [each for each in self.running.values() if each.batch == launch.batch]
            if event.error is None:
                self.ran.setdefault(launch.batch, []).append(launch.work)
            else:
                self.broken.add(launch.batch)
                self.seen["a part failed beside others"] += bool(siblings)
        actions = self.engine.handle(event, self.now)
        snapshot = self.engine.snapshot(self.now)
        gone = before - snapshot.waiting.keys() - {action.id for action in actions if isinstance(action, Launch)}
        self.seen["never ran, as nobody waited for it"] += len(gone)
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
                    self.seen["ran for fewer than it was enqueued for"] += len(action.queries) < len(enqueued.queries)
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
                self.seen["waited"] += bool(action.after)
                self.seen["beside others of its batch"] += any(e.batch == action.batch for e in self.running.values())
                self.seen["rows"] += bool(action.work.rows)
                self.running[action.id] = action
            case Expand():
                self.expanding[action.launch] = action.share
            case Respond():
                query = self.live.pop(action.query)
                if action.outcome is Outcome.ANSWERED:
                    *_, batch = [b for b, each in self.members.items() if query.id in each and self.is_whole(b)]
                    self.seen["answered in parts"] += len(self.ran[batch]) > 1
            case Release():
                assert action.batch not in self.released, "twice"
                assert all(launch.batch != action.batch for launch in self.running.values())
                self.released.add(action.batch)
                for number in [each.id for each in self.enqueued.values() if each.batch == action.batch]:
                    assert number in self.gone
                    del self.enqueued[number]
                    self.seen["enqueued, then released"] += 1

    def check_told(self, launch: Launch) -> None:
        """Queries are in no other batch that was enqueued, but in one that has to wait for its own launches to end."""
        for other in self.enqueued.values():
            if other.batch != launch.batch and set(other.queries) & set(launch.queries):
                assert any(each.batch == other.batch for each in self.running.values()), "not released before"
                self.seen["again while parts of before run"] += 1

    def is_whole(self, batch: int) -> bool:
        """Whether each unit of each row has run once."""
        works = self.ran.get(batch, [])
        if batch in self.broken or not works:
            return False
        tenant = self.tenants[works[0].tenant]
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
            assert (run.state is TaskState.EXPANDING) == (number in self.expanding)
        assert held & snapshot.free_mask == 0
        assert snapshot.waiting.keys() == self.enqueued.keys() - self.gone
        for launch in snapshot.waiting.values():
            assert launch.share.mask & snapshot.free_mask == 0, "its slots are not kept for it"
            assert not self.blockers(launch) <= self.ended, "it waits for nothing"
            held |= launch.share.mask
        assert held | snapshot.free_mask == self.machine.mask, "a slot is lost"
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
        assert (snapshot.free_mask, len(snapshot.waiting), len(snapshot.paused)) == (self.machine.mask, 0, 0)
        kept = {batch for batch, works in self.ran.items() if not self.is_whole(batch)}
        assert kept <= self.released, "what is kept of a batch is never let go of"
