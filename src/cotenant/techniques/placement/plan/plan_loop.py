"""Evaluator of plans and dispatcher of device queues, as inner loops over flat integer arrays (`inner_loop`).

For task i in plan order, on device d, with inputs from tasks j, and hand-over `h` if an input is from another device:

    start_i = max(max_j (end_j + copy_j), time at which all lanes of d are free)

    end_i = start_i + service_id + h

A copy starts when its producer has ended and its copy engine or lane is free, in the order of first readers. Compiled
and plain code give equal results.
"""

from __future__ import annotations

from typing import NamedTuple

from cotenant.inner_loop import Ints

IMPOSSIBLE = 1 << 61
"""Cost of a plan that needs a copy between spaces without a link."""
PENALTY = 1 << 52
"""Additional cost of a plan that breaks a limit: more than all costs without it (52 days in ns)."""
UNIT = 1024
"""Unit of the weights of an objective."""


class FlatGraph(NamedTuple):
    """A task graph as flat arrays. Tasks, devices, lanes, spaces and tensors count from 0.

    - `sizes`: tasks, devices, spaces, lanes, resources (lanes and copy engines), hand-over ns.
    - `service`, `memory`: by task and device (-1: cannot run); `copy`: by tensor and both spaces (-1: no link).
    - `engine`: resource of copies between two spaces, -1 for none; `limits`: by space, -1 for none.
    - `*_start`: start of the entries of each task or device in the array beside it.
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
    """Results and scratch of evaluations: `start`, `end` by task; `free`, `busy` by resource; `used` bytes by space.

    - `arrived`: end of a copy by an engine, by tensor and space, in the evaluation of number `seen`.
    - `requester`: position of the task that caused the copy. `stamp[0]`: number of the latest evaluation.
    - `marks`, `zeros`: arguments of `play` for a whole plan.
    """

    start: Ints
    end: Ints
    free: Ints
    busy: Ints
    used: Ints
    arrived: Ints
    seen: Ints
    requester: Ints
    zeros: Ints
    marks: Ints
    stamp: Ints


class FlatTaskPlan(NamedTuple):
    """A plan as arrays: tasks in order, the device of each task, and the position of each task."""

    order: Ints
    place: Ints
    position: Ints


def clear(g: FlatGraph, w: PlanScratch) -> None:
    """Reset all resources and the copies of the previous evaluation."""
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
    """Evaluate the tasks at positions `marks[0]` to before `marks[1]`, and return the makespan.

    - `marks[2]`: makespan of the rest of the plan.
    - `behind`: times from a task's end to the end of all, by task and space; `readers`: from a copy's end, by tensor
      and space. `arrived`, `seen`: as in `PlanScratch`.

    Returns IMPOSSIBLE if a link is missing, or as soon as the makespan exceeds `cutoff`.
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
                            w.requester[key] = p
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
    """Makespan of a plan in ns; IMPOSSIBLE if a link is missing."""
    clear(g, w)
    for s in range(g.sizes[2]):
        w.used[s] = 0
    for i in range(g.sizes[0]):
        w.used[g.space[place[i]]] += g.memory[i * g.sizes[1] + place[i]]
    return play(g, w, order, place, w.marks, w.arrived, w.seen, w.zeros, w.zeros, IMPOSSIBLE)


def cost_of(g: FlatGraph, w: PlanScratch, makespan: int, weights: Ints) -> int:
    """Cost of an evaluated plan.

    `weights` has five entries. The first three are weights (in UNIT) of the makespan, of the busiest resource's time,
    and of the bytes in a space. The others are that space and the latency limit, -1 for none. A broken limit costs
    PENALTY plus the excess.
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
    """Order the tasks of a placement as device queues do: the task of the earliest start first.

    Ties: the task that was ready first, if `by_arrival` (FIFO queue), else the highest `priority`. Fills `order`;
    `left`: scratch of three entries a task. Returns the number of ordered tasks.
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
