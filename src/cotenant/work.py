"""Work and its resources: units of a batch, shares of devices, machines, and the rounds of plans.

Times are integer nanoseconds. All types are immutable: they cross process boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from msgspec import Struct

from cotenant.errors import InvalidValueError

CPU = "cpu"
"""Name of the CPU as a device; its slots are cores."""
_FLAGS = bytes.maketrans(b"01", b"\0\1")


class Work(Struct, frozen=True, gc=False, order=True, cache_hash=True, array_like=True):
    """Units [start, end) of `items` rows of a tenant's batch: the argument of predictors and key of their memory.

    `end` 0 stands for the last unit, where the units are unknown; in a launch `end` is exact. `shape` is the number of
    the declared shape, `version` that of the compiled implementation. `rows` is empty for all rows of the batch, else
    (first row, last row + 1).
    """

    tenant: str
    shape: int
    items: int
    start: int = 0
    end: int = 0
    version: int = 0
    rows: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether it contains the first unit of the batch's first row."""
        return self.start == 0 and not any(self.rows[:1])

    def until(self, end: int) -> Work:
        """The same work up to another unit."""
        return Work(self.tenant, self.shape, self.items, self.start, end, self.version, self.rows)

    def since(self, start: int) -> Work:
        """The same work from another unit on."""
        return Work(self.tenant, self.shape, self.items, start, self.end, self.version, self.rows)

    def part(self, first: int, last: int) -> Work:
        """The same work for the rows [first, last)."""
        return Work(self.tenant, self.shape, last - first, self.start, self.end, self.version, (first, last))


def may_split(splits: Iterable[Sequence[int]], start: int, end: int) -> bool:
    """Whether units [start, end) may run for a part of the rows: one run of boundaries has both."""
    return any(start in run and end in run for run in splits)


class TaskTime(Struct, frozen=True, gc=False, array_like=True):
    """When one task of a placed launch ran: `units` units on these cores of its share, by number, from `start_ns` to
    `end_ns` after the first unit of the launch began."""

    cores: tuple[int, ...]
    units: int
    start_ns: int
    end_ns: int


def lane_name(number: int, cores: Sequence[int], device: str) -> str:
    """Name of core `number` of a `TaskTime`, in a share with these cores: a core of the machine. In a share of a GPU,
    number 0 is the GPU and number n the CPU core `cpu:n-1` beside it."""
    if device == CPU:
        return f"core {cores[number]}"
    return f"cpu:{number - 1}" if number else device


class _Derived:
    """Values derived from a share, computed once; no fields, so that files do not contain them."""

    __slots__ = ("mask", "size")

    mask: int
    """The slots as bits, by their numbers in the machine."""
    size: int
    """Number of cores, or of SMs."""


@dataclass(frozen=True, slots=True)
class Share(_Derived):
    """Slots of a device: cores of the CPU, or streaming multiprocessors (SMs) of a GPU.

    `device` is "cpu", "cuda:N", or the name of a simulated device. On the CPU `cores` are core numbers. On a GPU they
    number slots from 0, one for each SM; the driver chooses the SMs (`execute.gpu.sm_ladder`).

    `first` is the number of the device's slot 0 in its machine. So shares of one machine are disjoint exactly if their
    masks are, across devices. `Machine.share` sets it.

    Raises InvalidValueError without cores, for duplicate cores, or without a device.
    """

    cores: tuple[int, ...]
    device: str = CPU
    first: int = 0

    def __post_init__(self) -> None:
        if not self.cores or len(set(self.cores)) != len(self.cores) or min(self.cores) < 0:
            raise InvalidValueError("share", "cores", self.cores, "distinct core numbers from 0, at least one")
        if not self.device:
            raise InvalidValueError("share", "device", self.device, "the name of a device, such as cpu or cuda:0")
        object.__setattr__(self, "mask", sum(1 << core for core in self.cores) << self.first)
        object.__setattr__(self, "size", len(self.cores))

    @classmethod
    def of_mask(cls, mask: int, device: str = CPU, first: int = 0) -> Share:
        """The share of the slots in a mask: at least one, and none below the device's first slot."""
        bits = bin(mask >> first)[:1:-1].encode().translate(_FLAGS)
        return cls._made(tuple(compress(range(len(bits)), bits)), device, first, mask)

    def joined(self, other: Share) -> Share:
        """These slots, then those of a disjoint share of the same device."""
        return Share._made((*self.cores, *other.cores), self.device, self.first, self.mask | other.mask)

    @classmethod
    def _made(cls, cores: tuple[int, ...], device: str, first: int, mask: int) -> Share:
        """A share from values that are known to be valid."""
        made = object.__new__(cls)
        object.__setattr__(made, "cores", cores)
        object.__setattr__(made, "device", device)
        object.__setattr__(made, "first", first)
        object.__setattr__(made, "mask", mask)
        object.__setattr__(made, "size", len(cores))
        return made

    def __reduce__(self) -> tuple[type[Share], tuple[tuple[int, ...], str, int]]:
        return Share, (self.cores, self.device, self.first)


@dataclass(frozen=True, slots=True)
class Machine:
    """All slots of all devices in one numbering, device after device.

    Raises InvalidValueError without devices, or for two devices with a common name or common slots.
    """

    devices: tuple[Share, ...]
    """The whole of each device."""
    mask: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [device.device for device in self.devices]
        mask = sum(device.mask for device in self.devices)
        if not names or len(set(names)) != len(names) or mask.bit_count() != sum(each.size for each in self.devices):
            raise InvalidValueError("machine", "devices", self.devices, "devices of different names and slots")
        object.__setattr__(self, "mask", mask)

    @classmethod
    def of(cls, devices: Mapping[str, Iterable[int]]) -> Machine:
        """A machine of these devices, each with the numbers of its cores or SMs."""
        made: list[Share] = []
        first = 0
        for device, slots in devices.items():
            cores = tuple(slots)
            made.append(Share(cores, device, first))
            first += max(cores) + 1
        return cls(tuple(made))

    @classmethod
    def holding(cls, shares: Iterable[Share]) -> Machine:
        """The machine of exactly the slots of these shares, which keep their numbers."""
        slots: dict[tuple[str, int], set[int]] = {}
        for share in shares:
            slots.setdefault((share.device, share.first), set()).update(share.cores)
        return cls(tuple(Share(tuple(sorted(cores)), *device) for device, cores in slots.items()))

    @classmethod
    def cpu(cls, cores: Iterable[int]) -> Machine:
        """A machine with these cores as its only device."""
        return cls.of({CPU: cores})

    def share(self, cores: Iterable[int], device: str = CPU) -> Share:
        """The share of some slots of a device. Raises InvalidValueError for an unknown device or slot."""
        found = next((each for each in self.devices if each.device == device), None)
        if found is None:
            names = ", ".join(each.device for each in self.devices)
            raise InvalidValueError("share", "device", device, f"a device of the machine: {names}")
        made = Share(tuple(cores), device, found.first)
        if made not in self:
            raise InvalidValueError("share", "cores", made.cores, f"cores that device {device!r} has")
        return made

    def __contains__(self, share: Share) -> bool:
        return any(
            share.device == each.device and share.first == each.first and share.mask & ~each.mask == 0
            for each in self.devices
        )


class Slot(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tenant's slot in a round: one batch of up to `batch` rows, for `rate_per_s` rows a second of its rate.

    Slots of a round with the same `group`, from 1 on, form a group: their launches start together. 0 is a slot alone.
    `size` is the part of the partition that a member of a group has, in units of the partition's size; 0 for a slot
    alone, which has all of it.

    Raises InvalidValueError when a value is out of its range.
    """

    tenant: str
    batch: int
    rate_per_s: float
    group: int = 0
    size: int = 0

    def __post_init__(self) -> None:
        where = f"slot of tenant {self.tenant!r}"
        if self.batch < 1:
            raise InvalidValueError(where, "batch", self.batch, "at least 1 row")
        if not 0 < self.rate_per_s < float("inf"):
            raise InvalidValueError(where, "rate_per_s", self.rate_per_s, "a positive finite number")
        if self.group < 0:
            raise InvalidValueError(where, "group", self.group, "the number of its group from 1, or 0 for none")
        if self.size < 0 or bool(self.size) != bool(self.group):
            raise InvalidValueError(where, "size", self.size, "at least 1 of a member of a group, and none without one")


@dataclass(frozen=True, slots=True)
class Round:
    """The round of one partition: its slots run in order, once every duty cycle `duty_ns`. Without slots it is free.

    Raises InvalidValueError for slots without a duty cycle, and for groups with members that are not adjacent or of the
    same tenant.
    """

    duty_ns: int = 0
    slots: tuple[Slot, ...] = ()

    def __post_init__(self) -> None:
        if self.slots and self.duty_ns < 1:
            raise InvalidValueError("round", "duty_ns", self.duty_ns, "a positive duty cycle")
        seen: set[int] = set()
        for step in self.steps:
            number, tenants = step[0].group, [slot.tenant for slot in step]
            if not number:
                continue
            where = f"group {number} of a round"
            if number in seen:
                raise InvalidValueError(where, "slots", tenants, "members next to each other, no slot in between")
            if len(set(tenants)) < len(tenants):
                raise InvalidValueError(where, "slots", tenants, "slots of different tenants")
            seen.add(number)

    @property
    def steps(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots in order of execution: each step is a slot alone, or the members of a group."""
        steps: list[tuple[Slot, ...]] = []
        for slot in self.slots:
            if slot.group and steps and steps[-1][0].group == slot.group:
                steps[-1] = (*steps[-1], slot)
            else:
                steps.append((slot,))
        return tuple(steps)


@dataclass(frozen=True, slots=True)
class PlanLanes:
    """Lanes with their rounds, in the same order: those of the plan, then one for each core that the plan leaves."""

    lanes: tuple[Share, ...]
    rounds: tuple[Round, ...]
