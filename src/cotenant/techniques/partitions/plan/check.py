"""The checker of plans. It shares no code with the planners, so that it can refute any of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from cotenant.errors import PlanError
from cotenant.techniques.partitions.plan.types import (
    NS_PER_S,
    CoRunner,
    Costs,
    DevicePlan,
    DeviceType,
    Load,
    PartitionPlan,
    Plan,
    Slot,
    checked,
    worst_beside,
)
from cotenant.work import Work

_TOLERANCE = 1e-9
"""Relative tolerance of rates for rounding."""
_CHOICES = 1024
"""Most sets of co-runners that are tried one by one; of more, `Costs.adds` gives the worst set."""

INVENTORY = "inventory"
"""More devices than the inventory has, or an unknown device type."""
SPLIT = "split"
"""The partitions of a device fit none of its allowed splits."""
MEMORY = "memory"
"""The models of a device do not fit into its memory."""
UNKNOWN = "unknown"
"""A tenant without a load, or a batch that was not measured."""
ROUND = "round"
"""The executions of a partition do not fit into its duty cycle."""
SLO = "slo"
"""A duty cycle and the execution together exceed the SLO."""
BATCH = "batch"
"""The rate of a slot is more than its batch each duty cycle."""
GROUP = "group"
"""No group near this one was measured in such a partition."""
RATE = "rate"
"""The slots of a tenant serve less than its rate in all."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken constraint of a plan. `device` and `partition`: positions in the plan, -1 for none."""

    kind: str
    tenant: str
    device: int
    partition: int
    detail: str


def check_plan(
    plan: Plan, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, served_share: float = 1.0
) -> tuple[Violation, ...]:
    """All broken constraints of a plan; empty if it holds.

    - An execution takes `latency_ns` times the largest `factor` over all choices of at most one running slot in each
      other partition. A group takes `group_ns` times the largest factor of its members.
    - For other partitions, each member of a group counts as a partition.
    - `served_share`: part of each rate that must be served.

    Raises PlanError as `checked`, and what the costs raise for an unknown model, size or device.
    """
    if not 0 < served_share <= 1:
        raise PlanError(f"served_share is {served_share!r}, expected a share above 0, at most 1")
    types = checked(loads, devices)
    known = {load.tenant: load for load in loads}
    found = list(_inventory(plan, devices, types))
    for number, device in enumerate(plan.devices):
        if device.device in types:
            found += _device(number, device, types[device.device], known, costs)
    found += _rates(plan, loads, served_share)
    return tuple(found)


def _inventory(plan: Plan, devices: Sequence[DeviceType], types: dict[str, DeviceType]) -> Iterator[Violation]:
    there = Counter(device.name for device in devices)
    used = Counter(device.device for device in plan.devices)
    for name, count in used.items():
        if name not in types:
            yield Violation(INVENTORY, "", -1, -1, f"{count} of type {name!r}, which is not in the inventory")
        elif count > there[name]:
            yield Violation(INVENTORY, "", -1, -1, f"{count} of type {name!r}, there are {there[name]}")


def _device(
    number: int, plan: DevicePlan, kind: DeviceType, loads: dict[str, Load], costs: Costs
) -> Iterator[Violation]:
    sizes = Counter(partition.size for partition in plan.partitions)
    if not any(sizes <= Counter(split) for split in kind.splits):
        sizes_text = ", ".join(str(partition.size) for partition in plan.partitions)
        yield Violation(SPLIT, "", number, -1, f"partitions of {sizes_text} are in no split of {kind.name!r}")
        return
    has_unknown = False
    for index, partition in enumerate(plan.partitions):
        for slot in partition.slots:
            if slot.tenant not in loads:
                has_unknown = True
                yield Violation(UNKNOWN, slot.tenant, number, index, "has no load")
            elif slot.batch not in costs.batches(loads[slot.tenant].model):
                has_unknown = True
                yield Violation(UNKNOWN, slot.tenant, number, index, f"batch {slot.batch} was not measured")
    if has_unknown:
        return
    memory = sum(
        kind.partition_bytes
        + sum(costs.memory_bytes(model) for model in sorted({loads[slot.tenant].model for slot in partition.slots}))
        for partition in plan.partitions
    )
    if memory > kind.memory_bytes:
        yield Violation(MEMORY, "", number, -1, f"models take {memory} of {kind.memory_bytes} bytes")
    for index, partition in enumerate(plan.partitions):
        others = [other for position, other in enumerate(plan.partitions) if position != index]
        yield from _partition(number, index, partition, others, kind.name, loads, costs)


def _partition(
    number: int,
    index: int,
    partition: PartitionPlan,
    others: Sequence[PartitionPlan],
    device: str,
    loads: dict[str, Load],
    costs: Costs,
) -> Iterator[Violation]:
    beside = beside_of(others, loads)
    busy = 0
    for step in partition.round.steps:
        alone, factor = step_ns(partition, step, beside, device, loads, costs)
        if alone is None:
            names = ", ".join(f"{slot.tenant} {slot.batch} on {slot.size}" for slot in step)
            detail = f"no group was measured near that of {names}"
            yield Violation(GROUP, step[0].tenant, number, index, detail)
            continue
        execution = math.ceil(alone * factor)
        busy += execution
        for slot in step:
            slo_ns = loads[slot.tenant].slo_ns
            if partition.duty_ns + execution > slo_ns:
                detail = f"duty cycle {partition.duty_ns} ns and execution {execution} ns exceed the SLO {slo_ns} ns"
                yield Violation(SLO, slot.tenant, number, index, detail)
            if slot.rate_per_s * partition.duty_ns > slot.batch * NS_PER_S * (1 + _TOLERANCE):
                built = slot.batch * NS_PER_S / partition.duty_ns
                detail = f"{slot.rate_per_s:g} rows/s, its batches take {built:g}"
                yield Violation(BATCH, slot.tenant, number, index, detail)
    if busy > partition.duty_ns:
        detail = f"executions of {busy} ns in a duty cycle of {partition.duty_ns} ns"
        yield Violation(ROUND, partition.slots[-1].tenant, number, index, detail)


def beside_of(others: Sequence[PartitionPlan], loads: Mapping[str, Load]) -> list[list[CoRunner]]:
    """Possible co-runners: at most one of each list runs at a time. A group counts as one partition per member."""
    found: list[list[CoRunner]] = []
    for other in others:
        lanes: list[list[CoRunner]] = []
        for step in other.round.steps:
            for lane, slot in enumerate(step):
                lanes += [[]] if lane == len(lanes) else []
                lanes[lane].append((loads[slot.tenant].model, slot.batch, slot.size or other.size))
        found += lanes
    return found


def step_ns(
    partition: PartitionPlan,
    step: Sequence[Slot],
    beside: Sequence[Sequence[CoRunner]],
    device: str,
    loads: Mapping[str, Load],
    costs: Costs,
) -> tuple[int | None, float]:
    """Latency in ns of a step (a slot or a group) with idle other partitions, and its worst slowdown beside others.

    The latency is None for a group that the costs do not know.
    """
    members = [(loads[slot.tenant].model, slot.batch, slot.size or partition.size) for slot in step]
    factor = max(worst_factor(*member, beside, device, costs) for member in members)
    if len(step) > 1:
        return costs.group_ns(members, partition.size, device), factor
    ((model, batch, size),) = members
    return costs.latency_ns(Work(model, 0, batch), size, device), factor


def worst_factor(
    model: str, batch: int, size: int, beside: Sequence[Sequence[CoRunner]], device: str, costs: Costs
) -> float:
    """The largest slowdown of a batch over all choices of at most one slot of each other partition.

    `beside`: slots of each other partition. Up to `_CHOICES` choices are tried one by one. Of more choices,
    `worst_beside` finds the same maximum, if the costs keep the contract of `Costs.adds`.
    """
    if math.prod(len(slots) + 1 for slots in beside) > _CHOICES:
        chosen = [worst_beside(beside, lambda other: costs.adds(model, batch, size, other, device))]
    else:
        choices = product(*([None, *slots] for slots in beside))
        chosen = [[other for other in each if other is not None] for each in choices]
    return max(costs.factor(model, batch, size, others, device) for others in chosen)


def _rates(plan: Plan, loads: Sequence[Load], share: float) -> Iterator[Violation]:
    slots = Counter(
        slot.tenant for device in plan.devices for partition in device.partitions for slot in partition.slots
    )
    rates = plan.rates_per_s
    for load in loads:
        rate = rates.get(load.tenant, 0.0)
        if rate < load.rate_per_s * share * (1 - _TOLERANCE):
            detail = f"{rate:g} of {load.rate_per_s * share:g} rows/s in {slots[load.tenant]} slots"
            yield Violation(RATE, load.tenant, -1, -1, detail)
