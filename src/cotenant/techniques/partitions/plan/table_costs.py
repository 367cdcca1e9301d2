"""Costs of planning from the latency models of profiled models, with memory, interference and groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from typing_extensions import override

from cotenant.errors import InvalidValueError, PlanError
from cotenant.predict.latency import LatencyModel
from cotenant.techniques.partitions.plan.types import CoRunner, Costs
from cotenant.techniques.partitions.predict.factors import Interference
from cotenant.work import Work

Latencies = Mapping[str, LatencyModel]
"""Latency model of each model on one type of device. Its cores are partition sizes."""


class GroupTimes(Protocol):
    """Latencies of groups on one type of device: `Costs.divisions` and `Costs.group_ns` without the device."""

    def divisions(self, size: int, members: int) -> Sequence[tuple[int, ...]]:
        """Part sizes for groups of so many members in a partition of `size`."""
        ...

    def group_ns(self, members: Sequence[CoRunner], size: int) -> int | None:
        """Latency of a group in ns; None if too little was measured."""
        ...


Overhead = Callable[[str, str, int, int], int]
"""Time in ns that a launch takes besides its latency: of a device type, model, batch and partition size."""


def no_overhead(device: str, model: str, batch: int, size: int) -> int:
    """Launches take their latency alone."""
    return 0


class TableCosts(Costs):
    """Costs of models by their LatencyModel, with the same latencies as TablePredictor. Pure; results are cached.

    `cost = ceil(latency * latency_ratio) + overhead(device, model, batch, size)`, in ns, at the slowest declared shape.

    - `latencies`: the models of each device type. `sizes`: partition sizes of each type, by default the measured ones.
    - Unknown are sizes below the smallest measured one, and batches that were not measured at every size.
    - A device type without `interference` has no slowdowns; without `groups`, its slots run one after the other.

    Raises InvalidValueError for ratios that are not positive, and models without memory.
    """

    def __init__(
        self,
        latencies: Mapping[str, Latencies],
        memory_bytes: Mapping[str, int],
        interference: Mapping[str, Interference] | None = None,
        groups: Mapping[str, GroupTimes] | None = None,
        *,
        sizes: Mapping[str, Sequence[int]] | None = None,
        latency_ratio: float = 1.0,
        overhead: Overhead = no_overhead,
    ) -> None:
        if not 0 < latency_ratio < math.inf:
            raise InvalidValueError("costs", "latency_ratio", latency_ratio, "a positive finite number")
        self._memory = dict(memory_bytes)
        self._interference = dict(interference or {})
        self._groups = dict(groups or {})
        self._latency_ratio = latency_ratio
        self._overhead = overhead
        self._latencies = latencies
        self._known: dict[tuple[str, str, int], tuple[int, ...]] = {}
        largest: dict[str, int] = {}
        for device, models in latencies.items():
            for name, model in models.items():
                if name not in self._memory:
                    raise InvalidValueError("costs", "memory_bytes", sorted(self._memory), f"memory of model {name!r}")
                wanted = model.sizes if sizes is None else [size for size in sizes[device] if size >= model.sizes[0]]
                for size in wanted:
                    largest[name] = min(model.most_rows(size), largest.get(name, model.most_rows(size)))
        self._batches = {name: tuple(range(1, most + 1)) for name, most in largest.items()}

    @override
    def latency_ns(self, work: Work, size: int, device: str) -> int:
        """Latency of a whole batch; raises PlanError for all other work, as it was not measured."""
        model, batch = work.tenant, work.items
        if work != Work(model, 0, batch):
            raise PlanError(f"of model {model!r} whole batches were measured, not {work}")
        known = self._known.get((device, model, size)) or self._found(device, model, size)
        if known is None:
            raise PlanError(self._missing(model, size, device))
        if not 1 <= batch <= len(known):
            raise PlanError(f"model {model!r} has batches from 1 to {len(known)}, not {batch!r}")
        return known[batch - 1]

    @override
    def batches(self, model: str) -> Sequence[int]:
        """Every batch from 1 to the largest one that was measured at each size."""
        batches = self._batches.get(model)
        if batches is None:
            raise PlanError(f"there is no profile of model {model!r}; profiled are {', '.join(sorted(self._batches))}")
        return batches

    @override
    def memory_bytes(self, model: str) -> int:
        self.batches(model)
        return self._memory[model]

    @override
    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str) -> float:
        known = self._interference.get(device)
        return 1.0 if known is None or not others else known.factor(model, batch, size, others, device)

    @override
    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str) -> float:
        known = self._interference.get(device)
        return 0.0 if known is None else known.adds(model, batch, size, other, device)

    @override
    def divisions(self, size: int, members: int, device: str) -> Sequence[tuple[int, ...]]:
        known = self._groups.get(device)
        return () if known is None else known.divisions(size, members)

    @override
    def group_ns(self, members: Sequence[CoRunner], size: int, device: str) -> int | None:
        known = self._groups.get(device)
        found = None if known is None else known.group_ns(members, size)
        if found is None:
            return None
        overhead = sum(self._overhead(device, model, batch, own) for model, batch, own in members)
        tables = [(self._found(device, model, own), batch) for model, batch, own in members]
        alone = [table[batch - 1] for table, batch in tables if table is not None]
        return max(math.ceil(found * self._latency_ratio) + overhead, *alone, 1)

    def _found(self, device: str, model: str, size: int) -> tuple[int, ...] | None:
        """Latencies of all batches; None for an unknown size, model or device."""
        key = device, model, size
        if key not in self._known:
            known = self._latencies.get(device, {}).get(model)
            if known is None or size < known.sizes[0] or model not in self._batches:
                return None
            self._known[key] = tuple(
                math.ceil(known.slowest_ns(batch, size) * self._latency_ratio)
                + self._overhead(device, model, batch, size)
                for batch in self._batches[model]
            )
        return self._known[key]

    def _missing(self, model: str, size: int, device: str) -> str:
        if device not in self._latencies:
            return f"there is no profile for device type {device!r}; profiled are {', '.join(self._latencies)}"
        self.batches(model)
        if model not in self._latencies[device]:
            return f"model {model!r} has no profile on device type {device!r}"
        sizes = ", ".join(map(str, self._latencies[device][model].sizes))
        return f"model {model!r} was not profiled on {device!r} at size {size!r}; it was at {sizes}"


class WithoutInterference:
    """Costs without interference: every factor is 1."""

    def __init__(self, costs: Costs) -> None:
        self.latency_ns = costs.latency_ns
        self.batches = costs.batches
        self.memory_bytes = costs.memory_bytes
        self.divisions = costs.divisions
        self.group_ns = costs.group_ns

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str) -> float:
        """No slowdown."""
        return 1.0

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str) -> float:
        """No contribution to a slowdown."""
        return 0.0


class WithoutGroups:
    """Costs without groups: the slots of a partition run one after the other."""

    def __init__(self, costs: Costs) -> None:
        self.latency_ns = costs.latency_ns
        self.batches = costs.batches
        self.memory_bytes = costs.memory_bytes
        self.factor = costs.factor
        self.adds = costs.adds

    def divisions(self, size: int, members: int, device: str) -> Sequence[tuple[int, ...]]:
        """No groups are known."""
        return ()

    def group_ns(self, members: Sequence[CoRunner], size: int, device: str) -> int | None:
        """No group has a known latency."""
        return None
