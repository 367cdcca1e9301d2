"""Reserve of device time for expected demand: a query out of quota starts only if it ends in time beside that demand.

For a job with `left` ns to its deadline that takes `work` ns of a lane, the work that is expected to come and to go
first is `sum(lanes * (left - slo))` over the tenants with `slo < left`. A tenant's `lanes` are its demand in quota, or
its whole demand where a query of it costs less: its priority is higher, or equal and it takes less work. The demand
out of quota is a dominance sum in two dimensions: a merge-sort tree over the tenants has it, which takes n log n to
make and log n lookups to ask (Bentley, Multidimensional divide-and-conquer, CACM 1980).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

FRESH_NS = 1_000_000_000
"""Age up to which a reserve holds: what it goes by, work of the last ten seconds, changes little meanwhile."""
RANKED = 45
"""Bits of a cost that are work."""
MOST_WORK_NS = (1 << RANKED) - 1


def cost_of(rank: int, work_ns: int) -> int:
    """Cost of a query out of quota, where less goes first: by the rank of its tenant, then by its work of a lane."""
    return rank << RANKED | min(work_ns, MOST_WORK_NS)


class ExpectedDemand(NamedTuple):
    """Expected demand of a tenant: its SLO, the work of one query in ns of a lane, the lanes that its queries of late
    would keep busy (those in quota, and all), and its rank."""

    slo_ns: int
    work_ns: int
    in_quota: float
    demand: float
    rank: int = 0

    @property
    def cost(self) -> int:
        """Cost of one of its queries out of quota."""
        return cost_of(self.rank, self.work_ns)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Expected demand of n tenants from `made_ns` on; a query of a tenant is due its SLO after it comes.

    `slo_ns` and `costs` are those of all tenants, each ascending. `in_quota` and `in_quota_ns` [n + 1] are prefix sums
    in the order of SLOs: of lanes in quota, and of these times the SLO. Level `l` of the tree has the tenants in
    blocks of 2^l by SLO, each block in the order of cost; levels stand one behind the other in `keys` [n * levels],
    which ascend: (level * width + block) * width + place by cost. `out_of_quota` and `out_of_quota_ns` are prefix sums
    along them of demand out of quota. `known` and `columns` are caches: sums that were looked up, and all lists as
    arrays of numpy.
    """

    made_ns: int
    slo_ns: Sequence[int] = field(compare=False)
    costs: Sequence[int] = field(compare=False)
    in_quota: Sequence[float] = field(compare=False)
    in_quota_ns: Sequence[float] = field(compare=False)
    width: int = field(compare=False)
    keys: Sequence[int] = field(compare=False)
    out_of_quota: Sequence[float] = field(compare=False)
    out_of_quota_ns: Sequence[float] = field(compare=False)
    known: dict[int, tuple[float, float]] = field(default_factory=dict, compare=False, repr=False)
    columns: list[Any] = field(default_factory=list, compare=False, repr=False)

    @staticmethod
    def of(tenants: Sequence[ExpectedDemand], now_ns: int) -> Reserve:
        """For jobs out of quota: all expected queries in quota with an earlier deadline go first, and those out of
        quota of tenants whose queries cost less, as they have more value."""
        by_slo = sorted(tenants)
        by_cost = sorted(range(len(by_slo)), key=lambda at: by_slo[at].cost)
        width = 1 << len(by_slo).bit_length()
        keys = [
            (level * width + (at >> level)) * width + rank
            for level in range(len(by_slo).bit_length())
            for rank, at in enumerate(by_cost)
        ]
        keys.sort()
        inside = [(each.in_quota, each.slo_ns) for each in by_slo]
        outside = [(by_slo[at].demand - by_slo[at].in_quota, by_slo[at].slo_ns) for at in by_cost]
        more = [outside[key % width] for key in keys]
        return Reserve(
            now_ns,
            [each.slo_ns for each in by_slo],
            [by_slo[at].cost for at in by_cost],
            [0.0, *accumulate([lanes for lanes, _ in inside])],
            [0.0, *accumulate([lanes * slo_ns for lanes, slo_ns in inside])],
            width,
            keys,
            [0.0, *accumulate([lanes for lanes, _ in more])],
            [0.0, *accumulate([lanes * slo_ns for lanes, slo_ns in more])],
        )

    def ahead_ns(self, left_ns: int, cost: int) -> float:
        """Work that comes before the deadline of a job, so much from now on, and goes first."""
        place = bisect_left(self.slo_ns, left_ns) * self.width + bisect_left(self.costs, cost)
        try:
            lanes, lane_ns = self.known[place]
        except KeyError:
            lanes, lane_ns = self.known[place] = self._lanes(*divmod(place, self.width))
        return left_ns * lanes - lane_ns

    def _lanes(self, count: int, rank: int) -> tuple[float, float]:
        """Lanes, and the same times the SLO, of the first `count` by SLO: all of those whose place by cost is below
        `rank`, and the demand in quota of the others."""
        lanes = lane_ns = 0.0
        for level in range(count.bit_length()):
            block = (count >> level) - 1
            if not block & 1:  # the blocks that make up the first `count` are those of its bits
                first = level * len(self.slo_ns) + (block << level)
                until = bisect_left(self.keys, (level * self.width + block) * self.width + rank)
                lanes += self.out_of_quota[until] - self.out_of_quota[first]
                lane_ns += self.out_of_quota_ns[until] - self.out_of_quota_ns[first]
        return self.in_quota[count] + lanes, self.in_quota_ns[count] + lane_ns
