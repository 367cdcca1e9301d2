"""Division of the streaming multiprocessors (SMs) of a GPU: pure arithmetic, no driver.

The driver splits the SMs once into groups of equal size. A share is a set of these groups: shares of different groups
are disjoint.

Slots number the SMs of the groups: group k has the slots from k times the granularity. SMs beyond the last group are
only in the share of the whole device: 4 or 12 of the 132 SMs of an H100 with groups of 8, by die.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from cotenant.errors import InvalidValueError
from cotenant.work import Share

_SLACK = 1e-9
"""Relative tolerance of sums of shares: three times 33.3333 % may exceed 100 % by rounding."""


@dataclass(frozen=True, slots=True)
class SmGrid:
    """Division of a GPU's `total` SMs by the driver: `groups` groups of `granularity` SMs each (0: as many as fit).

    Raises InvalidValueError when the groups do not fit into the device.
    """

    total: int
    granularity: int = 1
    groups: int = 0

    def __post_init__(self) -> None:
        if not self.groups:
            object.__setattr__(self, "groups", self.total // max(1, self.granularity))
        if self.granularity < 1 or self.groups < 1 or self.groups * self.granularity > self.total:
            text = f"at least one group of at least one SM, {self.total} SMs in all at most"
            raise InvalidValueError("SMs", "groups", (self.groups, self.granularity), text)

    @property
    def spare(self) -> int:
        """Number of SMs that are in no group."""
        return self.total - self.groups * self.granularity


def device_name(index: int) -> str:
    """The name of a GPU in partitions."""
    return f"cuda:{index}"


def granularity_of(capability: tuple[int, int]) -> int:
    """SMs in the smallest share by compute capability, for bindings without it (CUDA guide, green contexts)."""
    major = capability[0]
    return 8 if major >= 9 else 4 if major == 8 else 2


def whole(grid: SmGrid, index: int) -> Share:
    """The partition of all SMs, including those in no group."""
    return Share(tuple(range(grid.total)), device_name(index))


def is_whole(partition: Share, grid: SmGrid) -> bool:
    """Whether a partition is the whole device, which needs no limit."""
    return partition.mask == (1 << grid.total) - 1


def counts_of(percents: Sequence[float], grid: SmGrid, where: str = "[device]") -> tuple[int, ...]:
    """Number of groups of each share; shares are in percent of the GPU's SMs.

    Each share is rounded to the nearest number of groups. While the sum is too large, the share that gained most by
    rounding loses one group, as do shares of the same percentage. Raises InvalidValueError when shares sum up to more
    than 100 %, or one is smaller than a group.
    """
    for percent in percents:
        if not percent * grid.total >= 100 * grid.granularity * (1 - _SLACK):
            least = -(-100 * grid.granularity // grid.total)
            text = f"at least {least} %: {grid.granularity} of {grid.total} SMs are the smallest share"
            raise InvalidValueError(where, "shares", percent, text)
    if not 0 < sum(percents) <= 100 * (1 + _SLACK):
        raise InvalidValueError(where, "shares", list(percents), f"100 % in all at most, not {sum(percents):g} %")
    exact = [percent * grid.total / (100 * grid.granularity) for percent in percents]
    counts = [max(1, int(groups + 0.5)) for groups in exact]
    while sum(counts) > grid.groups:
        giving = [place for place, count in enumerate(counts) if count > 1]
        if not giving:
            text = f"{grid.groups} shares at most: the driver makes so many groups of this GPU"
            raise InvalidValueError(where, "shares", list(percents), text)
        most = max(giving, key=lambda place: counts[place] - exact[place])
        for place in giving:
            if percents[place] == percents[most]:
                counts[place] -= 1
    return tuple(counts)


def shares_of(percents: Sequence[float], grid: SmGrid, index: int, where: str = "[device]") -> tuple[Share, ...]:
    """Disjoint partitions for shares in percent, from the first group on. Raises InvalidValueError; see `counts_of`."""
    counts = counts_of(percents, grid, where)
    pairs = zip(counts, accumulate(counts), strict=True)
    return tuple(partition_of(range(end - count, end), grid, index) for count, end in pairs)


def partition_of(groups: Sequence[int], grid: SmGrid, index: int) -> Share:
    """The partition of some groups."""
    size = grid.granularity
    return Share(tuple(slot for k in groups for slot in range(k * size, (k + 1) * size)), device_name(index))


def groups_of(partition: Share, grid: SmGrid) -> tuple[int, ...]:
    """The groups of a partition, ascending. Raises InvalidValueError unless it has all slots of each."""
    groups = tuple(sorted({slot // grid.granularity for slot in partition.cores}))
    if partition.size != len(groups) * grid.granularity or groups[-1] >= grid.groups:
        text = f"all {grid.granularity} slots of each of its groups, of {grid.groups} groups"
        raise InvalidValueError(
            f"partition of {partition.device}", "slots", f"{partition.size} from {partition.cores[0]} on", text
        )
    return groups
