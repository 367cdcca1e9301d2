"""Which candidates of a layer are kept as its versions: Algorithm 1 of VELTAIR, and by regret. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from cotenant.errors import InvalidValueError

VERSIONS = 5
"""V of the paper."""
WITHIN = 0.9
"""Versions go as long as the others reach this part of the performance of all."""
_PAYS = 0.01
"""A further version is kept where it takes this part off the mean time. Chosen by hand: less is noise."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a selection needs to know of a candidate: `solo_ns` alone, and its metrics (see `store.KernelCandidate`)."""

    name: str
    solo_ns: float
    parallelism: int
    locality: int


def layer_targets(
    target_ns: float, solo_ns: Sequence[float], operations: Sequence[int], by: Literal["time", "operations"] = "time"
) -> list[float]:
    """Shares of a model's latency target by layer: by time alone, or by operations as the paper has it.

    By operations small layers get less than they can ever reach. Raises InvalidValueError when nothing is to share by.
    """
    weights = [float(each) for each in (solo_ns if by == "time" else operations)]
    total = sum(weights)
    if total <= 0:
        raise InvalidValueError("layers", by, weights, "positive numbers")
    return [target_ns * each / total for each in weights]


def front(readings: Sequence[Reading]) -> list[Reading]:
    """Those beside which no other has both a smaller block and a smaller parallelism, by size of their blocks."""
    found = sorted(readings, key=lambda each: (each.locality, each.parallelism, each.solo_ns, each.name))
    kept: list[Reading] = []
    least = smaller = float("inf")  # parallelism of those with blocks smaller than this one's, and up to it
    block = None
    for each in found:
        if each.locality != block:
            least, block = smaller, each.locality
        if each.parallelism <= least:
            kept.append(each)
        smaller = min(smaller, each.parallelism)
    return kept


def uniform(readings: Sequence[Reading], count: int = VERSIONS) -> list[Reading]:
    """So many of them at equal distances, the first and the last included."""
    if len(readings) <= count:
        return list(readings)
    if count == 1:
        return [readings[0]]
    return [readings[round(at * (len(readings) - 1) / (count - 1))] for at in range(count)]


@dataclass(frozen=True, slots=True)
class KernelVersion:
    """A loaded kernel: where it is, the tasks that cores divide, and its time on one core, alone and by level of
    pressure where that was measured."""

    address: int
    tasks: int
    cpu_ns: int
    level_ns: tuple[int, ...] = ()

    def ns_on(self, cores: int) -> float:
        """Its time where every core does as many whole tasks as the busiest."""
        return self.cpu_ns * -(-self.tasks // cores) / self.tasks


def pick(versions: Sequence[KernelVersion], version: int, cores: int) -> KernelVersion:
    """The version of this number, or the last one; for the first of them, whatever is fastest on so many cores."""
    chosen = versions[min(version, len(versions) - 1)]
    return chosen if chosen != versions[0] else min(versions, key=lambda each: each.ns_on(cores))


Times = Mapping[str, Sequence[float]]
"""By candidate: its time at each level of pressure."""


def pruned(names: Sequence[str], times: Times, within: float = WITHIN) -> list[str]:
    """The fewest of them that reach, at every level of pressure, this part of the performance of all of them.

    Of equally few, those of the least time over all levels.
    """
    levels = range(len(times[names[0]]))
    best = [min(times[name][at] for name in names) for at in levels]
    for count in range(1, len(names)):
        fitting = [
            chosen
            for chosen in combinations(names, count)
            if all(min(times[name][at] for name in chosen) * within <= best[at] for at in levels)
        ]
        if fitting:
            return min((list(some) for some in fitting), key=lambda some: _cost(some, times))
    return list(names)


def single_pass(
    readings: Sequence[Reading], target_ns: float, times: Times | None = None, count: int = VERSIONS
) -> list[str]:
    """Algorithm 1 for one layer: filter by its target, front, uniform choice, pruning by times under pressure.

    Where no candidate reaches the target, none is filtered. Without `times` nothing is pruned.
    """
    reach = [each for each in readings if each.solo_ns <= target_ns] or list(readings)
    chosen = [each.name for each in uniform(front(reach), count)]
    return pruned(chosen, times) if times is not None else chosen


def least_regret(times: Times, count: int = VERSIONS, pays: float = _PAYS) -> list[str]:
    """The versions of least mean time over the levels of pressure, each at the level where it is best.

    The fastest alone (at the first level) is always in, and stands first. A further version is taken as long as the
    best set with it takes a part `pays` off the mean time. Exact: every set is looked at, of candidates that are best
    at some level or in some set; see `_useful`.
    """
    names = _useful(times)
    fastest = min(times, key=lambda name: (times[name][0], sum(times[name]), name))
    chosen = [fastest]
    cost = _cost(chosen, times)
    others = [name for name in names if name != fastest]
    for more in range(1, min(count, len(others) + 1)):
        sets = ((fastest, *some) for some in combinations(others, more))
        best = min(sets, key=lambda some: (_cost(some, times), some))
        found = _cost(best, times)
        if found > cost * (1 - pays) ** (more + 1 - len(chosen)):
            continue
        chosen, cost = list(best), found
    return chosen


def with_fastest(names: Sequence[str], readings: Sequence[Reading]) -> list[str]:
    """The chosen ones, the fastest of all candidates among them and first."""
    fastest = min(readings, key=lambda each: (each.solo_ns, each.name)).name
    return [fastest, *(name for name in names if name != fastest)]


def _useful(times: Times) -> list[str]:
    """Without those beside which another is no slower at any level: no best set needs them."""
    kept: list[str] = []
    for name in sorted(times, key=lambda each: (sum(times[each]), each)):
        if not any(all(a <= b for a, b in zip(times[other], times[name], strict=True)) for other in kept):
            kept.append(name)
    return kept


def _cost(chosen: Sequence[str], times: Times) -> float:
    """The mean over the levels of the least time."""
    levels = len(times[chosen[0]])
    return sum(min(times[name][at] for name in chosen) for at in range(levels)) / levels
