"""Inner loop of threshold annealing: random moves of a plan, each evaluated within a window of the order.

With the cost c of the current plan, heat `h` falling linearly from `heat[0]` to `heat[1]`, and `u` uniform in [0, 1):

1. Draw a move: another device for one task, for a few consecutive tasks, or for a block; another place in the order.
2. Accept the new plan if its cost is at most `c + h * u` (threshold accepting instead of Metropolis' rule).
3. Evaluate possible best plans, and the plan at the end of a window, as a whole; undo a window that is worse by `h`.

The code has integers and loops only, so that it runs compiled or plain. It draws its own random numbers. Numba caches
machine code by file. After a change of `plan_loop` or `window`, change this file too, or delete `__pycache__`.
"""

from __future__ import annotations

from cotenant.inner_loop import Ints
from cotenant.techniques.placement.plan.plan_loop import (
    IMPOSSIBLE,
    UNIT,
    FlatGraph,
    FlatTaskPlan,
    PlanScratch,
    cost_of,
    evaluate,
)
from cotenant.techniques.placement.plan.window import View, look, survey

WINDOW = 96
"""Positions of the order in a window."""
_MOVES = 4
"""Moves for each position of a window."""
_BLOCKS = 2
"""Moves of whole blocks between two windows."""
_MODULUS = 2147483647
_FACTOR = 48271
"""Random numbers: minimal standard generator of Park and Miller; products stay below 2**47."""


def random_below(seed: Ints, limit: int) -> int:
    """The next random number from 0 to below `limit`, which is below 2**31; `seed[0]` is the state."""
    seed[0] = seed[0] * _FACTOR % _MODULUS
    return seed[0] % limit


def shift(order: Ints, position: Ints, i: int, to: int) -> None:
    """Move a task to a position in the order; tasks in between move by one."""
    at = position[i]
    while at < to:
        order[at] = order[at + 1]
        position[order[at]] = at
        at += 1
    while at > to:
        order[at] = order[at - 1]
        position[order[at]] = at
        at -= 1
    order[at] = i
    position[i] = at


def random_place(g: FlatGraph, position: Ints, i: int, low: int, high: int, seed: Ints) -> int:
    """A random position in [low, high] for a task, behind its predecessors and before its successors."""
    for k in range(g.pred_start[i], g.pred_start[i + 1]):
        if position[g.preds[k]] >= low:
            low = position[g.preds[k]] + 1
    for k in range(g.succ_start[i], g.succ_start[i + 1]):
        if position[g.succs[k]] <= high:
            high = position[g.succs[k]] - 1
    return low + random_below(seed, high - low + 1)


def flip(g: FlatGraph, place: Ints, i: int, d: int, changed: Ints, count: int, used: Ints) -> int:
    """Move a task to a device if it can run there, and log the change; returns the number of logged changes."""
    devices = g.sizes[1]
    if place[i] == d or g.service[i * devices + d] < 0:
        return count
    changed[2 * count] = i
    changed[2 * count + 1] = place[i]
    used[g.space[place[i]]] -= g.memory[i * devices + place[i]]
    used[g.space[d]] += g.memory[i * devices + d]
    place[i] = d
    return count + 1


def unflip(g: FlatGraph, place: Ints, changed: Ints, count: int, used: Ints) -> None:
    """Undo the logged changes, the last one first."""
    devices = g.sizes[1]
    for k in range(count - 1, -1, -1):
        i = changed[2 * k]
        used[g.space[place[i]]] -= g.memory[i * devices + place[i]]
        place[i] = changed[2 * k + 1]
        used[g.space[place[i]]] += g.memory[i * devices + place[i]]


def keep_best(g: FlatGraph, plan: FlatTaskPlan, best: FlatTaskPlan) -> None:
    """Copy the current plan to the best one."""
    for i in range(g.sizes[0]):
        best.order[i] = plan.order[i]
        best.place[i] = plan.place[i]


def flip_block(
    g: FlatGraph,
    w: PlanScratch,
    order: Ints,
    place: Ints,
    blocks: Ints,
    weights: Ints,
    used: Ints,
    changed: Ints,
    seed: Ints,
    threshold: int,
) -> int:
    """Try another device for a random block; returns the new cost, or -1 if the move was rejected.

    `blocks`: number of blocks, start of each, and their tasks.
    """
    b = random_below(seed, blocks[0])
    d = random_below(seed, g.sizes[1])
    count = 0
    for k in range(blocks[1 + b], blocks[2 + b]):
        count = flip(g, place, blocks[k], d, changed, count, used)
    if count == 0:
        return -1
    cost = cost_of(g, w, evaluate(g, w, order, place), weights)
    if cost <= threshold and cost < IMPOSSIBLE:
        return cost
    unflip(g, place, changed, count, used)
    return -1


def anneal(
    g: FlatGraph,
    w: PlanScratch,
    v: View,
    plan: FlatTaskPlan,
    best: FlatTaskPlan,
    blocks: Ints,
    weights: Ints,
    seed: Ints,
    heat: Ints,
    steps: int,
    costs: Ints,
) -> int:
    """Anneal from the feasible `plan`, as the module describes; returns the number of evaluated plans.

    `heat`: allowed increase of the cost at the first and at the last step. `costs`: of the current and the best plan,
    updated in place.
    """
    order, place, position = plan
    n, devices = g.sizes[0], g.sizes[1]
    changed = [0] * (2 * n)
    used = [0] * g.sizes[2]
    for i in range(n):
        used[g.space[place[i]]] += g.memory[i * devices + place[i]]
    old_order, old_place = order.copy(), place.copy()
    may_cut = weights[0] == UNIT and weights[1] == 0 and weights[2] == 0
    width = min(n, WINDOW)
    evaluated = 0
    step = 0
    while step < steps:
        allowed = heat[0] + (heat[1] - heat[0]) * step // steps
        for _ in range(_BLOCKS if blocks[0] < n else 0):
            cost = flip_block(g, w, order, place, blocks, weights, used, changed, seed, costs[0] + allowed)
            evaluated += 1
            if cost >= 0:
                costs[0] = cost
                if cost < costs[1]:
                    costs[1] = cost
                    keep_best(g, plan, best)
        low = random_below(seed, n - width + 1)
        high = low + width
        survey(g, w, v, order, place, position, low, high)
        for p in range(n):
            old_order[p] = order[p]
            old_place[p] = place[p]
        before = costs[0]
        todo = min(steps - step, _MOVES * width)
        step += todo
        for _ in range(todo):
            kind = random_below(seed, 100)
            i = order[low + random_below(seed, width)]
            count = 0
            moved = 0
            was = position[i]
            if kind < 60:
                count = flip(g, place, i, random_below(seed, devices), changed, count, used)
                if kind < 15:
                    for p in range(was + 1, min(high, was + 2 + random_below(seed, 4))):
                        count = flip(g, place, order[p], random_below(seed, devices), changed, count, used)
            if kind >= 40:
                to = random_place(g, position, i, low, high - 1, seed)
                if to != was:
                    moved = 1
                    shift(order, position, i, to)
            if moved == 0 and count == 0:
                continue
            threshold = costs[0] + allowed * random_below(seed, 65536) // 65536
            cutoff = threshold if may_cut else IMPOSSIBLE
            cost = look(g, w, v, order, place, cutoff, weights, used)
            evaluated += 1
            if cost <= threshold and cost < IMPOSSIBLE:
                costs[0] = cost
                if cost < costs[1]:
                    cost = cost_of(g, w, evaluate(g, w, order, place), weights)
                    if cost < costs[1]:
                        costs[1] = cost
                        keep_best(g, plan, best)
            else:
                if moved:
                    shift(order, position, i, was)
                unflip(g, place, changed, count, used)
        costs[0] = cost_of(g, w, evaluate(g, w, order, place), weights)
        if costs[0] > before + allowed:
            costs[0] = before
            for p in range(n):
                order[p] = old_order[p]
                position[order[p]] = p
                place[p] = old_place[p]
            for s in range(g.sizes[2]):
                used[s] = 0
            for i in range(n):
                used[g.space[place[i]]] += g.memory[i * devices + place[i]]
    return evaluated
