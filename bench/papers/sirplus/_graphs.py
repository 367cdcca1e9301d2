"""Generated task graphs of a GPU and a CPU: chains with fan-out, and random wide ones.

Times are log-normal: heavy tasks are 3 to 40 times slower on the CPU, light ones about as quick.
"""

from __future__ import annotations

import math
from random import Random

from cotenant.techniques.placement.plan.task_graph import DeviceLink, GraphTask, TaskDevice, TaskGraph
from cotenant.techniques.placement.task_profile import UnitTensor

DEVICES = (TaskDevice("gpu"), TaskDevice("cpu"))
LINKS = (DeviceLink("gpu", "cpu", 12e9, 10_000), DeviceLink("cpu", "gpu", 12e9, 10_000))
_LIGHT = 0.75
"""Share of light tasks. The paper says 80 to 90 %."""


class GraphWriter:
    """Collects tasks and what each reads; a task's output is one tensor for all its readers."""

    def __init__(self) -> None:
        self.tasks: list[GraphTask] = []
        self._numbers: dict[str, int] = {}
        self._readers: dict[str, list[int]] = {}
        self._sizes: dict[str, int] = {}

    def add(self, task: GraphTask, reads: list[str], size_bytes: int) -> str:
        """Add a task that makes a tensor of this size; gives its name."""
        number = self._numbers[task.name] = len(self.tasks)
        self.tasks.append(task)
        self._sizes[task.name] = size_bytes
        for name in dict.fromkeys(reads):
            self._readers.setdefault(name, []).append(number)
        return task.name

    @property
    def tensors(self) -> tuple[UnitTensor, ...]:
        """All tensors with a reader."""
        return tuple(
            UnitTensor(f"{name}>", self._numbers[name], tuple(readers), self._sizes[name])
            for name, readers in self._readers.items()
        )

    def graph(self) -> TaskGraph:
        """The whole, on GPU and CPU."""
        return TaskGraph(DEVICES, tuple(self.tasks), self.tensors, LINKS)


def _add(writer: GraphWriter, rng: Random, reads: list[str]) -> str:
    name = f"t{len(writer.tasks)}"
    if rng.random() < _LIGHT:
        gpu = rng.lognormvariate(math.log(8.0), 0.3)
        times = {"gpu": gpu, "cpu": gpu * rng.uniform(0.5, 1.5)}
        size = rng.lognormvariate(math.log(2e4), 1.5)
    else:
        gpu = rng.lognormvariate(math.log(60.0), 0.8)
        times = {"gpu": gpu, "cpu": gpu * rng.uniform(3, 40)}
        size = rng.lognormvariate(math.log(4e5), 1.0)
    return writer.add(GraphTask(name, {key: round(us * 1000) for key, us in times.items()}), reads, round(size))


def chains_with_fan_out(size: int, seed: int) -> TaskGraph:
    """A chain that forks again and again into chains of equal length, which join."""
    rng = Random(f"chains {size} {seed}")
    writer = GraphWriter()
    last = _add(writer, rng, [])
    while len(writer.tasks) < size:
        for _ in range(min(rng.randint(1, 4), size - len(writer.tasks))):
            last = _add(writer, rng, [last])
        left = size - len(writer.tasks) - 1  # without the task that joins
        if left < 4:
            continue
        length = rng.randint(1, max(1, min(20, left // 4)))
        ends = []
        for _ in range(min(rng.randint(4, 80), left // length)):
            end = last
            for _ in range(length):
                end = _add(writer, rng, [end])
            ends.append(end)
        last = _add(writer, rng, ends)
    return writer.graph()


def random_wide(size: int, seed: int) -> TaskGraph:
    """Tasks that read one to three of those that stand up to an eighth of the graph before them."""
    rng = Random(f"wide {size} {seed}")
    writer = GraphWriter()
    names: list[str] = []
    for at in range(size):
        behind = names[-max(4, size // 8) :]
        reads = rng.sample(behind, min(len(behind), rng.choice((1, 1, 1, 2, 3)))) if at else []
        names.append(_add(writer, rng, reads))
    return writer.graph()
