"""The groups that a predictor was fitted to, as far as it takes to say how many of them are near another one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cotenant.core.predictor import Group
from cotenant.techniques.overlap.predict.overlap_features import MemberFeatures

Ints = npt.NDArray[np.intp]
Real = npt.NDArray[np.float64]
_NEAR = 2.0
"""How many times as long a near member may take alone. Chosen by hand: batches are measured at powers of two."""


class MemberKey(NamedTuple):
    """What is compared of a member: the number of its tenant (from 1 on; 0 for one that was in no group), the size of
    its share, the time that it takes alone in ns, and its units [start, end)."""

    tenant: float
    size: float
    solo_ns: float
    start: float
    end: float


_Kind = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class MeasuredGroups:
    """Measured groups: `lengths` has the members of each, `members` a row for each of these in turn, the values of
    MemberKey, shape (sum of lengths, 5)."""

    lengths: Ints
    members: Real
    _kinds: dict[_Kind, tuple[list[float], list[tuple[MemberKey, ...]]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The groups by tenants and sizes of their members, in ascending order of their first times; made when first asked
    for."""

    @classmethod
    def of(cls, groups: Sequence[Group], tenants: Sequence[str], features: MemberFeatures) -> MeasuredGroups:
        """From groups of these tenants. Raises CotenantError for a tenant without facts."""
        number = {name: at for at, name in enumerate(tenants, 1)}
        rows = [
            (number[work.tenant], size, features.solo_ns(member), work.start, work.end)
            for group in groups
            for member in group
            for work, size in (member,)
        ]
        return cls(
            np.array(list(map(len, groups)), np.intp), np.array(rows, np.float64).reshape(-1, len(MemberKey._fields))
        )

    @property
    def sizes(self) -> frozenset[int]:
        """Numbers of members of which there is a group."""
        return frozenset(self.lengths.tolist())

    def without(self, tenants: Collection[int]) -> MeasuredGroups:
        """Those without any of these tenants, by number: what was measured of them says nothing any more."""
        group_of = np.repeat(np.arange(len(self.lengths)), self.lengths)
        has = np.bincount(group_of, np.isin(self.members[:, 0], list(tenants)), len(self.lengths)) > 0
        return MeasuredGroups(self.lengths[~has], self.members[~has[group_of]])

    def near(self, members: Sequence[MemberKey]) -> int:
        """How many are near a group of these members: their members and these can be paired off so that both of a pair
        are of one tenant, on shares of one size, have units in common, and neither takes more than _NEAR times as long
        alone as the other."""
        if not self._kinds:
            self._sort()
        mine = sorted(members)
        kind = _kind_of(mine)
        known = self._kinds.get(kind)
        if known is None:
            return 0
        # In ascending order of time alone: where these are not within the factor, no other way to pair off is.
        times, groups = known
        is_distinct = len(set(kind)) == len(kind)
        first, found = mine[0].solo_ns, 0
        for theirs in groups[bisect_left(times, first / _NEAR) : bisect_right(times, first * _NEAR)]:
            others_units = False
            for (_, _, solo_ns, start, end), (_, _, other_ns, other_start, other_end) in zip(mine, theirs, strict=True):
                if solo_ns > _NEAR * other_ns or other_ns > _NEAR * solo_ns:
                    break
                if start >= other_end or other_start >= end:
                    if is_distinct:
                        break
                    others_units = True
            else:
                found += not others_units or _pair_off(mine, theirs)
        return found

    def _sort(self) -> None:
        rows = [MemberKey(*row) for row in self.members.tolist()]
        made: dict[_Kind, list[tuple[MemberKey, ...]]] = {}
        end = 0
        for length in self.lengths.tolist():
            begin, end = end, end + length
            group = tuple(sorted(rows[begin:end]))
            made.setdefault(_kind_of(group), []).append(group)
        for kind, groups in made.items():
            groups.sort(key=lambda group: group[0].solo_ns)
            self._kinds[kind] = [group[0].solo_ns for group in groups], groups


def _kind_of(members: Sequence[MemberKey]) -> _Kind:
    return tuple([(each.tenant, each.size) for each in members])


def _are_near(one: MemberKey, other: MemberKey) -> bool:
    tenant, size, solo_ns, start, end = one
    return (
        (tenant, size) == (other.tenant, other.size)
        and solo_ns <= _NEAR * other.solo_ns
        and other.solo_ns <= _NEAR * solo_ns
        and start < other.end
        and other.start < end
    )


def _pair_off(mine: Sequence[MemberKey], theirs: Sequence[MemberKey]) -> bool:
    """Whether each of mine has a near one of theirs to itself: augmenting paths (Kuhn, 1955)."""
    beside = [[at for at, other in enumerate(theirs) if _are_near(each, other)] for each in mine]
    taken: dict[int, int] = {}

    def place(one: int, tried: set[int]) -> bool:
        for at in beside[one]:
            if at not in tried:
                tried.add(at)
                if at not in taken or place(taken[at], tried):
                    taken[at] = one
                    return True
        return False

    return all(place(one, set()) for one in range(len(mine)))
