"""Lower bounds of the makespan of all plans.

- *Critical path*: `max_i head_i + service_i + tail_i`, with the least times before and after each task by device,
  copies included.
- *Load*: the fractional relaxation of unrelated machines (Lenstra, Shmoys and Tardos 1990). By duality, every lane
  weighting `w >= 0, sum w = 1` gives the bound `sum_i min_d service_id * sum(w of the lanes of d)`.
- *Carlier* (1982): `min head + load + min tail` over a set of tasks.
- *Hubs*, tasks with many predecessors or successors: the load before a hub, the hub, and the load behind it add up.
  The loads between several hubs do, too.
- *Articulation tasks*, which precede or follow every other task: the bounds of the segments between them add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cotenant.techniques.placement.plan.flat import PlacementProblem
from cotenant.techniques.placement.plan.plan_loop import IMPOSSIBLE

_ROUNDS = 100
_FORBIDDEN = float("inf")
_MOST = float(IMPOSSIBLE)
_HUBS = 40
"""Most hubs: the most related task of each of so many time spans, and half as many of the most related tasks in all."""
_HEADS = 12
"""Heads, and tails, for which Carlier's bound is evaluated, evenly among those of the tasks."""


@dataclass(frozen=True, slots=True)
class PlacementBound:
    """Lower bounds of the makespan: `path_ns` of the critical path, `load_ns` of all tasks, `makespan_ns` the best.

    `articulation`: the articulation tasks; `heads_ns`, `tails_ns`: least times before and after each task.
    """

    makespan_ns: int
    path_ns: int
    load_ns: int
    articulation: tuple[int, ...]
    heads_ns: tuple[int, ...]
    tails_ns: tuple[int, ...]

    def gap_pct(self, makespan_ns: int) -> float:
        """Largest possible excess of a plan over the optimum, in percent of the bound."""
        return 100.0 * (makespan_ns / self.makespan_ns - 1) if self.makespan_ns else 0.0


@lru_cache(maxsize=4)
def bound_of(problem: PlacementProblem) -> PlacementBound:
    """The bounds of a problem."""
    heads, tails = _heads(problem), _tails(problem)
    service = _service(problem)
    whole = list(range(problem.size))
    path = _path(heads, tails, service)
    load = load_bound_ns(problem, whole)
    cuts = articulation_tasks(problem)
    segments = 0
    for segment in _segments(problem, cuts):
        if len(segment) == 1:
            segments += int(service[segment[0]].min())
        elif segment:
            segments += _segment_ns(problem, segment, service)
    carlier = _carlier(problem, whole, heads.min(axis=1), tails.min(axis=1))
    best = max(path, load, segments, carlier, _hubs(problem, heads, tails))
    least = [tuple(int(min(each, _MOST)) for each in ways.min(axis=1).tolist()) for ways in (heads, tails)]
    return PlacementBound(best, path, load, tuple(cuts), *least)


def load_bound_ns(problem: PlacementProblem, tasks: Sequence[int]) -> int:
    """Load bound in ns: least time of the lanes for these tasks, if each may be divided over its devices.

    Copies, hand-overs, order and memory are left out. Exact for one device beside equal lanes, else the best of some
    weightings by subgradient steps.
    """
    service = _service(problem)[list(tasks)]
    if not len(service):
        return 0
    lanes = np.zeros((len(problem.device_names), len(problem.lane_names)))
    for device, held in enumerate(problem.lanes):
        lanes[device, list(held)] = 1.0
    if len(problem.device_names) == len(problem.lane_names) >= 2 and bool((lanes.sum(axis=1) == 1.0).all()):
        others = service[:, 1:]
        if bool((others == others[:, :1]).all()):  # n equal lanes are one lane of n times the speed
            pair = np.stack((service[:, 0], others[:, 0] / others.shape[1]), axis=1)
            return int(_two_lanes(pair) * (1 - 1e-12))
    weights = np.full(len(problem.lane_names), 1.0 / len(problem.lane_names))
    best = 0.0
    width = 1.0
    for _ in range(_ROUNDS):  # exponentiated subgradient: weights stay positive and sum up to one
        price = service * (lanes @ weights)
        chosen = price.argmin(axis=1)
        best = max(best, float(price[np.arange(len(price)), chosen].sum()))
        load = np.zeros(len(lanes))
        np.add.at(load, chosen, service[np.arange(len(price)), chosen])
        slope = load @ lanes
        weights = weights * np.exp(width * slope / max(slope.max(), 1.0))
        weights = np.maximum(weights / weights.sum(), 1e-9)
        weights /= weights.sum()
        width *= 0.93
    return int(best * (1 - 1e-12))


def _two_lanes(service: NDArray[np.float64]) -> float:
    """Maximum of `sum min(w * a, (1 - w) * b)` over the weight w of the first of two lanes."""
    first, second = service[:, 0], service[:, 1]
    # A task costs the first lane up to its own weight b / (a + b), from there on the second.
    turns = np.where(np.isfinite(second), np.where(np.isfinite(first), 0.0, -1.0), 2.0)
    both = turns == 0.0
    total = first[both] + second[both]
    turns[both] = np.where(total > 0, second[both] / np.where(total > 0, total, 1.0), 0.5)
    order = np.argsort(turns, kind="stable")
    ordered = turns[order]
    a = np.where(np.isfinite(first), first, 0.0)[order]
    b = np.where(np.isfinite(second), second, 0.0)[order]
    weights = np.concatenate((np.clip(ordered, 0.0, 1.0), [0.0, 1.0]))
    at = np.searchsorted(ordered, weights)  # tasks from here on cost the first lane
    firsts = np.concatenate((np.cumsum(a[::-1])[::-1], [0.0]))[at]
    seconds = np.concatenate(([0.0], np.cumsum(b)))[at]
    return float((weights * firsts + (1 - weights) * seconds).max())


def _hubs(problem: PlacementProblem, heads: NDArray[np.float64], tails: NDArray[np.float64]) -> int:
    size = problem.size
    before = np.zeros((size, size), dtype=np.bool_)  # predecessors of each task
    for i in range(size):
        for j in problem.preds[i]:
            before[i] |= before[j]
            before[i, j] = True
    # Not only the most related tasks, which may all belong to one long chain.
    related = before.sum(axis=0) + before.sum(axis=1)
    first = np.minimum(heads.min(axis=1), _MOST)
    spans = np.minimum(first * _HUBS // max(first.max(), 1.0), _HUBS - 1)
    ranked = np.lexsort((np.arange(size), -related, spans))
    spread = ranked[np.flatnonzero(np.diff(spans[ranked], prepend=-1.0))].tolist()
    hubs = sorted({*spread, *np.argsort(-related, kind="stable")[: _HUBS // 2].tolist()}) if size > 1 else []
    least = _service(problem).min(axis=1)
    reached: dict[int, int] = {}
    best = 0
    for hub in hubs:
        head = max(int(min(heads[hub].min(), _MOST)), load_bound_ns(problem, np.flatnonzero(before[hub]).tolist()))
        for other in reached:
            if before[hub, other]:
                between = np.flatnonzero(before[hub] & before[:, other]).tolist()
                head = max(head, reached[other] + load_bound_ns(problem, between))
        reached[hub] = head + int(least[hub])
        behind = load_bound_ns(problem, np.flatnonzero(before[:, hub]).tolist())
        best = max(best, reached[hub] + max(behind, int(min(tails[hub].min(), _MOST))))
    return best


def related_tasks(problem: PlacementProblem) -> tuple[list[int], list[int]]:
    """Predecessors and successors of each task (transitive), as bits."""
    size = problem.size
    before, behind = [0] * size, [0] * size
    for i in range(size):
        for j in problem.preds[i]:
            before[i] |= before[j] | 1 << j
    for i in reversed(range(size)):
        for j in problem.succs[i]:
            behind[i] |= behind[j] | 1 << j
    return before, behind


def articulation_tasks(problem: PlacementProblem) -> list[int]:
    """Tasks that precede or follow every other one, in order."""
    related = zip(*related_tasks(problem), strict=True)
    return [i for i, (a, b) in enumerate(related) if a.bit_count() + b.bit_count() == problem.size - 1]


def _segments(problem: PlacementProblem, cuts: Sequence[int]) -> list[list[int]]:
    """Segments: single articulation tasks, and the tasks between two of them. All are ranges of the order."""
    segments: list[list[int]] = []
    at = 0
    for cut in cuts:
        segments += [list(range(at, cut)), [cut]]
        at = cut + 1
    segments.append(list(range(at, problem.size)))
    return segments


def _segment_ns(problem: PlacementProblem, segment: list[int], service: NDArray[np.float64]) -> int:
    inside = set(segment)
    heads = np.zeros((problem.size, service.shape[1]))
    tails = np.zeros_like(heads)
    _walk(problem, segment, service, heads, inside, forward=True)
    _walk(problem, segment[::-1], service, tails, inside, forward=False)
    path = _path(heads[segment], tails[segment], service[segment])
    return max(path, _carlier(problem, segment, heads.min(axis=1), tails.min(axis=1)))


def _carlier(
    problem: PlacementProblem, tasks: Sequence[int], heads: NDArray[np.float64], tails: NDArray[np.float64]
) -> int:
    members = np.array(tasks)
    best = 0
    for head in _some(heads[members]):
        late = members[heads[members] >= head]
        for tail in _some(tails[late]):
            chosen = late[tails[late] >= tail]
            if len(chosen) > 1:
                floor = int(head) + int(tail)
                # Upper bound of their load: each on its fastest device, on one lane.
                most = float(_service(problem)[chosen].min(axis=1).sum())
                if floor + most > best:
                    best = max(best, floor + load_bound_ns(problem, chosen.tolist()))
    return best


def _some(values: NDArray[np.float64]) -> NDArray[np.float64]:
    ordered = np.unique(values)
    return ordered[np.unique(np.linspace(0, len(ordered) - 1, min(_HEADS, len(ordered))).astype(np.int64))]


def _path(heads: NDArray[np.float64], tails: NDArray[np.float64], service: NDArray[np.float64]) -> int:
    longest = (heads + service + tails).min(axis=1).max()
    return int(longest) if np.isfinite(longest) else IMPOSSIBLE


def _heads(problem: PlacementProblem) -> NDArray[np.float64]:
    heads = np.zeros((problem.size, len(problem.device_names)))
    _walk(problem, range(problem.size), _service(problem), heads, None, forward=True)
    return heads


def _tails(problem: PlacementProblem) -> NDArray[np.float64]:
    tails = np.zeros((problem.size, len(problem.device_names)))
    _walk(problem, range(problem.size - 1, -1, -1), _service(problem), tails, None, forward=False)
    return tails


def _service(problem: PlacementProblem) -> NDArray[np.float64]:
    """Service times by task and device, infinite where a task cannot run."""
    return problem.service_array


def _walk(
    problem: PlacementProblem,
    tasks: Sequence[int],
    service: NDArray[np.float64],
    out: NDArray[np.float64],
    inside: set[int] | None,
    forward: bool,
) -> None:
    """Heads (or tails) of tasks on each device: longest paths, with every neighbour on its best device."""
    ways = _copies(problem)
    edges: list[list[tuple[int, int]]] = [[] for _ in range(problem.size)]
    for reader, tensors in enumerate(problem.inputs):
        for tensor in tensors:
            producer = problem.producer[tensor]
            if inside is None or (reader in inside and producer in inside):
                if forward:
                    edges[reader].append((producer, tensor))
                else:
                    edges[producer].append((reader, tensor))
    for i in tasks:
        for j, tensor in edges[i]:
            cost = ways[tensor] if forward else ways[tensor].T
            np.maximum(out[i], (out[j] + service[j] + cost.T).min(axis=1), out=out[i])


def _copies(problem: PlacementProblem) -> list[NDArray[np.float64]]:
    """Cost of each tensor between devices of producer and reader: copy and hand-over, infinite without a link."""
    found = []
    spaces = problem.space
    hand = problem.graph.hand_over_ns
    for tensor in range(len(problem.producer)):
        table = np.zeros((len(spaces), len(spaces)))
        for a, source in enumerate(spaces):
            for b, target in enumerate(spaces):
                cost = problem.copy_ns(tensor, source, target)
                table[a, b] = _FORBIDDEN if cost < 0 else cost + (hand if a != b else 0)
        found.append(table)
    return found
