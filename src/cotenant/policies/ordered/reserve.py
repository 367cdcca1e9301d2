"""Reserve of device time for demand that is still to come: what is beyond a share begins only if it can end beside it.

For a job with `left` ns to its deadline that takes `work` ns of a lane, the work that is expected to come and to go
first is `sum(lanes * (left - slo))` over the tenants with `slo < left`. A tenant's `lanes` are its demand within its
share, or its whole demand where a query of it costs less: its priority is higher, or equal and it takes less work. What
is asked for beyond shares is a dominance sum in two dimensions: a merge-sort tree over the tenants has it, which takes
n log n to make and log n lookups to ask (Bentley, Multidimensional divide-and-conquer, CACM 1980).
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
    """What a query out of quota costs, where less goes first: by the rank of its tenant, then by its work of a lane."""
    return rank << RANKED | min(work_ns, MOST_WORK_NS)


class Expected(NamedTuple):
    """What a tenant is expected to ask for: its SLO, what a query of it takes of a lane, the lanes that its queries of
    late would keep busy (those within its share, and all), and its rank."""

    slo_ns: int
    work_ns: int
    within: float
    asked: float
    rank: int = 0

    @property
    def cost(self) -> int:
        """See `cost_of`."""
        return cost_of(self.rank, self.work_ns)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Expected demand of n tenants from `made_ns` on; a query of a tenant is due its SLO after it comes.

    `slo_ns` and `costs` are those of all tenants, each ascending. `within` and `within_ns` [n + 1] are prefix sums in
    the order of SLOs: of lanes within shares, and of these times the SLO. Level `l` of the tree has the tenants in
    blocks of 2^l by SLO, each block in the order of cost; levels stand one behind the other in `keys` [n * levels],
    which ascend: (level * width + block) * width + place by cost. `beyond` and `beyond_ns` are prefix sums along them
    of demand beyond shares. `known` and `columns` are caches: sums that were looked up, all lists as arrays of numpy.
    """

    made_ns: int
    slo_ns: Sequence[int] = field(compare=False)
    costs: Sequence[int] = field(compare=False)
    within: Sequence[float] = field(compare=False)
    within_ns: Sequence[float] = field(compare=False)
    width: int = field(compare=False)
    keys: Sequence[int] = field(compare=False)
    beyond: Sequence[float] = field(compare=False)
    beyond_ns: Sequence[float] = field(compare=False)
    known: dict[int, tuple[float, float]] = field(default_factory=dict, compare=False, repr=False)
    columns: list[Any] = field(default_factory=list, compare=False, repr=False)

    @staticmethod
    def of(tenants: Sequence[Expected], now_ns: int) -> Reserve:
        """For jobs beyond shares: all that comes within shares with an earlier deadline goes first, and what comes
        beyond them of tenants whose queries cost less, as it is worth more."""
        by_slo = sorted(tenants)
        by_cost = sorted(range(len(by_slo)), key=lambda at: by_slo[at].cost)
        width = 1 << len(by_slo).bit_length()
        keys = [
            (level * width + (at >> level)) * width + rank
            for level in range(len(by_slo).bit_length())
            for rank, at in enumerate(by_cost)
        ]
        keys.sort()
        inside = [(each.within, each.slo_ns) for each in by_slo]
        outside = [(by_slo[at].asked - by_slo[at].within, by_slo[at].slo_ns) for at in by_cost]
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
        `rank`, and what is within shares of the others."""
        lanes = lane_ns = 0.0
        for level in range(count.bit_length()):
            block = (count >> level) - 1
            if not block & 1:  # the blocks that make up the first `count` are those of its bits
                first = level * len(self.slo_ns) + (block << level)
                until = bisect_left(self.keys, (level * self.width + block) * self.width + rank)
                lanes += self.beyond[until] - self.beyond[first]
                lane_ns += self.beyond_ns[until] - self.beyond_ns[first]
        return self.within[count] + lanes, self.within_ns[count] + lane_ns
