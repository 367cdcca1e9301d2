"""HEFT list scheduling (Topcuoglu, Hariri and Wu, 2002).

1. Upward ranks: `rank(i) = mean_d service_id + max over successors j of (mean copy_ij + rank(j))`.
2. In descending order of rank, place each task on the device of its earliest finish time, in idle gaps where it fits.

Extended by lanes of moldable devices and hand-overs. It ignores copy engines and memory limits.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass
from functools import lru_cache

from typing_extensions import override

from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.strategies import PlacementStrategy

Taken = list[tuple[int, int]]
"""Busy intervals of a lane, by time."""


@dataclass(frozen=True, slots=True)
class Heft(PlacementStrategy):
    """Heterogeneous Earliest Finish Time."""

    name: str = "heft"

    @override
    def place(self, problem: PlacementProblem) -> TaskPlan:
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
            if best is None:  # no link from its inputs: the plan is infeasible, which its evaluation reports
                ready = max(end[j] for j in problem.preds[i])
                best = (ready, ready, problem.devices_of(i)[0])
            end[i], start[i], place[i] = best
            for lane in problem.lanes[place[i]]:
                insort(taken[lane], (start[i], end[i]))
        # Tasks of no duration that start at the same time keep the graph's topological order.
        return TaskPlan(tuple(place), tuple(sorted(range(problem.size), key=lambda i: (start[i], end[i], i))))


@lru_cache(maxsize=4)
def upward_ranks(problem: PlacementProblem) -> tuple[int, ...]:
    """Upward rank of each task in ns: means over devices, and over pairs of spaces for copies."""
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
        ranks[i] = behind[i] + sum(times) // len(times) + 1  # strictly falling along every edge
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
    """The first time from `ready` on at which all these lanes are free for `spent` ns."""
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
