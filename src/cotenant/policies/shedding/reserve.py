"""Reserve of device time for expected demand: a query out of quota starts only if it ends in time beside that demand.

For a job with `left` ns to its deadline, the expected work that arrives later and goes first is, over all tenants:

    sum(lanes * (left - slo) for each tenant with slo < left)

A tenant's `lanes` are its demand in quota, or its whole demand if its queries cost less than the job (`cost_of`). The
demand out of quota is a two-dimensional dominance sum. A merge-sort tree over n tenants takes n log n time to build and
log n lookups for each job (Bentley, Multidimensional divide-and-conquer, CACM 1980).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

FRESH_NS = 1_000_000_000
"""Age in ns up to which a reserve is used: the demand is an average over ten seconds."""
RANKED = 45
"""Bits of a cost that are work."""
MOST_WORK_NS = (1 << RANKED) - 1


def cost_of(rank: int, work_ns: int) -> int:
    """Cost of a query out of quota, the smallest goes first: by the tenant's rank, then by its work on a lane."""
    return rank << RANKED | min(work_ns, MOST_WORK_NS)


class ExpectedDemand(NamedTuple):
    """Expected demand of a tenant: its SLO, the work of one query in lane-ns, demand in lanes, and rank. `in_quota` is
    the part of `demand` that is in quota."""

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
    """Expected demand of n tenants from `made_ns` on.

    `slo_ns` and `costs` [n] have the values of all tenants, each ascending. `in_quota` and `in_quota_ns` [n + 1] are
    prefix sums by SLO: of lanes in quota, and of lanes times SLO. Level `l` of the tree has the tenants in blocks of
    2^l by SLO, each block sorted by cost. `keys` [n * levels] has all levels in sequence, ascending:
    `(level * width + block) * width + place by cost`. `out_of_quota` and `out_of_quota_ns` are prefix sums along `keys`
    of demand out of quota. `known` and `columns` are caches: sums of earlier lookups, and all lists as numpy arrays.
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
        """For jobs out of quota: expected queries in quota with an earlier deadline go first. So do expected queries
        out of quota of tenants with a lower cost, which have more value."""
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
        """Expected work in lane-ns that goes before a job with `left_ns` to its deadline."""
        place = bisect_left(self.slo_ns, left_ns) * self.width + bisect_left(self.costs, cost)
        try:
            lanes, lane_ns = self.known[place]
        except KeyError:
            lanes, lane_ns = self.known[place] = self._lanes(*divmod(place, self.width))
        return left_ns * lanes - lane_ns

    def _lanes(self, count: int, rank: int) -> tuple[float, float]:
        """Sums of lanes and of lanes times SLO, over the first `count` tenants by SLO. Of a tenant with a place by cost
        below `rank` all demand counts, of others the demand in quota."""
        lanes = lane_ns = 0.0
        for level in range(count.bit_length()):
            block = (count >> level) - 1
            if not block & 1:  # the blocks that make up the first `count` are those of its bits
                first = level * len(self.slo_ns) + (block << level)
                until = bisect_left(self.keys, (level * self.width + block) * self.width + rank)
                lanes += self.out_of_quota[until] - self.out_of_quota[first]
                lane_ns += self.out_of_quota_ns[until] - self.out_of_quota_ns[first]
        return self.in_quota[count] + lanes, self.in_quota_ns[count] + lane_ns
