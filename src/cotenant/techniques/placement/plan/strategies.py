"""Placement strategies of SIR+ (SYSTOR 2022, section 4 and Algorithm 1), their protocol, and sequential execution.

Let `b` be the base device of a task (in the sequential execution, mostly the GPU) and `o` its overflow device, the
fastest other one. With service times `t_b`, `t_o`, queueing delay `w` and `alpha`, the task overflows to `o` if

- QD_all: `w > 0`. QD: `w > 0` and `t_o < w + t_b` (section 4.1).
- SD: `t_o - t_b < alpha` (section 4.2).
- Comm+SD: as SD; then it moves back to `b` if `t_o + copies > t_b + alpha`, repeated until no task moves (section 4.3).

Of equally fast devices (lanes of a processor), `o` is that of the task's only predecessor, else each in turn.
Algorithm 1 multiplies size and rate where section 5 divides; here copies take `size / rate`. Its start is that of SD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.plan_loop import PENALTY

ALPHA_NS = 100_000
"""Largest slowdown of an overflowing task in ns. Source: SIR+, section 4.2."""
MOST_PASSES = 10
"""Most passes of Algorithm 1 (SIR+, section 4.3), which ends sooner as tasks only move back."""


class Progress(Protocol):
    """Callback of long searches with their progress."""

    def __call__(self, evaluated: int, best_ns: int, bound_ns: int) -> bool:
        """Whether to continue; False ends the search with its best plan."""
        ...


class PlacementStrategy(Protocol):
    """Places the tasks of a graph. Deterministic, except for strategies with a time limit."""

    @property
    def name(self) -> str:
        """Name in tables."""
        ...

    def place(self, problem: PlacementProblem) -> TaskPlan:
        """A plan. Strategies that ignore memory limits may break them: see `Timeline`."""
        ...


@dataclass(frozen=True, slots=True)
class Sequential(PlacementStrategy):
    """All tasks on the one device of the least total time; tasks that it cannot run, on their fastest device."""

    name: str = "sequential"

    @override
    def place(self, problem: PlacementProblem) -> TaskPlan:
        order = tuple(range(problem.size))
        places = [based_on(problem, device) for device in range(len(problem.device_names))]
        plans = [TaskPlan(tuple(place), order) for place in places]
        return min(plans, key=lambda plan: sequential_ns(problem, plan.place) or 1 << 62)


def based_on(problem: PlacementProblem, device: int) -> list[int]:
    """All tasks on one device, and those that it cannot run on their fastest device."""
    return [
        device if times[device] >= 0 else min(problem.devices_of(i), key=times.__getitem__)
        for i, times in enumerate(problem.service)
    ]


def sequential_ns(problem: PlacementProblem, place: Sequence[int]) -> int | None:
    """Time of a placement without overlap: sum of services, copies and hand-overs; None without a link."""
    total = 0
    copied = set()
    for i, times in enumerate(problem.service):
        total += times[place[i]]
        crossing = [t for t in problem.inputs[i] if place[problem.producer[t]] != place[i]]
        total += problem.graph.hand_over_ns if crossing else 0
        target = problem.space[place[i]]
        for tensor in crossing:
            source = problem.space[place[problem.producer[tensor]]]
            cost = problem.copy_ns(tensor, source, target)
            if cost < 0:
                return None
            if source != target and (tensor, target) not in copied:
                copied.add((tensor, target))
                total += cost
    return total


@dataclass(frozen=True, slots=True)
class QueueDelay(PlacementStrategy):
    """QD, or QD_all with `moves_all`: queued tasks overflow if they end sooner; QD_all moves all queued tasks."""

    moves_all: bool = False

    @property
    @override
    def name(self) -> str:
        return "qd_all" if self.moves_all else "qd"

    @override
    def place(self, problem: PlacementProblem) -> TaskPlan:
        plan = Sequential().place(problem)
        base = plan.place
        delays = queueing_delays_ns(problem, plan)
        return queued(
            problem,
            _overflowed(
                problem, base, lambda i, own, other: delays[i] > 0 and (self.moves_all or other < delays[i] + own)
            ),
        )


def queueing_delays_ns(problem: PlacementProblem, plan: TaskPlan) -> list[int]:
    """Queueing delay of each task in ns: its wait for the device after its last input was made (section 3)."""
    line = problem.evaluate(plan)
    if line is None:
        return [0] * problem.size
    ready = [max((line.end_ns[j] for j in before), default=0) for before in problem.preds]
    return [begin - at for begin, at in zip(line.start_ns, ready, strict=True)]


@dataclass(frozen=True, slots=True)
class Slowdown(PlacementStrategy):
    """SD: tasks overflow that take less than `alpha_ns` longer on the overflow device, or less time."""

    alpha_ns: int = ALPHA_NS
    name: str = "sd"

    @override
    def place(self, problem: PlacementProblem) -> TaskPlan:
        return queued(problem, self.assign(problem, Sequential().place(problem).place))

    def assign(self, problem: PlacementProblem, base: Sequence[int]) -> list[int]:
        """The devices of all tasks."""
        return _overflowed(problem, base, lambda _, own, other: other - own < self.alpha_ns)


@dataclass(frozen=True, slots=True)
class CommSlowdown(PlacementStrategy):
    """Comm+SD: as SD, but tasks move back to their base device if their copies cost more than `alpha_ns` allows.

    `as_published`: a copy counts once per edge, and a task moves to its fastest device, which may be the present one.
    Otherwise a copy counts once per tensor and space, and a task moves back to its base device.
    """

    alpha_ns: int = ALPHA_NS
    as_published: bool = False

    @property
    @override
    def name(self) -> str:
        return "comm_sd_published" if self.as_published else "comm_sd"

    @override
    def place(self, problem: PlacementProblem) -> TaskPlan:
        base = Sequential().place(problem).place
        place = Slowdown(self.alpha_ns).assign(problem, base)
        outputs: list[list[int]] = [[] for _ in place]
        for tensor, producer in enumerate(problem.producer):
            outputs[producer].append(tensor)
        for _ in range(MOST_PASSES):
            before = list(place)
            for i, times in enumerate(problem.service):
                home = base[i]
                if self.as_published:
                    home = min(problem.devices_of(i), key=lambda d: (times[d], d != place[i]))
                if home != place[i]:
                    comm = self._comm_ns(problem, place, i, outputs[i])
                    if times[place[i]] + comm > times[home] + self.alpha_ns:
                        place[i] = home
            if place == before:
                break
        return queued(problem, place)

    def _comm_ns(self, problem: PlacementProblem, place: Sequence[int], i: int, outputs: Sequence[int]) -> int:
        space = problem.space
        here = space[place[i]]
        ways = [(t, space[place[problem.producer[t]]], here) for t in problem.inputs[i]]
        for t in outputs:
            targets = [space[place[reader]] for reader in problem.readers[t]]
            ways += [(t, here, target) for target in (targets if self.as_published else dict.fromkeys(targets))]
        costs = [problem.copy_ns(*way) for way in ways]
        return PENALTY if any(cost < 0 for cost in costs) else sum(costs)


def queued(problem: PlacementProblem, place: Sequence[int]) -> TaskPlan:
    """A placement in the better of two orders: that of FIFO device queues, and the sequential order."""
    plans = [problem.dispatch(place), TaskPlan(tuple(place), tuple(range(problem.size)))]
    return min(plans, key=lambda plan: makespan_ns(problem, plan))


def makespan_ns(problem: PlacementProblem, plan: TaskPlan) -> int:
    """The makespan of a plan; larger than all others if the plan cannot run."""
    line = problem.evaluate(plan)
    return 1 << 62 if line is None else line.makespan_ns


def _overflowed(problem: PlacementProblem, base: Sequence[int], moves: Callable[[int, int, int], bool]) -> list[int]:
    """The base placement, with the tasks for which `moves(task, own ns, other ns)` on their overflow devices."""
    place = list(base)
    next_equal = 0
    for i, times in enumerate(problem.service):
        own = set(problem.lanes[base[i]])
        others = [d for d in problem.devices_of(i) if not own & set(problem.lanes[d])]
        if not others:
            continue
        least = min(times[d] for d in others)
        equal = [d for d in others if times[d] == least]
        if moves(i, times[base[i]], least):
            near = [place[j] for j in problem.preds[i] if place[j] in equal]
            place[i] = near[0] if len(problem.preds[i]) == 1 and near else equal[next_equal % len(equal)]
            next_equal += 1
    return place
