"""Contraction of a task graph: branches become single tasks, for fewer decisions and plans robust against noise.

The graph is cut at *hubs* (tasks with many neighbours: forks and joins), and at edges between tasks with different
possible devices. A block is a connected part at the same number of cuts from the start. Edges between blocks lead to
larger numbers of cuts, so the contracted graph is acyclic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.task_graph import GraphTask, TaskGraph
from cotenant.techniques.placement.task_profile import UnitTensor


@dataclass(frozen=True, slots=True)
class Contraction:
    """A contracted graph with a task for every block. `blocks`: numbers of their tasks in the whole graph."""

    graph: TaskGraph
    blocks: tuple[tuple[int, ...], ...]

    def expand(self, plan: TaskPlan) -> TaskPlan:
        """The plan of the whole graph that keeps every block together."""
        place = {i: plan.place[number] for number, block in enumerate(self.blocks) for i in block}
        order = tuple(i for number in plan.order for i in self.blocks[number])
        return TaskPlan(tuple(place[i] for i in range(len(place))), order)

    def shrink(self, plan: TaskPlan, problem: PlacementProblem) -> TaskPlan:
        """The nearest plan of the blocks: each on the device of most of its tasks, ordered by mean position.

        `problem`: the problem of the contracted graph.
        """
        place = []
        for number, block in enumerate(self.blocks):
            votes = dict.fromkeys(problem.devices_of(number), 0)
            for i in block:
                if plan.place[i] in votes:
                    votes[plan.place[i]] += 1
            place.append(max(votes, key=lambda d: (votes[d], -d)))
        position = {i: at for at, i in enumerate(plan.order)}
        first = [sum(position[i] for i in block) // len(block) for block in self.blocks]
        missing = [len(before) for before in problem.preds]
        ready = [number for number, count in enumerate(missing) if count == 0]
        order = []
        while ready:
            number = min(ready, key=lambda each: (first[each], each))
            ready.remove(number)
            order.append(number)
            for after in problem.succs[number]:
                missing[after] -= 1
                if missing[after] == 0:
                    ready.append(after)
        return TaskPlan(tuple(place), tuple(order))


def blocks_of(problem: PlacementProblem, fan: int) -> list[list[int]]:
    """Blocks in a topological order, where tasks with `fan` or more predecessors or successors are hubs."""
    kinds = [tuple(problem.devices_of(i)) for i in range(problem.size)]
    is_hub = [
        len(before) >= fan or len(behind) >= fan for before, behind in zip(problem.preds, problem.succs, strict=True)
    ]
    depth = [0] * problem.size
    root = list(range(problem.size))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for i in range(problem.size):
        joined = [not is_hub[i] and not is_hub[j] and kinds[i] == kinds[j] for j in problem.preds[i]]
        depth[i] = max(
            (depth[j] + (0 if joins else 1) for j, joins in zip(problem.preds[i], joined, strict=True)), default=0
        )
        for j, joins in zip(problem.preds[i], joined, strict=True):
            if joins and depth[j] == depth[i]:
                root[find(i)] = find(j)
    members: dict[int, list[int]] = {}
    for i in range(problem.size):
        members.setdefault(find(i), []).append(i)
    return sorted(members.values(), key=lambda block: (depth[block[0]], block[0]))


def contract(problem: PlacementProblem, fan: int) -> Contraction:
    """The graph with contracted blocks: times and memory are sums, tensors inside a block are removed.

    Tensors of a block are available when the whole block has ended.
    """
    graph = problem.graph
    blocks = blocks_of(problem, fan)
    home = {i: number for number, block in enumerate(blocks) for i in block}
    tasks = []
    for number, block in enumerate(blocks):
        members = [graph.tasks[i] for i in block]
        names = [name for name in problem.device_names if all(name in task.compute_ns for task in members)]
        tasks.append(
            GraphTask(
                f"block{number}",
                {name: sum(task.compute_ns[name] for task in members) for name in names},
                {name: sum(task.launch_ns.get(name, 0) for task in members) for name in names},
                {name: sum(task.memory_bytes.get(name, 0) for task in members) for name in names},
            )
        )
    tensors = []
    for number, tensor in enumerate(graph.tensors):
        own = home[problem.producer[number]]
        readers = sorted({home[reader] for reader in problem.readers[number]} - {own})
        if readers:
            tensors.append(UnitTensor(tensor.name, own, tuple(readers), tensor.size_bytes))
    contracted = TaskGraph(
        graph.devices,
        tuple(tasks),
        tuple(tensors),
        graph.links,
        graph.limits_bytes,
        graph.hand_over_ns,
        graph.transfers,
    )
    return Contraction(contracted, tuple(map(tuple, blocks)))


def levels_of(problem: PlacementProblem, fans: Sequence[int]) -> list[Contraction]:
    """Contractions from coarse to fine, each with at least 25 % more blocks than the previous one."""
    found: list[Contraction] = []
    for fan in fans:
        made = contract(problem, fan)
        size = len(made.blocks)
        if size > 1 and size * 5 <= problem.size * 4 and (not found or size * 4 >= len(found[-1].blocks) * 5):
            found.append(made)
    return found
