"""The nouns of planning: loads, kinds of device, plans, and what costs and planners must offer.

Times are integer nanoseconds, rates are rows a second. Everything here is frozen: it crosses boundaries. Plan files
hold the Structs among it, under the names of `field(name=...)`; what Meta bounds is what files may say.
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
from cotenant.work import Slot as Slot  # a noun of planning

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
CoRunner = tuple[str, int, int]
"""Model, batch and size of what runs in another partition of the same device, or in another part of the same one."""

Name = Annotated[str, Meta(min_length=1)]
Rate = Annotated[float, Meta(le=1e12)]
Size = Annotated[int, Meta(le=1_000_000)]

LATENCY = "latency"
"""Not even the smallest batch, alone on a whole device, is within the SLO."""
MEMORY = "memory"
"""The model does not fit into what is left of any device."""
DEVICES = "devices"
"""There are too few devices for the rate."""
INTERFERENCE = "interference"
"""There would be room, but not beside the other partitions of any device."""


class Load(Struct, frozen=True, forbid_unknown_fields=True):
    """What a tenant asks for: rows a second of a model, each answered within its SLO. Tenants may share a model.

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
    """A kind of device and the ways in which it may be divided.

    `splits` holds each allowed way as the sizes of its partitions, in percent of a GPU or in cores of a CPU; one of
    them must be the undivided device. A plan may leave partitions of a split unused. `memory_bytes` is what models may
    use, `partition_bytes` what each partition in use takes of it before any model. `price` is per device and unit of
    time, in any currency. `kind` is that of a device that may give its profile.

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
    """A partition and its round: every `duty_ns` each slot's batch runs once, in order, with nothing beside it there
    but the other members of its group, if it has one.

    A row waits at most one duty cycle for its batch to be built, and is answered when the batch, or its group, has run.

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
        """What runs there."""
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
        """Of every field: what servers report of the plan that they run."""
        return sha256(encode(self)).hexdigest()[:16]

    @property
    def rates_per_s(self) -> dict[str, float]:
        """Rows a second that it serves, by tenant."""
        return _summed((slot.tenant, slot.rate_per_s) for partition in self.partitions for slot in partition.slots)


@dataclass(frozen=True, slots=True)
class Plan:
    """All devices in use. `planner` is the name of who made it."""

    devices: tuple[DevicePlan, ...]
    planner: str = ""

    @property
    def rates_per_s(self) -> dict[str, float]:
        """Rows a second that it serves, by tenant."""
        return _summed(rate for device in self.devices for rate in device.rates_per_s.items())


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Why no plan was found: the tenant that breaks first, the constraint that breaks it, and the figures.

    `constraint` is one of the constants above; `detail` is a sentence for the user.
    Rates in it include the planner's headroom.
    """

    tenant: str
    constraint: str
    detail: str


class Costs(Protocol):
    """What a planner believes of latencies, interference and memory. Pure: equal questions have equal answers."""

    def latency_ns(self, work: Work, size: int, device: str) -> int:
        """As a Predictor's: time of work alone in a partition of `size` of such a device. Its tenant is a model.

        Raises PlanError for a model, size or device that the costs do not know.
        """
        ...

    def batches(self, model: str) -> Sequence[int]:
        """Batch sizes that a plan may use, ascending. Raises PlanError for an unknown model."""
        ...

    def memory_bytes(self, model: str) -> int:
        """What one copy of the model takes, weights and buffers. Raises PlanError for an unknown model."""
        ...

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str) -> float:
        """Latency beside what runs in the other partitions, at most one batch in each, over latency alone.

        At least 1.0; 1.0 when `others` is empty.
        """
        ...

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str) -> float:
        """What one co-runner adds to the slowdown of a batch, below 0 where the batch runs quicker for it.

        `factor` beside any co-runners never falls when the sum of what they add grows: that is what finds the worst of
        many without trying all.
        """
        ...

    def divisions(self, size: int, members: int, device: str) -> Sequence[tuple[int, ...]]:
        """Ways to divide a partition among so many members of a group, as their sizes, of which groups are known.

        None where slots run in turn alone.
        """
        return ()

    def group_ns(self, members: Sequence[CoRunner], size: int, device: str) -> int | None:
        """Time to the end of the last of batches that start together in a partition of `size`, nothing beside it.

        Each member is a model, its batch, and what it has of the partition. Never less than any part of them takes.
        None where too little was measured to tell.
        """
        return None


class Planner(Protocol):
    """Decides who runs where. Pure: equal questions have equal answers."""

    @property
    def name(self) -> str:
        """What tables and files call it."""
        ...

    def plan(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Plan | Infeasible:
        """A plan that serves every load, or why there is none that this planner finds.

        `devices` is the inventory, one entry a device; entries of one name must be equal. `running` is the plan to
        start from; a planner may ignore it. Raises PlanError for loads of one tenant twice and for unequal devices of
        one name.
        """
        ...


def _summed(rates: Iterable[tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for tenant, rate in rates:
        total[tenant] = total.get(tenant, 0.0) + rate
    return total


def checked(loads: Sequence[Load], devices: Sequence[DeviceType]) -> dict[str, DeviceType]:
    """The types of the inventory by name, in order. Raises PlanError as `Planner.plan` says."""
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
    """The co-runners that slow a batch down most: at most one of each other partition, whose slots `beside` holds.

    `adds` is that of Costs. A partition whose every slot would make the batch quicker counts as idle; where that are
    all of them, the mildest one runs.
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
    """The loads with a share of their rates added: a plan that is exactly full cannot hold its SLOs when arrivals vary.

    Raises InvalidValueError for a negative headroom.
    """
    if not 0 <= headroom < math.inf:
        raise InvalidValueError("planner", "headroom", headroom, "a share from 0")
    return tuple(replace(load, rate_per_s=load.rate_per_s * (1 + headroom)) for load in loads)
