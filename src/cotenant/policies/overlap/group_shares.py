"""The ways to share the lanes of a device among the members of a group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

from cotenant.types import Partition

_MOST_SPLITS = 8
"""Ways to share the device among a number of members."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The ways to share the lanes of a device: `splits[m - 1]` are those among m members."""

    splits: tuple[tuple[tuple[Partition, ...], ...], ...]
    widest: int
    """Cores of the whole device."""
    narrowest: int
    """Cores of the smallest share."""

    @classmethod
    def of(cls, lanes: tuple[Partition, ...], members: int) -> Shares:
        """Neighbouring lanes go together; of many ways the most even ones are kept."""
        splits = tuple(tuple(_splits(lanes, count)) for count in range(1, members + 1))
        sizes = [share.size for ways in splits for split in ways for share in split]
        return cls(splits, max(sizes), min(sizes))


def _splits(lanes: tuple[Partition, ...], count: int) -> Iterator[tuple[Partition, ...]]:
    ways = [(0, *inner, len(lanes)) for inner in combinations(range(1, len(lanes)), count - 1)]
    for edges in sorted(ways, key=_unevenness)[:_MOST_SPLITS]:
        yield tuple(
            Partition(tuple(core for lane in lanes[a:b] for core in lane.cores), lanes[0].device)
            for a, b in pairwise(edges)
        )


def _unevenness(edges: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    sizes = [b - a for a, b in pairwise(edges)]
    return max(sizes) - min(sizes), edges
