"""Incremental evaluation: the cost of a plan that differs from a surveyed plan within a window of the order only.

Times before the window do not change. Behind it, the longest paths to the end are stored. So an evaluation costs the
width of the window. It is exact if copies are delays and hand-overs cost nothing. Otherwise it is approximate, as a
copy may move into or out of the window.
"""

from __future__ import annotations

from typing import NamedTuple

from cotenant.inner_loop import Ints
from cotenant.techniques.placement.plan.plan_loop import IMPOSSIBLE, FlatGraph, PlanScratch, clear, cost_of, play

_BEFORE = 1 << 58
"""Value of `seen` for a copy that was made before the window."""
_FAR = 1 << 58


class View(NamedTuple):
    """The plan around a window.

    - `free`, `busy`, by resource: when it is free at the window's start, and its busy time outside the window.
    - `ways`, by resource: longest path from its first use behind the window to the end.
    - `readers`, by tensor and space: longest path from a reader behind the window, -1 without one; `out`: the same from
      a task's end, by task and space.
    - `arrived`, `seen`: as in `PlanScratch`; `data`: scratch; `marks`: the ends of the window, and the makespan of the
      rest.
    """

    free: Ints
    busy: Ints
    ways: Ints
    arrived: Ints
    seen: Ints
    readers: Ints
    out: Ints
    data: Ints
    marks: Ints


def survey(
    g: FlatGraph, w: PlanScratch, v: View, order: Ints, place: Ints, position: Ints, low: int, high: int
) -> None:
    """Fill the view of the window [low, high) of a feasible plan."""
    _look_forward(g, w, v, order, place, low, high)
    _look_back(g, w, v, order, place, high)
    n, spaces = g.sizes[0], g.sizes[2]
    rest = 0
    for p in range(low):
        rest = max(rest, w.end[order[p]])
    for x in range(n * spaces):
        v.out[x] = 0
    for p in range(high):  # the paths behind, including those over queued copies
        j = order[p]
        if p < low:
            rest = max(rest, w.end[j] + v.data[j])
        else:
            v.out[j * spaces + g.space[place[j]]] = v.data[j]
    for t in range(len(g.producer)):
        j = g.producer[t]
        if position[j] >= high:
            continue
        mine = g.space[place[j]]
        for s in range(spaces):
            key = t * spaces + s
            way = v.readers[key]
            if way < 0:
                continue
            for r in range(spaces):
                cost = g.copy[(t * spaces + r) * spaces + s]
                v.out[j * spaces + r] = max(v.out[j * spaces + r], _FAR if cost < 0 else cost + way)
            if position[j] < low:
                at = w.end[j] + g.copy[(t * spaces + mine) * spaces + s]
                if s != mine and v.seen[key] == _BEFORE:
                    at = v.arrived[key]
                rest = max(rest, at + way)
    v.marks[0] = low
    v.marks[1] = high
    v.marks[2] = rest


def _look_forward(g: FlatGraph, w: PlanScratch, v: View, order: Ints, place: Ints, low: int, high: int) -> None:
    clear(g, w)
    _play_between(g, w, v, order, place, 0, low)
    for x in range(g.sizes[4]):
        v.free[x] = w.free[x]
        v.busy[x] = w.busy[x]
    for key in range(len(v.seen)):
        v.seen[key] = _BEFORE if w.seen[key] == w.stamp[0] else 0
        v.arrived[key] = w.arrived[key]
    _play_between(g, w, v, order, place, low, high)
    for x in range(g.sizes[4]):
        v.busy[x] -= w.busy[x]
    _play_between(g, w, v, order, place, high, g.sizes[0])
    for x in range(g.sizes[4]):
        v.busy[x] += w.busy[x]


def _play_between(g: FlatGraph, w: PlanScratch, v: View, order: Ints, place: Ints, low: int, high: int) -> None:
    v.marks[0] = low
    v.marks[1] = high
    play(g, w, order, place, v.marks, w.arrived, w.seen, w.zeros, w.zeros, IMPOSSIBLE)


def _look_back(g: FlatGraph, w: PlanScratch, v: View, order: Ints, place: Ints, high: int) -> None:
    n, devices, spaces = g.sizes[0], g.sizes[1], g.sizes[2]
    for x in range(g.sizes[4]):
        v.ways[x] = 0
    for i in range(n):
        v.data[i] = 0
    for key in range(len(v.readers)):
        v.readers[key] = -1
    for p in range(n - 1, high - 1, -1):
        i = order[p]
        d = place[i]
        s = g.space[d]
        way = v.data[i]
        for k in range(g.lane_start[d], g.lane_start[d + 1]):
            way = max(way, v.ways[g.lanes[k]])
        way += g.service[i * devices + d]
        for k in range(g.in_start[i], g.in_start[i + 1]):
            if place[g.producer[g.in_tensor[k]]] != d:
                way += g.sizes[5]
                break
        for k in range(g.lane_start[d], g.lane_start[d + 1]):
            v.ways[g.lanes[k]] = way
        for k in range(g.in_start[i + 1] - 1, g.in_start[i] - 1, -1):
            t = g.in_tensor[k]
            j = g.producer[t]
            r = g.space[place[j]]
            key = t * spaces + s
            v.readers[key] = max(v.readers[key], way)
            before = v.readers[key]
            if r != s:
                cost = g.copy[(t * spaces + r) * spaces + s]
                x = g.engine[r * spaces + s]
                if x >= 0 and w.requester[key] == p:
                    before = max(before, v.ways[x])
                    v.ways[x] = before + cost
                before += cost
            v.data[j] = max(v.data[j], before)


def look(
    g: FlatGraph, w: PlanScratch, v: View, order: Ints, place: Ints, cutoff: int, weights: Ints, used: Ints
) -> int:
    """Cost (`plan_loop.cost_of`) of a plan that differs from the surveyed one within the window only.

    `used`: bytes by space. Returns IMPOSSIBLE as soon as the makespan exceeds `cutoff`.
    """
    for x in range(g.sizes[4]):
        w.free[x] = v.free[x]
        w.busy[x] = v.busy[x]
    w.stamp[0] += 1
    makespan = play(g, w, order, place, v.marks, v.arrived, v.seen, v.out, v.readers, cutoff)
    for x in range(g.sizes[4]):
        if w.free[x] + v.ways[x] > makespan:
            makespan = w.free[x] + v.ways[x]
    if makespan >= _FAR:
        return IMPOSSIBLE
    for s in range(g.sizes[2]):
        w.used[s] = used[s]
    return cost_of(g, w, makespan, weights)
