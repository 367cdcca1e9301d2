"""Data types of placement: a graph of tasks with their times on every device, and the devices with their links.

Times are integer nanoseconds. All types are frozen.
Source: SIR+ (SYSTOR 2022), sections 4 and 5; tensors, lanes and hand-overs are extensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from cotenant.errors import InvalidValueError
from cotenant.techniques.placement.task_profile import UnitTensor


class TransferMode(Enum):
    """The resource that the copy of a tensor occupies."""

    DELAY = "delay"
    """None: a copy is a pure delay, any number at once."""
    ENGINE = "engine"
    """The copy engine of its link, one for each direction, one copy at a time."""
    LANE = "lane"
    """The lane of the device that drives the link, which does not compute meanwhile."""


@dataclass(frozen=True, slots=True)
class TaskDevice:
    """A device that runs one task at a time and occupies its `lanes`, by default one of its own name.

    A *moldable* device has the lanes of several others and excludes them while it runs:
    `TaskDevice("both", ("core0", "core1"), "host")`. Tensors are copied between devices of different `space`, the
    device's memory, by default its own. Raises InvalidValueError without a name.
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
    """An indivisible task of the graph. All values are by device; devices without `compute_ns` cannot run it.

    `compute_ns`: time of the computation; `launch_ns`: additional time to start it; `memory_bytes`: weights and buffers
    in the device's space, for as long as the plan is loaded.
    """

    name: str
    compute_ns: Mapping[str, int]
    launch_ns: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: Mapping[str, int] = field(default_factory=dict)

    def service_ns(self, device: str) -> int:
        """Time in ns that it occupies the device's lanes, launch included. Raises KeyError if it cannot run there."""
        return self.compute_ns[device] + self.launch_ns.get(device, 0)


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """A link from one space to another. `driver`: the device that copies occupy in the mode LANE.

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
        """Time of one copy in ns: `latency_ns + size / rate`."""
        return self.latency_ns + round(size_bytes * 1e9 / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """A placement problem's data: tasks in the order of the sequential execution, which must be topological.

    - Tensors refer to tasks by number; a tensor is copied once into each space that reads it, over a link.
    - `limits_bytes`: memory limit of the tasks in each space.
    - `hand_over_ns`: lane time added to a task if any of its inputs is from another device.

    Raises InvalidValueError for duplicate or unknown names, unknown numbers, tasks that no device can run, negative
    times, and an order that is not topological.
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
