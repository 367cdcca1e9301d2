"""HEFT: tasks by their upward rank, each on the device where it ends first, in gaps between others where it fits.

Source: Topcuoglu, Hariri and Wu (2002), with lanes for moldable devices. It knows no copy engines and no memory limits.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass
from functools import lru_cache

from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan

Taken = list[tuple[int, int]]
"""When a lane is busy, by time."""


@dataclass(frozen=True, slots=True)
class Heft:
    """See above."""

    name: str = "heft"

    def place(self, problem: PlacementProblem) -> TaskPlan:
        """See PlacementStrategy."""
        ranks = upward_ranks(problem)
        taken: list[Taken] = [[] for _ in problem.lane_names]
        place = [-1] * problem.size
        start, end = [0] * problem.size, [0] * problem.size
        for i in sorted(range(problem.size), key=lambda i: (-ranks[i], i)):
            best: tuple[int, int, int] | None = None
            for d in problem.devices_of(i):
                ready = _ready(problem, i, d, place, end)
                if ready is None:
                    continue
                hand = any(place[j] != d for j in problem.preds[i]) * problem.graph.hand_over_ns
                spent = problem.service[i][d] + hand
                begin = _gap([taken[lane] for lane in problem.lanes[d]], ready, spent)
                if best is None or begin + spent < best[0]:
                    best = (begin + spent, begin, d)
            if best is None:  # no link from where its inputs are: the plan cannot run, and its evaluation says so
                ready = max(end[j] for j in problem.preds[i])
                best = (ready, ready, problem.devices_of(i)[0])
            end[i], start[i], place[i] = best
            for lane in problem.lanes[place[i]]:
                insort(taken[lane], (start[i], end[i]))
        # Of tasks that take no time and start at once, what is read must stand first: as in the graph.
        return TaskPlan(tuple(place), tuple(sorted(range(problem.size), key=lambda i: (start[i], end[i], i))))


@lru_cache(maxsize=4)
def upward_ranks(problem: PlacementProblem) -> tuple[int, ...]:
    """Mean time from the start of each task to the end of all, in ns: means over devices, and over pairs for copies."""
    spaces = range(len(problem.space_names))
    pairs = [(a, b) for a in spaces for b in spaces if a != b]
    mean_copy = []
    for tensor in range(len(problem.producer)):
        costs = [cost for a, b in pairs if (cost := problem.copy_ns(tensor, a, b)) >= 0]
        mean_copy.append(sum(costs) // (len(spaces) ** 2) if costs else 0)
    ranks = [0] * problem.size
    behind = [0] * problem.size
    for i in reversed(range(problem.size)):
        times = [time for time in problem.service[i] if time >= 0]
        ranks[i] = behind[i] + sum(times) // len(times) + 1  # so that it falls along every edge
        for tensor in problem.inputs[i]:
            j = problem.producer[tensor]
            behind[j] = max(behind[j], ranks[i] + mean_copy[tensor])
    return tuple(ranks)


def _ready(problem: PlacementProblem, i: int, device: int, place: list[int], end: list[int]) -> int | None:
    ready = 0
    for tensor in problem.inputs[i]:
        j = problem.producer[tensor]
        cost = problem.copy_ns(tensor, problem.space[place[j]], problem.space[device])
        if cost < 0:
            return None
        ready = max(ready, end[j] + cost)
    return ready


def _gap(lanes: list[Taken], ready: int, spent: int) -> int:
    """The first time from `ready` on at which all of these lanes are free for long enough."""
    begin = ready
    while True:
        found = begin
        for taken in lanes:
            at = bisect_right(taken, (found, 1 << 62))
            if at and taken[at - 1][1] > found:
                found = taken[at - 1][1]
            while at < len(taken) and taken[at][0] < found + spent:
                found = max(found, taken[at][1])
                at += 1
        if found == begin:
            return begin
        begin = found
