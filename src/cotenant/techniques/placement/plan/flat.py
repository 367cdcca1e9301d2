"""Placement problems: a task graph as flat arrays, with the one evaluator of plans for all strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cotenant.errors import InvalidValueError
from cotenant.inner_loop import InnerLoops, Ints, best_loops, plain_loops
from cotenant.techniques.placement.plan import annealing, plan_loop, window
from cotenant.techniques.placement.plan.plan_loop import IMPOSSIBLE, FlatGraph, PlanScratch
from cotenant.techniques.placement.plan.task_graph import TaskGraph, TransferMode
from cotenant.techniques.placement.plan.window import View

LOOPS = (plan_loop, window, annealing)
"""The inner loops of placement, in the order of compilation by `best_loops`."""
PLAIN = plain_loops(*LOOPS)


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """A placement: `place[i]` is the device of task i; `order` lists all tasks in a topological order.

    Every device runs its tasks in that order, one at a time.
    """

    place: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Evaluated plan, in ns and bytes: start and end by task, busy time by resource, task memory by space.

    Resources are the lanes, in the order of the devices, then the copy engines. A task starts when it occupies its
    lanes, hand-over included.
    """

    makespan_ns: int
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]
    busy_ns: tuple[int, ...]
    used_bytes: tuple[int, ...]
    over_bytes: int

    @property
    def period_ns(self) -> int:
        """Busy time of the busiest resource: the least period of a stream of queries."""
        return max(self.busy_ns)

    @property
    def is_feasible(self) -> bool:
        """Whether no memory limit is exceeded."""
        return self.over_bytes == 0


class PlacementProblem:
    """A task graph prepared for evaluation. `loops`: LOOPS, compiled or plain (by default compiled if possible).

    Pure from outside, but with scratch memory: use a problem in one thread at a time.
    """

    def __init__(self, graph: TaskGraph, loops: InnerLoops | None = None) -> None:
        self.graph = graph
        self.loops = loops or best_loops(*LOOPS)
        self.device_names = tuple(device.name for device in graph.devices)
        self.space_names = tuple(dict.fromkeys(device.space for device in graph.devices))
        self.lane_names = tuple(dict.fromkeys(lane for device in graph.devices for lane in device.lanes))
        self.size = len(graph.tasks)
        self.space = [self.space_names.index(device.space) for device in graph.devices]
        self.lanes = [tuple(self.lane_names.index(lane) for lane in device.lanes) for device in graph.devices]
        self.service = [
            [task.service_ns(name) if name in task.compute_ns else -1 for name in self.device_names]
            for task in graph.tasks
        ]
        self.memory = [[task.memory_bytes.get(name, 0) for name in self.device_names] for task in graph.tasks]
        self.producer = [tensor.producer for tensor in graph.tensors]
        self.readers = [tuple(dict.fromkeys(tensor.readers)) for tensor in graph.tensors]
        self.inputs: list[list[int]] = [[] for _ in graph.tasks]
        for tensor, readers in enumerate(self.readers):
            for reader in readers:
                self.inputs[reader].append(tensor)
        self.preds = [sorted({self.producer[tensor] for tensor in tensors}) for tensors in self.inputs]
        self.succs: list[list[int]] = [[] for _ in graph.tasks]
        for i, before in enumerate(self.preds):
            for j in before:
                self.succs[j].append(i)
        ways = {(link.source, link.target): link for link in graph.links}
        self._links = [[ways.get((a, b)) for b in self.space_names] for a in self.space_names]
        self.limits = [graph.limits_bytes.get(name, -1) for name in self.space_names]
        self.flat = self._flat()
        self.scratch = scratch_of(self.flat, self.loops)
        self.view = self._view()

    def devices_of(self, task: int) -> list[int]:
        """The devices that can run a task."""
        return [d for d, time in enumerate(self.service[task]) if time >= 0]

    def copy_ns(self, tensor: int, source: int, target: int) -> int:
        """Time to copy a tensor between two spaces: 0 within one, -1 without a link."""
        if source == target:
            return 0
        link = self._links[source][target]
        return -1 if link is None else link.transfer_ns(self.graph.tensors[tensor].size_bytes)

    def engine_of(self, source: int, target: int) -> int:
        """The resource of copies between two spaces, -1 for none."""
        return self._engines()[0][source * len(self.space_names) + target]

    @cached_property
    def service_array(self) -> NDArray[np.float64]:
        """Service times by task and device, infinite where a task cannot run."""
        times = np.array(self.service, dtype=np.float64)
        times[times < 0] = np.inf
        return times

    @cached_property
    def resources(self) -> tuple[str, ...]:
        """Names of the resources: lanes, then copy engines."""
        return (*self.lane_names, *self._engines()[1])

    def evaluate(self, plan: TaskPlan) -> Timeline | None:
        """The timeline of a plan; None if it copies between spaces without a link.

        Raises InvalidValueError for a device that cannot run its task, and an order that is not topological.
        """
        self._check(plan)
        ints = self.loops.ints
        makespan = self.loops[plan_loop].evaluate(self.flat, self.scratch, ints(plan.order), ints(plan.place))
        if makespan >= IMPOSSIBLE:
            return None
        used = tuple(map(int, self.scratch.used))
        return Timeline(
            int(makespan),
            tuple(map(int, self.scratch.start)),
            tuple(map(int, self.scratch.end)),
            tuple(map(int, self.scratch.busy)),
            used,
            sum(max(0, held - limit) for held, limit in zip(used, self.limits, strict=True) if limit >= 0),
        )

    def dispatch(self, place: Sequence[int], priority: Sequence[int] | None = None) -> TaskPlan:
        """The placement in the order of device queues: by arrival, or by priority (the highest first)."""
        ints = self.loops.ints
        order = ints([0] * self.size)
        self.loops[plan_loop].dispatch(
            self.flat,
            self.scratch,
            ints(place),
            ints(priority if priority is not None else [0] * self.size),
            int(priority is None),
            order,
            ints([0] * (3 * self.size)),
        )
        return TaskPlan(tuple(place), tuple(map(int, order)))

    def _check(self, plan: TaskPlan) -> None:
        where = f"plan of {self.size} tasks"
        if sorted(plan.order) != list(range(self.size)) or len(plan.place) != self.size:
            raise InvalidValueError(where, "order", len(plan.order), "every task of the graph once")
        position = {task: at for at, task in enumerate(plan.order)}
        for i, (device, before) in enumerate(zip(plan.place, self.preds, strict=True)):
            if not 0 <= device < len(self.device_names) or self.service[i][device] < 0:
                name = self.graph.tasks[i].name
                raise InvalidValueError(where, f"device of {name!r}", device, "one that can run it")
            at = position[i]
            for j in before:
                if position[j] > at:
                    names = [self.graph.tasks[task].name for task in (i, j)]
                    raise InvalidValueError(where, "order", names, "readers behind what they read")

    def _engines(self) -> tuple[list[int], list[str]]:
        """Resource of copies by pair of spaces, -1 for none; and names of the engines."""
        engines: list[int] = []
        names: list[str] = []
        for row in self._links:
            for link in row:
                number = -1
                if link is not None and self.graph.transfers is TransferMode.ENGINE:
                    number = len(self.lane_names) + len(names)
                    names.append(f"{link.source}>{link.target}")
                elif link is not None and self.graph.transfers is TransferMode.LANE:
                    driver = link.driver or next(
                        device.name for device in self.graph.devices if device.space in (link.source, link.target)
                    )
                    number = self.lanes[self.device_names.index(driver)][0]
                engines.append(number)
        return engines, names

    def _flat(self) -> FlatGraph:
        ints = self.loops.ints
        spaces = range(len(self.space_names))
        engines, names = self._engines()
        in_start, in_tensor = _starts(self.inputs)
        lane_start, lanes = _starts(self.lanes)
        pred_start, preds = _starts(self.preds)
        succ_start, succs = _starts(self.succs)
        return FlatGraph(
            sizes=ints(
                [
                    *(self.size, len(self.device_names), len(spaces)),
                    *(len(self.lane_names), len(self.lane_names) + len(names), self.graph.hand_over_ns),
                ]
            ),
            service=ints([time for times in self.service for time in times]),
            memory=ints([held for row in self.memory for held in row]),
            in_start=ints(in_start),
            in_tensor=ints(in_tensor),
            producer=ints(self.producer),
            copy=ints([self.copy_ns(t, a, b) for t in range(len(self.producer)) for a in spaces for b in spaces]),
            space=ints(self.space),
            lane_start=ints(lane_start),
            lanes=ints(lanes),
            engine=ints(engines),
            limits=ints(self.limits),
            pred_start=ints(pred_start),
            preds=ints(preds),
            succ_start=ints(succ_start),
            succs=ints(succs),
        )

    def _view(self) -> View:
        resources, spaces = len(self.resources), len(self.space_names)
        copies = len(self.producer) * spaces
        sizes = (resources, resources, resources, copies, copies, copies, self.size * spaces, self.size, 3)
        return View(*(self.loops.ints([0] * size) for size in sizes))


def scratch_of(g: FlatGraph, loops: InnerLoops) -> PlanScratch:
    """Scratch memory for evaluations of a graph."""
    n, spaces, resources = (int(g.sizes[at]) for at in (0, 2, 4))
    copies = len(g.producer) * spaces
    sizes = (n, n, resources, resources, spaces, copies, copies, copies, max(copies, n * spaces))
    return PlanScratch(*map(loops.ints, (*([0] * size for size in sizes), [0, n, 0], [0])))


def _starts(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Start of each row (and the end), and all rows as one sequence."""
    starts: Ints = [0]
    flat: Ints = []
    for row in rows:
        flat.extend(row)
        starts.append(len(flat))
    return starts, flat
