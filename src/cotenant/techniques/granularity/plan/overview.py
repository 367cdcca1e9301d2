"""What there is to say of a plan of models that are there together: who runs when without and with it, and where it
stops whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.techniques.granularity.joint_plan import JointPlan
from cotenant.techniques.granularity.kernel_table import KernelTable
from cotenant.techniques.granularity.plan.kept import LEAST_GAIN_PCT
from cotenant.techniques.granularity.plan.planner import FoundJointPlan
from cotenant.techniques.granularity.predict.evaluator import JointEvaluator, JointTimeline
from cotenant.techniques.granularity.predict.rules import Occupancy


@dataclass(frozen=True, slots=True)
class StreamView:
    """A stream of a member, all of it or a part of its rows, and from when to when it is busy, in ns; stretches that
    follow each other without a pause are one."""

    member: int
    name: str
    busy_ns: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class JointView:
    """All members beside each other: their streams, the times of barriers and the makespan, in ns."""

    streams: tuple[StreamView, ...]
    barriers_ns: tuple[int, ...]
    makespan_ns: int


@dataclass(frozen=True, slots=True)
class JointOverview:
    """A plan beside all members at once, as believed. `sequential_ns` is one member after another on the whole device;
    `stops` says in words where the plan stops or cuts whom."""

    members: tuple[str, ...]
    before: JointView
    after: JointView
    sequential_ns: int
    bound_ns: int
    evaluated: int
    stops: tuple[str, ...]

    @property
    def gain_pct(self) -> float:
        """How much shorter than all at once it is."""
        return 100.0 * (1 - self.after.makespan_ns / max(1, self.before.makespan_ns))

    @property
    def gap_pct(self) -> float:
        """How far at most it is above the best plan."""
        return 100.0 * (self.after.makespan_ns / max(1, self.bound_ns) - 1)

    @property
    def gains(self) -> bool:
        """Whether that is enough to follow it."""
        return self.gain_pct >= LEAST_GAIN_PCT


def overview(
    tables: Sequence[KernelTable], rules: Occupancy, found: FoundJointPlan, sequential_ns: int
) -> JointOverview:
    """All that reports say of a plan that was found."""
    evaluator = JointEvaluator(tables, rules)
    return JointOverview(
        tuple(f"{table.model}={table.batch}" for table in tables),
        _view(evaluator.streams, evaluator.timeline(evaluator.streams)),
        _view(found.plan, evaluator.timeline(found.plan)),
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


def _view(plan: JointPlan, line: JointTimeline) -> JointView:
    busy: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for run in line.runs:
        stretches = busy.setdefault((run.member, run.part), [])
        if stretches and run.start_ns <= stretches[-1][1]:
            stretches[-1] = stretches[-1][0], max(stretches[-1][1], run.end_ns)
        else:
            stretches.append((run.start_ns, run.end_ns))
    streams = tuple(
        StreamView(member, plan.members[member].model + (f", part {part + 1}" if part else ""), tuple(each))
        for (member, part), each in sorted(busy.items())
    )
    return JointView(streams, line.barriers_ns, line.makespan_ns)
