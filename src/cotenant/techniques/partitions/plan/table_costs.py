"""Costs looked up in measured tables: interpolated over the batch, exact in the size of the partition."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Protocol

from cotenant.errors import InvalidValueError, PlanError
from cotenant.profile.latency_table import LatencyTable
from cotenant.techniques.partitions.plan.types import CoRunner, Costs
from cotenant.techniques.partitions.predict.factors import Interference
from cotenant.work import Work

Latencies = Mapping[str, Mapping[int, Mapping[int, int]]]
"""Nanoseconds by model, size and batch."""


class GroupTimes(Protocol):
    """What is known of groups on one type of device; see Costs."""

    def divisions(self, size: int, members: int) -> Sequence[tuple[int, ...]]:
        """See Costs."""
        ...

    def group_ns(self, members: Sequence[CoRunner], size: int) -> int | None:
        """See Costs."""
        ...


class TableCosts(Costs):
    """See Costs. Pure; everything is worked out when it is made.

    `latencies` holds one table per device type. Between measured batches the latency is interpolated linearly; below
    the smallest it is that of the smallest; there are no larger batches than every table of the model has. Each
    latency is multiplied by `latency_ratio` and grows by `overhead_ns` of the model and batch, for the assembly of the
    batch. Without an interference model for a device type, its partitions are believed not to touch each other;
    without `groups` of it their slots run in turn.

    Raises InvalidValueError for tables without points, latencies and ratios that are not positive, and models without
    memory.
    """

    def __init__(
        self,
        latencies: Mapping[str, Latencies],
        memory_bytes: Mapping[str, int],
        interference: Mapping[str, Interference] | None = None,
        groups: Mapping[str, GroupTimes] | None = None,
        *,
        latency_ratio: float = 1.0,
        overhead_ns: Mapping[str, Mapping[int, int]] | None = None,
    ) -> None:
        if not 0 < latency_ratio < math.inf:
            raise InvalidValueError("costs", "latency_ratio", latency_ratio, "a positive finite number")
        self._memory = dict(memory_bytes)
        self._interference = dict(interference or {})
        self._groups = dict(groups or {})
        self._latency_ratio = latency_ratio
        self._overhead_ns = overhead_ns or {}
        self._batches = _batches(latencies)
        self._known: dict[tuple[str, str, int], tuple[int, ...]] = {}
        for device, models in latencies.items():
            for model, sizes in models.items():
                if model not in self._memory:
                    raise InvalidValueError("costs", "memory_bytes", sorted(self._memory), f"memory of model {model!r}")
                overhead = self._overhead_ns.get(model, {})
                for size, points in sizes.items():
                    measured = interpolate(points, self._batches[model])
                    self._known[device, model, size] = tuple(
                        math.ceil(ns * latency_ratio) + overhead.get(batch, 0)
                        for batch, ns in zip(self._batches[model], measured, strict=True)
                    )

    @classmethod
    def of_profile(cls, tables: Mapping[str, LatencyTable], memory_bytes: Mapping[str, int], device: str) -> TableCosts:
        """Costs of a device whose partitions are cores, from profiled tables; of several shapes the slowest."""
        return cls({device: {model: latencies_of(table) for model, table in tables.items()}}, memory_bytes)

    def latency_ns(self, work: Work, size: int, device: str) -> int:
        """See Costs. Raises PlanError for what was not measured, such as a part of a model."""
        model, batch = work.tenant, work.items
        if work != Work(model, 0, batch):
            raise PlanError(f"of model {model!r} whole batches were measured, not {work}")
        known = self._known.get((device, model, size))
        if known is None:
            raise PlanError(self._missing(model, size, device))
        if not 1 <= batch <= len(known):
            raise PlanError(f"model {model!r} has batches from 1 to {len(known)}, not {batch!r}")
        return known[batch - 1]

    def batches(self, model: str) -> Sequence[int]:
        """See Costs: every batch from 1 to the largest that was measured at each size. Raises PlanError."""
        batches = self._batches.get(model)
        if batches is None:
            raise PlanError(f"there is no profile of model {model!r}; profiled are {', '.join(sorted(self._batches))}")
        return batches

    def memory_bytes(self, model: str) -> int:
        """See Costs. Raises PlanError."""
        self.batches(model)
        return self._memory[model]

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str) -> float:
        """See Costs. Raises what the interference model of the device type raises."""
        known = self._interference.get(device)
        return 1.0 if known is None or not others else known.factor(model, batch, size, others, device)

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str) -> float:
        """See Costs. Raises what the interference model of the device type raises."""
        known = self._interference.get(device)
        return 0.0 if known is None else known.adds(model, batch, size, other, device)

    def divisions(self, size: int, members: int, device: str) -> Sequence[tuple[int, ...]]:
        """See Costs."""
        known = self._groups.get(device)
        return () if known is None else known.divisions(size, members)

    def group_ns(self, members: Sequence[CoRunner], size: int, device: str) -> int | None:
        """See Costs."""
        known = self._groups.get(device)
        found = None if known is None else known.group_ns(members, size)
        if found is None:
            return None
        overhead = sum(self._overhead_ns.get(model, {}).get(batch, 0) for model, batch, _ in members)
        tables = [(self._known.get((device, model, own)), batch) for model, batch, own in members]
        alone = [table[batch - 1] for table, batch in tables if table is not None]
        return max(math.ceil(found * self._latency_ratio) + overhead, *alone, 1)

    def _missing(self, model: str, size: int, device: str) -> str:
        devices = list(dict.fromkeys(known for known, _, _ in self._known))
        if device not in devices:
            return f"there is no profile for device type {device!r}; profiled are {', '.join(devices)}"
        self.batches(model)
        sizes = [str(known) for at, name, known in self._known if at == device and name == model]
        if not sizes:
            return f"model {model!r} has no profile on device type {device!r}"
        return f"model {model!r} was not profiled on {device!r} at size {size!r}; it was at {', '.join(sizes)}"


class WithoutInterference:
    """Costs with every factor 1: what a planner without an interference model believes."""

    def __init__(self, costs: Costs) -> None:
        self.latency_ns = costs.latency_ns
        self.batches = costs.batches
        self.memory_bytes = costs.memory_bytes
        self.divisions = costs.divisions
        self.group_ns = costs.group_ns

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str) -> float:
        """See Costs."""
        return 1.0

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str) -> float:
        """See Costs."""
        return 0.0


class WithoutGroups:
    """Costs by which slots run in turn alone: what a planner that knows of no groups believes."""

    def __init__(self, costs: Costs) -> None:
        self.latency_ns = costs.latency_ns
        self.batches = costs.batches
        self.memory_bytes = costs.memory_bytes
        self.factor = costs.factor
        self.adds = costs.adds

    def divisions(self, size: int, members: int, device: str) -> Sequence[tuple[int, ...]]:
        """See Costs."""
        return ()

    def group_ns(self, members: Sequence[CoRunner], size: int, device: str) -> int | None:
        """See Costs."""
        return None


def latencies_of(table: LatencyTable) -> dict[int, dict[int, int]]:
    """Nanoseconds by cores and rows, from a profiled table; of several shapes the slowest."""
    sizes: dict[int, dict[int, int]] = {}
    for row in table.rows:
        points = sizes.setdefault(row.cores, {})
        points[row.items] = max(points.get(row.items, 0), row.latency_ns)
    return sizes


def interpolate(points: Mapping[int, int], batches: Sequence[int]) -> list[int]:
    """Latencies at `batches`, from measured ones: linear in between, constant outside.

    Raises InvalidValueError when there is no point or one is not positive.
    """
    if not points or min(points) < 1 or min(points.values()) <= 0:
        raise InvalidValueError("latency table", "points", dict(points), "positive latencies of batches from 1")
    ordered = dict(sorted(points.items()))
    return [math.ceil(_between(ordered, batch)) for batch in batches]


def _between(points: Mapping[int, float], at: int) -> float:
    """Linear interpolation in points that ascend; constant outside."""
    known = list(points)
    high = bisect_left(known, at)
    if high == len(known):
        return points[known[-1]]
    if high == 0 or known[high] == at:
        return points[known[high]]
    low, top = known[high - 1], known[high]
    return points[low] + (points[top] - points[low]) * (at - low) / (top - low)


def _batches(latencies: Mapping[str, Latencies]) -> dict[str, tuple[int, ...]]:
    largest: dict[str, int] = {}
    for models in latencies.values():
        for model, sizes in models.items():
            for points in sizes.values():
                most = max(points, default=0)
                largest[model] = min(most, largest.get(model, most))
    return {model: tuple(range(1, most + 1)) for model, most in largest.items()}
