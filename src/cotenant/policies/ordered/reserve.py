"""Work that is still to come and goes first: what is beyond a share is begun only if it can be done beside that."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

FRESH_NS = 1_000_000_000
"""Age up to which a reserve holds: what it goes by, work of the last ten seconds, changes little meanwhile."""


class Expected(NamedTuple):
    """What a tenant is expected to ask for: its SLO, what a query of it takes of a lane, and the lanes that its queries
    of late would keep busy: those within its share, and all."""

    slo_ns: int
    work_ns: int
    within: float
    asked: float


@dataclass(frozen=True, slots=True)
class Reserve:
    """What tenants are predicted to ask for, from `made_ns` on: queries of theirs are due their SLO after they come.

    `busy` are lanes, and `begun_ns` the same times the SLO, [tenants + 1][tenants + 1]: of those tenants that have the
    first so many of `slo_ns` together, for a job that takes more work than so many of `work_ns`.
    """

    made_ns: int
    slo_ns: Sequence[float] = field(compare=False)
    work_ns: Sequence[float] = field(compare=False)
    busy: Sequence[Sequence[float]] = field(compare=False)
    begun_ns: Sequence[Sequence[float]] = field(compare=False)

    @staticmethod
    def of(tenants: Sequence[Expected], now_ns: int) -> Reserve:
        """For jobs beyond shares: all that comes within shares with an earlier deadline goes first, and what comes
        beyond them of tenants whose queries take less work, as it is worth more."""
        by_slo = sorted(tenants)
        by_work = sorted(range(len(by_slo)), key=lambda at: by_slo[at].work_ns)
        busy, begun = list[list[float]](), list[list[float]]()
        for count in range(len(by_slo) + 1):
            less = set(by_work[:count])
            lanes = [each.asked if at in less else each.within for at, each in enumerate(by_slo)]
            busy.append([0.0, *accumulate(lanes)])
            begun.append([0.0, *accumulate([each * one.slo_ns for each, one in zip(lanes, by_slo, strict=True)])])
        return Reserve(now_ns, [each.slo_ns for each in by_slo], [by_slo[at].work_ns for at in by_work], busy, begun)

    def ahead_ns(self, left_ns: int, work_ns: int) -> float:
        """Work that comes before the deadline of a job, so much from now on, and goes first."""
        row, column = bisect_left(self.work_ns, work_ns), bisect_left(self.slo_ns, left_ns)
        return left_ns * self.busy[row][column] - self.begun_ns[row][column]
