"""The nouns of placement: a graph of tasks with their times on every device, and the devices with their links.

Times are integer nanoseconds. Everything here is frozen plain data.
Source: SIR+ (SYSTOR 2022), sections 4 and 5; tensors, lanes and hand-overs are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from cotenant.errors import InvalidValueError
from cotenant.techniques.placement.task_profile import UnitTensor


class TransferMode(Enum):
    """Where the copy of a tensor sits while it takes its time."""

    DELAY = "delay"
    """Nowhere: it only takes time, any number at once."""
    ENGINE = "engine"
    """On a copy engine of its link, one for each direction, one copy at a time."""
    LANE = "lane"
    """On the lane of the device that drives the link, which computes nothing meanwhile."""


@dataclass(frozen=True, slots=True)
class TaskDevice:
    """Something that runs one task at a time.

    A device keeps its `lanes` busy; without any named it has one of its own name. A *moldable* device names the lanes
    of others and excludes them while it runs: `TaskDevice("both", ("core0", "core1"), "host")`. Tensors are copied
    between devices of different `space` (memory; by default its own). Raises InvalidValueError without a name.
    """

    name: str
    lanes: tuple[str, ...] = ()
    space: str = ""

    def __post_init__(self) -> None:
        if not self.name or len(set(self.lanes)) != len(self.lanes):
            raise InvalidValueError("device of a task graph", "name, lanes", (self.name, self.lanes), "different names")
        object.__setattr__(self, "lanes", self.lanes or (self.name,))
        object.__setattr__(self, "space", self.space or self.name)


@dataclass(frozen=True, slots=True)
class GraphTask:
    """What runs as one piece. A device that `compute_ns` leaves out cannot run it.

    `compute_ns` is the time on the device alone, `launch_ns` what starting it there takes on top; `memory_bytes` is
    what it occupies where it is placed, as long as the plan stands (weights, and buffers of its own).
    """

    name: str
    compute_ns: Mapping[str, int]
    launch_ns: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: Mapping[str, int] = field(default_factory=dict)

    def service_ns(self, device: str) -> int:
        """Time that it occupies the device's lanes, launch included. KeyError where it cannot run."""
        return self.compute_ns[device] + self.launch_ns.get(device, 0)


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """The way from one space to another, in that direction only. `driver` is the device whose lane copies take in LANE.

    Raises InvalidValueError for a rate that is not positive or a negative latency.
    """

    source: str
    target: str
    bytes_per_s: float
    latency_ns: int = 0
    driver: str = ""

    def __post_init__(self) -> None:
        where = f"link {self.source}:{self.target}"
        if not self.bytes_per_s > 0:
            raise InvalidValueError(where, "bytes_per_s", self.bytes_per_s, "a positive rate")
        if self.latency_ns < 0:
            raise InvalidValueError(where, "latency_ns", self.latency_ns, "a time from 0")

    def transfer_ns(self, size_bytes: int) -> int:
        """Time of one copy: latency and size over rate."""
        return self.latency_ns + round(size_bytes * 1e9 / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks in the order of the sequential execution, which must be topological, and all that placing them takes.

    Tensors name tasks by their numbers in that order; a tensor is copied once into each space that reads it. Spaces
    without a link exchange nothing. `limits_bytes` bounds, by space, the memory of the tasks placed there.
    `hand_over_ns` is lane time of a task, once, where any of its inputs is of another device. Raises InvalidValueError
    for names twice or unknown, unknown numbers, tasks that no device can run, negative times, and an order that is not
    topological.
    """

    devices: tuple[TaskDevice, ...]
    tasks: tuple[GraphTask, ...]
    tensors: tuple[UnitTensor, ...]
    links: tuple[DeviceLink, ...] = ()
    limits_bytes: Mapping[str, int] = field(default_factory=dict)
    hand_over_ns: int = 0
    transfers: TransferMode = TransferMode.DELAY

    def __post_init__(self) -> None:
        devices = _numbered("device", [device.name for device in self.devices])
        _numbered("task", [task.name for task in self.tasks])
        spaces = {device.space for device in self.devices}
        for task in self.tasks:
            where = f"task {task.name!r}"
            if not task.compute_ns:
                raise InvalidValueError(where, "compute_ns", {}, "a time on at least one device")
            for figures in (task.compute_ns, task.launch_ns, task.memory_bytes):
                for name, value in figures.items():
                    if name not in devices or value < 0:
                        raise InvalidValueError(where, f"figure on {name!r}", value, f"from 0, of {', '.join(devices)}")
        for tensor in self.tensors:
            where = f"tensor {tensor.name!r}"
            if tensor.size_bytes < 0:
                raise InvalidValueError(where, "size_bytes", tensor.size_bytes, "a size from 0")
            for number in (tensor.producer, *tensor.readers):
                if not 0 <= number < len(self.tasks):
                    raise InvalidValueError(where, "task", number, f"the number of one of {len(self.tasks)} tasks")
            if min(tensor.readers, default=len(self.tasks)) <= tensor.producer:
                early, behind = (self.tasks[at].name for at in (min(tensor.readers), tensor.producer))
                raise InvalidValueError(where, "reader", early, f"a task that stands behind {behind!r}")
        for link in self.links:
            if not {link.source, link.target} <= spaces or (link.driver and link.driver not in devices):
                raise InvalidValueError("link", "ends", f"{link.source}:{link.target}", f"among {sorted(spaces)}")
        for name, limit in self.limits_bytes.items():
            if name not in spaces or limit < 0:
                raise InvalidValueError("memory limit", name, limit, f"from 0, for one of {sorted(spaces)}")
        if self.hand_over_ns < 0:
            raise InvalidValueError("task graph", "hand_over_ns", self.hand_over_ns, "a time from 0")


def _numbered(kind: str, names: list[str]) -> dict[str, int]:
    numbers = {name: number for number, name in enumerate(names)}
    if not names or len(numbers) != len(names):
        double = [name for name in numbers if names.count(name) > 1]
        raise InvalidValueError("task graph", f"{kind}s", double[:3], f"at least one {kind}, no name twice")
    return numbers
