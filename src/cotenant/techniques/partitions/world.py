"""Simulation of a plan under Poisson arrivals: the core with the policy `duty_cycle`, in virtual time.

- Lanes are the partitions of each device, without backfill from other lanes.
- Queries go to the devices in proportion to the planned rates, whatever the queue lengths.
- A launch takes its latency times the slowdown beside the launches that run in other partitions when it starts. The
  policy predicts the latency without slowdown.
- Members of a group end together. Decisions, network and front ends take no time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop

from msgspec import structs
from typing_extensions import override

from cotenant.core.actions import Action, Launch, Respond, group_of
from cotenant.core.engine import Engine
from cotenant.core.events import Event, QueryArrived
from cotenant.core.flow import StageGraph
from cotenant.core.predictor import Group, Member, Predictor
from cotenant.core.snapshot import Policy
from cotenant.errors import PlanError
from cotenant.metrics import OutcomeLog, Summary, summarise
from cotenant.sim.applications import SimulatedApplication, StagedEngine
from cotenant.sim.driver import simulate
from cotenant.techniques.partitions.plan.application import Application
from cotenant.techniques.partitions.plan.types import NS_PER_S, CoRunner, Costs, Load, Plan
from cotenant.techniques.partitions.policy.duty_cycle import DutyCycle
from cotenant.types import Query, Tenant
from cotenant.work import CPU, Machine, Round, Share, Slot, Work
from cotenant.workload import Poisson, TenantLoad, Workload, arrivals
from cotenant.world.simulated import WorldEvent

_FOR_EVER_NS = 1 << 60
_UNBOUNDED = 1 << 30
"""Queue length of simulated tenants: unbounded."""


def simulate_plan(
    plan: Plan,
    loads: Sequence[Load],
    costs: Costs,
    *,
    duration_s: float,
    seed: int = 0,
    applications: Sequence[Application] = (),
) -> Summary:
    """Simulate a plan with Poisson arrivals at the rates of its loads; outcomes by tenant, then by application.

    `loads` include those of the applications' stages. Raises PlanError for a load without a slot and a slot without a
    load, and what the costs raise.
    """
    fleet = _Fleet(plan, loads, costs, applications)
    staged = {app.tenant(stage) for app in applications for stage in app.stages}
    alone = [load for load in loads if load.tenant not in staged]
    slo_ns = {load.tenant: load.slo_ns for load in alone} | {app.name: app.slo_ns for app in applications}
    rates = {each.tenant: each.rate_per_s for each in alone} | {app.name: app.rate_per_s for app in applications}
    names = list(rates)
    end_ns = max(1, round(duration_s * NS_PER_S))
    workload = Workload(tuple(TenantLoad(name, name, Poisson(rate)) for name, rate in rates.items()), end_ns, seed=seed)
    for time_ns, position, _ in arrivals(workload):
        name = names[position]
        fleet.offer(name, time_ns, time_ns + slo_ns[name])
    return summarise(fleet.run(OutcomeLog(names)), end_ns=end_ns, slo_ns=slo_ns, tenants=names)


class _Routes:
    """Weighted round robin of a tenant's queries over its devices, by planned rate."""

    def __init__(self, plan: Plan) -> None:
        self._rates: dict[str, dict[int, float]] = {}
        for number, device in enumerate(plan.devices):
            for partition in device.partitions:
                for slot in partition.slots:
                    rates = self._rates.setdefault(slot.tenant, {})
                    rates[number] = rates.get(number, 0.0) + slot.rate_per_s
        self._given = {tenant: dict.fromkeys(rates, 0) for tenant, rates in self._rates.items()}

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._rates

    def next(self, tenant: str) -> int:
        """The device of the tenant's next query."""
        rates, given = self._rates[tenant], self._given[tenant]
        device = min(rates, key=lambda number: ((given[number] + 0.5) / rates[number], number))
        given[device] += 1
        return device


class _Fleet:
    """The devices of a plan, in sets that are simulated independently: one of all devices with stages of applications,
    and one of each other device."""

    def __init__(self, plan: Plan, loads: Sequence[Load], costs: Costs, applications: Sequence[Application]) -> None:
        self._loads = {load.tenant: load for load in loads}
        self._applications = applications
        self._costs = costs
        self._plan = plan
        self._routes = _Routes(plan)
        staged = {app.tenant(stage): None for app in applications for stage in app.stages}
        for tenant in {**self._loads, **staged}:
            if tenant not in self._loads:
                raise PlanError(f"stage {tenant!r} of an application has no load")
            if tenant not in self._routes:
                raise PlanError(f"tenant {tenant!r} has no slot in the plan")
        staged_devices = [
            number
            for number, device in enumerate(plan.devices)
            if any(slot.tenant in staged for partition in device.partitions for slot in partition.slots)
        ]
        rest = [[number] for number in range(len(plan.devices)) if number not in staged_devices]
        self._groups = [staged_devices, *rest]
        self._group_of = {number: at for at, group in enumerate(self._groups) for number in group}
        self._offered: list[list[tuple[str, Query]]] = [[] for _ in self._groups]

    def offer(self, name: str, arrival_ns: int, deadline_ns: int) -> None:
        """Add an arriving query; arrivals are in order."""
        if name in self._loads:
            device = self._routes.next(name)
            at, tenant = self._group_of[device], _there(name, device)
        else:
            at, tenant = 0, name
        queries = self._offered[at]
        queries.append((name, Query(len(queries), tenant, arrival_ns, deadline_ns)))

    def run(self, log: OutcomeLog) -> OutcomeLog:
        """Simulate all offered queries."""
        for group, offered in zip(self._groups, self._offered, strict=True):
            if offered:
                self._run(group, offered, log)
        return log

    def _run(self, group: Sequence[int], offered: Sequence[tuple[str, Query]], log: OutcomeLog) -> None:
        lanes: list[Share] = []
        rounds: list[Round] = []
        served: dict[str, _Served] = {}
        tenants: dict[str, Tenant] = {}
        sizes = {number: sum(each.size for each in self._plan.devices[number].partitions) for number in group}
        machine = Machine.of({_name(self._plan, number): range(size) for number, size in sizes.items()})
        for number in group:
            device = self._plan.devices[number]
            first = 0
            for partition in device.partitions:
                lanes.append(machine.share(range(first, first + partition.size), _name(self._plan, number)))
                first += partition.size
                slots = []
                for slot in partition.slots:
                    load = self._loads.get(slot.tenant)
                    if load is None:
                        raise PlanError(f"tenant {slot.tenant!r} of the plan has no load")
                    name = _there(slot.tenant, number)
                    slots.append(structs.replace(slot, tenant=name))
                    mine = served.setdefault(name, _Served(self._costs, load.model, device.device))
                    mine.sizes += [partition.size, *([slot.size] if mine.knows(slot) else [])]
                    most = max(slot.batch, tenants[name].max_batch if name in tenants else 1)
                    tenants[name] = Tenant(name, load.slo_ns, max_batch=most, max_queue=_UNBOUNDED)
                rounds.append(Round(partition.duty_ns, tuple(slots)))
        policy = DutyCycle(tuple(lanes), rounds=tuple(rounds), backfill=False)
        believed = _Believed(served)
        engine = _RoutedEngine(self._routes, list(tenants.values()), policy, believed, machine)
        staged = {app.name: self._simulated(app) for app in self._applications} if group == self._groups[0] else {}

        def responded(respond: Respond, now_ns: int) -> None:
            name, query = offered[respond.query]
            log.add(name, query.arrival_ns, now_ns, respond.outcome)

        driven = StagedEngine(engine, staged) if staged else engine
        simulate(driven, _PlanWorld(served, believed), (query for _, query in offered), responded)
        log.policy_faults += sum(engine.guard.faults.values())

    def _simulated(self, app: Application) -> SimulatedApplication:
        order = app.order()
        places = {stage.name: at for at, stage in enumerate(order)}
        graph = StageGraph(
            tuple(stage.name for stage in order),
            tuple(tuple(places[name] for name in stage.after) for stage in order),
        )
        loads = {stage.name: self._loads[app.tenant(stage)] for stage in order}
        tenants = tuple(Tenant(load.tenant, load.slo_ns) for load in loads.values())
        return SimulatedApplication(graph.divided({name: load.slo_ns for name, load in loads.items()}), tenants)


class _RoutedEngine(Engine):
    """An engine of several devices that routes the queries of stages to the devices in turn."""

    def __init__(
        self, routes: _Routes, tenants: Sequence[Tenant], policy: Policy, predictor: Predictor, machine: Machine
    ) -> None:
        super().__init__(tenants, policy, predictor, machine)
        self._routes = routes

    @override
    def handle(self, event: Event, now_ns: int) -> list[Action]:
        if type(event) is QueryArrived and event.query.tenant in self._routes:
            tenant = event.query.tenant
            event = QueryArrived(structs.replace(event.query, tenant=_there(tenant, self._routes.next(tenant))))
        return super().handle(event, now_ns)


class _Served:
    """Costs of one tenant on one device, in partitions and parts of them of `sizes`."""

    def __init__(self, costs: Costs, model: str, device: str) -> None:
        self.costs = costs
        self.model = model
        self.device = device
        self.sizes: list[int] = []

    def knows(self, slot: Slot) -> bool:
        """Whether the costs know the latency of a member of a group alone on its part."""
        try:
            return slot.size > 0 and self.costs.latency_ns(Work(self.model, 0, slot.batch), slot.size, self.device) > 0
        except PlanError:
            return False

    def batch(self, rows: int) -> int:
        """The smallest known batch of at least so many rows, else the largest known batch."""
        known = self.costs.batches(self.model)
        return next((batch for batch in known if batch >= rows), known[-1])

    def alone_ns(self, rows: int, cores: int) -> int:
        """Latency in ns in its largest partition of at most `cores`, without neighbours; `_FOR_EVER_NS` without one."""
        size = max([size for size in self.sizes if size <= cores], default=0)
        return self.costs.latency_ns(Work(self.model, 0, rows), size, self.device) if size else _FOR_EVER_NS


class _Believed:
    """Predicts latencies without neighbours. Implements Predictor, and the parts of GroupPredictor that rounds use."""

    def __init__(self, served: Mapping[str, _Served]) -> None:
        self._served = served

    def latency_ns(self, work: Work, size: int, device: str = CPU) -> int:
        """Latency of work alone, in ns."""
        return self._served[work.tenant].alone_ns(work.items, size)

    def upper_ns(self, tenant: str, latency_ns: int, slo_ns: int) -> int:
        """The predicted latency: executions do not vary here."""
        return latency_ns

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        """Latencies of groups in ns. Groups unknown to the costs, such as parts of a planned group, take the sum of
        their members' latencies."""
        return [self._together_ns(group) for group in groups]

    longest_ns = group_ns

    def unmeasured(self, most: int) -> frozenset[int]:
        """No numbers of members: `group_ns` bounds unknown groups already."""
        return frozenset()

    def _together_ns(self, group: Group) -> int:
        served = [self._served[work.tenant] for work, _ in group]
        if len(group) == 1:
            return self.latency_ns(*group[0])
        taken = sum([size for _, size in group])
        whole = min(size for size in served[0].sizes if size >= taken)
        members = [(each.model, each.batch(work.items), size) for each, (work, size) in zip(served, group, strict=True)]
        known = served[0].costs.group_ns(members, whole, served[0].device)
        return sum([self.latency_ns(work, whole) for work, _ in group]) if known is None else known


class _PlanWorld:
    """World where launches take their latency times the slowdown at their start. Implements World."""

    def __init__(self, served: Mapping[str, _Served], alone: _Believed) -> None:
        self._served = served
        self._alone = alone
        self._ends: list[tuple[int, int]] = []
        self._running: dict[int, tuple[Launch, float, CoRunner]] = {}

    def start(self, launch: Launch, now_ns: int) -> None:
        """Start a launch and set its end, and that of its group."""
        served, lane, rows = self._served[launch.work.tenant], launch.share, launch.work.items
        there = [each for each in self._running.values() if each[0].share.device == lane.device]
        others = [runner for other, _, runner in there if group_of(other) != group_of(launch)]
        factor = served.costs.factor(served.model, rows, lane.size, others, served.device) if others else 1.0
        self._running[launch.id] = launch, factor, (served.model, rows, lane.size)
        mates = {number: each for number, each in self._running.items() if group_of(each[0]) == group_of(launch)}
        group = tuple([Member(mate.work, mate.share.size) for mate, *_ in mates.values()])
        factor = max([factor for _, factor, _ in mates.values()])
        end_ns = now_ns + math.ceil(self._alone.group_ns([group])[0] * factor)
        self._ends = [(at, number) for at, number in self._ends if number not in mates]
        self._ends += [(end_ns, number) for number in mates]
        heapify(self._ends)

    def expand(self, launch: int, share: Share, now_ns: int) -> None:
        """Nothing: launches keep their first share here."""

    def next_ns(self) -> int | None:
        """Time of the next end, or None."""
        return self._ends[0][0] if self._ends else None

    def pop(self) -> WorldEvent:
        """Remove and return the next end."""
        _, number = heappop(self._ends)
        del self._running[number]
        return WorldEvent(number)


def _name(plan: Plan, number: int) -> str:
    """Name of a device of the plan in the machine."""
    return f"{plan.devices[number].device}:{number}"


def _there(tenant: str, device: int) -> str:
    """Name of a tenant's queue on one device."""
    return f"{tenant}\x1f{device}"  # which is in no name
