"""Placements by names, as files hold them, from plans by numbers and back."""

from __future__ import annotations

from cotenant.plan.placement.flat import PlacementProblem, TaskPlan
from cotenant.profile.unit_placement import UnitPlacement, runs_of


def placement_of(
    model: str, graph: str, problem: PlacementProblem, plan: TaskPlan, sequential_ns: int, bound_ns: int
) -> UnitPlacement:
    """A plan of a graph by names; see UnitPlacement."""
    line = problem.evaluate(plan)
    assert line is not None
    units = [(problem.graph.tasks[i].name, problem.device_names[plan.place[i]]) for i in plan.order]
    cores = len(problem.lane_names)
    return UnitPlacement(model, graph, cores, line.makespan_ns, sequential_ns, bound_ns, runs_of(units))


def plan_of(placement: UnitPlacement, problem: PlacementProblem) -> TaskPlan:
    """The plan by numbers of a graph. Raises ProfileError where it is of another; evaluation checks the rest."""
    order, place = placement.places([task.name for task in problem.graph.tasks], problem.device_names)
    return TaskPlan(tuple(problem.device_names.index(device) for device in place), order)
