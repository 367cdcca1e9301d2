"""Random task graphs, and the best plan of a tiny one by trying all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from random import Random

from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.task_graph import (
    DeviceLink,
    GraphTask,
    TaskDevice,
    TaskGraph,
    TransferMode,
)
from cotenant.techniques.placement.task_profile import UnitTensor

GPU_CPU = (TaskDevice("gpu"), TaskDevice("cpu"))
CORES = (TaskDevice("a", (), "host"), TaskDevice("b", (), "host"), TaskDevice("ab", ("a", "b"), "host"))


def random_graph(
    seed: int,
    size: int,
    devices: tuple[TaskDevice, ...] = GPU_CPU,
    transfers: TransferMode = TransferMode.DELAY,
    hand_over_ns: int = 0,
    reach: int = 80,
) -> TaskGraph:
    """Tasks of some microseconds, each reading up to two of the `reach` before it."""
    rng = Random(seed)
    tasks = []
    for i in range(size):
        base = 1000 * rng.randint(1, 20)
        times = {d.name: int(base * rng.uniform(0.4, 2.0)) if len(d.lanes) < 2 else base * 7 // 10 for d in devices}
        memory = {d.name: rng.randint(0, 100) for d in devices}
        tasks.append(GraphTask(f"t{i}", times, {devices[0].name: rng.randint(0, 500)}, memory))
    readers: dict[int, list[int]] = {}
    for i in range(1, size):
        for j in sorted({rng.randrange(max(0, i - reach), i) for _ in range(rng.randint(0, 2))}):
            readers.setdefault(j, []).append(i)
    tensors = [UnitTensor(f"x{j}", j, tuple(each), rng.randint(0, 6000)) for j, each in readers.items()]
    spaces = sorted({d.space for d in devices})
    links = [DeviceLink(a, b, 1e9, 1000, devices[0].name) for a in spaces for b in spaces if a != b]
    return TaskGraph(devices, tuple(tasks), tuple(tensors), tuple(links), {}, hand_over_ns, transfers)


def numbered(
    tasks: Iterable[GraphTask], tensors: Iterable[tuple[str, str, Iterable[str], int]]
) -> tuple[UnitTensor, ...]:
    """Tensors of tasks that are given by name: their own name, producer, readers and size."""
    at = {task.name: number for number, task in enumerate(tasks)}
    return tuple(
        UnitTensor(name, at[made_by], tuple(at[each] for each in read), size) for name, made_by, read, size in tensors
    )


def random_plan(problem: PlacementProblem, seed: int) -> TaskPlan:
    """Any devices, any topological order."""
    rng = Random(seed)
    place = tuple(rng.choice(problem.devices_of(i)) for i in range(problem.size))
    order: list[int] = []
    while len(order) < problem.size:
        ready = [i for i in range(problem.size) if i not in order and all(j in order for j in problem.preds[i])]
        order.append(rng.choice(ready))
    return TaskPlan(place, tuple(order))


def orders(problem: PlacementProblem, done: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """All topological orders."""
    if len(done) == problem.size:
        yield done
    for i in range(problem.size):
        if i not in done and all(j in done for j in problem.preds[i]):
            yield from orders(problem, (*done, i))


def best_of_all(problem: PlacementProblem) -> int:
    """The least makespan of all placements in all orders."""
    found = []
    sequences = list(orders(problem))
    for place in itertools.product(*(problem.devices_of(i) for i in range(problem.size))):
        for order in sequences:
            line = problem.evaluate(TaskPlan(place, order))
            if line is not None and line.is_feasible:
                found.append(line.makespan_ns)
    return min(found)
