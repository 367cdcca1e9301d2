"""The choice of a layer's kernel versions: Algorithm 1 of VELTAIR, and least regret. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from cotenant.errors import InvalidValueError

VERSIONS = 5
"""V of the paper: versions of a layer at most."""
WITHIN = 0.9
"""Share of the performance of all versions that the pruned ones must reach."""
_PAYS = 0.01
"""Least relative reduction of the mean time by which a further version is kept. Chosen by hand: less is noise."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Facts of a candidate for the choice: `solo_ns` alone, and its metrics (see `store.KernelCandidate`)."""

    name: str
    solo_ns: float
    parallelism: int
    locality: int


def layer_targets(
    target_ns: float, solo_ns: Sequence[float], operations: Sequence[int], by: Literal["time", "operations"] = "time"
) -> list[float]:
    """A model's latency target divided among its layers, by time alone, or by operations as in the paper.

    By operations, small layers get targets that they cannot reach. Raises InvalidValueError for weights that sum to 0.
    """
    weights = [float(each) for each in (solo_ns if by == "time" else operations)]
    total = sum(weights)
    if total <= 0:
        raise InvalidValueError("layers", by, weights, "positive numbers")
    return [target_ns * each / total for each in weights]


def front(readings: Sequence[Reading]) -> list[Reading]:
    """The Pareto front of smaller block and smaller parallelism, in order of block size (ExtractDominant)."""
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
    """`count` of the readings at equal distances, with the first and the last one."""
    if len(readings) <= count:
        return list(readings)
    if count == 1:
        return [readings[0]]
    return [readings[round(at * (len(readings) - 1) / (count - 1))] for at in range(count)]


@dataclass(frozen=True, slots=True)
class KernelVersion:
    """A loaded kernel: its address, the tasks that cores divide, its CPU time alone, and by level of pressure if
    measured."""

    address: int
    tasks: int
    cpu_ns: int
    level_ns: tuple[int, ...] = ()

    def ns_on(self, cores: int) -> float:
        """Its time on some cores: the busiest core runs `ceil(tasks / cores)` whole tasks."""
        return self.cpu_ns * -(-self.tasks // cores) / self.tasks


def pick(versions: Sequence[KernelVersion], version: int, cores: int) -> KernelVersion:
    """The version of this number, or the last one. For the first version: the fastest one on this number of cores."""
    chosen = versions[min(version, len(versions) - 1)]
    return chosen if chosen != versions[0] else min(versions, key=lambda each: each.ns_on(cores))


Times = Mapping[str, Sequence[float]]
"""By candidate: its time at each level of pressure."""


def pruned(names: Sequence[str], times: Times, within: float = WITHIN) -> list[str]:
    """The fewest candidates that reach this share of the performance of all, at every level of pressure.

    Ties: the least time over all levels.
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
    """Algorithm 1 of VELTAIR (section 4.1) for one layer, as a reference. Returns names of versions.

    `cotenant compile` does not store this choice: no policy can choose among its versions without times under pressure,
    and with these `least_regret` loses least.

    1. Keep the candidates within the layer's latency target; all if none is.
    2. Take the Pareto front of locality and parallelism.
    3. Choose `count` of them at equal distances.
    4. Prune them by their times under pressure; skipped without `times`.
    """
    reach = [each for each in readings if each.solo_ns <= target_ns] or list(readings)
    chosen = [each.name for each in uniform(front(reach), count)]
    return pruned(chosen, times) if times is not None else chosen


def least_regret(times: Times, count: int = VERSIONS, pays: float = _PAYS) -> list[str]:
    """The versions with the least mean time over the levels of pressure, each used at its best levels.

    The fastest alone (at the first level) is always included, and is first. A further version is kept if the best set
    with it has a mean time lower by the share `pays`. Exact: all sets of undominated candidates are compared.
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


def _useful(times: Times) -> list[str]:
    """The candidates without the dominated ones, which are no faster than another one at any level."""
    kept: list[str] = []
    for name in sorted(times, key=lambda each: (sum(times[each]), each)):
        if not any(all(a <= b for a, b in zip(times[other], times[name], strict=True)) for other in kept):
            kept.append(name)
    return kept


def _cost(chosen: Sequence[str], times: Times) -> float:
    """The mean over the levels of the least time."""
    levels = len(times[chosen[0]])
    return sum(min(times[name][at] for name in chosen) for at in range(levels)) / levels
