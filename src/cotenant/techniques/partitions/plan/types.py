"""Data types of planning: loads, device types, plans, and the protocols of costs and planners.

Times are integer nanoseconds, rates are rows a second. All types are frozen. Plan files hold the Structs under the
names of `field(name=...)`; Meta bounds the values that files may have.
Source: GPU-let (ATC 2022), section 4; duty cycles are those of Nexus (SOSP 2019), section 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct, field
from msgspec.json import encode
from msgspec.structs import replace

from cotenant.errors import InvalidValueError, PlanError
from cotenant.files import Milliseconds
from cotenant.work import Round, Work
from cotenant.work import Slot as Slot  # a type of planning

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
CoRunner = tuple[str, int, int]
"""Model, batch and partition size of a launch beside another one on the same device."""

Name = Annotated[str, Meta(min_length=1)]
Rate = Annotated[float, Meta(le=1e12)]
Size = Annotated[int, Meta(le=1_000_000)]

LATENCY = "latency"
"""Not even the smallest batch alone on a whole device meets the SLO."""
MEMORY = "memory"
"""The model does not fit into the free memory of any device."""
DEVICES = "devices"
"""The rate needs more devices than the inventory has."""
SERVER = "server"
"""The server cannot process so many requests, whatever its models need."""
MISSES = "misses"
"""Simulations of the plans miss more SLOs than are promised."""
INTERFERENCE = "interference"
"""The load would fit, but for the interference of the other partitions."""


class Load(Struct, frozen=True, forbid_unknown_fields=True):
    """Demand of one tenant: rows a second of a model, each answered within the SLO. Tenants may share a model.

    Raises InvalidValueError when a value is out of its range.
    """

    tenant: Name = field(name="name")
    model: Name
    rate_per_s: Rate = field(name="rate")
    slo_ns: Milliseconds = field(name="slo_ms")

    def __post_init__(self) -> None:
        where = f"load of tenant {self.tenant!r}"
        if not 0 < self.rate_per_s < math.inf:
            raise InvalidValueError(where, "rate_per_s", self.rate_per_s, "a positive finite number")
        if self.slo_ns <= 0:
            raise InvalidValueError(where, "slo_ns", self.slo_ns, "a positive latency target")


@dataclass(frozen=True, slots=True)
class DeviceType:
    """A type of device and its allowed splits into partitions.

    `splits`: the partition sizes of each allowed split, in percent of a GPU or in cores of a CPU. One split must be the
    undivided device; a plan may leave partitions unused. `memory_bytes`: memory for models; `partition_bytes`: part of
    it that each partition in use takes before any model. `price`: per device and unit of time, in any currency. `kind`:
    the kind of device from which a profile of this type may come.

    Raises InvalidValueError when a value is out of its range.
    """

    name: str
    splits: tuple[tuple[int, ...], ...]
    memory_bytes: int
    price: float = 1.0
    partition_bytes: int = 0
    kind: Literal["cpu", "gpu"] = "cpu"

    def __post_init__(self) -> None:
        where = f"device type {self.name!r}"
        if not self.splits or any(not split or min(split) < 1 for split in self.splits):
            raise InvalidValueError(where, "splits", self.splits, "lists of sizes from 1, at least one list")
        if (max(map(sum, self.splits)),) not in self.splits:
            raise InvalidValueError(where, "splits", self.splits, "one split that is the whole device")
        if self.memory_bytes <= 0:
            raise InvalidValueError(where, "memory_bytes", self.memory_bytes, "a positive number")
        if not 0 <= self.price < math.inf:
            raise InvalidValueError(where, "price", self.price, "a finite number from 0")
        if self.partition_bytes < 0:
            raise InvalidValueError(where, "partition_bytes", self.partition_bytes, "a number from 0")

    @property
    def whole(self) -> int:
        """Size of the undivided device."""
        return max(map(sum, self.splits))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every size that a partition may have, ascending."""
        return tuple(sorted({size for split in self.splits for size in split}))


class PartitionPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """A partition and its round. Every `duty_ns` each slot's batch runs once, in order, alone in the partition or
    beside the other members of its group.

    A row waits at most one duty cycle for its batch, and is answered when the batch, or its group, ends.

    Raises InvalidValueError when a value is out of its range.
    """

    size: Size
    duty_ns: Milliseconds = field(name="duty_ms")
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        where = f"partition of size {self.size!r}"
        if self.size < 1:
            raise InvalidValueError("partition", "size", self.size, "at least 1")
        if self.duty_ns < 1:
            raise InvalidValueError(where, "duty_ns", self.duty_ns, "a positive duty cycle")
        if not self.slots:
            raise InvalidValueError(where, "slots", self.slots, "at least one slot; leave an unused partition out")
        for sizes in ([slot.size for slot in step] for step in self.round.steps):
            if sum(sizes) > self.size:
                raise InvalidValueError(where, "sizes", sizes, f"sizes of the members of a group of {self.size} in all")

    @property
    def round(self) -> Round:
        """The round of the partition."""
        return Round(self.duty_ns, self.slots)


class DevicePlan(Struct, frozen=True, forbid_unknown_fields=True):
    """One device of the named type and its partitions in use.

    Raises InvalidValueError when there is no partition.
    """

    device: Name
    partitions: tuple[PartitionPlan, ...] = field(name="partition")

    def __post_init__(self) -> None:
        if not self.partitions:
            raise InvalidValueError(f"plan of a {self.device!r}", "partitions", (), "at least one")

    @property
    def digest(self) -> str:
        """Digest of all fields, by which servers report the plan that they run."""
        return sha256(encode(self)).hexdigest()[:16]

    @property
    def rates_per_s(self) -> dict[str, float]:
        """Rows a second that it serves, by tenant."""
        return _summed((slot.tenant, slot.rate_per_s) for partition in self.partitions for slot in partition.slots)


@dataclass(frozen=True, slots=True)
class Plan:
    """All devices in use. `planner`: name of the planner that made the plan."""

    devices: tuple[DevicePlan, ...]
    planner: str = ""

    @property
    def rates_per_s(self) -> dict[str, float]:
        """Rows a second that it serves, by tenant."""
        return _summed(rate for device in self.devices for rate in device.rates_per_s.items())


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Why no plan was found: the tenant that breaks first, and the constraint that breaks it.

    `constraint`: one of the constants above; `detail`: a sentence for the user. Its rates include the planner's
    headroom.
    """

    tenant: str
    constraint: str
    detail: str


class Costs(Protocol):
    """A planner's estimates of latencies, interference and memory. Pure functions."""

    def latency_ns(self, work: Work, size: int, device: str) -> int:
        """Latency in ns of work alone in a partition of `size` of such a device. The work's tenant is a model's name.

        Raises PlanError for a model, size or device that the costs do not know.
        """
        ...

    def batches(self, model: str) -> Sequence[int]:
        """Batch sizes that a plan may use, ascending. Raises PlanError for an unknown model."""
        ...

    def memory_bytes(self, model: str) -> int:
        """Memory of one copy of the model, weights and buffers. Raises PlanError for an unknown model."""
        ...

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str) -> float:
        """Slowdown: latency beside `others`, at most one batch in each other partition, over latency alone.

        At least 1.0; 1.0 when `others` is empty.
        """
        ...

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str) -> float:
        """Contribution of one co-runner to the slowdown of a batch; negative if the batch runs faster beside it.

        `factor` must not fall when the sum of the contributions grows. So the worst of many co-runners is found without
        trying all.
        """
        ...

    def divisions(self, size: int, members: int, device: str) -> Sequence[tuple[int, ...]]:
        """Sizes into which a partition may be divided for a group of so many members: those with known group latencies.

        Empty where slots run one after the other only.
        """
        return ()

    def group_ns(self, members: Sequence[CoRunner], size: int, device: str) -> int | None:
        """Latency in ns of a group: from its start to the end of its last batch, with idle other partitions.

        `members`: model, batch and size of each. Never less than the latency of a part of the group. None where too
        little was measured.
        """
        return None


class Planner(Protocol):
    """Assigns loads to partitions of devices. Pure."""

    @property
    def name(self) -> str:
        """Name in tables and files."""
        ...

    def plan(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Plan | Infeasible:
        """A plan that serves every load, or the reason why this planner finds none.

        `devices`: the inventory, one entry a device; entries of one name must be equal. `running`: the plan to start
        from; a planner may ignore it. Raises PlanError for two loads of one tenant, and unequal devices of one name.
        """
        ...


def _summed(rates: Iterable[tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for tenant, rate in rates:
        total[tenant] = total.get(tenant, 0.0) + rate
    return total


def checked(loads: Sequence[Load], devices: Sequence[DeviceType]) -> dict[str, DeviceType]:
    """Device types of the inventory by name, in order. Raises PlanError as `Planner.plan`."""
    tenants: dict[str, Load] = {}
    for load in loads:
        if load.tenant in tenants:
            raise PlanError(f"tenant {load.tenant!r} has two loads, expected one")
        tenants[load.tenant] = load
    types: dict[str, DeviceType] = {}
    for device in devices:
        if types.setdefault(device.name, device) != device:
            raise PlanError(f"device type {device.name!r} is described in two ways, expected one")
    return types


def worst_beside(beside: Sequence[Sequence[CoRunner]], adds: Callable[[CoRunner], float]) -> list[CoRunner]:
    """The co-runners that slow a batch down most, at most one of each other partition.

    `beside`: the slots of each other partition; `adds`: `Costs.adds`. A partition counts as idle if all its slots make
    the batch faster; if all partitions are such, the slot with the least effect runs.
    """
    if len(beside) == 1 and len(beside[0]) == 1:  # the most frequent case
        return list(beside[0])
    slowing = []
    mildest, mild = -math.inf, None
    for slots in beside:
        most, worst = -math.inf, None
        for slot in slots:
            more = adds(slot)
            if more > most:
                most, worst = more, slot
        if worst is not None and most >= 0:
            slowing.append(worst)
        elif most > mildest:
            mildest, mild = most, worst
    return slowing if slowing or mild is None else [mild]


def padded(loads: Sequence[Load], headroom: float) -> tuple[Load, ...]:
    """The loads with rates raised by the share `headroom`, so that the plan bears varying arrivals.

    Raises InvalidValueError for a negative headroom.
    """
    if not 0 <= headroom < math.inf:
        raise InvalidValueError("planner", "headroom", headroom, "a share from 0")
    return tuple(replace(load, rate_per_s=load.rate_per_s * (1 + headroom)) for load in loads)
