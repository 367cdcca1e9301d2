"""Exact placement by CP-SAT (OR-Tools, the extra `solver`): SIR+ (SYSTOR 2022), section 5, as interval scheduling.

- Each task has an optional interval on each of its devices, exactly one of which is present.
- Intervals on a lane do not overlap; a moldable device takes several lanes. Memory limits hold by space.
- Copies are made once per tensor and space, in every transfer mode.
- Redundant constraints: heads and tails, and the load of every lane before, behind and between hubs.

With a good plan as hint, the solver raises the lower bound of the makespan, which proves optimality sooner than a
search for better plans. Hand-overs are left out, and a copy may stand anywhere on its lane. So the bound is valid for
the evaluator, and without hand-overs the optimum is the same under DELAY.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from cotenant.errors import PlanError
from cotenant.techniques.placement.plan.bounds import bound_of, related_tasks
from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.strategies import PlacementStrategy, sequential_ns

_HUBS = 12
_FEW = 80
"""Most tasks for which the solver is faster without a linear relaxation."""


@dataclass(frozen=True, slots=True)
class Solved:
    """Result of a solver: a plan, a lower bound of the makespan, and whether the plan is proved optimal."""

    plan: TaskPlan
    bound_ns: int
    is_proved: bool


@dataclass(frozen=True, slots=True)
class IntervalSearch(PlacementStrategy):
    """CP-SAT. `seconds`: time limit; `workers`: threads. Deterministic if it ends before the limit with one worker."""

    seconds: float = 30.0
    workers: int = 1
    seed: int = 1
    name: str = "cp_sat"

    @override
    def place(self, problem: PlacementProblem) -> TaskPlan:
        return self.solve(problem).plan

    def solve(self, problem: PlacementProblem, hint: TaskPlan | None = None) -> Solved:
        """Solve, starting from the plan `hint`, which is returned if no better one is found.

        Raises PlanError if no plan was found or exists.
        """
        cp_model = ortools("sat.python.cp_model")
        model = cp_model.CpModel()
        horizon = 2 * max(1, horizon_of(problem))
        begins, ends, chosen = [], [], []
        lanes: list[list[Any]] = [[] for _ in problem.resources]
        for i, times in enumerate(problem.service):
            begin, end = model.new_int_var(0, horizon, ""), model.new_int_var(0, horizon, "")
            on = {d: model.new_bool_var("") for d in problem.devices_of(i)}
            model.add_exactly_one(on.values())
            model.add(end == begin + sum(times[d] * use for d, use in on.items()))
            for d, use in on.items():
                interval = model.new_optional_interval_var(begin, times[d], end, use, "")
                for lane in problem.lanes[d]:
                    lanes[lane].append(interval)
            begins.append(begin)
            ends.append(end)
            chosen.append(on)
        self._copies(problem, model, begins, ends, chosen, lanes, horizon)
        for intervals in lanes:
            model.add_no_overlap(intervals)
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
    """Add the load of every lane before a hub, behind it, and between two hubs as lower bounds of these times."""
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


def horizon_of(problem: PlacementProblem) -> int:
    """Upper bound of the makespan in ns: the slowest times of all tasks and copies, one after another."""
    slowest = sum(max(times) for times in problem.service)
    place = [max(problem.devices_of(i), key=times.__getitem__) for i, times in enumerate(problem.service)]
    spaces = range(len(problem.space_names))
    copies = sum(max(problem.copy_ns(t, a, b) for a in spaces for b in spaces) for t in range(len(problem.producer)))
    return max(slowest + copies, sequential_ns(problem, place) or 0)


def _is_nowhere(expression: Any) -> bool:
    return isinstance(expression, int)


def ortools(module: str) -> Any:
    """A module of OR-Tools. Raises PlanError where OR-Tools is not installed."""
    import importlib

    try:
        return importlib.import_module(f"ortools.{module}")
    except ImportError:
        raise PlanError("exact placement needs OR-Tools: pip install 'cotenant[solver]'") from None
