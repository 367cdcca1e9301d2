"""The groups that a search is likely to request, so that their latencies are predicted before.

A group that was never predicted costs a decision more than the rest of its search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from cotenant.core.predictor import Group, Member
from cotenant.techniques.overlap.policy.group_cuts import coarse, spread
from cotenant.techniques.overlap.policy.group_splits import Splits
from cotenant.types import Tenant
from cotenant.work import Work

_Ranges = list[tuple[int, int]]
_PAIRS = ((0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (2, 2))
"""Kinds of ranges (see `_ranges`) of the two members of a pair, in descending order of frequency."""


def likely_groups(tenants: Sequence[Tenant], splits: Splits, ways: int, repeat: bool) -> Iterator[Group]:
    """Members alone on the whole device, then pairs, each once and with its members in ascending order.

    Queries have one row of the first declared shape. `ways` and `repeat` are as in `find_group`.
    """
    ranges = {tenant.name: _ranges(tenant.cuts, ways) for tenant in tenants}
    largest = max((tenant.max_batch for tenant in tenants), default=0)
    # By batch size, then tenant: the first groups cover all tenants.
    batches = [(tenant, rows) for rows in range(1, largest + 1) for tenant in tenants if rows <= tenant.max_batch]
    kinds = [
        [(tenant.name, rows, *span) for tenant, rows in batches for span in ranges[tenant.name][kind]]
        for kind in range(4)
    ]
    for kind in kinds:
        for name, rows, start, end in kind:
            yield (Member(Work(name, 0, rows, start, end), splits.widest),)
    if len(splits.by_members) == 1:
        return
    sizes = sorted({(a.size, b.size) for split in splits.by_members[1] for a, b in (split, split[::-1])})
    for (one, other), (size, rest) in product(_PAIRS, sizes):
        if one == other and size > rest:
            continue  # the same pairs as with the sizes the other way round
        left = [Member(Work(name, 0, rows, start, end), size) for name, rows, start, end in kinds[one]]
        right = [Member(Work(name, 0, rows, start, end), rest) for name, rows, start, end in kinds[other]]
        is_same = one == other and size == rest
        for at, last in enumerate(right):
            for first in left[: at + 1] if is_same else left:
                if repeat or first.work.tenant != last.work.tenant:
                    yield (first, last) if first <= last else (last, first)


def _ranges(cuts: tuple[int, ...], ways: int) -> list[_Ranges]:
    """Ranges of units of a member: the whole model, its start, the rest behind a cut, and segments of that rest."""
    units = cuts[-1]
    if not ways:
        return [[(0, units)], [], [], []]
    starts = coarse(cuts)[1:-1]
    return [
        [(0, units)],
        [(0, end) for end in spread(cuts, 0, ways)],
        [(start, units) for start in starts],
        [(start, end) for start in starts for end in spread(cuts, start, ways)],
    ]
