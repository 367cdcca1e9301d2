"""Neighbourhood of the search: random changes of a joint plan within a window of time."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from cotenant.techniques.granularity.joint_plan import Chunk, JointPlan, Wait
from cotenant.techniques.granularity.kernel_table import KernelTable

_MOST_CHUNKS = 4
"""Chunks of a batch that a random change makes at most."""
_MOST_WAITS = 24
"""Waits of a plan at most."""


@dataclass(frozen=True, slots=True)
class Window:
    """Units [low, high) of each member, with start and end times of all units in the present plan."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    begins: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]

    @classmethod
    def of(cls, begins: Sequence[Sequence[float]], ends: Sequence[Sequence[float]], rng: random.Random) -> Window:
        """A random window of 5 to 100 % of a plan's makespan."""
        makespan = max(each[-1] for each in ends)
        length = makespan * 0.05 ** rng.random()
        start = rng.uniform(-length / 2, makespan - length / 2)
        return cls(
            tuple(bisect_right(each, start) for each in ends),
            tuple(bisect_right(each, start + length) for each in begins),
            begins,
            ends,
        )

    def members(self) -> list[int]:
        """Members with units in the window."""
        return [m for m, (a, b) in enumerate(zip(self.low, self.high, strict=True)) if a < b]

    def has(self, member: int, unit: int) -> bool:
        """Whether a unit lies in the window."""
        return self.low[member] <= unit < self.high[member]

    def after(self, time: float, member: int) -> int:
        """Number of units of a member that started before a time."""
        return bisect_right(self.begins[member], time)


class Moves:
    """Random changes of plans of a set. Each returns another plan, or None if it has nothing to change."""

    def __init__(self, tables: Sequence[KernelTable], rng: random.Random) -> None:
        self._tables = tables
        self._rng = rng
        self._runs = [table.splits if table.batch > 1 else () for table in tables]
        self.kinds: tuple[Callable[[JointPlan, Window], JointPlan | None], ...] = (
            *(self.add_chunk,) * 4,
            *(self.change_chunk,) * 4,
            *(self.add_wait,) * 3,
            *(self.change_wait,) * 3,
            self.change_rank,
            self.change_barrier,
        )

    def any(self, plan: JointPlan, window: Window) -> JointPlan | None:
        """A change of a random kind."""
        return self._rng.choice(self.kinds)(plan, window)

    def stripped(self, plan: JointPlan, window: Window) -> JointPlan:
        """The plan without a random half of the chunks, waits and barriers in the window."""
        keep = self._rng.random
        return msgspec.structs.replace(
            plan,
            chunks=tuple(c for c in plan.chunks if not window.has(c.member, c.start) or keep() < 0.5),
            waits=tuple(w for w in plan.waits if not window.has(w.member, w.unit) or keep() < 0.5),
            barriers=tuple(b for b in plan.barriers if not self._is_in(b, window) or keep() < 0.5),
        )

    def rows(self, batch: int) -> tuple[int, ...]:
        """Rows of the chunks of a batch: two to four equal chunks, or two of random sizes."""
        if batch > 2 and self._rng.random() < 0.3:
            first = self._rng.randint(1, batch - 1)
            return (first, batch - first)
        return even_rows(batch, self._rng.choice((2, 2, 2, *range(3, min(batch, _MOST_CHUNKS) + 1))))

    def add_chunk(self, plan: JointPlan, window: Window) -> JointPlan | None:
        """Cut a run of units into chunks, in place of the chunks that are there."""
        found = [
            (m, run)
            for m in window.members()
            for run in self._runs[m]
            if run[0] < window.high[m] and window.low[m] < run[-1]
        ]
        if not found:
            return None
        m, run = self._rng.choice(found)
        first, last = max(0, bisect_right(run, window.low[m]) - 1), min(bisect_left(run, window.high[m]), len(run) - 1)
        if self._rng.random() < 0.7:
            first, last = sorted((self._rng.randint(first, last), self._rng.randint(first, last)))
        if first == last:
            return None
        low, high = run[first], run[last]
        kept: list[Chunk] = []
        for chunk in plan.chunks:
            if chunk.member != m or chunk.end <= low or high <= chunk.start:
                kept.append(chunk)
                continue
            if chunk.start < low:
                kept.append(Chunk(m, chunk.start, low, chunk.rows))
            if high < chunk.end:
                kept.append(Chunk(m, high, chunk.end, chunk.rows))
        kept.append(Chunk(m, low, high, self.rows(self._tables[m].batch)))
        return msgspec.structs.replace(plan, chunks=tuple(sorted(kept)))

    def change_chunk(self, plan: JointPlan, window: Window) -> JointPlan | None:
        """Remove a chunk, move one of its edges, or cut its rows in another way."""
        found = [c for c in plan.chunks if window.has(c.member, c.start) or window.has(c.member, c.end - 1)]
        if not found:
            return None
        chunk = self._rng.choice(found)
        others = [c for c in plan.chunks if c is not chunk]
        m, kind = chunk.member, self._rng.randrange(6)
        low = max((c.end for c in others if c.member == m and c.end <= chunk.start), default=0)
        high = min((c.start for c in others if c.member == m and c.start >= chunk.end), default=self._tables[m].size)
        run = next(run for run in self._runs[m] if run[0] <= chunk.start < run[-1])
        first, last, rows = run.index(chunk.start), run.index(chunk.end), chunk.rows
        if kind <= 1:
            first = min(max(bisect_left(run, low), first + self._step()), last - 1)
        elif kind <= 3:
            last = max(min(bisect_right(run, high) - 1, last + self._step()), first + 1)
        elif kind == 4:
            rows = self.rows(self._tables[m].batch)
        if kind < 5:
            others.append(Chunk(m, run[first], run[last], rows))
        return msgspec.structs.replace(plan, chunks=tuple(sorted(others)))

    def add_wait(self, plan: JointPlan, window: Window) -> JointPlan | None:
        """Let a unit wait for a unit that another member starts at about the same time."""
        members = window.members()
        if len(self._tables) < 2 or not members or len(plan.waits) >= _MOST_WAITS:
            return None
        m = self._rng.choice(members)
        unit = self._rng.randrange(window.low[m], window.high[m])
        after = self._rng.choice([other for other in range(len(self._tables)) if other != m])
        until = window.after(window.begins[m][unit], after) + abs(self._step()) - 1
        until = min(max(1, until), self._tables[after].size)
        return self._with_waits(plan, [*plan.waits, Wait(m, unit, after, until)])

    def change_wait(self, plan: JointPlan, window: Window) -> JointPlan | None:
        """Remove a wait, or move one of its ends."""
        found = [wait for wait in plan.waits if window.has(wait.member, wait.unit)]
        if not found:
            return None
        wait = self._rng.choice(found)
        others = [each for each in plan.waits if each is not wait]
        kind = self._rng.randrange(3)
        if kind < 2:
            unit, until = wait.unit, wait.after_unit
            if kind:
                unit = min(max(0, unit + self._step()), self._tables[wait.member].size - 1)
            else:
                until = min(max(1, until + self._step()), self._tables[wait.after].size)
            others.append(Wait(wait.member, unit, wait.after, until))
        return self._with_waits(plan, others)

    def change_rank(self, plan: JointPlan, window: Window) -> JointPlan | None:
        """Shuffle the ranks of the members, or reset them."""
        if len(plan.members) < 2:
            return None
        ranks = list(range(len(plan.members)))
        self._rng.shuffle(ranks)
        if self._rng.random() < 0.2:
            ranks = [0] * len(ranks)
        return with_ranks(plan, ranks)

    def change_barrier(self, plan: JointPlan, window: Window) -> JointPlan | None:
        """Remove a barrier, replace it by waits between pairs, or move one of its pointers; add one if there is
        none."""
        inside = [number for number, barrier in enumerate(plan.barriers) if self._is_in(barrier, window)]
        if not inside:
            m = self._rng.choice(window.members() or [0])
            time = window.begins[m][self._rng.randrange(len(window.begins[m]))]
            added = tuple(bisect_left(begins, time) for begins in window.begins)
            barriers = sorted((*plan.barriers, added))
            if any(a > b for low, high in pairwise(barriers) for a, b in zip(low, high, strict=True)):
                return None
            return msgspec.structs.replace(plan, barriers=tuple(barriers))
        number = self._rng.choice(inside)
        kind = self._rng.randrange(4)
        if kind == 0:
            return msgspec.structs.replace(plan, barriers=(*plan.barriers[:number], *plan.barriers[number + 1 :]))
        if kind == 1:
            return barrier_as_waits(plan, number)
        m = self._rng.randrange(len(plan.members))
        edges = [0, *(barrier[m] for barrier in plan.barriers), plan.members[m].units]
        place = min(max(edges[number], edges[number + 1] + self._step()), edges[number + 2])
        barrier = plan.barriers[number]
        moved = (*barrier[:m], place, *barrier[m + 1 :])
        return msgspec.structs.replace(plan, barriers=(*plan.barriers[:number], moved, *plan.barriers[number + 1 :]))

    def _step(self) -> int:
        """A random offset, mostly small, of either sign."""
        return self._rng.choice((-1, 1)) * (1 + int(self._rng.expovariate(0.5)))

    def _with_waits(self, plan: JointPlan, waits: Sequence[Wait]) -> JointPlan:
        return msgspec.structs.replace(plan, waits=tuple(sorted(dict.fromkeys(waits))))

    def _is_in(self, barrier: tuple[int, ...], window: Window) -> bool:
        return any(window.has(m, min(at, self._tables[m].size - 1)) for m, at in enumerate(barrier))


def even_rows(batch: int, count: int) -> tuple[int, ...]:
    """Rows of chunks that differ by one row at most, the larger ones first."""
    least, more = divmod(batch, count)
    return (least + 1,) * more + (least,) * (count - more)


def with_ranks(plan: JointPlan, ranks: Sequence[int]) -> JointPlan:
    """The plan with other ranks."""
    members = tuple(
        msgspec.structs.replace(member, rank=rank) for member, rank in zip(plan.members, ranks, strict=True)
    )
    return msgspec.structs.replace(plan, members=members)


def barrier_as_waits(plan: JointPlan, number: int) -> JointPlan:
    """The plan with one barrier replaced by waits between all pairs of members."""
    barrier = plan.barriers[number]
    waits = [
        Wait(m, at, after, until)
        for m, at in enumerate(barrier)
        for after, until in enumerate(barrier)
        if m != after and at < plan.members[m].units and until > 0
    ]
    return msgspec.structs.replace(
        plan,
        barriers=(*plan.barriers[:number], *plan.barriers[number + 1 :]),
        waits=tuple(sorted(dict.fromkeys((*plan.waits, *waits)))),
    )
