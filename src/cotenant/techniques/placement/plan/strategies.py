"""What places tasks: the protocol, the sequential execution, and the strategies of the paper.

The *base* of a task is its device in the sequential execution (the GPU, for most); its *overflow* device is the other
one on which it is quickest; of equal ones (lanes of a processor) that of its only predecessor, else each in turn.
Source: SIR+ (SYSTOR 2022), section 4 and Algorithm 1. Algorithm 1 multiplies a size by a rate, where a time is meant
(section 5 divides); it names no start, which is the assignment of SD (section 4.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.plan_loop import PENALTY

ALPHA_NS = 100_000
"""How much longer a task may take elsewhere. Source: SIR+, section 4.2."""
MOST_PASSES = 10
"""Of Algorithm 1, which ends by itself sooner: tasks only move back. Source: SIR+, section 4.3."""


class Progress(Protocol):
    """Told by long searches how far they are; gives False to end them with what they have."""

    def __call__(self, evaluated: int, best_ns: int, bound_ns: int) -> bool:
        """Whether to go on."""
        ...


class PlacementStrategy(Protocol):
    """Places the tasks of a graph. Deterministic, but for those that say how long they may take."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    def place(self, problem: PlacementProblem) -> TaskPlan:
        """A plan. It may break a memory limit where the strategy does not know of limits: see `Timeline`."""
        ...


@dataclass(frozen=True, slots=True)
class Sequential:
    """Every task on one device, those that it cannot run on their quickest: the device for which that takes least."""

    name: str = "sequential"

    def place(self, problem: PlacementProblem) -> TaskPlan:
        """See PlacementStrategy."""
        order = tuple(range(problem.size))
        places = [based_on(problem, device) for device in range(len(problem.device_names))]
        plans = [TaskPlan(tuple(place), order) for place in places]
        return min(plans, key=lambda plan: sequential_ns(problem, plan.place) or 1 << 62)


def based_on(problem: PlacementProblem, device: int) -> list[int]:
    """Every task on a device, those that it cannot run on their quickest one."""
    return [
        device if times[device] >= 0 else min(problem.devices_of(i), key=times.__getitem__)
        for i, times in enumerate(problem.service)
    ]


def sequential_ns(problem: PlacementProblem, place: Sequence[int]) -> int | None:
    """Time of a placement when nothing overlaps: services, copies and hand-overs in a row; None without a link."""
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
class QueueDelay:
    """QD: tasks that wait in the sequential execution overflow where they would end sooner; QD_all: all that wait."""

    moves_all: bool = False

    @property
    def name(self) -> str:
        """See PlacementStrategy."""
        return "qd_all" if self.moves_all else "qd"

    def place(self, problem: PlacementProblem) -> TaskPlan:
        """See PlacementStrategy."""
        plan = Sequential().place(problem)
        base = plan.place
        waits = waits_ns(problem, plan)
        return queued(
            problem,
            _overflowed(
                problem, base, lambda i, own, other: waits[i] > 0 and (self.moves_all or other < waits[i] + own)
            ),
        )


def waits_ns(problem: PlacementProblem, plan: TaskPlan) -> list[int]:
    """How long each task waits for its device after the last of its inputs was made (section 3)."""
    line = problem.evaluate(plan)
    if line is None:
        return [0] * problem.size
    ready = [max((line.end_ns[j] for j in before), default=0) for before in problem.preds]
    return [begin - at for begin, at in zip(line.start_ns, ready, strict=True)]


@dataclass(frozen=True, slots=True)
class Slowdown:
    """SD: tasks overflow that take less than `alpha_ns` longer there, also those that are quicker."""

    alpha_ns: int = ALPHA_NS
    name: str = "sd"

    def place(self, problem: PlacementProblem) -> TaskPlan:
        """See PlacementStrategy."""
        return queued(problem, self.assign(problem, Sequential().place(problem).place))

    def assign(self, problem: PlacementProblem, base: Sequence[int]) -> list[int]:
        """The devices alone."""
        return _overflowed(problem, base, lambda _, own, other: other - own < self.alpha_ns)


@dataclass(frozen=True, slots=True)
class CommSlowdown:
    """Comm+SD: of what SD moves, tasks move back whose copies make them cost more than `alpha_ns`.

    As published a copy counts once for every edge, and a task moves to the device where it is quickest, which may be
    where it is. As we read it a copy counts once for every tensor and space, and a task moves back to its base.
    """

    alpha_ns: int = ALPHA_NS
    as_published: bool = False

    @property
    def name(self) -> str:
        """See PlacementStrategy."""
        return "comm_sd_published" if self.as_published else "comm_sd"

    def place(self, problem: PlacementProblem) -> TaskPlan:
        """See PlacementStrategy."""
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
    """A placement in the better of two orders: that in which queues give the tasks out, and the sequential one."""
    plans = [problem.dispatch(place), TaskPlan(tuple(place), tuple(range(problem.size)))]
    return min(plans, key=lambda plan: makespan_ns(problem, plan))


def makespan_ns(problem: PlacementProblem, plan: TaskPlan) -> int:
    """The makespan of a plan, beyond all others where it cannot run."""
    line = problem.evaluate(plan)
    return 1 << 62 if line is None else line.makespan_ns


def _overflowed(problem: PlacementProblem, base: Sequence[int], moves: Callable[[int, int, int], bool]) -> list[int]:
    """The base placement with those tasks on their overflow device for which `moves(task, own ns, other ns)`."""
    place = list(base)
    turn = 0
    for i, times in enumerate(problem.service):
        own = set(problem.lanes[base[i]])
        others = [d for d in problem.devices_of(i) if not own & set(problem.lanes[d])]
        if not others:
            continue
        least = min(times[d] for d in others)
        equal = [d for d in others if times[d] == least]
        if moves(i, times[base[i]], least):
            near = [place[j] for j in problem.preds[i] if place[j] in equal]
            place[i] = near[0] if len(problem.preds[i]) == 1 and near else equal[turn % len(equal)]
            turn += 1
    return place
