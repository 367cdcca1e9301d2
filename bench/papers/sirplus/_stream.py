"""Many queries of one task graph in flight: the placement's dispatcher and evaluator on as many copies of the graph.

A query's arrival is a task of its own, on a lane that only keeps time. Lanes take ready tasks, of the oldest query
first, and of a query in the order of its plan. Nothing is known before it happens: times are those of the world, orders
those of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from cotenant.inner_loop import Ints
from cotenant.techniques.placement.plan import plan_loop
from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan, scratch_of
from cotenant.techniques.placement.plan.plan_loop import IMPOSSIBLE, FlatGraph
from cotenant.techniques.placement.plan.task_graph import DeviceLink, GraphTask, TaskDevice, TaskGraph
from cotenant.techniques.placement.task_profile import UnitTensor

CLOCK = "clock"
Times = NDArray[np.int64]


class QueryStream:
    """So many queries of a graph. `problem` is that of one; plans are given for it."""

    def __init__(self, problem: PlacementProblem, queries: int) -> None:
        self.queries = queries
        self.loops = problem.loops
        one = PlacementProblem(_with_arrival(problem), problem.loops)
        self.size = one.size
        self.devices = len(one.device_names)
        self._base = np.array(one.service, dtype=np.int64)
        self._flat = self._copies(one)
        total = one.size * queries
        self._scratch = scratch_of(self._flat, self.loops)
        self._order, self._left = (self._ints(np.zeros(size, dtype=np.int64)) for size in (total, 3 * total))

    def latencies_ns(self, plan: TaskPlan, gaps_ns: Sequence[int], factors: NDArray[np.float64]) -> Times:
        """From each query's arrival to its last task. `gaps_ns` lie before the arrivals.

        `factors` [queries, tasks, devices] are by how much the world's times differ from the graph's.
        """
        ends = self._ends(plan, gaps_ns, factors)
        return np.asarray(ends.max(axis=1) - ends[:, 0])

    def queries_per_s(self, plan: TaskPlan, factors: NDArray[np.float64]) -> float:
        """How many queries a second come out when all are there: over the middle half of them."""
        done = np.sort(self._ends(plan, [0] * self.queries, factors).max(axis=1))
        first, last = self.queries // 4, self.queries - 1 - self.queries // 4
        return float((last - first) * 1e9 / (done[last] - done[first]))

    def _ends(self, plan: TaskPlan, gaps_ns: Sequence[int], factors: NDArray[np.float64]) -> Times:
        ints, queries = self._ints, self.queries
        times = np.broadcast_to(self._base, (queries, self.size, self.devices)).copy()
        mine = times[:, 1:, :-1]
        np.copyto(mine, np.where(mine >= 0, np.rint(mine * factors), -1).astype(np.int64))
        times[:, 0, -1] = gaps_ns
        flat = self._flat._replace(service=ints(times.ravel()))
        rank = np.zeros(self.size, dtype=np.int64)
        rank[np.array(plan.order) + 1] = np.arange(1, self.size)
        urgency = -(np.arange(queries)[:, None] * self.size + rank)
        place = ints(np.tile(np.array([self.devices - 1, *plan.place], dtype=np.int64), queries))
        module = self.loops[plan_loop]
        module.dispatch(flat, self._scratch, place, ints(urgency.ravel()), 0, self._order, self._left)
        makespan = module.evaluate(flat, self._scratch, self._order, place)
        assert makespan < IMPOSSIBLE
        return np.array(self._scratch.end, dtype=np.int64).reshape(queries, self.size)

    def _copies(self, one: PlacementProblem) -> FlatGraph:
        """The flat graph of all queries; each arrival waits for the one before it."""
        flat, queries, size = one.flat, self.queries, one.size
        tensors = len(one.producer)

        def tile(values: Sequence[int], step: int = 0) -> Times:
            whole = np.array(values, dtype=np.int64)
            return np.asarray((whole + step * np.arange(queries)[:, None]).ravel())

        def starts(begin: Sequence[int]) -> Times:
            return np.append(tile(begin[:-1], begin[-1]), queries * begin[-1])

        preds, pred_start = tile(flat.preds, size), starts(flat.pred_start)
        succs, succ_start = tile(flat.succs, size), starts(flat.succ_start)
        later = size * np.arange(1, queries)  # the arrivals but for the first
        earlier = later - size
        preds = np.insert(preds, pred_start[later], earlier)
        succs = np.insert(succs, succ_start[earlier + 1], later)
        for begin, where in ((pred_start, later), (succ_start, earlier)):
            extra = np.zeros(len(begin), dtype=np.int64)
            extra[where + 1] = 1
            begin += np.cumsum(extra)
        made = {
            "sizes": np.array([size * queries, *flat.sizes[1:]], dtype=np.int64),
            "memory": tile(flat.memory),
            "in_start": starts(flat.in_start),
            "in_tensor": tile(flat.in_tensor, tensors),
            "producer": tile(flat.producer, size),
            "copy": tile(flat.copy),
            "pred_start": pred_start,
            "preds": preds,
            "succ_start": succ_start,
            "succs": succs,
        }
        return flat._replace(**{name: self._ints(values) for name, values in made.items()})

    def _ints(self, values: Times) -> Ints:
        """Numbers in the form that the loops take, without a detour over lists."""
        return cast(Ints, np.ascontiguousarray(values)) if self.loops.is_compiled else values.tolist()


def _with_arrival(problem: PlacementProblem) -> TaskGraph:
    """The graph behind a task that every task without a predecessor waits for, at no cost."""
    graph = problem.graph
    roots = tuple(number + 1 for number, before in enumerate(problem.preds) if not before)
    moved = [
        UnitTensor(each.name, each.producer + 1, tuple(at + 1 for at in each.readers), each.size_bytes)
        for each in graph.tensors
    ]
    arrival = GraphTask(CLOCK, {CLOCK: 0})
    return replace(
        graph,
        devices=(*graph.devices, TaskDevice(CLOCK)),
        tasks=(arrival, *graph.tasks),
        tensors=(UnitTensor(CLOCK, 0, roots, 0), *moved),
        links=(*graph.links, *(DeviceLink(CLOCK, space, 1e18, 0, CLOCK) for space in problem.space_names)),
    )
