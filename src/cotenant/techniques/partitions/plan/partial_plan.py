"""Partial plan of a greedy planner: partitions in use by device, free partition sizes, and whether more load fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from cotenant.techniques.partitions.plan.rounds import Demand, Neighbour, RoundCache, RoundFit
from cotenant.techniques.partitions.plan.types import (
    DEVICES,
    INTERFERENCE,
    LATENCY,
    MEMORY,
    DevicePlan,
    DeviceType,
    Infeasible,
    Load,
    PartitionPlan,
    Plan,
    Slot,
)

_PASSES = 4
"""Most passes in which the rounds of a device are adjusted to each other; then they count as infeasible."""


class PartialPartition(NamedTuple):
    """A partition with its loads, their rates, and their round.

    `neighbour`: size and slots, as the other partitions of the device see them; `memory_bytes`: memory of its models.
    """

    size: int
    loads: tuple[Load, ...]
    demands: tuple[Demand, ...]
    memory_bytes: int
    round: RoundFit = RoundFit(0, ())
    neighbour: Neighbour = (0, ())


Partitions = tuple[PartialPartition, ...]


class PartialPlan:
    """Devices and the partitions placed on them so far.

    `interference`: whether rounds must be feasible beside their neighbours. `reserve`: loads that may come into unused
    partitions; rounds are feasible beside any one of them.
    """

    def __init__(
        self,
        cache: RoundCache,
        devices: Sequence[DeviceType],
        *,
        interference: bool = False,
        reserve: Sequence[Load] = (),
        most_partitions: int = 2,
        most_models: int = 3,
    ) -> None:
        self.cache = cache
        self.kinds = tuple(devices)
        self.types = tuple({kind.name: kind for kind in devices}.values())
        self.made: list[Partitions] = [()] * len(devices)
        self._interference = interference
        self._reserve = tuple(reserve)
        self.most_partitions = most_partitions
        self._most_models = most_models
        self._memory = True
        self.slowdowns: Mapping[tuple[str, str, int], float] = {}
        """Expected slowdowns by tenant, device type and size, set by the planner."""

    def free_sizes(self, device: int) -> tuple[int, ...]:
        """Sizes of partitions that may be added to a device, ascending."""
        made = self.made[device]
        if len(made) >= self.most_partitions:
            return ()
        return _free_sizes(self.kinds[device].splits, tuple([partition.size for partition in made]))

    def beside(self, kind: DeviceType, size: int) -> int:
        """The largest partition that may stand beside one of `size` on an unused device; 0 for none."""
        return max(_free_sizes(kind.splits, (size,)), default=0) if self.most_partitions > 1 else 0

    def fresh(self) -> list[int]:
        """The first unused device of each type."""
        first: dict[str, int] = {}
        for number, kind in enumerate(self.kinds):
            if not self.made[number]:
                first.setdefault(kind.name, number)
        return list(first.values())

    def room(self, load: Load, device: int, size: int) -> float:
        """The largest rate in rows/s that a new partition can serve beside the partitions of the device."""
        kind, made = self.kinds[device], self.made[device]
        around: tuple[Neighbour, ...] = ()
        if self._interference:
            around = tuple(partition.neighbour for partition in made)
            if self._reserve:
                around += self._to_come(kind, (*(partition.size for partition in made), size))
        return self.cache.capacity(load.model, load.slo_ns, size, kind.name, around)

    def opened(self, device: int, size: int, load: Load, rate: float) -> Partitions | None:
        """The partitions of a device with a new one for this load; None if they are infeasible."""
        made = self.made[device]
        memory_bytes = self.cache.costs.memory_bytes(load.model)
        new = PartialPartition(size, (load,), (Demand(load.model, load.slo_ns, rate),), memory_bytes)
        return self._settled(device, [*made, new], len(made))

    def merged(self, device: int, index: int, load: Load, rate: float) -> Partitions | None:
        """The partitions of a device with a rate of this load added to one of them; None if they are infeasible."""
        made = list(self.made[device])
        size, loads, demands, memory_bytes, *_ = made[index]
        if any(there is load for there in loads):
            demands = tuple(
                work._replace(rate_per_s=work.rate_per_s + rate) if there is load else work
                for there, work in zip(loads, demands, strict=True)
            )
        elif len(loads) >= self._most_models:
            return None
        else:
            if all(there.model != load.model for there in loads):
                memory_bytes += self.cache.costs.memory_bytes(load.model)
            loads = (*loads, load)
            demands = (*demands, Demand(load.model, load.slo_ns, rate))
        made[index] = PartialPartition(size, loads, demands, memory_bytes)
        return self._settled(device, made, index)

    def plan(self, planner: str) -> Plan:
        """The placed partitions as a plan."""
        return Plan(
            tuple(
                DevicePlan(kind.name, tuple(_plan(partition) for partition in made))
                for kind, made in zip(self.kinds, self.made, strict=True)
                if made
            ),
            planner,
        )

    def sees_interference(self, model: str) -> bool:
        """Whether interference is considered, and a model has any with the placed models."""
        placed = {work.model for made in self.made for partition in made for work in partition.demands}
        models = sorted(placed | {model})
        return self._interference and self.cache.interferes(models, self.types)

    def relaxed(self, *, memory: bool = True, interference: bool = True) -> PartialPlan:
        """A copy without the constraint of memory, or of interference."""
        copy = PartialPlan(
            self.cache,
            self.kinds,
            interference=self._interference and interference,
            reserve=self._reserve,
            most_partitions=self.most_partitions,
            most_models=self._most_models,
        )
        copy.made = list(self.made)
        copy._memory = memory
        copy.slowdowns = self.slowdowns if interference else {}
        return copy

    def _settled(self, device: int, made: list[PartialPartition], changed: int) -> Partitions | None:
        """Adjust the round of a changed partition and of its neighbours until all are feasible; None if that fails."""
        kind = self.kinds[device]
        if self._memory:
            taken = sum([partition.memory_bytes for partition in made])
            if taken + kind.partition_bytes * len(made) > kind.memory_bytes:
                return None
        if not self._fitted(device, made, changed):
            return None
        if not self._interference or len(made) == 1:
            return tuple(made)
        visited = [*(index for index in range(len(made)) if index != changed), changed]
        for _ in range(_PASSES):
            is_steady = True
            for index in visited:
                own = made[index]
                around = self._around(device, made, index)
                if not self.cache.stands(own.demands, own.round, own.size, kind.name, around):
                    if not self._fitted(device, made, index):
                        return None
                    is_steady = False
            if is_steady:
                return tuple(made)
        return None

    def _fitted(self, device: int, made: list[PartialPartition], index: int) -> bool:
        own = made[index]
        around = self._around(device, made, index)
        fitted = self.cache.fit(own.demands, own.size, self.kinds[device].name, around)
        if fitted is None:
            return False
        slots = [(work.model, batch) for work, batch in zip(own.demands, fitted.batches, strict=True)]
        neighbour = own.size, tuple(sorted(set(slots)))
        made[index] = PartialPartition(own.size, own.loads, own.demands, own.memory_bytes, fitted, neighbour)
        return True

    def _around(self, device: int, made: Sequence[PartialPartition], index: int) -> tuple[Neighbour, ...]:
        """Neighbours beside which partition `index` of a device must be feasible: the others, and reserved loads."""
        if not self._interference:
            return ()
        others = tuple([partition.neighbour for number, partition in enumerate(made) if number != index])
        if not self._reserve:
            return others
        return others + self._to_come(self.kinds[device], tuple(partition.size for partition in made))

    def _to_come(self, kind: DeviceType, sizes: tuple[int, ...]) -> tuple[Neighbour, ...]:
        free_sizes = _free_sizes(kind.splits, sizes) if len(sizes) < self.most_partitions else ()
        if not free_sizes:
            return ()
        batches = (
            (load.model, self.cache.best_batch(load.model, load.slo_ns, free_sizes[-1], kind.name))
            for load in self._reserve
        )
        return ((free_sizes[-1], tuple(sorted({(model, batch) for model, batch in batches if batch}))),)


@lru_cache(maxsize=1 << 12)
def _free_sizes(splits: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes that remain in some split when these are in use, ascending."""
    used = Counter(sizes)
    left = [Counter(split) - used for split in splits if used <= Counter(split)]
    return tuple(sorted({size for counter in left for size in counter}))


def diagnose(
    partial: PartialPlan, load: Load, left: float, place: Callable[[PartialPlan, Load, float], bool]
) -> Infeasible:
    """Why `place` fails for the unserved part of a load's rate: the constraint without which it succeeds."""
    impossible = impossible_alone(partial, load)
    if impossible is not None:
        return impossible
    served = f"{load.rate_per_s - left:.4g} of {load.rate_per_s:.4g} rows/s"
    found = f"tenant {load.tenant!r} gets {served} of model {load.model!r}"
    if place(partial.relaxed(memory=False), load, left):
        return Infeasible(load.tenant, MEMORY, f"{found}; the devices' free memory is too small for the model")
    if partial.sees_interference(load.model) and place(partial.relaxed(interference=False), load, left):
        return Infeasible(load.tenant, INTERFERENCE, f"{found}; the rest would fit but for interference")
    return Infeasible(load.tenant, DEVICES, f"{found}; devices: {len(partial.kinds)}, without room for the rest")


def impossible_alone(partial: PartialPlan, load: Load, *, whole: bool = False) -> Infeasible | None:
    """Why no empty device can serve a load at any rate; None if one can. `whole`: try undivided devices only."""
    cache = partial.cache
    kinds = partial.types
    if not kinds:
        return Infeasible(load.tenant, DEVICES, f"tenant {load.tenant!r} has no device: the inventory is empty")
    able = [
        kind
        for kind in kinds
        for sizes in [(kind.whole,) if whole else kind.sizes]
        if any(cache.capacity(load.model, load.slo_ns, size, kind.name) > 0 for size in sizes)
    ]
    if not able:
        quickest, kind = min(
            (min(cache.curve(load.model, kind.whole, kind.name).latency_ns), kind.name) for kind in kinds
        )
        detail = (
            f"tenant {load.tenant!r} needs an SLO of {2 * quickest / 1e6:.4g} ms and has {load.slo_ns / 1e6:.4g} ms: "
            f"a row waits up to one duty cycle and then for its batch, and the fastest batch of model {load.model!r} "
            f"takes {quickest / 1e6:.4g} ms on a whole {kind!r}"
        )
        return Infeasible(load.tenant, LATENCY, detail)
    needed = cache.costs.memory_bytes(load.model)
    most = max(kind.memory_bytes - kind.partition_bytes for kind in able)
    if needed > most:
        detail = f"model {load.model!r} of tenant {load.tenant!r} needs {needed} bytes, a device has {most} for models"
        return Infeasible(load.tenant, MEMORY, detail)
    return None


def _plan(partition: PartialPartition) -> PartitionPlan:
    slots = zip(partition.loads, partition.demands, partition.round.batches, strict=True)
    return PartitionPlan(
        partition.size,
        partition.round.duty_ns,
        tuple(Slot(load.tenant, batch, work.rate_per_s) for load, work, batch in slots),
    )
