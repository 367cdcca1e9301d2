"""The makespan of joint plans, predicted from tables of units and a cost model of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from cotenant.errors import InvalidValueError
from cotenant.inner_loop import InnerLoops, best_loops, plain_loops
from cotenant.techniques.granularity.joint_plan import JointMember, JointPlan
from cotenant.techniques.granularity.kernel_table import Column, KernelTable
from cotenant.techniques.granularity.predict import cluster_loop
from cotenant.techniques.granularity.predict.cluster_loop import MAX_CHUNKS, ClusterScratch, FlatPlan, FlatSet
from cotenant.techniques.granularity.predict.rules import Admission, Issuing, Occupancy

_MEMORY = 20_000
"""Clusters in the cache at most."""


PLAIN = plain_loops(cluster_loop)


class UnitRun(NamedTuple):
    """One run of a unit, or of one chunk of it with `rows` rows: times in ns, `need` in shares of all
    slots."""

    member: int
    unit: int
    chunk: int
    rows: int
    start_ns: int
    end_ns: int
    need: float


@dataclass(frozen=True, slots=True)
class JointTimeline:
    """The predicted run of a plan. `barriers_ns` are the times at which members continue behind each barrier.
    `residue_ns` is R of Eq. 8: idle slot-time, barriers included, in ns of all slots."""

    makespan_ns: int
    residue_ns: float
    runs: tuple[UnitRun, ...]
    barriers_ns: tuple[int, ...]


class JointCost(NamedTuple):
    """Makespan and residue of a plan, both in ns."""

    makespan_ns: float
    residue_ns: float


class JointEvaluator:
    """Evaluates joint plans of one set on one device. `runs` counts simulated clusters.

    With barriers a makespan is a sum over clusters, and results of clusters are cached (GACER, Eqs. 2, 3 and 8):

        makespan = sum over clusters of play(cluster) + barriers * barrier_ns

    An evaluator shares the prepared form of a plan with one that it is `beside`. Not thread-safe: they share working
    memory.
    """

    def __init__(
        self,
        tables: Sequence[KernelTable],
        rules: Occupancy,
        loops: InnerLoops | None = None,
        beside: JointEvaluator | None = None,
    ) -> None:
        if not tables:
            raise InvalidValueError("set of models", "tables", 0, "at least one")
        self.tables = tuple(tables)
        self.rules = rules
        self.loops = loops or best_loops(cluster_loop)
        self.runs = 0
        self._memory: dict[object, JointCost] = {}
        self._latest: dict[int, tuple[JointPlan, FlatPlan]] = beside._latest if beside is not None else {}
        self._flat = self._flatten()
        self._scratch = self._scratch_of()
        self._ends = tuple(table.size for table in self.tables)
        self._sizes = [(table.size, table.batch) for table in self.tables]
        self._stepped = [m for m, table in enumerate(self.tables) if table.has_long_steps]

    @property
    def streams(self) -> JointPlan:
        """All members at once, each as one stream: no barrier, no wait, no chunk."""
        return JointPlan(tuple(JointMember(table.model, table.batch, table.size) for table in self.tables))

    def sequential_ns(self) -> int:
        """Makespan of one member after another in one stream of one thread; launches are issued ahead."""
        issued, end = 0.0, 0.0
        for table in self.tables:
            for duration in table.duration_ns[:, -1].tolist():
                issued += self.rules.launch_ns
                end = max(issued, end + self.rules.gap_ns if end else 0.0) + duration
        return ceil(end)

    def cost(self, plan: JointPlan) -> JointCost:
        """Makespan and residue of a plan of this set.

        Raises InvalidValueError for a plan of other members, and for one that cannot run: see `cost_if`.
        """
        cost = self.cost_if(plan)
        if cost is None:
            text = "no circular waits or barriers, and no stop between units that are row-wise only together"
            raise InvalidValueError("joint plan", "waits", plan.waits, text)
        return cost

    def cost_if(self, plan: JointPlan) -> JointCost | None:
        """As `cost`; None if waits are circular, or a pointer stops a chunk between units that are row-wise only
        together."""
        self._check(plan)
        if not all(self.tables[m].may_split(*part) for m in self._stepped for part in plan.chunk_segments(m)):
            return None
        if not plan.barriers:
            return self._cluster(plan, (0,) * len(self._ends), self._ends)
        makespan, residue = len(plan.barriers) * float(self.rules.barrier_ns), 0.0
        low = (0,) * len(self._ends)
        for high in (*plan.barriers, self._ends):
            cost = self._cluster(plan, low, high)
            if cost is None:
                return None
            makespan += cost.makespan_ns
            residue += cost.residue_ns
            low = high
        return JointCost(makespan, residue + len(plan.barriers) * self.rules.barrier_ns)

    def timeline(self, plan: JointPlan, absent: Sequence[int] = ()) -> JointTimeline:
        """The predicted run of a plan without the `absent` members. Raises as `cost`."""
        found: list[UnitRun] = []
        barriers: list[int] = []
        residue = end = 0.0
        begins, ends = self._scratch.begin, self._scratch.end
        for number, (low, high, start, taken) in enumerate(self._played(plan, absent)):
            if number:
                residue += start - end
                barriers.append(round(start))
            end = start + taken
            residue += taken - float(self._scratch.area[0])
            for m, (a, b) in enumerate(zip(low, high, strict=True)):
                cut = {u: c.rows for c in plan.chunks if c.member == m for u in range(c.start, c.end)}
                need = np.minimum(self.tables[m].need, 1.0)
                for u in range(a, b):
                    for chunk, rows in enumerate(cut.get(u, (self.tables[m].batch,))):
                        at = (int(self._flat.first[m]) + u) * MAX_CHUNKS + chunk
                        times = (round(start + begins[at]), round(start + ends[at]))
                        found.append(UnitRun(m, u, chunk, rows, *times, float(need[u, rows - 1])))
        found.sort(key=lambda run: (run.start_ns, run.member, run.unit, run.chunk))
        return JointTimeline(ceil(end), residue, tuple(found), tuple(barriers))

    def spans(self, plan: JointPlan) -> tuple[list[list[float]], list[list[float]]]:
        """Start and end of the units of each member in ns, by the first chunk; faster than a timeline. Raises as
        `cost`."""
        begins: list[list[float]] = [[] for _ in self.tables]
        ends: list[list[float]] = [[] for _ in self.tables]
        for low, high, start, _ in self._played(plan):
            for m, (a, b) in enumerate(zip(low, high, strict=True)):
                first = int(self._flat.first[m])
                begins[m] += [
                    start + x
                    for x in self._scratch.begin[(first + a) * MAX_CHUNKS : (first + b) * MAX_CHUNKS : MAX_CHUNKS]
                ]
                ends[m] += [start + x for x in self._scratch.done[first + a : first + b]]
        return begins, ends

    def _played(
        self, plan: JointPlan, absent: Sequence[int] = ()
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], float, float]]:
        """Simulate cluster by cluster: its units [low, high), its start and its time. The scratch holds the details."""
        self._check(plan)
        flat, start = self._flat_plan(plan), 0.0
        low = tuple(end if m in absent else 0 for m, end in enumerate(self._ends))
        for barrier in (*plan.barriers, self._ends):
            high = tuple(max(pair) for pair in zip(low, barrier, strict=True))
            taken = self._play(flat, low, high)
            if taken < 0:
                raise InvalidValueError("joint plan", "waits", plan.waits, "no circular waits or barriers")
            yield low, high, start, taken
            start += taken + self.rules.barrier_ns
            low = high

    def _check(self, plan: JointPlan) -> None:
        if [(member.units, member.batch) for member in plan.members] != self._sizes:
            sizes = ", ".join(f"{table.model}:{table.batch} of {table.size} units" for table in self.tables)
            raise InvalidValueError("joint plan", "members", [member.model for member in plan.members], sizes)

    def _cluster(self, plan: JointPlan, low: tuple[int, ...], high: tuple[int, ...]) -> JointCost | None:
        key = (
            low,
            high,
            tuple([member.rank for member in plan.members]),
            tuple([c for c in plan.chunks if low[c.member] < c.end and c.start < high[c.member]]),
            tuple([w for w in plan.waits if low[w.member] <= w.unit < high[w.member]]),
        )
        cost = self._memory.get(key)
        if cost is None:
            taken = self._play(self._flat_plan(plan), low, high)
            if taken < 0:
                return None
            cost = JointCost(taken, taken - float(self._scratch.area[0]))
            if len(self._memory) >= _MEMORY:
                self._memory.clear()
            self._memory[key] = cost
        return cost

    def _play(self, flat: FlatPlan, low: Sequence[int], high: Sequence[int]) -> float:
        self.runs += 1
        ints = self.loops.ints
        return float(self.loops[cluster_loop].play(self._flat, flat, self._scratch, ints(low), ints(high)))

    def _flatten(self) -> FlatSet:
        ints, floats, rules = self.loops.ints, self.loops.floats, self.rules
        sizes = [table.size for table in self.tables]
        cells = [table.size * table.batch for table in self.tables]
        issuing = (Issuing.STREAM, Issuing.MEMBER, Issuing.ALL).index(rules.issuing)
        flags = (rules.admission is Admission.FILL, rules.shares_rates, rules.keeps_slots)

        def of(name: str) -> Column:
            return np.concatenate([getattr(table, name).ravel() for table in self.tables])

        return FlatSet(
            modes=ints([*map(int, flags), issuing]),
            costs=floats([rules.launch_ns, rules.gap_ns, rules.event_ns]),
            first=ints(np.cumsum([0, *sizes]).tolist()),
            cell=ints(np.cumsum([0, *cells]).tolist()),
            batch=ints([table.batch for table in self.tables]),
            duration=floats(of("duration_ns")),
            need=floats(np.minimum(of("need"), 1.0)),
            compute=floats(of("compute")),
            bandwidth=floats(of("bandwidth")),
            join=floats(of("join_ns")),
        )

    def _scratch_of(self) -> ClusterScratch:
        members, units = len(self.tables), sum(table.size for table in self.tables)
        sizes = dict.fromkeys(("chunk", "width", "open", "resume"), members)
        sizes |= dict.fromkeys(("ended", "done", "issued"), units)
        sizes |= {"begin": units * MAX_CHUNKS, "end": units * MAX_CHUNKS, "area": 1}
        whole = ("live", "unit", "limit", "rows", "state", "chunk", "width", "open", "ended")
        made: list[Any] = []
        for name in ClusterScratch._fields:
            values = [0] * sizes.get(name, members * MAX_CHUNKS)
            made.append(self.loops.ints(values) if name in whole else self.loops.floats(values))
        return ClusterScratch(*made)

    def _flat_plan(self, plan: JointPlan) -> FlatPlan:
        ints = self.loops.ints
        known = self._latest.get(0)
        if known is not None and known[0] is plan:
            return known[1]
        chunks, waits = sorted(plan.chunks), sorted(plan.waits)
        members = range(len(self._ends) + 1)
        rows_from = [0]
        for chunk in chunks:
            rows_from.append(rows_from[-1] + len(chunk.rows))
            splits = self.tables[chunk.member].may_split(chunk.start, chunk.end)
            if len(chunk.rows) > MAX_CHUNKS or not splits:
                raise InvalidValueError("joint plan", "chunk", chunk, f"at most {MAX_CHUNKS} chunks of row-wise units")
        flat = FlatPlan(
            rank=ints([member.rank for member in plan.members]),
            chunk_from=ints([sum(chunk.member < m for chunk in chunks) for m in members]),
            chunk_start=ints([chunk.start for chunk in chunks]),
            chunk_end=ints([chunk.end for chunk in chunks]),
            rows_from=ints(rows_from),
            chunk_rows=ints([rows for chunk in chunks for rows in chunk.rows]),
            wait_from=ints([sum(wait.member < m for wait in waits) for m in members]),
            wait_unit=ints([wait.unit for wait in waits]),
            wait_after=ints([wait.after for wait in waits]),
            wait_until=ints([wait.after_unit for wait in waits]),
        )
        self._latest[0] = plan, flat
        return flat
