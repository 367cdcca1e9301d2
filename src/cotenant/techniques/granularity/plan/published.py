"""Algorithm 1 of GACER: barriers by coordinate descent, chunks at the largest residue, in alternation.

Source: GACER (2023), sections 4.2 to 4.4. Our reading of it:

1. Cut units into chunks while that lowers the objective (4.2). The listing omits this step; it follows each descent.
2. Add one pointer to each model, in the middle of the longest cluster.
3. Lines 4 to 9: for each model in turn, try every position of every pointer between its neighbours; take the best.
4. End the descent after a sweep without a change. Repeat step 1.
5. Lines 10 to 14: go to step 2 unless the best plan with one pointer more is no better.

A *round* of its Table 4 is one evaluation. Units that are row-wise only together are cut as one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice, pairwise
from math import inf

import msgspec
import numpy as np
from typing_extensions import override

from cotenant.techniques.granularity.joint_plan import Chunk, JointPlan
from cotenant.techniques.granularity.kernel_table import KernelTable
from cotenant.techniques.granularity.plan.planner import FoundJointPlan, JointPlanner, JointProgress, found
from cotenant.techniques.granularity.predict.cluster_loop import MAX_CHUNKS
from cotenant.techniques.granularity.predict.evaluator import JointCost, JointEvaluator, JointTimeline, UnitRun
from cotenant.techniques.granularity.predict.rules import Occupancy

_RESIDUES, _TRIED = 64, 8
"""Largest residues that a spatial step looks at, and chunks that it tries before it stops."""


class JointObjective(StrEnum):
    """The objective that a search minimises."""

    MAKESPAN = "makespan"
    RESIDUE = "residue"
    """R of Eq. 8. It orders plans as the makespan does only if chunks leave the slot-time unchanged."""


@dataclass(frozen=True, slots=True)
class Published(JointPlanner):
    """The published search. Without `temporal` it sets no barriers, without `spatial` no chunks. `rounds` limits the
    evaluated plans, `sweeps` the passes over all models in one descent."""

    spatial: bool = True
    temporal: bool = True
    objective: JointObjective = JointObjective.MAKESPAN
    rounds: int = 2000
    sweeps: int = 4

    @property
    @override
    def name(self) -> str:
        kind = "both" if self.spatial and self.temporal else "spatial" if self.spatial else "temporal"
        return kind if self.objective is JointObjective.MAKESPAN else f"{kind}, {self.objective}"

    @override
    def find(
        self, tables: Sequence[KernelTable], rules: Occupancy, progress: JointProgress | None = None
    ) -> FoundJointPlan:
        search = Descent(self, JointEvaluator(tables, rules), progress)
        try:
            search.run()
        except KeyboardInterrupt:
            pass
        return found(search.evaluator, search.best, search.evaluated)


class _EnoughError(Exception):
    """The limit of rounds is reached, or `progress` ended the search."""


class Descent:
    """State of one published search: the best plan so far, and the number of evaluated plans."""

    def __init__(self, settings: Published, evaluator: JointEvaluator, progress: JointProgress | None) -> None:
        self.settings = settings
        self.evaluator = evaluator
        self.evaluated = 0
        self.best = evaluator.streams
        self._progress = progress
        self._least = self._of(evaluator.cost(self.best))

    def run(self) -> None:
        """Search until it converges, its rounds are used up, or `progress` ends it."""
        try:
            self._add_pointers()
        except _EnoughError:
            pass

    def _add_pointers(self) -> None:
        """Add pointers one by one while the objective falls."""
        plan = self._cut_rows(self.evaluator.streams) if self.settings.spatial else self.evaluator.streams
        before = self._value(plan)
        while self.settings.temporal:
            plan = self._descend(self._with_pointer(plan))
            if self.settings.spatial:
                plan = self._cut_rows(plan)
            value = self._value(plan)
            if value >= before:
                return
            before = value

    def _of(self, cost: JointCost) -> float:
        return cost.makespan_ns if self.settings.objective is JointObjective.MAKESPAN else cost.residue_ns

    def _value(self, plan: JointPlan) -> float:
        """The objective of a plan; counts as one round."""
        if self.evaluated >= self.settings.rounds:
            raise _EnoughError
        self.evaluated += 1
        cost = self.evaluator.cost_if(plan)
        value = inf if cost is None else self._of(cost)
        if value < self._least:
            self._least, self.best = value, plan
        if self._progress is not None and self.evaluated % 16 == 0:
            best_ns = self.evaluator.cost(self.best).makespan_ns
            if not self._progress(self.evaluated, best_ns):
                raise _EnoughError
        return value

    def _with_pointer(self, plan: JointPlan) -> JointPlan:
        """The plan with one more barrier, at the middle in time of each member's segment of the longest cluster."""
        ends = tuple(member.units for member in plan.members)
        edges = [(0,) * len(ends), *plan.barriers, ends]
        spans: list[float] = []
        for low, high in pairwise(edges):
            spans.append(
                max(
                    float(table.duration_ns[a:b, -1].sum())
                    for table, a, b in zip(self.evaluator.tables, low, high, strict=True)
                )
            )
        at = spans.index(max(spans))
        middle: list[int] = []
        for table, low, high in zip(self.evaluator.tables, *edges[at : at + 2], strict=True):
            times = table.duration_ns[low:high, -1].cumsum()
            middle.append(int(low + (times <= times[-1] / 2).sum()) if len(times) else low)
        for chunk in plan.chunks:
            place = middle[chunk.member]
            if chunk.start < place < chunk.end:
                middle[chunk.member] = max(edges[at][chunk.member], self.evaluator.tables[chunk.member].step(place)[0])
        return msgspec.structs.replace(plan, barriers=(*plan.barriers[:at], tuple(middle), *plan.barriers[at:]))

    def _descend(self, plan: JointPlan) -> JointPlan:
        """Lines 4 to 9: for each model in turn, move the pointer with the largest gain to its best position."""
        value = self._value(plan)
        for _ in range(self.settings.sweeps):
            before = value
            for member in range(len(plan.members)):
                least, best = value, plan
                for moved in _moved(plan, member):
                    other = self._value(moved)
                    if other < least:
                        least, best = other, moved
                value, plan = least, best
            if value >= before:
                break
        return plan

    def _cut_rows(self, plan: JointPlan) -> JointPlan:
        """Section 4.2: cut the largest unit that follows the largest residue to the size of that residue. If that does
        not lower the objective, the next residue is tried. Repeats while the objective falls."""
        value = self._value(plan)
        while True:
            for chunk in islice(self._chunks_for_residues(plan), _TRIED):
                cut = msgspec.structs.replace(plan, chunks=tuple(sorted((*plan.chunks, chunk))))
                other = self._value(cut)
                if other < value:
                    value, plan = other, cut
                    break
            else:
                return plan

    def _chunks_for_residues(self, plan: JointPlan) -> Iterator[Chunk]:
        """A chunk for each residue that has room for one, in descending order of residues."""
        line = self.evaluator.timeline(plan)
        runs = [[run for run in line.runs if run.member == m] for m in range(len(plan.members))]
        met: dict[Chunk, None] = {}
        for start, residue in _residues(line)[:_RESIDUES]:
            chunk = self._chunk_for(plan, runs, sum(start >= at for at in line.barriers_ns), start, residue)
            if chunk is not None and chunk not in met:
                met[chunk] = None
                yield chunk

    def _chunk_for(
        self, plan: JointPlan, runs: Sequence[Sequence[UnitRun]], behind: int, start: int, residue: float
    ) -> Chunk | None:
        """The largest unit (or step of units) that is ready at time `start`, cut so that its first chunk fits the
        residue. `behind` is the number of barriers before that time."""
        ends = tuple(member.units for member in plan.members)
        low = (0,) * len(ends) if behind == 0 else plan.barriers[behind - 1]
        high = (*plan.barriers, ends)[behind]
        follows: list[tuple[float, Chunk]] = []
        going = 0
        for member, table in enumerate(self.evaluator.tables):
            begun = runs[member][: bisect_right(runs[member], start, key=lambda run: run.start_ns)]
            unit = max(low[member], begun[-1].unit + 1 if begun else 0)
            going += unit < high[member]
            is_open = any(start < run.end_ns for run in begun[-2 * MAX_CHUNKS :])
            if is_open or not low[member] <= unit < high[member]:
                continue
            start_unit, end = table.step(unit)
            if start_unit != unit or start_unit == end:
                continue
            if any(chunk.member == member and chunk.start <= unit < chunk.end for chunk in plan.chunks):
                continue
            need = np.minimum(1.0, table.need[unit:end].max(axis=0))
            fits = [rows for rows in range(1, table.batch) if need[rows - 1] <= residue + 1e-9]
            if fits:
                rows = (max(fits), table.batch - max(fits))
                follows.append((float(table.need[unit:end, -1].max()), Chunk(member, unit, end, rows)))
        return max(follows)[1] if follows and going > 1 else None  # tails are skipped


def _moved(plan: JointPlan, member: int) -> Iterator[JointPlan]:
    """The plan with one pointer of a member moved, for each pointer and each position between its neighbours."""
    own = [0, *(barrier[member] for barrier in plan.barriers), plan.members[member].units]
    for number, barrier in enumerate(plan.barriers):
        for place in range(own[number], own[number + 2] + 1):
            if place != barrier[member]:
                moved = (*barrier[:member], place, *barrier[member + 1 :])
                barriers = (*plan.barriers[:number], moved, *plan.barriers[number + 1 :])
                yield msgspec.structs.replace(plan, barriers=barriers)


def _residues(line: JointTimeline) -> list[tuple[int, float]]:
    """Start times of idle intervals and their idle share of slots, in descending order of idle slot-time."""
    changes: dict[int, float] = dict.fromkeys(line.barriers_ns, 0.0)
    for run in line.runs:
        changes[run.start_ns] = changes.get(run.start_ns, 0.0) + run.need
        changes[run.end_ns] = changes.get(run.end_ns, 0.0) - run.need
    found: list[tuple[float, int, float]] = []
    taken = 0.0
    for start, end in pairwise(sorted(changes)):
        taken += changes[start]
        if taken < 1.0:
            found.append(((1.0 - taken) * (end - start), start, 1.0 - taken))
    return [(start, residue) for _, start, residue in sorted(found, reverse=True)]
