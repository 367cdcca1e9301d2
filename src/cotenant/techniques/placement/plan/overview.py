"""Overview of a placement for reports: where branches run, queueing delays before, latency and gap after.

A *stage* has the tasks at one depth of the contracted graph: parallel branches between two forks or joins, or a
sequence. The queueing delay of a task is its wait for the device once its inputs are available, in the sequential
execution (SIR+, Figure 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.gantt import Bar, GanttChart
from cotenant.techniques.placement.plan.contract import blocks_of
from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan, Timeline
from cotenant.techniques.placement.plan.overflow import FANS, FoundPlacement
from cotenant.techniques.placement.plan.strategies import Sequential, queueing_delays_ns

LEAST_GAIN_PCT = 3.0
"""Least gain in percent for placing a model: task times are not known more precisely."""


@dataclass(frozen=True, slots=True)
class StageView:
    """Parallel branches, or a sequence (one branch), from the first task to the last in the graph's order.

    - `service_ns`: sum of service times, by device; `waits_ns`: sum of queueing delays in the sequential execution.
    - `runs_on`: number of branches with most of their time on a device; `placed_ns`: service time where tasks are
      placed, by device.
    """

    first: str
    last: str
    branches: int
    tasks: int
    service_ns: dict[str, int]
    waits_ns: int
    runs_on: dict[str, int]
    placed_ns: dict[str, int]


@dataclass(frozen=True, slots=True)
class PlacementOverview:
    """A placement and the sequential execution. `before`, `after`: Gantt charts, labelled by the numbers of stages.

    `queueing_ns`, `service_ns`: of each task in the sequential execution, in the graph's order.
    """

    model: str
    devices: tuple[str, ...]
    stages: tuple[StageView, ...]
    before: GanttChart
    after: GanttChart
    sequential_ns: int
    latency_ns: int
    period_ns: int
    bound_ns: int
    gap_pct: float
    is_proved: bool
    queueing_ns: tuple[int, ...]
    service_ns: tuple[int, ...]

    @property
    def gain_pct(self) -> float:
        """Decrease of the latency against the sequential execution, in percent."""
        return 100.0 * (1 - self.latency_ns / self.sequential_ns) if self.sequential_ns else 0.0

    @property
    def gains(self) -> bool:
        """Whether the gain is at least LEAST_GAIN_PCT."""
        return self.gain_pct >= LEAST_GAIN_PCT

    @property
    def most_gain_pct(self) -> float:
        """Upper bound of the gain of all placements, in percent."""
        return 100.0 * (1 - self.bound_ns / self.sequential_ns) if self.sequential_ns else 0.0


def overview(model: str, problem: PlacementProblem, found: FoundPlacement) -> PlacementOverview:
    """The overview of a found placement."""
    plan = Sequential().place(problem)
    line = problem.evaluate(plan)
    assert line is not None
    stages = stages_of(problem)
    delays = queueing_delays_ns(problem, plan)
    stage_of = {i: number for number, branches in enumerate(stages) for branch in branches for i in branch}
    return PlacementOverview(
        model,
        problem.device_names,
        tuple(_stage(problem, branches, delays, found.plan) for branches in stages),
        _chart(problem, plan, line, stage_of),
        _chart(problem, found.plan, found.timeline, stage_of),
        line.makespan_ns,
        found.timeline.makespan_ns,
        found.timeline.period_ns,
        found.bound_ns,
        found.gap_pct,
        found.is_proved,
        tuple(delays),
        tuple(end - start for start, end in zip(line.start_ns, line.end_ns, strict=True)),
    )


def stages_of(problem: PlacementProblem) -> list[list[list[int]]]:
    """Tasks by stage and branch, of the coarsest contraction with parallel branches, in the graph's order.

    Consecutive stages of one branch are combined.
    """
    levels: list[list[list[int]]] = []
    for fan in FANS:
        levels = _levels(problem, blocks_of(problem, fan))
        if any(len(level) > 1 for level in levels):
            break
    stages: list[list[list[int]]] = []
    for level in levels:
        if stages and len(level) == len(stages[-1]) == 1:
            stages[-1][0].extend(level[0])
        else:
            stages.append([list(branch) for branch in level])
    return stages


def _levels(problem: PlacementProblem, blocks: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Blocks by depth: the number of blocks on the longest path to them."""
    home = {i: number for number, block in enumerate(blocks) for i in block}
    depth = [0] * len(blocks)
    for number, block in enumerate(blocks):  # in a topological order
        before = {home[j] for i in block for j in problem.preds[i]} - {number}
        depth[number] = max((depth[other] + 1 for other in before), default=0)
    return [[list(block) for block, at in zip(blocks, depth, strict=True) if at == d] for d in range(max(depth) + 1)]


def _stage(
    problem: PlacementProblem, branches: Sequence[Sequence[int]], delays: Sequence[int], plan: TaskPlan
) -> StageView:
    tasks = sorted(i for branch in branches for i in branch)
    runs_on = dict.fromkeys(problem.device_names, 0)
    placed = dict.fromkeys(problem.device_names, 0)
    for branch in branches:
        taken = dict.fromkeys(problem.device_names, 0)
        for i in branch:
            taken[problem.device_names[plan.place[i]]] += problem.service[i][plan.place[i]]
        runs_on[max(taken, key=taken.__getitem__)] += 1
        placed = {name: ns + taken[name] for name, ns in placed.items()}
    names = [task.name for task in problem.graph.tasks]
    return StageView(
        names[tasks[0]],
        names[tasks[-1]],
        len(branches),
        len(tasks),
        {
            name: sum(problem.service[i][d] for i in tasks)
            for d, name in enumerate(problem.device_names)
            if all(problem.service[i][d] >= 0 for i in tasks)
        },
        sum(delays[i] for i in tasks),
        {name: count for name, count in runs_on.items() if count},
        {name: ns for name, ns in placed.items() if ns},
    )


def _chart(problem: PlacementProblem, plan: TaskPlan, line: Timeline, stage_of: dict[int, int]) -> GanttChart:
    """Gantt chart of the lanes; consecutive tasks of one stage without a pause are one bar."""
    found: dict[str, list[Bar]] = {name: [] for name in problem.lane_names}
    for i in plan.order:
        for lane in problem.lanes[plan.place[i]]:
            name, label, start, end = problem.lane_names[lane], str(stage_of[i]), line.start_ns[i], line.end_ns[i]
            bars = found[name]
            if bars and (bars[-1].label, bars[-1].end_ns) == (label, start):
                start = bars.pop().start_ns
            if end > start:
                bars.append(Bar(name, label, start, end))
    return GanttChart(tuple(found), tuple(bar for bars in found.values() for bar in bars), line.makespan_ns)
