"""Features of a member of a group: numbers that do not decrease with its units and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log

import numpy as np
import numpy.typing as npt

from cotenant.core.predictor import Group, Member
from cotenant.errors import CotenantError, InvalidValueError
from cotenant.predict.latency import LatencyModel
from cotenant.profiles.latency_table import LatencyTable

Floats = npt.NDArray[np.float32]

RANGE_FEATURES = ("ends late", "begins early", "share", "last unit", "first unit", "units", "log solo", "solo")
COST_FEATURES = ("log MACs", "log bytes")
ROW_FEATURES = ("log rows", "rows", "log solo of the whole")
FREE_FEATURES = ("log cores", "log MACs a byte", "log solo over that at shape 0")
NONDECREASING = len(RANGE_FEATURES) + len(COST_FEATURES)
"""Number of features that never fall when units or rows are added."""
WIDTH = NONDECREASING + len(ROW_FEATURES) + len(FREE_FEATURES)
_UNITS = 64.0
_ROWS = 32.0
_SHORTEST = -6.0
"""Logarithm of the shortest distinguishable solo time, relative to the scale."""


@dataclass(frozen=True, slots=True)
class TenantFacts:
    """Facts of a tenant without measured groups: its profile, and optionally MACs and bytes of its units.

    `macs` and `traffic_bytes` hold one number per unit for one row. Raises InvalidValueError when their lengths do not
    fit.
    """

    name: str
    table: LatencyTable
    macs: tuple[int, ...] = ()
    traffic_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field, values in (("macs", self.macs), ("traffic_bytes", self.traffic_bytes)):
            if values and (len(values) != len(self.table.unit_weights) or min(values) < 0):
                raise InvalidValueError(f"facts of {self.name!r}", field, values, "a number from 0 for each unit")


class _Known:
    """The facts of one tenant as prefix sums over its units."""

    def __init__(self, facts: TenantFacts) -> None:
        self.facts = facts
        weights = facts.table.unit_weights
        sums = [0.0, *accumulate(weights)]
        total = sums[-1]
        self.units = len(weights)
        self.work = [part / total for part in sums] if total > 0 else [n / self.units for n in range(self.units + 1)]
        self.macs = [0, *accumulate(facts.macs)] if facts.macs else [0] * (self.units + 1)
        self.traffic = [0, *accumulate(facts.traffic_bytes)] if facts.traffic_bytes else [0] * (self.units + 1)
        has_both = self.macs[-1] > 0 and self.traffic[-1] > 0
        self.intensity = log(self.macs[-1] / self.traffic[-1]) / 5 if has_both else 0.0
        self._model = LatencyModel(facts.table)
        self._sizes = sorted({row.items for row in facts.table.rows})
        self._whole: dict[tuple[int, int, int], int] = {}

    def whole_ns(self, shape: int, items: int, cores: int) -> int:
        """Solo latency of the whole model; never falls with rows, unlike measured medians."""
        key = shape, items, cores
        found = self._whole.get(key)
        if found is None:
            sizes = [size for size in self._sizes if size < items]
            found = max(self._model.latency_ns(shape, size, cores) for size in [*sizes, items])
            self._whole[key] = found
        return found


class MemberFeatures:
    """Computes features of members, rows of WIDTH numbers. `scale_ns` is the latency that counts as 1."""

    def __init__(self, facts: Sequence[TenantFacts], scale_ns: float) -> None:
        self.scale_ns = scale_ns
        self._known = {each.name: _Known(each) for each in facts}

    def unit_count(self, tenant: str) -> int:
        """Number of units of a tenant's model. Raises CotenantError for an unknown one."""
        return self._of(tenant).units

    def row(self, member: Member) -> tuple[list[float], float]:
        """Features of a member, and its solo time over the scale.

        Raises CotenantError for a tenant without facts, InvalidValueError for units outside its model or no rows.
        """
        work, cores = member
        tenant, shape, items, start, end = work.tenant, work.shape, work.items, work.start, work.end
        known = self._of(tenant)
        last = known.units
        if not 0 <= start < end <= last:
            raise InvalidValueError(f"member of {tenant!r}", "range", (start, end), f"units within 0..{last}")
        if items < 1 or cores < 1:
            raise InvalidValueError(f"member of {tenant!r}", "items and cores", (items, cores), "at least 1 each")
        whole = known.whole_ns(shape, items, cores)
        share = known.work[end] - known.work[start]
        solo = max(whole * share / self.scale_ns, 1e-9)
        nondecreasing = [
            known.work[end],
            1.0 - known.work[start],
            share,
            end / last,
            1.0 - start / last,
            (end - start) / _UNITS,
            (max(log(solo), _SHORTEST) - _SHORTEST) / 3,
            solo / 2,
            log(1.0 + items * (known.macs[end] - known.macs[start]) / 1e6) / 5,
            log(1.0 + items * (known.traffic[end] - known.traffic[start]) / 1e6) / 5,
        ]
        by_rows = [log(items) / 3, items / _ROWS, log(whole / self.scale_ns) / 2]
        free = [log(cores) / 2, known.intensity, log(whole / known.whole_ns(0, items, cores))]
        return nondecreasing + by_rows + free, solo

    def solo_ns(self, member: Member) -> float:
        """Solo time of a member by its profile: the latency of the model times the share of its units."""
        return self.row(member)[1] * self.scale_ns

    def _of(self, tenant: str) -> _Known:
        known = self._known.get(tenant)
        if known is None:
            raise CotenantError(f"there is no profile of {tenant!r}: profile it first")
        return known


def paper_features(
    groups: Sequence[Group], order: Sequence[str], lengths: Mapping[str, Sequence[int]], slots: int
) -> npt.NDArray[np.float64]:
    """The input of Abacus (SC'21, section 5.3), shape (groups, tenants + 4 slots).

    A bitmap of the tenants, then start, end, batch and sequence length per member. Members are in the order of `order`,
    as in training. The published system fills slots by deadline, another order, which raises its error. `lengths` gives
    the sequence length by shape.

    Raises InvalidValueError for a group with more than `slots` members.
    """
    place = {name: number for number, name in enumerate(order)}
    x = np.zeros((len(groups), len(order) + 4 * slots))
    for line, group in enumerate(groups):
        if len(group) > slots:
            raise InvalidValueError("features of a group", "members", len(group), f"at most {slots}")
        for slot, member in enumerate(sorted(group, key=lambda member: place[member.work.tenant])):
            known = lengths.get(member.work.tenant, ())
            x[line, place[member.work.tenant]] = 1.0
            at = len(order) + 4 * slot
            length = known[member.work.shape] if known else 0
            x[line, at : at + 4] = member.work.start, member.work.end, member.work.items, length
    return x


def scale_of(latencies_ns: Sequence[float]) -> float:
    """The geometric mean of latencies, which counts as 1."""
    return exp(sum(log(value) for value in latencies_ns) / len(latencies_ns))
