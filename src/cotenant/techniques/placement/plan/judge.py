"""Check of a placement from a file against the measured tasks of its model."""

from __future__ import annotations

from collections.abc import Mapping

from cotenant.errors import CotenantError
from cotenant.techniques.placement.plan.flat import PLAIN, PlacementProblem
from cotenant.techniques.placement.plan.placed_units import plan_of
from cotenant.techniques.placement.plan.profiled import graph_of
from cotenant.techniques.placement.plan.strategies import Sequential, makespan_ns
from cotenant.techniques.placement.plan.verify import violations
from cotenant.techniques.placement.task_profile import ModelTasks
from cotenant.techniques.placement.unit_placement import UnitPlacement


def placement_faults(placement: UnitPlacement, measured: Mapping[int, ModelTasks]) -> list[str]:
    """Faults of a placement, as sentences; `measured`: tasks of its model by size of share.

    Empty if its graph is the measured one, it can run, and it is predicted to be faster than the sequential run.
    """
    where = f"placement of {placement.model!r} on {placement.where}"
    tasks = measured.get(placement.size)
    if tasks is None:
        return [
            f"{where}: the model's tasks were not measured there; run 'cotenant place REPOSITORY {placement.model}'"
        ]
    if placement.graph != tasks.graph:
        return [f"{where}: was made for graph {placement.graph}, the measured one is {tasks.graph}"]
    if (placement.cores, placement.sms) != (tasks.cores, tasks.sms):
        return [f"{where}: the measured share has {tasks.where}"]
    problem = PlacementProblem(graph_of(tasks), PLAIN)
    try:
        plan = plan_of(placement, problem)
        line = problem.evaluate(plan)
    except CotenantError as error:
        return [f"{where}: {error}"]
    assert line is not None  # all cores share one memory, and a GPU has links to it
    found = violations(problem, plan, line)
    sequential_ns = makespan_ns(problem, Sequential().place(problem))
    if line.makespan_ns >= sequential_ns:
        taken, before = line.makespan_ns / 1e6, sequential_ns / 1e6
        found.append(f"is predicted to take {taken:.3g} ms, the sequential run {before:.3g} ms")
    return [f"{where}: {each}" for each in found]
