"""Work that is still to come and goes first: what is beyond a share is begun only if it can be done beside that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cotenant.policies.ordered.jobs import Column, Jobs

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

    `busy` are lanes, and `begun_ns` the same times the SLO, [tenants + 1, tenants + 1]: of those tenants that have the
    first so many of `slo_ns` together, for a job that takes more work than so many of `work_ns`.
    """

    made_ns: int
    slo_ns: NDArray[np.float64] = field(compare=False)
    work_ns: NDArray[np.float64] = field(compare=False)
    busy: NDArray[np.float64] = field(compare=False)
    begun_ns: NDArray[np.float64] = field(compare=False)

    @staticmethod
    def of(tenants: Sequence[Expected], now_ns: int) -> Reserve:
        """For jobs beyond shares: all that comes within shares with an earlier deadline goes first, and what comes
        beyond them of tenants whose queries take less work, as it is worth more."""
        slo, work, within, asked = np.array(sorted(tenants), np.float64).reshape(-1, 4).T
        by_work, count = work.argsort(), len(tenants)
        nth = np.empty_like(by_work)
        nth[by_work] = np.arange(count)
        lanes = np.where(nth < np.arange(count + 1)[:, None], asked, within)
        none = np.zeros((count + 1, 1))
        return Reserve(
            now_ns,
            slo,
            work[by_work],
            np.hstack((none, lanes.cumsum(axis=1))),
            np.hstack((none, (lanes * slo).cumsum(axis=1))),
        )

    def ahead_ns(self, jobs: Jobs) -> Column:
        """Work that comes before each job's deadline and goes first."""
        at = self.work_ns.searchsorted(jobs.work_ns), self.slo_ns.searchsorted(jobs.deadline_ns)
        ahead: NDArray[np.float64] = jobs.deadline_ns * self.busy[at] - self.begun_ns[at]
        return ahead.astype(np.int64)
