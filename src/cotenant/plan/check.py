"""Checks a plan from first principles. Shares no code with the planners, so that it can refute any of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from cotenant.plan.types import (
    NS_PER_S,
    CoRunner,
    Costs,
    DevicePlan,
    DeviceType,
    Load,
    PartitionPlan,
    Plan,
    PlanError,
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
    them idle or with one of its slots.
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
    strangers = False
    for index, partition in enumerate(plan.partitions):
        for slot in partition.slots:
            if slot.tenant not in loads:
                strangers = True
                yield Violation(UNKNOWN, slot.tenant, number, index, "has no load")
            elif slot.batch not in costs.batches(loads[slot.tenant].model):
                strangers = True
                yield Violation(UNKNOWN, slot.tenant, number, index, f"batch {slot.batch} is none that was measured")
    if strangers:
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
    beside = [[(loads[slot.tenant].model, slot.batch, other.size) for slot in other.slots] for other in others]
    busy = 0
    for slot in partition.slots:
        load = loads[slot.tenant]
        alone = costs.latency_ns(Work(load.model, 0, slot.batch), partition.size, device)
        execution = math.ceil(alone * worst_factor(load.model, slot.batch, partition.size, beside, device, costs))
        busy += execution
        if partition.duty_ns + execution > load.slo_ns:
            detail = f"duty cycle {partition.duty_ns} ns and execution {execution} ns exceed the SLO {load.slo_ns} ns"
            yield Violation(SLO, slot.tenant, number, index, detail)
        if slot.rate_per_s * partition.duty_ns > slot.batch * NS_PER_S * (1 + _TOLERANCE):
            built = slot.batch * NS_PER_S / partition.duty_ns
            yield Violation(
                BATCH, slot.tenant, number, index, f"{slot.rate_per_s:g} rows/s, its batches take {built:g}"
            )
    if busy > partition.duty_ns:
        detail = f"executions of {busy} ns in a duty cycle of {partition.duty_ns} ns"
        yield Violation(ROUND, partition.slots[-1].tenant, number, index, detail)


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
