"""A joint plan in words and Gantt charts: the timelines without it and with it, and its stops and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.gantt import Bar, GanttChart
from cotenant.techniques.granularity.joint_plan import JointPlan
from cotenant.techniques.granularity.kernel_table import KernelTable
from cotenant.techniques.granularity.plan.kept import LEAST_GAIN_PCT
from cotenant.techniques.granularity.plan.planner import FoundJointPlan
from cotenant.techniques.granularity.predict.evaluator import JointEvaluator, JointTimeline
from cotenant.techniques.granularity.predict.rules import Occupancy


@dataclass(frozen=True, slots=True)
class JointOverview:
    """A plan beside all members at once, as predicted.

    The charts have a lane for each stream: a member, or a chunk of its rows. Labels are the numbers of members, marks
    are barriers. `sequential_ns` is one member after another on the whole device. `stops` lists the barriers, waits and
    chunks in words.
    """

    members: tuple[str, ...]
    before: GanttChart
    after: GanttChart
    sequential_ns: int
    bound_ns: int
    evaluated: int
    stops: tuple[str, ...]

    @property
    def gain_pct(self) -> float:
        """Reduction of the makespan against all members at once, in percent."""
        return 100.0 * (1 - self.after.end_ns / max(1, self.before.end_ns))

    @property
    def gap_pct(self) -> float:
        """Upper bound on the distance to the optimal plan, in percent."""
        return 100.0 * (self.after.end_ns / max(1, self.bound_ns) - 1)

    @property
    def gains(self) -> bool:
        """Whether the gain is large enough to follow the plan."""
        return self.gain_pct >= LEAST_GAIN_PCT


def overview(
    tables: Sequence[KernelTable], rules: Occupancy, found: FoundJointPlan, sequential_ns: int
) -> JointOverview:
    """The overview of a plan that was found."""
    evaluator = JointEvaluator(tables, rules)
    return JointOverview(
        tuple(f"{table.model}={table.batch}" for table in tables),
        _chart(evaluator.streams, evaluator.timeline(evaluator.streams)),
        _chart(found.plan, evaluator.timeline(found.plan)),
        sequential_ns,
        int(found.bound_ns),
        found.evaluated,
        tuple(stops_of(found.plan, tables)),
    )


def stops_of(plan: JointPlan, tables: Sequence[KernelTable]) -> list[str]:
    """The barriers, waits and chunks of a plan in words, with the names of units."""
    names = [member.model for member in plan.members]
    found = []
    for number, barrier in enumerate(plan.barriers, 1):
        places = ", ".join(f"{names[m]} {_before(tables[m], at)}" for m, at in enumerate(barrier))
        found.append(f"barrier {number}: {places}")
    for wait in sorted(plan.waits):
        until = _before(tables[wait.after], wait.after_unit)
        found.append(
            f"wait: {names[wait.member]} {_before(tables[wait.member], wait.unit)} for {names[wait.after]} {until}"
        )
    for chunk in sorted(plan.chunks):
        rows = " + ".join(map(str, chunk.rows))
        units = tables[chunk.member].units
        span = f"{chunk.start} ({units[chunk.start]}) to {chunk.end - 1} ({units[chunk.end - 1]})"
        found.append(f"chunks: {names[chunk.member]}, units {span}, rows {rows}")
    ranks = [member.rank for member in plan.members]
    if len(set(ranks)) > 1:
        order = sorted(range(len(ranks)), key=lambda m: (ranks[m], m))
        found.append(f"first come: {', '.join(names[m] for m in order)}")
    return found


def _before(table: KernelTable, at: int) -> str:
    return "at its end" if at == table.size else f"before unit {at} ({table.units[at]})"


def _chart(plan: JointPlan, line: JointTimeline) -> GanttChart:
    """A chart of the streams that run units; consecutive runs without a pause are one bar."""
    streams: dict[tuple[int, int], list[Bar]] = {}
    for run in line.runs:
        bars = streams.setdefault((run.member, run.chunk), [])
        start, end = run.start_ns, run.end_ns
        if bars and start <= bars[-1].end_ns:
            before = bars.pop()
            start, end = before.start_ns, max(before.end_ns, end)
        name = plan.members[run.member].model + (f", chunk {run.chunk + 1}" if run.chunk else "")
        bars.append(Bar(name, str(run.member), start, end))
    ordered = [bars for _, bars in sorted(streams.items())]
    lanes = tuple(bars[0].lane for bars in ordered)
    return GanttChart(lanes, tuple(bar for bars in ordered for bar in bars), line.makespan_ns, line.barriers_ns)
