"""The MILP of SIR+, section 5, as we read it.

One start S_i and end F_i = S_i + sum of D_id mu_id. For every edge with ends on different devices, F_j + copy <= S_i.
Of two tasks that share a device, where neither precedes the other, one ends before the other starts (big M). As printed
it forbids one task to start when another ends, and lets devices exclude where no task is.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from cotenant.errors import PlanError
from cotenant.techniques.placement.plan.bounds import related_tasks
from cotenant.techniques.placement.plan.exact import Solved, horizon_of, ortools
from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan


@dataclass(frozen=True, slots=True)
class MixedInteger:
    """The MILP, by SCIP. `seconds` is its time limit. The copy of an edge counts by itself, on no copy engine."""

    seconds: float = 60.0
    name: str = "milp"

    def solve(self, problem: PlacementProblem) -> Solved:
        """Solve. Raises PlanError where SCIP finds no plan in its time, which is usual from 30 tasks on."""
        solver = ortools("linear_solver.pywraplp").Solver.CreateSolver("SCIP")
        solver.SetTimeLimit(int(self.seconds * 1000))
        unit = max(1.0, horizon_of(problem) / 1e4)  # nanoseconds beside ones are more than its tolerances bear
        big = 2 * horizon_of(problem) / unit
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
