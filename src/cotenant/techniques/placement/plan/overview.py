"""What there is to say of a placement: where its branches run, queueing before, latency and gap after.

A *stage* is what stands at one depth of the contracted graph: parallel branches between two forks or joins, or a
stretch without any. Queueing is as in Figure 2 of SIR+ (SYSTOR 2022): how long a task waits for its device after its
inputs are there, in the sequential execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.gantt import Bar, GanttChart
from cotenant.techniques.placement.plan.contract import blocks_of
from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan, Timeline
from cotenant.techniques.placement.plan.overflow import FANS, FoundPlacement
from cotenant.techniques.placement.plan.strategies import Sequential, waits_ns

LEAST_GAIN_PCT = 3.0
"""What gains less is left alone: times of tasks are not known better."""


@dataclass(frozen=True, slots=True)
class StageView:
    """Parallel branches, or a stretch without any (one branch), from its first task to its last in the graph's order.

    `service_ns` is what all its tasks take in a row, by device; `waits_ns` what they wait together in the sequential
    execution; `runs_on` how many branches have most of their time on each device that has some, and `placed_ns` what
    all tasks take where they are placed, by device.
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
    """A placement beside the sequential execution. `before` and `after` are what each lane runs; labels are the
    numbers of stages.

    `queueing_ns` and `service_ns` are those of each task in the sequential execution, in the graph's order.
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
        """How much shorter than the sequential execution it is."""
        return 100.0 * (1 - self.latency_ns / self.sequential_ns) if self.sequential_ns else 0.0

    @property
    def gains(self) -> bool:
        """Whether that is enough to place anything."""
        return self.gain_pct >= LEAST_GAIN_PCT

    @property
    def most_gain_pct(self) -> float:
        """What no placement can exceed, by the bound."""
        return 100.0 * (1 - self.bound_ns / self.sequential_ns) if self.sequential_ns else 0.0


def overview(model: str, problem: PlacementProblem, found: FoundPlacement) -> PlacementOverview:
    """All that reports say of a placement that was found."""
    plan = Sequential().place(problem)
    line = problem.evaluate(plan)
    assert line is not None
    stages = stages_of(problem)
    waits = waits_ns(problem, plan)
    stage_of = {i: number for number, branches in enumerate(stages) for branch in branches for i in branch}
    return PlacementOverview(
        model,
        problem.device_names,
        tuple(_stage(problem, branches, waits, found.plan) for branches in stages),
        _chart(problem, plan, line, stage_of),
        _chart(problem, found.plan, found.timeline, stage_of),
        line.makespan_ns,
        found.timeline.makespan_ns,
        found.timeline.period_ns,
        found.bound_ns,
        found.gap_pct,
        found.is_proved,
        tuple(waits),
        tuple(end - start for start, end in zip(line.start_ns, line.end_ns, strict=True)),
    )


def stages_of(problem: PlacementProblem) -> list[list[list[int]]]:
    """The tasks of each branch of each stage: of the fewest forks that show parallel branches, in the graph's order.

    Stages of one branch that follow each other are one.
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
    """Blocks by the number of blocks on the longest way to them."""
    home = {i: number for number, block in enumerate(blocks) for i in block}
    depth = [0] * len(blocks)
    for number, block in enumerate(blocks):  # which stand in a topological order
        before = {home[j] for i in block for j in problem.preds[i]} - {number}
        depth[number] = max((depth[other] + 1 for other in before), default=0)
    return [[list(block) for block, at in zip(blocks, depth, strict=True) if at == d] for d in range(max(depth) + 1)]


def _stage(
    problem: PlacementProblem, branches: Sequence[Sequence[int]], waits: Sequence[int], plan: TaskPlan
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
        sum(waits[i] for i in tasks),
        {name: count for name, count in runs_on.items() if count},
        {name: ns for name, ns in placed.items() if ns},
    )


def _chart(problem: PlacementProblem, plan: TaskPlan, line: Timeline, stage_of: dict[int, int]) -> GanttChart:
    """What each lane runs; tasks of one stage without a pause between them are one bar."""
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
