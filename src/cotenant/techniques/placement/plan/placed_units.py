"""Placements by names, as files hold them, from plans by numbers and back."""

from __future__ import annotations

from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan
from cotenant.techniques.placement.unit_placement import UnitPlacement, runs_of


def placement_of(
    model: str, graph: str, problem: PlacementProblem, plan: TaskPlan, sequential_ns: int, bound_ns: int, sms: int = 0
) -> UnitPlacement:
    """A plan by names, see UnitPlacement, in an order of long runs unless copies that queue would then end later.

    With `sms` it is of a share of a GPU of that size, and of the cores beside it.
    """
    line = problem.evaluate(plan)
    assert line is not None
    order = in_runs(problem, plan)
    again = problem.evaluate(TaskPlan(plan.place, order))
    if again is None or again.makespan_ns > line.makespan_ns:
        order = plan.order
    units = [(problem.graph.tasks[i].name, problem.device_names[plan.place[i]]) for i in order]
    cores = len(problem.lane_names) - bool(sms)
    return UnitPlacement(model, graph, cores, line.makespan_ns, sequential_ns, bound_ns, runs_of(units), sms=sms)


def plan_of(placement: UnitPlacement, problem: PlacementProblem) -> TaskPlan:
    """The plan by numbers of a graph. Raises ProfileError where it is of another; evaluation checks the rest."""
    order, place = placement.places([task.name for task in problem.graph.tasks], problem.device_names)
    return TaskPlan(tuple(problem.device_names.index(device) for device in place), order)


def in_runs(problem: PlacementProblem, plan: TaskPlan) -> tuple[int, ...]:
    """Another order of the same plan: one device's tasks for as long as neither inputs nor its lanes stand against it.

    Every lane keeps its own order, so that without copies all tasks begin and end when they did.
    """
    missing = [len(before) for before in problem.preds]
    queues = [
        [i for i in plan.order if lane in problem.lanes[plan.place[i]]] for lane in range(len(problem.lane_names))
    ]
    at = [0] * len(queues)
    order: list[int] = []

    def ready(device: int) -> int | None:
        heads = {queues[lane][at[lane]] if at[lane] < len(queues[lane]) else -1 for lane in problem.lanes[device]}
        if len(heads) != 1 or -1 in heads:
            return None
        (task,) = heads
        return task if plan.place[task] == device and not missing[task] else None

    device = 0
    while len(order) < problem.size:
        task = ready(device)
        if task is None:
            device = next(d for d in range(len(problem.device_names)) if ready(d) is not None)
            continue
        order.append(task)
        for lane in problem.lanes[device]:
            at[lane] += 1
        for reader in problem.succs[task]:
            missing[reader] -= 1
    return tuple(order)
