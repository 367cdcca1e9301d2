"""The effects of a plan, found without the checker: it is laid out, and run by the core under `duty_cycle`.

Every slot is a tenant of its own here, which sends as many rows as the slot promises to take. They wait as long as the
promise allows from the beginning. At first a lane is busy for a whole duty cycle. Then each round lasts one, as a
filler without end takes the time that the batches leave. In the world launches slow each other down by the factor of
the launches that really run beside them at each instant.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

from cotenant.core.actions import Launch, Respond
from cotenant.core.snapshot import DropRule
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.sim.driver import simulate
from cotenant.techniques.partitions.plan.check import worst_factor
from cotenant.techniques.partitions.plan.types import NS_PER_S, Costs, DevicePlan, DeviceType, Load, Plan
from cotenant.techniques.partitions.policy.duty_cycle import DutyCycle
from cotenant.types import Query, Tenant
from cotenant.work import Machine, Round, Share, Slot, Work
from cotenant.world.simulated import WorldEvent
from strict_engine import StrictEngine as Engine

_ROUNDS = 40
"""Rounds of the slowest partition that are run."""
_ROUNDING_NS = 1000
"""By so much an answer may be late for nothing but the rounding of times."""
_LEAST_FILL = 1 / 16
"""Share of a duty cycle below which it is left as it is: a round may then be a little shorter."""
_EVER = 1 << 50


def truth(
    plan: Plan, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, served_share: float = 1.0
) -> list[str]:
    """What goes wrong with a plan; nothing when it holds."""
    wrong = _misplaced(plan, loads, devices, costs)
    for load in loads:
        planned = sum(
            slot.rate_per_s
            for device in plan.devices
            for partition in device.partitions
            for slot in partition.slots
            if slot.tenant == load.tenant
        )
        if round((load.rate_per_s * served_share - planned) * 3600) > 0:
            wrong.append(f"{load.tenant}: rows of an hour have no slot")
    if not wrong:
        for device in plan.devices:
            count = len(device.partitions)
            chance = Random(count)
            for phases in ([0.0] * count, [0.0] + [0.5] * (count - 1), [chance.random() for _ in range(count)]):
                wrong += run(device, loads, costs, phases)
    return wrong


def _misplaced(plan: Plan, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs) -> list[str]:
    """The slots that cannot even be laid out, on one device of the inventory after the other."""
    models = {load.tenant: load.model for load in loads}
    left = list(devices)
    wrong = []
    for device in plan.devices:
        kind = next((kind for kind in left if kind.name == device.device), None)
        if kind is None:
            wrong.append(f"no {device.device} is left")
            continue
        left.remove(kind)
        if not any(_is_part([part.size for part in device.partitions], split) for split in kind.splits):
            wrong.append("no split has these partitions")
        slots = [(number, slot) for number, part in enumerate(device.partitions) for slot in part.slots]
        bad = [s for _, s in slots if s.tenant not in models or s.batch not in costs.batches(models[s.tenant])]
        if bad:
            wrong.append(f"{bad} cannot run")
            continue
        loaded = {(number, models[slot.tenant]) for number, slot in slots}
        taken = sum(costs.memory_bytes(model) for _, model in loaded) + kind.partition_bytes * len(device.partitions)
        if taken > kind.memory_bytes:
            wrong.append(f"{taken} bytes are loaded")
    return wrong


def _is_part(sizes: Sequence[int], split: Sequence[int]) -> bool:
    left = list(split)
    for size in sizes:
        if size not in left:
            return False
        left.remove(size)
    return True


class Beside:
    """A world of one device: work is left in ns alone, and done at the speed that the launches beside it allow."""

    def __init__(self, factor: Callable[[Launch, Sequence[Launch]], float], alone_ns: Callable[[Launch], int]) -> None:
        self._factor = factor
        self._alone_ns = alone_ns
        self._left: dict[int, float] = {}
        self._running: dict[int, Launch] = {}
        self._slow: dict[int, float] = {}
        self._now = 0

    def start(self, launch: Launch, now_ns: int) -> None:
        self._go_to(now_ns)
        self._running[launch.id] = launch
        self._left[launch.id] = self._alone_ns(launch)
        self._slow.clear()

    def expand(self, launch: int, share: Share, now_ns: int) -> None:
        """See World: here launches keep the share that they began with."""

    def next_ns(self) -> int | None:
        return self._next()[0] if self._running else None

    def pop(self) -> WorldEvent:
        at, number = self._next()
        self._go_to(at)
        del self._running[number], self._left[number]
        self._slow.clear()
        return WorldEvent(number)

    def _next(self) -> tuple[int, int]:
        self._look()
        ends = ((self._now + math.ceil(self._left[each] * self._slow[each] - 1e-3), each) for each in self._running)
        return min((max(self._now, end), each) for end, each in ends)

    def _go_to(self, now_ns: int) -> None:
        self._look()
        for each in self._running:
            self._left[each] = max(0.0, self._left[each] - (now_ns - self._now) / self._slow[each])
        self._now = now_ns

    def _look(self) -> None:
        if not self._slow:
            for number, launch in self._running.items():
                others = [other for at, other in self._running.items() if at != number]
                self._slow[number] = self._factor(launch, others)


def run(device: DevicePlan, loads: Sequence[Load], costs: Costs, phases: Sequence[float]) -> list[str]:
    """The tenants that are late on one device, when every slot gets the rows that it promises to take, evenly.

    `phases` say by which share of its duty cycle the rounds of each partition begin before those of phase 0.
    """
    models = {load.tenant: load for load in loads}
    lanes, rounds, tenants, queries = [], [], [], []
    of: dict[str, Load] = {}
    idle: dict[str, int] = {}
    """The filler that keeps a lane busy without interference, and for how long."""
    tables: dict[str, LatencyTable] = {}
    longest = max(partition.duty_ns for partition in device.partitions)
    end_ns = (2 + _ROUNDS) * longest
    start = 0
    for number, partition in enumerate(device.partitions):
        lanes.append(Share(tuple(range(start, start + partition.size))))
        start += partition.size
        begin_ns = 2 * longest - round(phases[number] * partition.duty_ns)
        waits_ns, slots = 0, [Slot(f"begin@{number}", 1, 1.0)]
        idle[f"begin@{number}"] = begin_ns
        queries.append((0, f"begin@{number}", _EVER))
        for at, slot in enumerate(partition.slots):
            name = f"{slot.tenant}@{number}.{at}"
            load = of[name] = models[slot.tenant]
            rate = max(slot.rate_per_s, slot.batch * NS_PER_S / partition.duty_ns)
            slots.append(Slot(name, slot.batch, rate))
            tables[name] = _table(load.model, partition.size, device.device, costs)
            tenants.append(Tenant(name, load.slo_ns, max_batch=slot.batch, max_queue=_EVER))
            first = begin_ns - partition.duty_ns + waits_ns
            count = int((end_ns - first) * rate / NS_PER_S)
            queries += [(first + math.ceil(row * NS_PER_S / rate), name, load.slo_ns) for row in range(count)]
            waits_ns += _worst_ns(device, number, slot, models, costs)
        rest = partition.duty_ns - waits_ns
        if rest > partition.duty_ns * _LEAST_FILL:
            slots.append(Slot(f"filler@{number}", 1, 1.0))
            idle[f"filler@{number}"] = rest
            queries += [(1, f"filler@{number}", _EVER)] * (end_ns // rest + 1)
        rounds.append(Round(partition.duty_ns, tuple(slots)))

    def batch(launch: Launch) -> tuple[str, int, int]:
        model = of[launch.work.tenant].model
        rows = next(each for each in costs.batches(model) if each >= launch.work.items)
        return model, rows, launch.share.size

    def work(launch: Launch) -> tuple[Work, int]:
        model, rows, size = batch(launch)
        return Work(model, 0, rows), size

    def factor(launch: Launch, others: Sequence[Launch]) -> float:
        if launch.work.tenant in idle:
            return 1.0
        return costs.factor(*batch(launch), [batch(each) for each in others if each.work.tenant in of], device.device)

    def alone_ns(launch: Launch) -> int:
        return idle.get(launch.work.tenant) or costs.latency_ns(*work(launch), device.device)

    for name, ns in idle.items():
        tables[name] = LatencyTable((LatencyRow(0, 1, 1, ns),))
        tenants.append(Tenant(name, _EVER, max_queue=_EVER))
    late: dict[str, int] = {}
    ordered = [Query(number, name, time, time + slo_ns) for number, (time, name, slo_ns) in enumerate(sorted(queries))]

    def on_respond(respond: Respond, now_ns: int) -> None:
        query = ordered[respond.query]
        if now_ns > query.deadline_ns + _ROUNDING_NS:
            late[query.tenant] = max(late.get(query.tenant, 0), now_ns - query.deadline_ns)

    policy = DutyCycle(tuple(lanes), DropRule.NONE, rounds=tuple(rounds), backfill=False)
    engine = Engine(tenants, policy, TablePredictor(tables), Machine.cpu(range(start)))
    simulate(engine, Beside(factor, alone_ns), ordered, on_respond)
    return [f"{name} is late by {ns} ns" for name, ns in late.items()]


def _table(model: str, size: int, device: str, costs: Costs) -> LatencyTable:
    points = [(batch, costs.latency_ns(Work(model, 0, batch), size, device)) for batch in costs.batches(model)]
    return LatencyTable(tuple(LatencyRow(0, batch, size, ns) for batch, ns in points))


def _worst_ns(device: DevicePlan, number: int, slot: Slot, models: Mapping[str, Load], costs: Costs) -> int:
    """What the checker believes that a slot's batch takes. Should that be too little, rounds are too long here."""
    size = device.partitions[number].size
    beside = [
        [(models[each.tenant].model, each.batch, other.size) for each in other.slots]
        for at, other in enumerate(device.partitions)
        if at != number
    ]
    model = models[slot.tenant].model
    factor = worst_factor(model, slot.batch, size, beside, device.device, costs)
    return math.ceil(costs.latency_ns(Work(model, 0, slot.batch), size, device.device) * factor)


# --- branches ------------------------------------------------------------------------------------------------------

Branch = tuple[int, bool]
"""A line with an `if` or a `for`, and whether its body is entered."""


def branches(path: Path) -> set[Branch]:
    """Every branch of a module."""
    return {(line, is_entered) for line, *_ in _forks(path) for is_entered in (True, False)}


@contextmanager
def reached(path: Path) -> Iterator[set[Branch]]:
    """Collects the branches of a module that are taken inside."""
    fork_at: dict[int, tuple[int, range]] = {}
    for line, test, body in _forks(path):
        fork_at |= dict.fromkeys(test, (line, body))
    found: set[Branch] = set()

    def note(before: int, line: int) -> None:
        if before in fork_at:
            fork, body = fork_at[before]
            if line not in fork_at or fork_at[line][0] != fork:
                found.add((fork, line in body))

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != str(path):
            return None
        return follow(frame.f_code)

    def follow(code: CodeType) -> Any:
        before = 0

        def local(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal before
            if event == "line":
                note(before, frame.f_lineno)
                before = frame.f_lineno
            elif event == "return" and not code.co_name.startswith("<"):
                note(before, 0)
            return local

        return local

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield found
    finally:
        sys.settrace(outer)


def _forks(path: Path) -> list[tuple[int, range, range]]:
    """By `if` and `for`: its line, the lines of its test, and those of its body."""
    return [
        (
            node.lineno,
            range(node.lineno, node.body[0].lineno),
            range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1),
        )
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.If | ast.For | ast.While)
    ]
