"""A window of a plan's order: what a plan costs that differs from another one inside the window alone.

What lies before the window does not change, and of what lies behind it the longest ways to the end are known: so an
evaluation costs no more than the window is wide. That is exact where copies are delays and hand-overs cost nothing;
else it is near: whether a copy is made before, in or behind the window may change.
"""

from __future__ import annotations

from typing import NamedTuple

from cotenant.techniques.placement.plan.kernels import IMPOSSIBLE, FlatGraph, Ints, Scratch, cost_of

_NEVER = 1 << 40
_FAR = 1 << 58


class View(NamedTuple):
    """What a window sees of the plan around it.

    `free` and `busy` by resource: when it is free at the window's start, and its busy time outside the window. `ways`:
    from the first thing behind the window that takes the resource to the end. `copied`, `copied_at`: by tensor and
    space when its copy is there and the place of the task that asked for it. `readers`: by tensor and space the longest
    way from a reader behind the window to the end, -1 without one; `out`: by task and space, from its end. `data` is
    scratch. `marks`: the window's two ends, and what the rest of the plan makes of the makespan.
    """

    free: Ints
    busy: Ints
    ways: Ints
    copied: Ints
    copied_at: Ints
    readers: Ints
    out: Ints
    data: Ints
    marks: Ints


def survey(g: FlatGraph, w: Scratch, v: View, order: Ints, place: Ints, position: Ints, low: int, high: int) -> None:
    """Look around from the window [low, high) of a plan that can run."""
    _look_forward(g, w, v, order, place, low, high)
    _look_back(g, v, order, place, high)
    n, spaces = g.sizes[0], g.sizes[2]
    rest = 0
    for p in range(low):
        rest = max(rest, w.end[order[p]])
    for x in range(n * spaces):
        v.out[x] = 0
    for p in range(high):  # the ways behind, those by copies that take turns with others included
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
                if s != mine and v.copied_at[key] < low:
                    at = v.copied[key]
                rest = max(rest, at + way)
    v.marks[0] = low
    v.marks[1] = high
    v.marks[2] = rest


def _look_forward(g: FlatGraph, w: Scratch, v: View, order: Ints, place: Ints, low: int, high: int) -> None:
    n, devices, spaces, resources, hand = g.sizes[0], g.sizes[1], g.sizes[2], g.sizes[4], g.sizes[5]
    free, busy = w.free, w.busy
    for x in range(resources):
        free[x] = 0
        busy[x] = 0
        v.free[x] = 0
        v.busy[x] = 0
    for key in range(len(v.copied_at)):
        v.copied_at[key] = _NEVER
    for p in range(n):
        if p == low:
            for x in range(resources):
                v.free[x] = free[x]
                v.busy[x] += busy[x]
        if p == high:
            for x in range(resources):
                v.busy[x] -= busy[x]
        i = order[p]
        d = place[i]
        s = g.space[d]
        ready = 0
        spent = g.service[i * devices + d]
        crossed = 0
        for k in range(g.in_start[i], g.in_start[i + 1]):
            t = g.in_tensor[k]
            j = g.producer[t]
            at = w.end[j]
            if place[j] != d:
                crossed = hand
                r = g.space[place[j]]
                if r != s:
                    key = t * spaces + s
                    if v.copied_at[key] == _NEVER:
                        cost = g.copy[(t * spaces + r) * spaces + s]
                        x = g.engine[r * spaces + s]
                        if x >= 0:
                            at = max(at, free[x])
                            free[x] = at + cost
                            busy[x] += cost
                        v.copied[key] = at + cost
                        v.copied_at[key] = p
                    at = v.copied[key]
            ready = max(ready, at)
        for k in range(g.lane_start[d], g.lane_start[d + 1]):
            ready = max(ready, free[g.lanes[k]])
        done = ready + spent + crossed
        for k in range(g.lane_start[d], g.lane_start[d + 1]):
            free[g.lanes[k]] = done
            busy[g.lanes[k]] += spent + crossed
        w.end[i] = done
    if high < n:
        for x in range(resources):
            v.busy[x] += busy[x]


def _look_back(g: FlatGraph, v: View, order: Ints, place: Ints, high: int) -> None:
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
                if x >= 0 and v.copied_at[key] == p:
                    before = max(before, v.ways[x])
                    v.ways[x] = before + cost
                before += cost
            v.data[j] = max(v.data[j], before)


def look(g: FlatGraph, w: Scratch, v: View, order: Ints, place: Ints, cutoff: int, weights: Ints, used: Ints) -> int:
    """What a plan costs that differs from the surveyed one inside the window alone, as `kernels.cost_of` says.

    `used` are the bytes by space. Gives IMPOSSIBLE as soon as the makespan is known to exceed `cutoff`.
    """
    devices, spaces, resources, hand = g.sizes[1], g.sizes[2], g.sizes[4], g.sizes[5]
    service, in_start, in_tensor, producer = g.service, g.in_start, g.in_tensor, g.producer
    copy, space, lane_start, lanes = g.copy, g.space, g.lane_start, g.lanes
    end, free, busy, out = w.end, w.free, w.busy, v.out
    low = v.marks[0]
    makespan = v.marks[2]
    for x in range(resources):
        free[x] = v.free[x]
        busy[x] = v.busy[x]
    stamp = w.stamp[0] + 1
    w.stamp[0] = stamp
    for p in range(low, v.marks[1]):
        i = order[p]
        d = place[i]
        s = space[d]
        ready = 0
        spent = service[i * devices + d]
        crossed = 0
        for k in range(in_start[i], in_start[i + 1]):
            t = in_tensor[k]
            j = producer[t]
            at = end[j]
            e = place[j]
            if e != d:
                crossed = hand
                r = space[e]
                if r != s:
                    cost = copy[(t * spaces + r) * spaces + s]
                    if cost < 0:
                        return IMPOSSIBLE
                    x = g.engine[r * spaces + s]
                    if x < 0:
                        at += cost
                    else:
                        key = t * spaces + s
                        if v.copied_at[key] < low:
                            at = v.copied[key]
                        elif w.seen[key] == stamp:
                            at = w.arrived[key]
                        else:
                            if free[x] > at:
                                at = free[x]
                            at += cost
                            free[x] = at
                            busy[x] += cost
                            w.seen[key] = stamp
                            w.arrived[key] = at
                            if at + v.readers[key] > makespan:
                                makespan = at + v.readers[key]
            if at > ready:
                ready = at
        for k in range(lane_start[d], lane_start[d + 1]):
            if free[lanes[k]] > ready:
                ready = free[lanes[k]]
        spent += crossed
        done = ready + spent
        for k in range(lane_start[d], lane_start[d + 1]):
            free[lanes[k]] = done
            busy[lanes[k]] += spent
        end[i] = done
        done += out[i * spaces + s]
        if done > makespan:
            makespan = done
            if done > cutoff:
                return IMPOSSIBLE
    for x in range(resources):
        if free[x] + v.ways[x] > makespan:
            makespan = free[x] + v.ways[x]
    if makespan >= _FAR:
        return IMPOSSIBLE
    for s in range(spaces):
        w.used[s] = used[s]
    return cost_of(g, w, makespan, weights)
