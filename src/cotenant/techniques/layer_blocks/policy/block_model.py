"""Predicted times and memory traffic of one model, for every block of its units."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from cotenant.core.predictor import Spans
from cotenant.techniques.layer_blocks.policy.price_plans import SWITCH_NS, UnitPlans, plans_of
from cotenant.types import Tenant


class BlockModel:
    """Predicted times and memory traffic of one model: a tenant at one shape and number of rows.

    A block is units [start, end). It runs in one version, on `cores` lanes of a policy at most, at one level of memory
    pressure. Units are the segments between two cuts of the tenant, numbered from 0. Times are ns, traffic is in bytes.
    """

    __slots__ = (
        "averages",
        "cores",
        "items",
        "levels",
        "moved",
        "ns",
        "plans",
        "preferred",
        "rest_ns",
        "shape",
        "tenant",
        "tight",
        "unit_at",
        "units",
        "versions",
    )

    def __init__(self, tenant: Tenant, shape: int, items: int, spans: Spans) -> None:
        self.tenant, self.shape, self.items = tenant, shape, items
        self.units, self.versions, self.levels, self.cores, self.ns, self.moved = spans
        alone = self.ns[(self.cores - 1) * (self.units + 1) :][: self.units + 1]
        self.rest_ns = [alone[-1] - before for before in alone]
        """By unit: the least time from there to the end of the model, alone on all lanes in the first version."""
        self.unit_at = {cut: unit for unit, cut in enumerate(tenant.cuts)}
        """The unit that begins at a cut; the number of units at the last cut."""
        self.tight: list[list[list[float]]] = []
        """Of `layer_block` alone, by level, lanes - 1 and unit: the budget below which a unit needs more lanes, per ns
        alone on all lanes. 0 if more lanes do not make it faster."""
        self.averages: list[int] = []
        """Of `layer_block` alone, by level: Avg_C, the constant number of lanes that keeps a query to its budget."""
        self.plans: list[list[UnitPlans]] = []
        """Of `slack_blocks` alone, by level and unit: the planned blocks that begin there."""
        self.preferred: list[int] = []
        """Of `slack_blocks` alone, by level: the lowest price at which a whole query is in time."""

    def add_pivots(self, adapts: bool, budget_ns: float) -> None:
        """Fill `tight` and `averages` (VELTAIR, section 4.2) for the budget of a whole query.

        Units run in the version compiled for the level if the policy `adapts`, else in the first one. The static budget
        of a layer is its part of the target by time alone on all lanes. By operations, small layers would have
        infeasible budgets.
        """
        alone = self.unit_ns(0, 0, self.cores)
        for level in range(self.levels):
            version = self.version_at(level) if adapts else 0
            times = [self.unit_ns(version, level, cores) for cores in range(1, self.cores + 1)]
            self.tight.append([_tightness(each, times[-1], alone) for each in times])
            self.averages.append(self.least_cores(version, level, 0, self.units, budget_ns, self.cores))

    def add_plans(
        self, choices: Sequence[int], byte_cost: float, budget_ns: float, switch_ns: float = SWITCH_NS
    ) -> None:
        """Fill `plans` and `preferred` for the budget of a whole query, of these numbers of lanes.

        `byte_cost` is the cost of a byte of traffic in core-ns.
        """
        for level in range(self.levels):
            version = self.version_at(level)
            takes = [self.unit_ns(version, level, cores) for cores in choices]
            moves = [[byte_cost * each for each in self.unit_bytes(version, cores)] for cores in choices]
            plans = plans_of(choices, list(zip(*takes, strict=True)), list(zip(*moves, strict=True)), switch_ns)
            self.plans.append(plans)
            self.preferred.append(plans[0].cheapest_within(budget_ns))

    def row(self, version: int, level: int, cores: int) -> int:
        """Where the times of a version at a level on so many lanes begin in `ns`: see Spans. More lanes than `cores`
        take as long as `cores`."""
        most = self.cores
        if cores > most:
            cores = most
        return ((version * self.levels + level) * most + cores - 1) * (self.units + 1)

    def moved_row(self, version: int, cores: int) -> int:
        """Where the bytes of a version on so many lanes begin in `moved`."""
        most = self.cores
        if cores > most:
            cores = most
        return (version * most + cores - 1) * (self.units + 1)

    def unit_ns(self, version: int, level: int, cores: int) -> list[int]:
        """Predicted time of each unit by itself."""
        at = self.row(version, level, cores)
        return [after - before for before, after in pairwise(self.ns[at : at + self.units + 1])]

    def unit_bytes(self, version: int, cores: int) -> list[int]:
        """Predicted memory traffic of each unit by itself."""
        at = self.moved_row(version, cores)
        return [after - before for before, after in pairwise(self.moved[at : at + self.units + 1])]

    def level_of(self, pressure: float) -> int:
        """The level nearest to a pressure from 0 to 1."""
        return int(pressure * (self.levels - 1) + 0.5)

    def version_at(self, level: int) -> int:
        """The version that is compiled for a level: of the same number, or the last version."""
        last = self.versions - 1
        return level if level < last else last

    def draw(self, version: int, cores: int, start: int, end: int, takes_ns: int) -> float:
        """Predicted memory bandwidth that a block of this duration uses, in bytes per ns."""
        at, moved = self.moved_row(version, cores), self.moved
        return (moved[at + end] - moved[at + start]) / (takes_ns if takes_ns > 0 else 1)

    def end_within(
        self, version: int, level: int, cores: int, start: int, end: int, quantum_ns: float
    ) -> tuple[int, int]:
        """The end of a block that ends at `end` at most and within the quantum, but after one unit at least.

        Returns the unit behind the block and its predicted time.
        """
        at, ns = self.row(version, level, cores), self.ns
        begun = ns[at + start]
        end = bisect_right(ns, begun + int(quantum_ns), at + start + 2, at + end + 1) - at - 1
        return end, ns[at + end] - begun

    def least_cores(self, version: int, level: int, start: int, end: int, budget_ns: float, most: int) -> int:
        """Core(l) of a block and Avg_C of a whole model (VELTAIR, section 4.2): the fewest lanes that meet a budget.

        If no number of lanes up to `most` meets it: the fewest lanes that are as fast as `most`. Binary search; times
        never rise with lanes.
        """
        ns, stride = self.ns, self.units + 1
        if most > self.cores:
            most = self.cores
        begin = self.row(version, level, 1) - stride + start
        end += begin - start
        least = ns[end + most * stride] - ns[begin + most * stride]
        if least > budget_ns:
            budget_ns = least
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            at = middle * stride
            if ns[end + at] - ns[begin + at] <= budget_ns:
                high = middle
            else:
                low = middle + 1
        return low

    def cheapest_version(self, level: int, byte_cost: float, start: int, end: int, cores: int) -> int:
        """The version of a block that costs least, of those compiled for this level of pressure or a higher one.

        The cost is core time plus `byte_cost` (core-ns) for each byte of memory traffic.
        """
        best = self.version_at(level)
        last = self.versions - 1
        if best == last:
            return best
        ns, moved, least = self.ns, self.moved, -1.0
        for version in range(best, last + 1):
            at, bytes_at = self.row(version, level, cores), self.moved_row(version, cores)
            cost = cores * (ns[at + end] - ns[at + start]) + byte_cost * (
                moved[bytes_at + end] - moved[bytes_at + start]
            )
            if least < 0 or cost < least:
                best, least = version, cost
        return best


def _tightness(takes_ns: Sequence[int], least_ns: Sequence[int], alone_ns: Sequence[int]) -> list[float]:
    """By unit: its time over its time alone if more lanes make it faster, else 0."""
    return [
        takes / (alone or 1) if takes > least else 0.0
        for takes, least, alone in zip(takes_ns, least_ns, alone_ns, strict=True)
    ]
