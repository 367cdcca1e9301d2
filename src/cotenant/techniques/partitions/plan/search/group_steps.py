"""Groups of slots in a column: the partition of the slots into steps that makes the duty cycle shortest.

All set partitions of the slots into single slots and known groups are tried. With `T(s)` the latency of step s, and
`f_i` the slowdown of slot i, the duty cycle `D` and the constraint are

    E(s) = T(s) * max(f_i for i in s),    D = sum_s E(s),    D + E(s) <= SLO of all slots of s

The shortest feasible round serves every load at the largest rate with these batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import combinations, product
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cotenant.techniques.partitions.plan.rounds import most_members
from cotenant.techniques.partitions.plan.types import Costs, DeviceType, Load

Floats = NDArray[np.float64]
Steps = tuple[tuple[int, ...], ...]
"""Positions of slots by step."""
_MOST_CELLS = 20_000
"""Most groups that are evaluated for the exact gain; with more, the gain is bounded by the number of members."""
_KEPT = 1 << 17
_MOST_GROUPS = 1500
"""Most combinations of batches evaluated for a group of the same loads; of more, some batches are left out."""
_MOST_CHOICES = 1 << 17
"""Most combinations of batches that are tried at once."""


class Arrangement(NamedTuple):
    """The steps of a round, the execution in ns of each slot's step, and the duty cycle in ns."""

    steps: Steps
    took: tuple[float, ...]
    duty: float


class GroupSteps:
    """The groups that loads may form in the partitions of one type of device. Pure; results are cached.

    `rows`: batches of each load by position, 0 where there is none; `alone[size]`: their latencies in ns, infinite
    there.
    """

    def __init__(
        self, costs: Costs, loads: Sequence[Load], kind: DeviceType, rows: Floats, alone: dict[int, Floats]
    ) -> None:
        self._costs = costs
        self._loads = loads
        self._device = kind.name
        self._rows = rows
        self._alone = alone
        self._slo = np.array([load.slo_ns for load in loads], dtype=np.float64)
        self._times: dict[tuple[int, tuple[int, ...]], Floats | None] = {}
        self._place = [{int(batch): at for at, batch in enumerate(each) if batch} for each in rows.tolist()]
        self._arranged: dict[tuple[int, tuple[tuple[int, int], ...], tuple[float, ...]], Arrangement | None] = {}
        self._divided: dict[tuple[int, tuple[tuple[int, int], ...]], tuple[int, tuple[int, ...]] | None] = {}
        self._ways: dict[tuple[int, tuple[int, ...]], list[Steps]] = {}
        self.most = {size: most_members(costs, kind, size, len(loads)) for size in kind.sizes}

    def __bool__(self) -> bool:
        return max(self.most.values()) > 1

    def gain(self) -> float:
        """Upper bound of the time of the members one after the other, over that of their group."""
        most = max(self.most.values())
        numbers = range(len(self._loads))
        sets = [(s, each) for s, n in self.most.items() for k in range(2, n + 1) for each in combinations(numbers, k)]
        if sum(math.prod(self._count(number) for number in each) for _, each in sets) > _MOST_CELLS:
            return float(most)
        found = 1.0
        for size, each in sets:
            times = self.times(size, each)
            if times is not None:
                in_turn = reduce(add, np.ix_(*(self._alone[size][n, : self._count(n)] for n in each)))
                found = max(found, float((in_turn / times).max()))
        return found

    def times(self, size: int, numbers: tuple[int, ...]) -> Floats | None:
        """Latencies in ns of groups of these loads (ascending numbers), by the positions of their batches.

        Infinite for groups that are unknown or left out; None if all are.
        """
        key = size, numbers
        if key not in self._times:
            shape = tuple(self._count(number) for number in numbers)
            found = np.full(shape, np.inf)
            if len(numbers) <= self.most[size]:
                for at in product(*(_thinned(count, len(shape)) for count in shape)):
                    batches = [int(self._rows[n, place]) for n, place in zip(numbers, at, strict=True)]
                    known = self.division(size, list(zip(numbers, batches, strict=True)))
                    found[at] = np.inf if known is None else known[0]
            self._times[key] = found if np.isfinite(found).any() else None
        return self._times[key]

    def division(self, size: int, slots: Sequence[tuple[int, int]]) -> tuple[int, tuple[int, ...]] | None:
        """Least latency in ns of a group of slots (load's number, batch), and the part sizes; None if unknown."""
        key = size, tuple(slots)
        if key in self._divided:
            return self._divided[key]
        best: tuple[int, tuple[int, ...]] | None = None
        for sizes in self._costs.divisions(size, len(slots), self._device):
            members = [(self._loads[n].model, batch, part) for (n, batch), part in zip(slots, sizes, strict=True)]
            ns = self._costs.group_ns(members, size, self._device)
            if ns is not None and (best is None or ns < best[0]):
                best = ns, tuple(sizes)
        self._divided[key] = best
        return best

    def arranged(self, size: int, slots: Sequence[tuple[int, int]], factors: Sequence[float]) -> Arrangement | None:
        """The shortest feasible round under slowdowns `factors` of the slots; None if there is none."""
        key = size, tuple(slots), tuple(factors)
        if key not in self._arranged:
            if len(self._arranged) >= _KEPT:
                self._arranged.clear()
            self._arranged[key] = self._shortest(size, slots, factors)
        return self._arranged[key]

    def _shortest(self, size: int, slots: Sequence[tuple[int, int]], factors: Sequence[float]) -> Arrangement | None:
        numbers = tuple(number for number, _ in slots)
        places = [self._place[number][batch] for number, batch in slots]
        best: Arrangement | None = None
        for steps in self._set_partitions(size, numbers):
            took, duty = [0.0] * len(slots), 0.0
            for step in steps:
                if len(step) == 1:
                    ns = float(self._alone[size][numbers[step[0]], places[step[0]]]) * factors[step[0]]
                else:
                    ordered = sorted(step, key=lambda at: numbers[at])
                    times = self.times(size, tuple(numbers[at] for at in ordered))
                    assert times is not None
                    ns = float(times[tuple(places[at] for at in ordered)]) * max(factors[at] for at in step)
                duty += ns
                for at in step:
                    took[at] = ns
            if best is not None and duty >= best.duty:
                continue
            if all(duty + ns <= self._slo[number] for number, ns in zip(numbers, took, strict=True)):
                best = Arrangement(steps, tuple(took), duty)
        return best

    def extended_duties(
        self, size: int, slots: Sequence[tuple[int, int]], number: int, factors: Sequence[float]
    ) -> Floats:
        """Duty cycles of a column with one more slot, by its batch; infinite if infeasible. `factors` includes it."""
        numbers = [*slots, (number, 0)]
        picked = [*(np.array([self._place[n][batch]]) for n, batch in slots), np.arange(self._count(number))]
        best = np.full(self._rows.shape[1], np.inf)
        for steps, took in self._timed(size, numbers, picked, factors):
            duty, late = self._round(numbers, steps, took)
            own = np.where(late, np.inf, duty).reshape(-1)
            best[: len(own)] = np.minimum(best[: len(own)], own)
        return best

    def choices(
        self, size: int, numbers: Sequence[int], factors: Sequence[float]
    ) -> tuple[list[Floats], Floats] | None:
        """Batches of each load, one axis a load, and the shortest duty cycle with them; infinite if infeasible.

        Of too many combinations, some batches are left out; None if even the rest is too many.
        """
        slots = [(number, 0) for number in numbers]
        able = [np.flatnonzero(2 * self._alone[size][n] <= self._slo[n]) for n in numbers]
        picked = able
        if math.prod(map(len, picked)) > _MOST_CHOICES:
            kept = [_thinned(self._count(number), len(numbers)) for number in numbers]
            picked = [np.intersect1d(own, some) for own, some in zip(able, kept, strict=True)]
        if math.prod(map(len, picked)) > _MOST_CHOICES:
            return None
        best = np.full(tuple(map(len, picked)), np.inf)
        for steps, took in self._timed(size, slots, picked, factors):
            duty, late = self._round(slots, steps, took)
            best = np.minimum(best, np.where(late, np.inf, duty))
        batches = [self._rows[number, at] for number, at in zip(numbers, picked, strict=True)]
        return list(np.ix_(*batches)), best

    def _round(
        self, slots: Sequence[tuple[int, int]], steps: Steps, took: Sequence[Floats]
    ) -> tuple[Floats, NDArray[np.bool_]]:
        duty = reduce(add, [took[step[0]] for step in steps])
        late = reduce(
            np.logical_or, [duty + ns > self._slo[number] for (number, _), ns in zip(slots, took, strict=True)]
        )
        return duty, late

    def _timed(
        self,
        size: int,
        slots: Sequence[tuple[int, int]],
        picked: Sequence[NDArray[np.int64]],
        factors: Sequence[float],
    ) -> Iterator[tuple[Steps, list[Floats]]]:
        """Every set partition of the slots into steps, single slots first, and the execution of each slot's step.

        `picked`: positions of the batches of each slot, one axis of the executions.
        """
        count = len(slots)
        numbers = tuple(number for number, _ in slots)
        for steps in self._set_partitions(size, numbers):
            took: list[Floats] = [np.zeros(0)] * count
            for step in steps:
                ordered = sorted(step, key=lambda at: numbers[at])
                if len(step) == 1:
                    times: Floats | None = self._alone[size][numbers[step[0]]]
                else:
                    times = self.times(size, tuple(numbers[at] for at in ordered))
                assert times is not None
                own = times[np.ix_(*(picked[at] for at in ordered))] * max(factors[at] for at in step)
                own = own.transpose([ordered.index(at) for at in sorted(step)])
                shape = [len(picked[at]) if at in step else 1 for at in range(count)]
                for at in step:
                    took[at] = own.reshape(shape)
            yield steps, took

    def _set_partitions(self, size: int, numbers: tuple[int, ...]) -> list[Steps]:
        """Set partitions of the slots into single slots and known groups, that of single slots first."""
        key = size, numbers
        if key not in self._ways:
            self._ways[key] = [
                steps
                for steps in _set_partitions(tuple(range(len(numbers))), self.most[size])
                if all(
                    len(step) == 1 or self.times(size, tuple(sorted(numbers[at] for at in step))) is not None
                    for step in steps
                )
            ]
        return self._ways[key]

    def _count(self, number: int) -> int:
        return len(self._place[number])


def _thinned(count: int, members: int) -> list[int]:
    """Positions of the batches that are evaluated for groups of so many members: all, or some at equal ratios."""
    most = int(_MOST_GROUPS ** (1 / members))
    if count <= most:
        return list(range(count))
    return sorted({round(each) - 1 for each in np.geomspace(1, count, most).tolist()})


def _set_partitions(positions: tuple[int, ...], most: int) -> Iterator[Steps]:
    """All set partitions of positions into sets of up to `most`, that of single ones first."""
    if not positions:
        yield ()
        return
    first, rest = positions[0], positions[1:]
    for count in range(most):
        for others in combinations(rest, count):
            left = tuple(at for at in rest if at not in others)
            for steps in _set_partitions(left, most):
                yield ((first, *others), *steps)
