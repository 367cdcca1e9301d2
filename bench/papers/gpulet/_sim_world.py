"""The state of one simulation of a plan: waiting queries, the partitions in force, and the outcomes of queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bench.papers.gpulet._arrivals import Times
from bench.papers.gpulet._sim_lanes import DROPPED, NEVER, Finish, Lane, Lanes, LaneSlot, Queue
from bench.papers.gpulet._sim_outcomes import Answers, PartitionUse, PlanChange, Simulated, TenantOutcome
from cotenant.errors import PlanError
from cotenant.techniques.partitions.plan.application import Application, Stage
from cotenant.techniques.partitions.plan.types import Costs, DevicePlan, DeviceType, Load, Plan

_CYCLE = 1024
"""Rows after which the turns of devices repeat, for rows that come one by one."""
_HELD = ("", 0, 0)
"""What a partition runs that may not start yet."""

Push = Callable[[str, int, int, int], None]


def turns(weights: Sequence[float], count: int) -> Times:
    """The next turns for `count` rows: positions in `weights`, in proportion to them and as evenly as can be."""
    if len(weights) == 1:
        return np.zeros(count, np.int64)
    shares = np.array(weights) / sum(weights)
    amounts = np.ceil(shares * count).astype(np.int64) + 1
    at = np.concatenate([(np.arange(amount) + 0.5) / share for amount, share in zip(amounts, shares, strict=True)])
    order: Times = np.argsort(at, kind="stable")[:count]
    who: Times = np.repeat(np.arange(len(weights)), amounts)[order]
    return who


class _Route:
    """The devices that serve a tenant, and the next one in turn."""

    def __init__(self, weights: Mapping[int, float]) -> None:
        self.devices = list(weights)
        self.weights = list(weights.values())
        self.queues: list[Queue] = []
        self._cycle: list[int] = []
        self._at = 0

    def next(self) -> Queue:
        """Where the next row goes."""
        if not self._cycle:
            self._cycle = turns(self.weights, _CYCLE).tolist() if len(self.weights) > 1 else [0]
        queue = self.queues[self._cycle[self._at]]
        self._at = (self._at + 1) % len(self._cycle)
        return queue


class _Run:
    """The queries of an application: how many stages each still needs, and when it ended."""

    def __init__(self, app: Application, arrivals: Times, push: Push) -> None:
        self._app = app
        self._arrivals: list[int] = arrivals.tolist()
        self._left = [len(app.stages)] * len(arrivals)
        self.ends = [DROPPED] * len(arrivals)
        self._missing = {stage.name: [len(stage.after)] * len(arrivals) for stage in app.stages if len(stage.after) > 1}
        self._push = push

    def finisher(self, stage: Stage) -> Finish:
        """What to call when rows of a stage have ended."""
        left, ends, arrivals, slo_ns, push = self._left, self.ends, self._arrivals, self._app.slo_ns, self._push
        followers = [
            (self._app.tenant(other), self._missing.get(other.name))
            for other in self._app.stages
            if stage.name in other.after
        ]

        def finish(queries: list[int], now: int) -> None:
            for query in queries:
                left[query] -= 1
                if left[query] == 0:
                    ends[query] = now
                elif left[query] > 0:
                    for tenant, missing in followers:
                        if missing is not None:
                            missing[query] -= 1
                            if missing[query]:
                                continue
                        push(tenant, query, arrivals[query] + slo_ns, now)

        return finish

    def lose(self, queries: list[int], now: int) -> None:
        """Rows of a stage were dropped, and their queries with them."""
        for query in queries:
            self._left[query] = -1


class World:
    """One simulation, driven by `change` and `hand_out` in the order of time."""

    def __init__(
        self,
        lanes: Lanes,
        loads: Mapping[str, Load],
        types: Mapping[str, DeviceType],
        costs: Costs,
        actual: Costs,
        staged: Mapping[str, tuple[Application, Stage]],
        arrivals: Mapping[str, Times],
    ) -> None:
        self._lanes = lanes
        self._loads = loads
        self._types = types
        self._costs = costs
        self._actual = actual
        self._staged = staged
        self._arrivals = arrivals
        self._latency = {tenant: np.full(len(times), DROPPED, np.int64) for tenant, times in arrivals.items()}
        self._runs = {app.name: _Run(app, arrivals[app.name], self._push) for app, _ in staged.values()}
        self._plan = Plan(())
        self._now: list[list[Lane]] = []
        """Lanes in force by device."""
        self._held: dict[int, int] = {}
        """Retired lanes that still run, by device."""
        self._used: list[PartitionUse] = []
        self._routes: dict[str, _Route] = {}
        self._past: dict[str, _Route] = {}
        """Routes with queues that hold outcomes not yet written down."""
        lanes.on_retired = self._retired

    def change(self, change: PlanChange) -> None:
        """Put another plan in force; its lanes get their queues from `hand_out`."""
        now, plan = change.at_ns, change.plan
        for number, device in enumerate(plan.devices):
            if device.device not in self._types:
                raise PlanError(f"the plan uses device type {device.device!r}, which is not in the inventory")
            if number < len(self._now) and self._plan.devices[number] == device:
                continue
            self._retire(number, now)
            fresh = self._made(number, device, now)
            self._now[number:] = [fresh, *self._now[number + 1 :]]
            if self._held.get(number):
                for lane in fresh:
                    lane.running = _HELD
        for number in range(len(plan.devices), len(self._now)):
            self._retire(number, now)
        del self._now[len(plan.devices) :]
        self._plan = plan
        weights: dict[str, dict[int, float]] = {}
        for number, device in enumerate(plan.devices):
            for partition in device.partitions:
                for slot in partition.slots:
                    by_device = weights.setdefault(slot.tenant, {})
                    by_device[number] = by_device.get(number, 0.0) + slot.rate_per_s
        self._routes = {tenant: _Route(by_device) for tenant, by_device in weights.items()}

    def hand_out(self, start: int, end: int) -> None:
        """New queues for all lanes: what still waits, and the arrivals in [start, end)."""
        waiting = self._collect()
        self._past = self._routes
        queues: dict[tuple[int, str], Queue] = {}
        for number, lanes in enumerate(self._now):
            for lane in lanes:
                for slot in lane.slots:
                    queue = queues.get((number, slot.tenant))
                    if queue is None:
                        queue = queues[number, slot.tenant] = self._queue(slot.tenant)
                    slot.queue = queue
                    queue.lanes.append(lane)
        for tenant, route in self._routes.items():
            route.queues = [queues[number, tenant] for number in route.devices]
            self._fill(tenant, route, waiting.get(tenant, []), start, end)
        for lanes in self._now:
            for lane in lanes:
                if lane.running is None:
                    lane.due = NEVER
                    self._lanes.wake(lane, start)

    def _fill(self, tenant: str, route: _Route, waiting: list[Queue], start: int, end: int) -> None:
        times, ids, deadlines = _left(waiting)
        staged = self._staged.get(tenant)
        if staged is None or not staged[1].after:
            arrivals = self._arrivals.get(staged[0].name if staged else tenant, np.empty(0, np.int64))
            low, high = (int(at) for at in np.searchsorted(arrivals, (start, end)))
            times = np.concatenate((times, arrivals[low:high]))
            ids = np.concatenate((ids, np.arange(low, high)))
        whose = turns(route.weights, len(times))
        for number, queue in enumerate(route.queues):
            mine = whose == number
            queue.times = times[mine].tolist()
            queue.ids = ids[mine].tolist()
            if queue.deadlines is not None:
                queue.deadlines = deadlines[mine].tolist()

    def _queue(self, tenant: str) -> Queue:
        staged = self._staged.get(tenant)
        if staged is None:
            return Queue(tenant, self._loads[tenant].slo_ns)
        app, stage = staged
        run = self._runs[app.name]
        queue = Queue(tenant, app.slo_ns, run.finisher(stage), run.lose)
        if stage.after:
            queue.deadlines = []
        return queue

    def _push(self, tenant: str, query: int, deadline: int, now: int) -> None:
        route = self._routes.get(tenant)
        if route is not None:
            self._lanes.push(route.next(), query, deadline, now)

    def _collect(self) -> dict[str, list[Queue]]:
        """Write down the answered rows, and give the queues with the others."""
        found: dict[str, list[Queue]] = {}
        for tenant, route in self._past.items():
            for queue in route.queues:
                if queue.finish is None and queue.head:
                    ends = np.array(queue.ends, np.int64)
                    ids = np.array(queue.ids[: queue.head], np.int64)
                    came = np.array(queue.times[: queue.head], np.int64)
                    self._latency[tenant][ids] = np.where(ends < 0, DROPPED, ends - came)
            found[tenant] = route.queues
        return found

    def _made(self, number: int, device: DevicePlan, now: int) -> list[Lane]:
        lanes = []
        for index, partition in enumerate(device.partitions):
            slots = []
            for slot in partition.slots:
                if slot.tenant not in self._loads:
                    raise PlanError(f"tenant {slot.tenant!r} of the plan has no load")
                model = self._loads[slot.tenant].model
                slots.append(LaneSlot(slot, model, partition.size, device.device, self._costs, self._actual))
            lane = Lane(len(self._lanes.all), number, index, slots, now)
            self._lanes.all.append(lane)
            lanes.append(lane)
        for lane in lanes:
            lane.peers = [other for other in lanes if other is not lane]
        return lanes

    def _retire(self, number: int, now: int) -> None:
        if number >= len(self._now):
            return
        for lane in self._now[number]:
            self._note(lane, now)
            if lane.running is not None and lane.running is not _HELD:
                lane.is_retired = True
                self._held[number] = self._held.get(number, 0) + 1
            else:
                lane.due = NEVER
                lane.running = _HELD

    def _retired(self, lane: Lane, now: int) -> None:
        self._held[lane.device] -= 1
        if not self._held[lane.device] and lane.device < len(self._now):
            for fresh in self._now[lane.device]:
                if fresh.running is _HELD:
                    fresh.running = None
                    self._lanes.wake(fresh, now)

    def _note(self, lane: Lane, end_ns: int) -> None:
        size = lane.slots[0].size
        use = PartitionUse(lane.device, lane.index, size, lane.start_ns, end_ns, lane.busy_ns, lane.turns, lane.rows)
        self._used.append(use)

    def result(self, loads: Sequence[Load], applications: Sequence[Application], warmup_ns: int) -> Simulated:
        """All figures, once every lane has come to rest."""
        self._collect()
        for lanes in self._now:
            for lane in lanes:
                self._note(lane, 0)
        answers: dict[str, Answers] = {}
        for load in loads:
            if load.tenant not in self._staged and load.tenant in self._arrivals:
                times = self._arrivals[load.tenant]
                answers[load.tenant] = Answers(times, self._latency[load.tenant], load.slo_ns)
        for app in applications:
            times = self._arrivals[app.name]
            ends = np.array(self._runs[app.name].ends, np.int64)
            answers[app.name] = Answers(times, np.where(ends < 0, DROPPED, ends - times), app.slo_ns)
        outcomes = tuple(_outcome(name, each, warmup_ns) for name, each in answers.items())
        return Simulated(outcomes, answers, tuple(self._used))


def _left(queues: Sequence[Queue]) -> tuple[Times, Times, Times]:
    """Times, numbers and deadlines of the rows that still wait, in the order of their times."""
    times = np.array([time for queue in queues for time in queue.times[queue.head :]], np.int64)
    ids = np.array([query for queue in queues for query in queue.ids[queue.head :]], np.int64)
    deadlines = np.array([at for queue in queues for at in (queue.deadlines or ())[queue.head :]], np.int64)
    order = np.argsort(times, kind="stable")
    return times[order], ids[order], deadlines[order] if len(deadlines) else deadlines


def _outcome(name: str, answers: Answers, warmup_ns: int) -> TenantOutcome:
    latency = answers.latency_ns[answers.arrival_ns >= warmup_ns]
    answered = latency[latency >= 0]
    late = int(np.sum(answered > answers.slo_ns))
    p50, p99 = (int(np.percentile(answered, at)) for at in (50, 99)) if len(answered) else (0, 0)
    return TenantOutcome(name, len(latency), len(answered) - late, late, len(latency) - len(answered), p50, p99)
