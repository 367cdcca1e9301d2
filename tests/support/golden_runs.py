"""Runs with golden traces: an engine that gets more events than its driver hands it, and groups without a fit."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.papers.abacus._group_world import GroupWorld
from cotenant import trace
from cotenant.core.actions import Action
from cotenant.core.events import Event
from cotenant.core.predictor import Group
from cotenant.core.snapshot import Policy
from cotenant.predict.grouped import FittedGroups, GroupedPredictor
from cotenant.predict.table import TablePredictor
from cotenant.sim.applications import SimulatedApplication, StagedEngine
from cotenant.sim.driver import Driven, Log, simulate
from cotenant.types import Query, Tenant
from cotenant.work import Machine
from cotenant.world.groups import GroupWorld as PartitionGroups
from cotenant.world.simulated import TableWorld, World
from golden_workload import TABLES, TENANTS
from scenario import CORES
from strict_engine import StrictEngine as Engine

BELIEVED = TablePredictor(TABLES)
_NOISE = 0.1


@dataclass(frozen=True)
class Change:
    """A run: the events that the core gets at given times, besides those that happen by themselves."""

    policy: Policy
    events: Sequence[tuple[int, Event]] = ()
    predictor: TablePredictor = BELIEVED
    queries: Sequence[Query] = ()
    tenants: Sequence[Tenant] = TENANTS
    cores: Sequence[int] = CORES
    applications: Mapping[str, SimulatedApplication] = field(default_factory=dict)
    failure_rate: float = 0.03
    machine: Machine | None = None
    """By default these cores of the policy's only device."""

    def world(self) -> World:
        """Latencies as believed at the start, with noise."""
        if isinstance(self.predictor, GroupedPredictor) and not self.policy.spec.grouped:
            grouped = GroupedPredictor(self.predictor.tables, None, CROWDED)
            return PartitionGroups(grouped, noise=_NOISE, failure_rate=self.failure_rate, seed=7)
        if isinstance(self.predictor, GroupedPredictor):
            return GroupWorld(lambda group: CROWDED.group_ns([group])[0], noise=_NOISE, seed=7)
        return TableWorld(self.predictor.scaled({}), noise=_NOISE, failure_rate=self.failure_rate, seed=7)


class Interrupted:
    """An engine that gets events at the first instant from their times on, after those of the driver."""

    def __init__(self, engine: Driven, events: Sequence[tuple[int, Event]], log: Log | None) -> None:
        self.policy = engine.policy
        self._engine = engine
        self._events = list(events)
        self._log = log

    @property
    def live(self) -> int:
        """See Driven."""
        return self._engine.live

    @property
    def left(self) -> int:
        """Events that were never delivered."""
        return len(self._events)

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """See Driven."""
        actions = self._tell(event, now_ns)
        while self._events and self._events[0][0] <= now_ns:
            actions = [*actions, *self._tell(self._events.pop(0)[1], now_ns)]
        return actions

    def _tell(self, event: Event, now_ns: int) -> list[Action]:
        actions = self._engine.handle(event, now_ns)
        if self._log is not None:
            self._log(now_ns, event, actions)
        return actions


class Crowded(FittedGroups):
    """Predicts that a group takes the time of its longest member alone, and a share of the times of the others.

    These are whole nanoseconds, where a fitted predictor adds up vectors in an order that depends on the machine.
    """

    def __init__(self, percent: int, quantile: float) -> None:
        self.percent = percent
        self._quantile = quantile

    @property
    def quantile(self) -> float:
        """See FittedGroups."""
        return self._quantile

    @property
    def key(self) -> str:
        """See FittedGroups."""
        return f"crowded-{self.percent}"

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        """See FittedGroups."""
        found = []
        for group in groups:
            alone = [BELIEVED.latency_ns(*member) for member in group]
            found.append(max(alone) + (sum(alone) - max(alone)) * self.percent // 100)
        return found


CROWDED = Crowded(40, 0.95)


def find_groups(key: str, quantile: float) -> Crowded:
    """What a log names by its key."""
    return Crowded(int(key.removeprefix("crowded-")), quantile)


def record(change: Change) -> bytes:
    file = io.BytesIO()
    machine = change.machine or Machine.of({change.policy.spec.lanes[0].device: change.cores})
    head = trace.header(change.policy, change.predictor, change.tenants, machine, created="")
    log = trace.TraceWriter(file, head)
    engine = Engine(change.tenants, change.policy, change.predictor, machine)
    if change.applications:  # it logs what the engine within is told
        driven = Interrupted(StagedEngine(engine, change.applications, log), change.events, None)
    else:
        driven = Interrupted(engine, change.events, log)
    ended: list[int] = []
    simulate(driven, change.world(), change.queries, lambda respond, now_ns: ended.append(respond.query))
    assert sorted(ended) == sorted(query.id for query in change.queries)
    assert driven.left == 0, "the run is too short for its changes"
    log.flush()
    return file.getvalue()
