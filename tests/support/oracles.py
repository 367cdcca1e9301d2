"""Answers by trying everything, that share nothing with the planners."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement, product

from cotenant.techniques.partitions.plan.table_costs import TableCosts
from cotenant.techniques.partitions.plan.types import NS_PER_S, CoRunner, Costs, DeviceType, Load
from cotenant.work import Work


class Few(Costs):
    """Costs of two batches only, so that everything can be enumerated."""

    def __init__(self, inner: TableCosts, batches: tuple[int, ...]) -> None:
        self._inner = inner
        self._batches = batches

    def latency_ns(self, work: Work, size: int, device: str) -> int:
        return self._inner.latency_ns(work, size, device)

    def batches(self, model: str) -> Sequence[int]:
        return self._batches

    def memory_bytes(self, model: str) -> int:
        return self._inner.memory_bytes(model)

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str) -> float:
        return self._inner.factor(model, batch, size, others, device)

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str) -> float:
        return self._inner.adds(model, batch, size, other, device)


def brute_force(loads: Sequence[Load], devices: Sequence[DeviceType], costs: Few) -> float:
    """The least price by trying all batches in all partitions of all devices; infinite where none serves the loads.

    GpuPartitioner nothing with the planner: executions and duty cycles are worked out here.
    """
    served = {kind.name: all_rates(loads, kind, costs) for kind in dict.fromkeys(devices)}
    best = math.inf
    for count in range(1, len(devices) + 1):
        for kinds in dict.fromkeys(combinations_of(devices, count)):
            price = sum(kind.price for kind in kinds)
            if price < best and any(
                all(
                    sum(rates) >= its.rate_per_s * (1 - 1e-9)
                    for its, rates in zip(loads, zip(*chosen, strict=True), strict=True)
                )
                for chosen in product(*(served[kind.name] for kind in kinds))
            ):
                best = price
    return best


def all_rates(loads: Sequence[Load], kind: DeviceType, costs: Few) -> list[tuple[float, ...]]:
    """What every load may be served at, in rows/s, by the contents of a device that hold."""
    contents: dict[int, list[tuple[tuple[Load, int], ...]]] = {}
    for size in kind.sizes:
        contents[size] = [
            tuple((its, batch) for its, batch in zip(loads, batches, strict=True) if batch)
            for batches in product((0, *costs.batches(loads[0].model)), repeat=len(loads))
        ]
    found = []
    for split in kind.splits:
        for filled in product(*(contents[size] for size in split)):
            rates = device_rates(loads, kind, [(s, c) for s, c in zip(split, filled, strict=True) if c], costs)
            if rates is not None:
                found.append(rates)
    return list(dict.fromkeys(found))


def combinations_of(devices: Sequence[DeviceType], count: int) -> list[tuple[DeviceType, ...]]:
    kinds = list(dict.fromkeys(devices))
    return [
        chosen
        for chosen in combinations_with_replacement(kinds, count)
        if all(chosen.count(kind) <= devices.count(kind) for kind in kinds)
    ]


def device_rates(
    loads: Sequence[Load], kind: DeviceType, parts: list[tuple[int, tuple[tuple[Load, int], ...]]], costs: Few
) -> tuple[float, ...] | None:
    memory = sum(
        kind.partition_bytes + sum(map(costs.memory_bytes, {its.model for its, _ in slots})) for _, slots in parts
    )
    if memory > kind.memory_bytes:
        return None
    rates = dict.fromkeys((its.tenant for its in loads), 0.0)
    for number, (size, slots) in enumerate(parts):
        others = [
            [(its.model, batch, other) for its, batch in there]
            for at, (other, there) in enumerate(parts)
            if at != number
        ]
        took = [
            math.ceil(
                costs.latency_ns(Work(its.model, 0, batch), size, kind.name)
                * max(costs.factor(its.model, batch, size, around, kind.name) for around in product(*others))
            )
            for its, batch in slots
        ]
        for (its, batch), ns in zip(slots, took, strict=True):
            if sum(took) + ns > its.slo_ns:
                return None
            rates[its.tenant] += batch * NS_PER_S / sum(took)
    return tuple(rates.values())
