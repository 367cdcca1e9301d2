"""The evaluator of plans and the orders of queues, as an inner loop over flat sequences of integers (`inner_loop`).

There are only integers here, so both forms give the same numbers.
"""

from __future__ import annotations

from typing import NamedTuple

from cotenant.inner_loop import Ints

IMPOSSIBLE = 1 << 61
"""What a plan costs that needs a copy between spaces without a link."""
PENALTY = 1 << 52
"""What a plan costs more that breaks a limit: beyond every cost of one that breaks none (52 days in nanoseconds)."""
UNIT = 1024
"""Weights of an objective are shares of this."""


class FlatGraph(NamedTuple):
    """A task graph as numbers. Tasks, devices, lanes, spaces and tensors count from 0.

    `sizes`: tasks, devices, spaces, lanes, resources (lanes and copy engines), hand-over ns. `service` and `memory` are
    by task and device (-1: cannot run), `copy` by tensor and both spaces (-1: no link). `engine` is the resource of
    copies between two spaces, -1 for none. `limits` are by space, -1 for none. What `_start` names is where the entries
    of each task or device begin in the sequence beside it.
    """

    sizes: Ints
    service: Ints
    memory: Ints
    in_start: Ints
    in_tensor: Ints
    producer: Ints
    copy: Ints
    space: Ints
    lane_start: Ints
    lanes: Ints
    engine: Ints
    limits: Ints
    pred_start: Ints
    preds: Ints
    succ_start: Ints
    succs: Ints


class PlanScratch(NamedTuple):
    """What evaluations write: starts and ends by task, by resource when it is free and how long it was busy, bytes by
    space.

    `arrived` holds by tensor and space when a copy by an engine is there, in the evaluation that `seen` names, and
    `asked` the place in the order of the task that asked for it; `stamp[0]` is the number of the latest evaluation.
    `marks` are those of `play` for a whole plan, and `zeros` the times behind it, by task and space or by tensor and
    space.
    """

    start: Ints
    end: Ints
    free: Ints
    busy: Ints
    used: Ints
    arrived: Ints
    seen: Ints
    asked: Ints
    zeros: Ints
    marks: Ints
    stamp: Ints


class FlatTaskPlan(NamedTuple):
    """A plan as numbers: tasks in their order, the device of each task, and the position of each task in the order."""

    order: Ints
    place: Ints
    position: Ints


def clear(g: FlatGraph, w: PlanScratch) -> None:
    """Make all resources free, and forget the copies of the evaluation before."""
    for x in range(g.sizes[4]):
        w.free[x] = 0
        w.busy[x] = 0
    w.stamp[0] += 1


def play(
    g: FlatGraph,
    w: PlanScratch,
    order: Ints,
    place: Ints,
    marks: Ints,
    arrived: Ints,
    seen: Ints,
    behind: Ints,
    readers: Ints,
    cutoff: int,
) -> int:
    """Time the tasks from `marks[0]` to before `marks[1]` of an order, each where it is placed, and give the makespan.

    Every lane runs its tasks one at a time in that order; a copy is queued when the first reader in that order comes
    up. `marks[2]` is what the rest of the plan makes of the makespan; `behind` are times from a task's end to the end
    of all, by task and space, `readers` those from a copy's end, by tensor and space. `arrived` and `seen` are as in
    `PlanScratch`. Gives IMPOSSIBLE where a link is missing, or as soon as the makespan is known to exceed `cutoff`.
    """
    devices, spaces, hand, stamp = g.sizes[1], g.sizes[2], g.sizes[5], w.stamp[0]
    service, in_start, in_tensor, producer = g.service, g.in_start, g.in_tensor, g.producer
    copy, space, lane_start, lanes = g.copy, g.space, g.lane_start, g.lanes
    start, end, free, busy = w.start, w.end, w.free, w.busy
    makespan = marks[2]
    for p in range(marks[0], marks[1]):
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
                        if seen[key] >= stamp:
                            at = arrived[key]
                        else:
                            if free[x] > at:
                                at = free[x]
                            at += cost
                            free[x] = at
                            busy[x] += cost
                            seen[key] = stamp
                            arrived[key] = at
                            w.asked[key] = p
                            if at + readers[key] > makespan:
                                makespan = at + readers[key]
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
        start[i] = ready
        end[i] = done
        done += behind[i * spaces + s]
        if done > makespan:
            makespan = done
            if done > cutoff:
                return IMPOSSIBLE
    return makespan


def evaluate(g: FlatGraph, w: PlanScratch, order: Ints, place: Ints) -> int:
    """Makespan of a plan in ns, IMPOSSIBLE where a link is missing."""
    clear(g, w)
    for s in range(g.sizes[2]):
        w.used[s] = 0
    for i in range(g.sizes[0]):
        w.used[g.space[place[i]]] += g.memory[i * g.sizes[1] + place[i]]
    return play(g, w, order, place, w.marks, w.arrived, w.seen, w.zeros, w.zeros, IMPOSSIBLE)


def cost_of(g: FlatGraph, w: PlanScratch, makespan: int, weights: Ints) -> int:
    """What an objective makes of an evaluated plan.

    `weights`: shares (of UNIT) of makespan, of the busiest resource's time, of the bytes in a space; that space; the
    latency that must not be exceeded, -1 for none. Broken limits cost PENALTY and what they are exceeded by.
    """
    if makespan >= IMPOSSIBLE:
        return IMPOSSIBLE
    period = 0
    for x in range(g.sizes[4]):
        if w.busy[x] > period:
            period = w.busy[x]
    cost = (weights[0] * makespan + weights[1] * period + weights[2] * w.used[weights[3]]) // UNIT
    for s in range(g.sizes[2]):
        if g.limits[s] >= 0 and w.used[s] > g.limits[s]:
            cost += PENALTY + (w.used[s] - g.limits[s])
    if weights[4] >= 0 and makespan > weights[4]:
        cost += PENALTY + (makespan - weights[4])
    return cost


def dispatch(
    g: FlatGraph, w: PlanScratch, place: Ints, priority: Ints, by_arrival: int, order: Ints, left: Ints
) -> int:
    """Order the tasks of a placement as queues would: always the task that can start first, then the most urgent.

    Urgent is, where `by_arrival`, what was ready first (a queue that gives out in the order of arrival), else what has
    the highest `priority`. Fills `order`; `left` is scratch of three entries a task. Gives the number of tasks ordered.
    """
    n, devices, spaces = g.sizes[0], g.sizes[1], g.sizes[2]
    clear(g, w)
    count = 0
    for i in range(n):
        left[i] = g.pred_start[i + 1] - g.pred_start[i]
        if left[i] == 0:
            left[n + i] = 0
            left[2 * n + count] = i
            count += 1
    for p in range(n):
        best = -1
        best_start = 0
        best_key = 0
        for q in range(count):
            i = left[2 * n + q]
            begin = left[n + i]
            key = begin if by_arrival else -priority[i]
            for k in range(g.lane_start[place[i]], g.lane_start[place[i] + 1]):
                if w.free[g.lanes[k]] > begin:
                    begin = w.free[g.lanes[k]]
            is_better = best < 0 or begin < best_start or (begin == best_start and key < best_key)
            if not is_better and begin == best_start and key == best_key and i < left[2 * n + best]:
                is_better = True
            if is_better:
                best, best_start, best_key = q, begin, key
        i = left[2 * n + best]
        count -= 1
        left[2 * n + best] = left[2 * n + count]
        order[p] = i
        d = place[i]
        crossed = 0
        for k in range(g.pred_start[i], g.pred_start[i + 1]):
            if place[g.preds[k]] != d:
                crossed = g.sizes[5]
        done = best_start + g.service[i * devices + d] + crossed
        w.end[i] = done
        for k in range(g.lane_start[d], g.lane_start[d + 1]):
            w.free[g.lanes[k]] = done
        for k in range(g.succ_start[i], g.succ_start[i + 1]):
            j = g.succs[k]
            left[j] -= 1
            if left[j] == 0:
                ready = 0
                s = g.space[place[j]]
                for m in range(g.in_start[j], g.in_start[j + 1]):
                    t = g.in_tensor[m]
                    made = g.producer[t]
                    at = w.end[made]
                    cost = g.copy[(t * spaces + g.space[place[made]]) * spaces + s]
                    if cost > 0:
                        at += cost
                    if at > ready:
                        ready = at
                left[n + j] = ready
                left[2 * n + count] = j
                count += 1
    return n
