"""Whether a placement of a file still holds on what was measured of its model."""

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
    """What speaks against a placement, in words; `measured` are the tasks of its model by size of share.

    Empty where it is of the graph that was measured, can run, and is believed quicker than one unit after the other.
    """
    where = f"placement of {placement.model!r} on {placement.where}"
    tasks = measured.get(placement.size)
    if tasks is None:
        return [
            f"{where}: the model's tasks were not measured there; run 'cotenant place REPOSITORY {placement.model}'"
        ]
    if placement.graph != tasks.graph:
        return [f"{where}: is of the graph {placement.graph}, and {tasks.graph} was measured"]
    if (placement.cores, placement.sms) != (tasks.cores, tasks.sms):
        return [f"{where}: was made for it, and {tasks.where} were measured"]
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
        found.append(f"takes {taken:.3g} ms by what was measured, one unit after the other {before:.3g} ms")
    return [f"{where}: {each}" for each in found]
