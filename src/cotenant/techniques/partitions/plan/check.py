"""Checks a plan from first principles. Shares no code with the planners, so that it can refute any of them."""

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
"""Share of a rate that rounding may lose."""
_CHOICES = 1024
"""Sets of co-runners that are tried one by one; of more, the costs say what the worst are."""

INVENTORY = "inventory"
"""More devices than there are, or of an unknown type."""
SPLIT = "split"
"""The partitions of a device are in none of its allowed splits."""
MEMORY = "memory"
"""The models of a device do not fit into its memory."""
UNKNOWN = "unknown"
"""A tenant without a load, or a batch that the costs do not list."""
ROUND = "round"
"""The executions of a partition do not fit into its duty cycle."""
SLO = "slo"
"""A duty cycle and the execution together exceed the SLO."""
BATCH = "batch"
"""The rate of a slot is more than its batch each duty cycle."""
GROUP = "group"
"""Nothing near a group was measured in such a partition."""
RATE = "rate"
"""The slots of a tenant serve less than its rate."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong with a plan. `device` and `partition` are positions in it; -1 where none is meant."""

    kind: str
    tenant: str
    device: int
    partition: int
    detail: str


def check_plan(
    plan: Plan, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, served_share: float = 1.0
) -> tuple[Violation, ...]:
    """Everything that is wrong with a plan; nothing when it holds.

    Batches run `latency_ns` times the largest `factor` that the other partitions of the device can cause, each of
    them idle or with one of its slots. The members of a group all take as long as the group does, times the largest of
    their factors; to other partitions its members are so many partitions, each idle or with a slot.
    `served_share` is the part of each rate that must be served. Raises PlanError as `checked` says, and what the
    costs raise for a model, size or device that they do not know.
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
                yield Violation(UNKNOWN, slot.tenant, number, index, f"batch {slot.batch} is none that was measured")
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
    """What other partitions may run at a time: one, or none, of each list. Groups count as so many partitions as they
    have members."""
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
    """What a slot alone, or a group, takes with nothing beside its partition, and the worst slowdown beside others.

    The time is None for a group of which the costs know nothing.
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
    """The largest slowdown of a batch over all choices of one slot, or none, in each other partition.

    `beside` holds the slots of each. Up to 1,024 choices are tried one by one; of more, the worst slots are those that
    add the most by `Costs.adds`: the same, as long as the costs keep what they promise there.
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
