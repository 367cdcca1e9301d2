"""The splits of the lanes of a device among the members of a group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

from cotenant.work import Share

_MOST_SPLITS = 8
"""Splits for each number of members at most."""


@dataclass(frozen=True, slots=True)
class Splits:
    """The splits of the lanes of a device: `by_members[m - 1]` are those for m members."""

    by_members: tuple[tuple[tuple[Share, ...], ...], ...]
    widest: int
    """Cores of the whole device."""
    narrowest: int
    """Cores of the smallest share."""

    @classmethod
    def of(cls, lanes: tuple[Share, ...], members: int) -> Splits:
        """The splits with adjacent lanes for each member; the most even ones if there are many."""
        splits = tuple(tuple(_splits(lanes, count)) for count in range(1, members + 1))
        sizes = [share.size for ways in splits for split in ways for share in split]
        return cls(splits, max(sizes), min(sizes))


def _splits(lanes: tuple[Share, ...], count: int) -> Iterator[tuple[Share, ...]]:
    ways = [(0, *inner, len(lanes)) for inner in combinations(range(1, len(lanes)), count - 1)]
    for edges in sorted(ways, key=_unevenness)[:_MOST_SPLITS]:
        yield tuple(
            Share(tuple(core for lane in lanes[a:b] for core in lane.cores), lanes[0].device, lanes[0].first)
            for a, b in pairwise(edges)
        )


def _unevenness(edges: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    sizes = [b - a for a, b in pairwise(edges)]
    return max(sizes) - min(sizes), edges
