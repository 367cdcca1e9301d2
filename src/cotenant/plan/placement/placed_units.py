"""A placement as plan files hold it: each unit and its device, in the order in which the devices run them."""

from __future__ import annotations

from msgspec import Struct

from cotenant.plan.placement.flat import PlacementProblem, TaskPlan, Timeline
from cotenant.plan.types import Name, PlanError


class PlacedUnit(Struct, frozen=True, forbid_unknown_fields=True):
    """A unit (a task of the graph) and the device that runs it."""

    unit: Name
    device: Name


class UnitPlacement(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the units of a model run, in order: every device runs its own as they stand here.

    `latency_ns` is what the plan was made to come to, `bound_ns` what no plan can go below.
    """

    model: Name
    units: tuple[PlacedUnit, ...]
    latency_ns: int
    bound_ns: int

    @classmethod
    def of(cls, model: str, problem: PlacementProblem, plan: TaskPlan, line: Timeline, bound_ns: int) -> UnitPlacement:
        """A plan by names."""
        units = tuple(PlacedUnit(problem.graph.tasks[i].name, problem.device_names[plan.place[i]]) for i in plan.order)
        return cls(model, units, line.makespan_ns, bound_ns)

    def to_plan(self, problem: PlacementProblem) -> TaskPlan:
        """The plan by numbers of a graph. Raises PlanError where it is not of this graph: another unit or device.

        Evaluation checks the rest.
        """
        tasks = {task.name: i for i, task in enumerate(problem.graph.tasks)}
        devices = {name: d for d, name in enumerate(problem.device_names)}
        place = [-1] * problem.size
        order = []
        for placed in self.units:
            if placed.unit not in tasks or placed.device not in devices:
                raise PlanError(
                    f"placement of {self.model!r}: unit {placed.unit!r} on {placed.device!r}, "
                    f"expected units of the model and one of {', '.join(devices)}"
                )
            place[tasks[placed.unit]] = devices[placed.device]
            order.append(tasks[placed.unit])
        if sorted(order) != list(range(problem.size)):
            raise PlanError(f"placement of {self.model!r}: expected each of its {problem.size} units once")
        return TaskPlan(tuple(place), tuple(order))
