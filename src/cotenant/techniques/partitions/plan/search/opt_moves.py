"""Differences between plans: cheaper sets of devices, tenants that move, and devices that keep their places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cotenant.techniques.partitions.plan.match import match
from cotenant.techniques.partitions.plan.types import DevicePlan, DeviceType, Plan


def cheaper(kinds: Sequence[str], inventory: Sequence[str], types: Mapping[str, DeviceType]) -> list[tuple[str, ...]]:
    """Sets of devices cheaper than these: one device fewer, or one replaced by a cheaper type; the cheapest first."""

    def price(names: Sequence[str]) -> float:
        return sum(types[name].price for name in names)

    found: dict[tuple[str, ...], float] = {}
    for name in dict.fromkeys(kinds):
        rest = list(kinds)
        rest.remove(name)
        found[tuple(sorted(rest))] = price(rest)
        for other in types:
            if types[other].price < types[name].price and kinds.count(other) < inventory.count(other):
                found[tuple(sorted([*rest, other]))] = price([*rest, other])
    return [each for each in sorted(found, key=lambda each: (found[each], each)) if each]


def aligned(plan: Plan, running: Plan) -> Plan:
    """The plan with its devices in the order of the most similar running devices."""
    places = _places(plan, running)
    order = sorted(range(len(plan.devices)), key=lambda number: (places[number], number))
    return replace(plan, devices=tuple(plan.devices[number] for number in order))


def moved(plan: Plan, running: Plan) -> tuple[str, ...]:
    """The tenants with other partitions (device or size) than now. Another batch or rate moves no tenant."""
    places = _places(plan, running)
    now, then = _homes(running, list(range(len(running.devices)))), _homes(plan, places)
    return tuple(sorted(tenant for tenant in then if now.get(tenant) != then[tenant]))


def _places(plan: Plan, running: Plan) -> list[int]:
    """For each device, the number of the running one that it replaces (most similar first), else a new number."""
    found = match(
        (_likeness(new, old), number, place)
        for number, new in enumerate(plan.devices)
        for place, old in enumerate(running.devices)
        if new.device == old.device
    )
    beyond = len(running.devices)
    return [found.get(number, beyond + number) for number in range(len(plan.devices))]


def _likeness(new: DevicePlan, old: DevicePlan) -> int:
    return (_tenants(new) & _tenants(old)).total()


def _tenants(device: DevicePlan) -> Counter[tuple[str, int]]:
    return Counter((slot.tenant, partition.size) for partition in device.partitions for slot in partition.slots)


def _homes(plan: Plan, places: list[int]) -> dict[str, Counter[tuple[int, int]]]:
    homes: dict[str, Counter[tuple[int, int]]] = {}
    for place, device in zip(places, plan.devices, strict=True):
        for partition in device.partitions:
            for slot in partition.slots:
                homes.setdefault(slot.tenant, Counter())[place, partition.size] += 1
    return homes


def limited(device: DeviceType, most_partitions: int) -> DeviceType:
    """The type without splits into more than `most_partitions` partitions; 0 keeps all."""
    if not most_partitions:
        return device
    return replace(device, splits=tuple(split for split in device.splits if len(split) <= most_partitions))
