"""Conversion between plans (by number) and placements (by name, as in files)."""

from __future__ import annotations

from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan
from cotenant.techniques.placement.unit_placement import UnitPlacement, runs_of


def placement_of(
    model: str, graph: str, problem: PlacementProblem, plan: TaskPlan, sequential_ns: int, bound_ns: int, sms: int = 0
) -> UnitPlacement:
    """A plan by names, in an order with long runs of each device, unless queued copies would then end later.

    `sms`: number of SMs of a GPU share, 0 without a GPU.
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
    """The plan by numbers. Raises ProfileError for a placement of another graph; evaluation checks the rest."""
    order, place = placement.places([task.name for task in problem.graph.tasks], problem.device_names)
    return TaskPlan(tuple(problem.device_names.index(device) for device in place), order)


def in_runs(problem: PlacementProblem, plan: TaskPlan) -> tuple[int, ...]:
    """Another order of the same plan, with runs of each device as long as dependencies and lanes allow.

    Every lane keeps its order, so without copies all tasks keep their times.
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
