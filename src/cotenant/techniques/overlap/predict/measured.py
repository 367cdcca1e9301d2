"""The measured groups of a predictor, and the number of them near another group."""

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
"""Largest ratio of solo times of near members. Chosen by hand: batches are measured at powers of two."""


class MemberKey(NamedTuple):
    """The compared facts of a member. `tenant` is its number (0 for an unseen one), `size` that of its share, and its
    units are [start, end)."""

    tenant: float
    size: float
    solo_ns: float
    start: float
    end: float


_Kind = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class MeasuredGroups:
    """Measured groups. `lengths` is the number of members of each. `members` has a row of MemberKey values for each
    member, shape (sum of lengths, 5)."""

    lengths: Ints
    members: Real
    _kinds: dict[_Kind, tuple[list[float], list[tuple[MemberKey, ...]]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Groups by tenants and share sizes, in ascending order of the first solo time; built at first use."""

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
        """Numbers of members with at least one measured group."""
        return frozenset(self.lengths.tolist())

    def without(self, tenants: Collection[int]) -> MeasuredGroups:
        """The groups without any of these tenants, by number; their measurements are outdated."""
        group_of = np.repeat(np.arange(len(self.lengths)), self.lengths)
        has = np.bincount(group_of, np.isin(self.members[:, 0], list(tenants)), len(self.lengths)) > 0
        return MeasuredGroups(self.lengths[~has], self.members[~has[group_of]])

    def near(self, members: Sequence[MemberKey]) -> int:
        """Number of measured groups near a group of these members.

        Two groups are near if their members can be matched in pairs. Both of a pair have the same tenant and share
        size, common units, and solo times within a factor of _NEAR.
        """
        if not self._kinds:
            self._sort()
        mine = sorted(members)
        kind = _kind_of(mine)
        known = self._kinds.get(kind)
        if known is None:
            return 0
        # Sorted by solo time: if these pairs are not within the factor, no other matching is.
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
    """Whether a perfect matching of near members exists: augmenting paths (Kuhn, 1955)."""
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
