"""Assessment of a plan: utilisation of every partition, worst latencies, and the slack of each SLO.

Pure. It needs the plan alone, so a plan from a file is assessed like a new one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from cotenant.techniques.partitions.plan.application import Application
from cotenant.techniques.partitions.plan.check import beside_of, check_plan, step_ns
from cotenant.techniques.partitions.plan.types import (
    NS_PER_S,
    Costs,
    DevicePlan,
    DeviceType,
    Load,
    PartitionPlan,
    Plan,
    checked,
    padded,
)
from cotenant.work import Work


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot: its execution beside the worst neighbours, and its slack `SLO - duty cycle - execution`.

    `factor`: the slowdown in `execution_ns`. `tail_slack_ns`: the slack with executions at their tail quantile; None if
    no tail was measured. A member of a group has the group's execution; `in_turn_ns` is then the time of the members
    one after the other in the whole partition, and 0 without a group.
    """

    tenant: str
    model: str
    batch: int
    rate_per_s: float
    execution_ns: int
    factor: float
    slo_ns: int
    slack_ns: int
    tail_slack_ns: int | None
    group: int = 0
    member_size: int = 0
    in_turn_ns: int = 0


@dataclass(frozen=True, slots=True)
class PartitionView:
    """A partition. `load`: its utilisation, the busy share of the duty cycle when every batch is full."""

    size: int
    duty_ns: int
    load: float
    slots: tuple[SlotView, ...]


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device in use. `whole` and the sizes of partitions are in the units of its type."""

    device: str
    whole: int
    memory_used_bytes: int
    memory_bytes: int
    partitions: tuple[PartitionView, ...]


@dataclass(frozen=True, slots=True)
class TenantView:
    """Demand and service of a tenant, in rows a second.

    `planned_per_s`: rate of its slots in the plan; `capacity_per_s`: rate of its full batches. `worst_ns`: largest sum
    of duty cycle and execution of its slots; `slack_ns`: the SLO less `worst_ns`. `growth`: capacity over demand, below
    1 for a tenant that is not served.
    """

    tenant: str
    model: str
    rate_per_s: float
    planned_per_s: float
    capacity_per_s: float
    slo_ns: int
    worst_ns: int
    slack_ns: int
    tail_slack_ns: int | None
    growth: float


@dataclass(frozen=True, slots=True)
class Assessment:
    """A plan by device and by tenant, in the order of the plan and of the loads."""

    devices: tuple[DeviceView, ...]
    tenants: tuple[TenantView, ...]

    @property
    def first(self) -> TenantView:
        """The tenant that reaches its capacity first when all rates grow together and the plan stays."""
        return min(self.tenants, key=lambda each: each.growth)


def assess(
    plan: Plan, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, tail: Costs | None = None
) -> Assessment:
    """Assess a plan without unknown loads, types or batches (see `violations`). Raises what the costs raise."""
    known = {load.tenant: load for load in loads}
    types = checked(loads, devices)
    views = tuple(_device(device, types[device.device], known, costs, tail) for device in plan.devices)
    return Assessment(views, tuple(_tenant(load, views) for load in loads))


def violations(
    plan: Plan,
    loads: Sequence[Load],
    devices: Sequence[DeviceType],
    costs: Costs,
    headroom: float = 0.0,
    applications: Sequence[Application] = (),
) -> tuple[str, ...]:
    """A sentence for every broken constraint: those of `check_plan` with the promised headroom, and paths of stages
    with SLOs that exceed the application's. Raises what `check_plan` and `padded` raise.
    """
    found = []
    for each in check_plan(plan, padded(loads, headroom), devices, costs):
        place = "" if each.device < 0 else f"device {each.device} "
        place += "" if each.partition < 0 else f"partition {each.partition} "
        tenant = f"tenant {each.tenant!r} " if each.tenant else ""
        found.append(f"{each.kind}: {place}{tenant}: {each.detail}".replace(" :", ":"))
    slos = {load.tenant: load.slo_ns for load in loads}
    for application in applications:
        ends: dict[str, int] = {}
        for stage in application.order():
            name = application.tenant(stage)
            if name not in slos:
                found.append(f"stage: application {application.name!r}: stage {stage.name!r} has no load {name!r}")
            ends[stage.name] = slos.get(name, 0) + max((ends[needed] for needed in stage.after), default=0)
        if max(ends.values()) > application.slo_ns:
            took, slo = max(ends.values()) / 1e6, application.slo_ns / 1e6
            found.append(
                f"stage: application {application.name!r}: SLOs of its stages add up to {took:g} of {slo:g} ms"
            )
    return tuple(found)


def sequential_slot_notes(plan: Plan, loads: Sequence[Load], costs: Costs) -> tuple[str, ...]:
    """A sentence for every partition that runs several slots in turn although groups are known: why no group was used.

    Raises what the costs raise.
    """
    models = {load.tenant: load.model for load in loads}
    notes = []
    for number, device in enumerate(plan.devices):
        for index, partition in enumerate(device.partitions):
            alone = [step[0] for step in partition.round.steps if len(step) == 1]
            ways = costs.divisions(partition.size, 2, device.device)
            if len(alone) < 2 or not ways:
                continue
            best: tuple[float, str] | None = None
            for pair in combinations(alone, 2):
                works = [Work(models[slot.tenant], 0, slot.batch) for slot in pair]
                in_turn = sum(costs.latency_ns(work, partition.size, device.device) for work in works)
                for sizes in ways:
                    members = [(work.tenant, work.items, size) for work, size in zip(works, sizes, strict=True)]
                    took = costs.group_ns(members, partition.size, device.device)
                    if took is not None and (best is None or took / in_turn < best[0]):
                        names = f"{pair[0].tenant!r} with {pair[1].tenant!r}"
                        best = took / in_turn, f"{names} takes {took / 1e6:.3g} ms, in turn {in_turn / 1e6:.3g} ms"
            text = f"the best pair of them, {best[1]}" if best else "no measured group is near any two of them"
            notes.append(f"groups: device {number} partition {index} has {len(alone)} slots in turn: {text}")
    return tuple(notes)


def _device(plan: DevicePlan, kind: DeviceType, loads: dict[str, Load], costs: Costs, tail: Costs | None) -> DeviceView:
    memory = 0
    views = []
    for position, partition in enumerate(plan.partitions):
        models = sorted({loads[slot.tenant].model for slot in partition.slots})
        memory += kind.partition_bytes + sum(costs.memory_bytes(model) for model in models)
        others = [other for index, other in enumerate(plan.partitions) if index != position]
        views.append(_partition(partition, others, kind.name, loads, costs, tail))
    return DeviceView(plan.device, kind.whole, memory, kind.memory_bytes, tuple(views))


def _partition(
    partition: PartitionPlan,
    others: Sequence[PartitionPlan],
    device: str,
    loads: dict[str, Load],
    costs: Costs,
    tail: Costs | None,
) -> PartitionView:
    beside = beside_of(others, loads)
    slots: list[SlotView] = []
    busy = 0
    for step in partition.round.steps:
        works = [Work(loads[slot.tenant].model, 0, slot.batch) for slot in step]
        in_turn = sum(costs.latency_ns(work, partition.size, device) for work in works)
        alone, factor = step_ns(partition, step, beside, device, loads, costs)
        execution = math.ceil((in_turn if alone is None else alone) * factor)
        busy += execution
        late = None if tail is None else step_ns(partition, step, beside, device, loads, tail)[0]
        for slot in step:
            load = loads[slot.tenant]
            left = load.slo_ns - partition.duty_ns
            slots.append(
                SlotView(
                    slot.tenant,
                    load.model,
                    slot.batch,
                    slot.rate_per_s,
                    execution,
                    factor,
                    load.slo_ns,
                    left - execution,
                    None if late is None else left - math.ceil(late * factor),
                    slot.group,
                    slot.size,
                    in_turn if slot.group else 0,
                )
            )
    return PartitionView(partition.size, partition.duty_ns, busy / partition.duty_ns, tuple(slots))


def _tenant(load: Load, devices: Sequence[DeviceView]) -> TenantView:
    own = [
        (partition, slot)
        for device in devices
        for partition in device.partitions
        for slot in partition.slots
        if slot.tenant == load.tenant
    ]
    worst = max((partition.duty_ns + slot.execution_ns for partition, slot in own), default=0)
    tails = [slot.tail_slack_ns for _, slot in own if slot.tail_slack_ns is not None]
    capacity = sum(slot.batch * NS_PER_S / partition.duty_ns for partition, slot in own)
    return TenantView(
        load.tenant,
        load.model,
        load.rate_per_s,
        sum(slot.rate_per_s for _, slot in own),
        capacity,
        load.slo_ns,
        worst,
        load.slo_ns - worst,
        min(tails) if tails else None,
        capacity / load.rate_per_s,
    )
