"""Exact placement: CP-SAT with an optional interval for every task and device, and the paper's MILP as we read it.

From a plan that is good already CP-SAT walks up from the bound: that a plan of some makespan is not there it often
proves in a second where a search for better plans proves nothing in ten. What lanes have to do between two hubs, tasks
that are before or behind many others, is told to it for every pair of these.

CP-SAT knows copies once per tensor and space (in every mode of transfer), lanes of moldable devices and memory limits.
It leaves hand-overs out, and where a copy takes a lane it may stand anywhere on it: so its bound holds for the
evaluator too, and without hand-overs its optimum is the evaluator's under DELAY.

The MILP of section 5, read so: one start S_i and end F_i = S_i + sum of D_id mu_id; F_j + copy <= S_i for every edge
whose ends are on different devices; of two tasks that neither precedes and that share a device one ends before the
other starts (big M). As printed it forbids one task to start when another ends, and lets devices exclude where no task
is. Needs OR-Tools (the extra `solver`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from cotenant.errors import PlanError
from cotenant.techniques.placement.plan.bounds import bound_of, related_tasks
from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.strategies import sequential_ns

_HUBS = 12
_FEW = 80
"""Up to so many tasks the solver is quicker without a linear relaxation."""


@dataclass(frozen=True, slots=True)
class Solved:
    """What a solver found: a plan, a bound below the makespan of all plans, and whether the plan was proved optimal."""

    plan: TaskPlan
    bound_ns: int
    is_proved: bool


@dataclass(frozen=True, slots=True)
class IntervalSearch:
    """CP-SAT. `seconds` is all that it may take; `workers` are its threads.

    Deterministic where it ends by itself with one worker.
    """

    seconds: float = 30.0
    workers: int = 1
    seed: int = 1
    name: str = "cp_sat"

    def place(self, problem: PlacementProblem) -> TaskPlan:
        """See PlacementStrategy. Raises as `solve`."""
        return self.solve(problem).plan

    def solve(self, problem: PlacementProblem, hint: TaskPlan | None = None) -> Solved:
        """Solve, or improve and bound the plan that is given, which comes back where no better one is found.

        Raises PlanError where no plan was found, or none is there.
        """
        cp_model = _ortools("sat.python.cp_model")
        model = cp_model.CpModel()
        horizon = 2 * max(1, _horizon(problem))
        begins, ends, chosen = [], [], []
        lanes: list[list[Any]] = [[] for _ in problem.resources]
        for i, times in enumerate(problem.service):
            begin, end = model.new_int_var(0, horizon, ""), model.new_int_var(0, horizon, "")
            on = {d: model.new_bool_var("") for d in problem.devices_of(i)}
            model.add_exactly_one(on.values())
            model.add(end == begin + sum(times[d] * use for d, use in on.items()))
            for d, use in on.items():
                piece = model.new_optional_interval_var(begin, times[d], end, use, "")
                for lane in problem.lanes[d]:
                    lanes[lane].append(piece)
            begins.append(begin)
            ends.append(end)
            chosen.append(on)
        self._copies(problem, model, begins, ends, chosen, lanes, horizon)
        for pieces in lanes:
            model.add_no_overlap(pieces)
        for space, limit in enumerate(problem.limits):
            if limit >= 0:
                held = [
                    (use, problem.memory[i][d])
                    for i, on in enumerate(chosen)
                    for d, use in on.items()
                    if problem.space[d] == space
                ]
                model.add(sum(use * size for use, size in held) <= limit)
        known = bound_of(problem)
        most = horizon
        line = problem.evaluate(hint) if hint is not None else None
        if line is not None and line.is_feasible:
            most = line.makespan_ns
        makespan = model.new_int_var(min(known.makespan_ns, most), most, "")
        heads, tails = known.heads_ns, known.tails_ns
        for i, end in enumerate(ends):
            model.add(makespan >= end + tails[i])
            model.add(begins[i] >= heads[i])
        _loads(problem, model, begins, ends, chosen, makespan)
        model.minimize(makespan)
        if hint is not None:
            for i, on in enumerate(chosen):
                for d, use in on.items():
                    model.add_hint(use, int(hint.place[i] == d))
                if line is not None:
                    model.add_hint(begins[i], line.start_ns[i])
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = self.seconds
        solver.parameters.num_workers = self.workers
        solver.parameters.random_seed = self.seed
        if hint is not None and line is not None:
            solver.parameters.use_objective_lb_search = True
            if problem.size <= _FEW:
                solver.parameters.linearization_level = 0
        status = solver.solve(model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            if status == cp_model.UNKNOWN and hint is not None and line is not None and line.is_feasible:
                return Solved(hint, max(known.makespan_ns, int(solver.best_objective_bound)), is_proved=False)
            raise PlanError(f"{self.name} found no plan in {self.seconds:g} s: {solver.status_name(status)}")
        place = tuple(next(d for d, use in on.items() if solver.value(use)) for on in chosen)
        starts = [(solver.value(begins[i]), solver.value(ends[i]), i) for i in range(problem.size)]
        order = tuple(i for *_, i in sorted(starts))
        bound = int(solver.best_objective_bound)
        return Solved(TaskPlan(place, order), bound, status == cp_model.OPTIMAL)

    def _copies(
        self,
        problem: PlacementProblem,
        model: Any,
        begins: list[Any],
        ends: list[Any],
        chosen: list[dict[int, Any]],
        lanes: list[list[Any]],
        horizon: int,
    ) -> None:
        spaces = range(len(problem.space_names))
        within = [{s: sum(use for d, use in on.items() if problem.space[d] == s) for s in spaces} for on in chosen]
        for tensor, producer in enumerate(problem.producer):
            readers = problem.readers[tensor]
            for reader in readers:
                model.add(begins[reader] >= ends[producer])
            for a in spaces:
                for b in spaces:
                    if a == b or _is_nowhere(within[producer][a]):
                        continue
                    cost = problem.copy_ns(tensor, a, b)
                    crossing = [reader for reader in readers if not _is_nowhere(within[reader][b])]
                    if cost < 0:
                        for reader in crossing:
                            model.add(within[producer][a] + within[reader][b] <= 1)
                        continue
                    if cost == 0 or not crossing:
                        continue
                    resource = problem.engine_of(a, b)
                    if resource < 0:
                        for reader in crossing:
                            both = model.new_bool_var("")
                            model.add(within[producer][a] + within[reader][b] <= 1 + both)
                            model.add(begins[reader] >= ends[producer] + cost).only_enforce_if(both)
                        continue
                    arrival = model.new_int_var(0, horizon, "")
                    is_there = model.new_bool_var("")
                    for reader in crossing:
                        both = model.new_bool_var("")
                        model.add(within[producer][a] + within[reader][b] <= 1 + both)
                        model.add_implication(both, is_there)
                        model.add(begins[reader] >= arrival).only_enforce_if(both)
                    begin = model.new_int_var(0, horizon, "")
                    model.add(begin >= ends[producer]).only_enforce_if(is_there)
                    lanes[resource].append(model.new_optional_interval_var(begin, cost, arrival, is_there, ""))


def _loads(
    problem: PlacementProblem,
    model: Any,
    begins: Sequence[Any],
    ends: Sequence[Any],
    chosen: Sequence[Mapping[int, Any]],
    makespan: Any,
) -> None:
    """What every lane does before a hub, behind it and between two, as a lower bound of the time that this takes."""
    before, behind = related_tasks(problem)
    related = [one.bit_count() + other.bit_count() for one, other in zip(before, behind, strict=True)]
    hubs = sorted(sorted(range(problem.size), key=lambda i: -related[i])[:_HUBS])
    for lane in range(len(problem.lane_names)):
        uses = [
            sum(use * problem.service[i][d] for d, use in on.items() if lane in problem.lanes[d])
            for i, on in enumerate(chosen)
        ]

        def load(tasks: int, uses: Sequence[Any] = uses) -> Any:
            return sum(uses[i] for i in range(problem.size) if tasks >> i & 1)

        model.add(makespan >= sum(uses))
        for hub in hubs:
            model.add(begins[hub] >= load(before[hub]))
            model.add(makespan >= ends[hub] + load(behind[hub]))
            for other in hubs:
                if before[other] >> hub & 1:
                    model.add(begins[other] >= ends[hub] + load(behind[hub] & before[other]))


@dataclass(frozen=True, slots=True)
class MixedInteger:
    """The MILP, by SCIP: an edge's copy counts by itself, and nothing stands on a copy engine."""

    seconds: float = 60.0
    name: str = "milp"

    def place(self, problem: PlacementProblem) -> TaskPlan:
        """See PlacementStrategy. Raises PlanError where SCIP finds nothing in its time, which is usual from 30 tasks
        on."""
        return self.solve(problem).plan

    def solve(self, problem: PlacementProblem) -> Solved:
        """Solve. Raises PlanError where no plan was found."""
        solver = _ortools("linear_solver.pywraplp").Solver.CreateSolver("SCIP")
        solver.SetTimeLimit(int(self.seconds * 1000))
        unit = max(1.0, _horizon(problem) / 1e4)  # nanoseconds beside ones are more than its tolerances bear
        big = 2 * _horizon(problem) / unit
        starts = [solver.NumVar(0.0, big, "") for _ in range(problem.size)]
        on = [{d: solver.BoolVar("") for d in problem.devices_of(i)} for i in range(problem.size)]
        ends = []
        makespan = solver.NumVar(0.0, big, "")
        for i, start in enumerate(starts):
            solver.Add(sum(on[i].values()) == 1)
            ends.append(start + sum(problem.service[i][d] / unit * use for d, use in on[i].items()))
            solver.Add(makespan >= ends[i])
        for i, tensors in enumerate(problem.inputs):
            for tensor in tensors:
                j = problem.producer[tensor]
                solver.Add(starts[i] >= ends[j])
                for a, from_there in on[j].items():
                    for b, to_here in on[i].items():
                        cost = problem.copy_ns(tensor, problem.space[a], problem.space[b])
                        if cost < 0:
                            solver.Add(from_there + to_here <= 1)
                        elif cost > 0:
                            solver.Add(starts[i] >= ends[j] + cost / unit - big * (2 - from_there - to_here))
        before, _ = related_tasks(problem)
        for j, i in combinations(range(problem.size), 2):
            pairs = [(a, b) for a in on[j] for b in on[i] if set(problem.lanes[a]) & set(problem.lanes[b])]
            if before[i] >> j & 1 or not pairs:
                continue
            first = solver.BoolVar("")
            for a, b in pairs:
                apart = big * (2 - on[j][a] - on[i][b])
                solver.Add(starts[i] >= ends[j] - big * (1 - first) - apart)
                solver.Add(starts[j] >= ends[i] - big * first - apart)
        for space, limit in enumerate(problem.limits):
            if limit >= 0:
                held = [
                    use * (problem.memory[i][d] / max(1, limit))
                    for i, uses in enumerate(on)
                    for d, use in uses.items()
                    if problem.space[d] == space
                ]
                solver.Add(sum(held) <= (1.0 if limit else 0.0))
        solver.Minimize(makespan)
        status = solver.Solve()
        if status not in (solver.OPTIMAL, solver.FEASIBLE):
            raise PlanError(f"{self.name} found no plan in {self.seconds:g} s")
        place = tuple(max(uses, key=lambda d: uses[d].solution_value()) for uses in on)
        order = sorted(range(problem.size), key=lambda i: (round(starts[i].solution_value() * unit), i))
        plan = TaskPlan(place, tuple(_topological(problem, order)))
        return Solved(plan, int(solver.Objective().BestBound() * unit * (1 - 1e-6)), status == solver.OPTIMAL)


def _horizon(problem: PlacementProblem) -> int:
    slowest = sum(max(times) for times in problem.service)
    place = [max(problem.devices_of(i), key=times.__getitem__) for i, times in enumerate(problem.service)]
    spaces = range(len(problem.space_names))
    copies = sum(max(problem.copy_ns(t, a, b) for a in spaces for b in spaces) for t in range(len(problem.producer)))
    return max(slowest + copies, sequential_ns(problem, place) or 0)


def _topological(problem: PlacementProblem, order: list[int]) -> list[int]:
    """An order in which tolerances of a solver may have swapped tasks, made topological."""
    done: set[int] = set()
    mended: list[int] = []
    waiting = order
    while waiting:
        later = []
        for i in waiting:
            if all(j in done for j in problem.preds[i]):
                done.add(i)
                mended.append(i)
            else:
                later.append(i)
        waiting = later
    return mended


def _is_nowhere(expression: Any) -> bool:
    return isinstance(expression, int)


def _ortools(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"ortools.{module}")
    except ImportError:
        raise PlanError("exact placement needs OR-Tools: pip install 'cotenant[solver]'") from None
