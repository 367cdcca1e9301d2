"""The yardstick: every partitioning of all devices, each filled in every way. Source: GPU-let (ATC 2022), section 6.4.

The paper's ideal scheduler searches all combinations of partitions of its GPUs, two a GPU at most. It serves as the
bound that its own scheduler is compared with. Enumerated here:

- every split of every device into at most `most_partitions` (one or two) partitions, unused ones among them;
- every way to divide the loads over these partitions, with up to `most_models` loads a partition. Each load is cut into
  equal parts: two, then as many as keep the number of divisions below a limit, six at most.
- for every partition with its parts, the rounds of several duty cycles, each with the batches that are quickest alone.
  Duty cycles go from the shortest to the longest that serve it.
- beside each other, all pairs of such rounds, with the factors that they cause each other, and memory.

Divisions that serve less in every load than another does are not pursued: that loses nothing. Not enumerated: rates cut
at other places, and batches larger than a round needs. Plans of elastic partitioning, which cuts rates wherever a
partition is full, are therefore tried first and taken where they exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cotenant.errors import InvalidValueError, PlanError
from cotenant.techniques.partitions.plan.elastic import MOST_MODELS, Elastic
from cotenant.techniques.partitions.plan.rounds import Curve, Demand, RoundCache, round_cache_of
from cotenant.techniques.partitions.plan.search.columns import Column, ColumnGenerator, DeviceConfiguration, device_plan
from cotenant.techniques.partitions.plan.search.local_search import SERVED
from cotenant.techniques.partitions.plan.search.opt_bound import Bound
from cotenant.techniques.partitions.plan.types import (
    NS_PER_S,
    Costs,
    DeviceType,
    Infeasible,
    Load,
    Plan,
    checked,
    padded,
)

_LIMIT = 400_000
"""Divisions of all loads that a search may have."""
_PARTS = 6
"""Parts of a load at most."""
_ROUNDS = 6
"""Duty cycles that are tried for a partition and its parts."""
_BLOCK = 1 << 20

Reach = NDArray[np.bool_]
"""By the parts of every load, one axis each: whether so much can be served."""


class Row(NamedTuple):
    """A partition's parts of each load, the slots of a round that serves them, and what its models take."""

    parts: tuple[int, ...]
    slots: tuple[tuple[int, int], ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Ideal:
    """Says whether the loads can be served at all, by trying everything that this module's docstring lists.

    `headroom` is the share of each rate that is added. The number of devices is not made small.

    Raises InvalidValueError when a setting is out of its range; `plan` raises PlanError for more loads than can be
    searched (17).
    """

    headroom: float = 0.0
    most_partitions: int = 2
    most_models: int = MOST_MODELS

    def __post_init__(self) -> None:
        if self.most_partitions not in (1, 2):
            raise InvalidValueError("ideal planner", "most_partitions", self.most_partitions, "1 or 2")
        if self.most_models < 1:
            raise InvalidValueError("ideal planner", "most_models", self.most_models, "at least 1")

    @property
    def name(self) -> str:
        """See Planner."""
        return "ideal"

    def plan(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Plan | Infeasible:
        """See Planner. `running` is ignored."""
        types = checked(loads, devices)
        elastic = Elastic(
            with_interference=True,
            headroom=self.headroom,
            most_partitions=self.most_partitions,
            most_models=self.most_models,
        )
        first = elastic.plan(loads, devices, costs)
        if isinstance(first, Plan):
            return replace(first, planner=self.name)
        cache = round_cache_of(costs)
        asked = padded(loads, self.headroom)
        kinds = {
            name: replace(kind, splits=tuple(split for split in kind.splits if len(split) <= self.most_partitions))
            for name, kind in types.items()
        }
        generators = {name: ColumnGenerator(cache, asked, kind) for name, kind in kinds.items()}
        rates = np.array([load.rate_per_s for load in asked])
        inventory = [device.name for device in devices]
        if not inventory or Bound(generators, rates).is_too_little(inventory):
            return first
        for parts, rounds in _stages(len(asked)):
            configs = {
                name: _Configurations(cache, asked, kinds[name], generator, parts, self.most_models, rounds)
                for name, generator in generators.items()
            }
            chosen = _divided([configs[name] for name in inventory], parts)
            if chosen is not None:
                total = np.sum([config.served for _, config in chosen], axis=0)
                shares = np.minimum(1.0, rates / total).tolist()
                made = tuple(device_plan(each.generator, config, shares) for each, config in chosen)
                return Plan(made, self.name)
        return first


class _Configurations:
    """What one device of a type can serve: `reach` by parts, `maximal` those that nothing above is served with."""

    def __init__(
        self,
        cache: RoundCache,
        loads: Sequence[Load],
        kind: DeviceType,
        generator: ColumnGenerator,
        parts: int,
        most: int,
        rounds: int,
    ) -> None:
        self.generator = generator
        self._ways: dict[tuple[int, ...], tuple[Column, ...]] = {}
        self.reach = np.zeros((parts + 1,) * len(loads), dtype=np.bool_)
        self.reach[(0,) * len(loads)] = True
        rows = {size: _rows(cache, loads, kind, size, parts, most, rounds) for size in kind.sizes}
        for split in kind.splits:
            if len(split) == 2:
                self._pairs(split, rows[split[0]], rows[split[1]], parts)
        for size in kind.sizes:
            for row in rows[size]:
                if row.memory_bytes + kind.partition_bytes <= kind.memory_bytes:
                    self._add(row.parts, (Column(size, row.slots),))
        _close(self.reach)
        self.maximal = _maximal(self.reach)

    def config(self, parts: tuple[int, ...]) -> DeviceConfiguration:
        """A configuration that serves so much."""
        for known, columns in self._ways.items():
            if all(a >= b for a, b in zip(known, parts, strict=True)):
                found = self.generator.config(columns)
                assert found is not None
                return found
        raise PlanError(f"no configuration serves parts {parts!r}, expected one")

    def _add(self, parts: tuple[int, ...], columns: tuple[Column, ...]) -> None:
        if not self.reach[parts]:
            self.reach[parts] = True
            self._ways[parts] = columns

    def _pairs(self, split: tuple[int, ...], first: list[Row], second: list[Row], parts: int) -> None:
        """Every two rows beside each other that hold, a block of them at a time."""
        if not first or not second:
            return
        kind = self.generator.kind
        left = _Side(self.generator, split[0], first, split[1], second, parts)
        right = _Side(self.generator, split[1], second, split[0], first, parts)
        memory = kind.memory_bytes - 2 * kind.partition_bytes
        step = max(1, _BLOCK // len(second))
        for at in range(0, len(first), step):
            part = slice(at, at + step)
            holds = left.holds(part, slice(None)) & right.holds(slice(None), part).T
            holds &= left.memory[part, None] + right.memory[None, :] <= memory
            above, beside = np.nonzero(holds)
            total = left.parts[at + above] + right.parts[beside]
            whole = np.flatnonzero(total.max(axis=1, initial=0) <= parts)
            codes = np.ravel_multi_index(tuple(total[whole].T), self.reach.shape)
            codes, lines = np.unique(codes, return_index=True)
            for line in whole[lines[~self.reach.reshape(-1)[codes]]].tolist():
                row, other = first[at + above[line]], second[beside[line]]
                columns = Column(split[0], row.slots), Column(split[1], other.slots)
                self._add(tuple(total[line].tolist()), columns)


class _Side:
    """Rows of one partition, and what rows of the other one make of them."""

    def __init__(
        self, generator: ColumnGenerator, size: int, rows: list[Row], other_size: int, others: list[Row], parts: int
    ) -> None:
        self.parts = np.array([row.parts for row in rows])
        self.memory = np.array([row.memory_bytes for row in rows])
        slots, self._slots = _numbered(rows)
        other_slots, around = _numbered(others)
        took = [
            [generator.execution_ns(*slot, size, [Column(other_size, (other,))]) for other in other_slots]
            for slot in slots
        ]
        # a row of zeros for slots that are not there; of several slots beside it, the worst counts
        self._took = np.array([*took, [0] * len(other_slots)])[:, np.where(around < 0, around[:, :1], around)].max(
            axis=2
        )
        loads = generator.loads
        self._slo = np.full(self._slots.shape, np.iinfo(np.int64).max)
        self._longest = np.zeros(len(rows))
        for line, row in enumerate(rows):
            self._slo[line, : len(row.slots)] = [loads[number].slo_ns for number, _ in row.slots]
            self._longest[line] = min(
                batch * NS_PER_S * parts / (loads[number].rate_per_s * row.parts[number]) for number, batch in row.slots
            )

    def holds(self, rows: slice, others: slice) -> NDArray[np.bool_]:
        """By row and other row: whether the round holds beside the other one."""
        took = self._took[:, others][self._slots[rows]]  # by row, slot and other row
        busy = took.sum(axis=1)
        found: NDArray[np.bool_] = busy <= self._longest[rows, None] * (1 + SERVED)
        found &= (busy[:, None, :] + took <= self._slo[rows, :, None]).all(axis=1)
        return found


def _numbered(rows: list[Row]) -> tuple[list[tuple[int, int]], NDArray[Any]]:
    """All slots of some rows, and by row their numbers; -1 for none."""
    slots = sorted(dict.fromkeys(slot for row in rows for slot in row.slots))
    place = {slot: number for number, slot in enumerate(slots)}
    found = np.full((len(rows), max(len(row.slots) for row in rows)), -1)
    for line, row in enumerate(rows):
        found[line, : len(row.slots)] = [place[slot] for slot in row.slots]
    return slots, found


def _stages(loads: int) -> list[tuple[int, int]]:
    """Into how many parts each load is cut, and the rounds of a partition, from little work to much.

    Raises PlanError where even whole loads are too many.
    """
    able = [parts for parts in range(_PARTS, 0, -1) if (parts + 1) ** loads <= _LIMIT]
    if not able:
        most = int(math.log(_LIMIT, 2))
        raise PlanError(f"the ideal planner tries everything: expected at most {most} loads, got {loads}")
    coarse = min(2, able[0])
    return list(dict.fromkeys(((coarse, 1), (coarse, _ROUNDS), (able[0], 1), (able[0], _ROUNDS))))


def _rows(
    cache: RoundCache, loads: Sequence[Load], kind: DeviceType, size: int, parts: int, most: int, rounds: int
) -> list[Row]:
    """All parts of the loads that a partition serves alone, with their rounds."""
    curves = [cache.curve(load.model, size, kind.name) for load in loads]
    rows = []
    level: list[tuple[tuple[int, int], ...]] = [()]
    for _ in range(most):
        grown = []
        for known in level:
            for number in range(known[-1][0] + 1 if known else 0, len(loads)):
                for part in range(1, parts + 1):
                    chosen = (*known, (number, part))
                    demands = tuple(
                        Demand(loads[n].model, loads[n].slo_ns, loads[n].rate_per_s * p / parts) for n, p in chosen
                    )
                    best = cache.fit(demands, size, kind.name)
                    if best is None:
                        break  # nor would more of this load fit
                    grown.append(chosen)
                    memory = sum(map(cache.costs.memory_bytes, dict.fromkeys(work.model for work in demands)))
                    vector = [0] * len(loads)
                    for n, p in chosen:
                        vector[n] = p
                    own = [curves[n] for n, _ in chosen]
                    for batches in _batches(demands, own, best.batches, rounds):
                        slots = tuple((n, batch) for (n, _), batch in zip(chosen, batches, strict=True))
                        rows.append(Row(tuple(vector), slots, memory))
        level = grown
    return rows


def _batches(
    demands: Sequence[Demand], curves: Sequence[Curve], best: tuple[int, ...], rounds: int
) -> list[tuple[int, ...]]:
    """The batches of up to so many rounds: those that bear the most, then some of evenly spread duty cycles."""
    if rounds == 1:
        return [best]
    rates = [work.rate_per_s / NS_PER_S for work in demands]
    duties = sorted(
        {
            int(batch / rate)
            for work, rate, curve in zip(demands, rates, curves, strict=True)
            for batch, ns in zip(curve.batches, curve.latency_ns, strict=True)
            if ns <= batch / rate and 2 * ns <= work.slo_ns
        }
    )
    found = []
    for duty in duties:
        rows = [math.ceil(rate * duty * (1 - SERVED)) for rate in rates]
        if any(row > curve.batches[-1] for row, curve in zip(rows, curves, strict=True)):
            break
        at = [curve.choice[row] for row, curve in zip(rows, curves, strict=True)]
        took = [curve.latency_ns[each] for each, curve in zip(at, curves, strict=True)]
        busy = sum(took)
        if busy <= duty and all(busy + ns <= work.slo_ns for ns, work in zip(took, demands, strict=True)):
            found.append(tuple(curve.batches[each] for each, curve in zip(at, curves, strict=True)))
    distinct = list(dict.fromkeys(found))
    step = max(1.0, len(distinct) / (rounds - 1))
    spread = [distinct[min(len(distinct) - 1, int(number * step))] for number in range(rounds - 1)] if distinct else []
    return list(dict.fromkeys((best, *spread)))


def _close(reach: Reach) -> None:
    """A load that can be served more can be served less: in place, along every axis."""
    for axis in range(reach.ndim):
        flipped = np.flip(reach, axis)
        np.logical_or.accumulate(flipped, axis=axis, out=flipped)


def _maximal(reach: Reach) -> list[tuple[int, ...]]:
    """The loads that can be served such that nothing more can."""
    is_below = np.zeros_like(reach)
    for axis in range(reach.ndim):
        low = [slice(None)] * reach.ndim
        high = list(low)
        low[axis], high[axis] = slice(0, -1), slice(1, None)
        is_below[tuple(low)] |= reach[tuple(high)]
    return [tuple(map(int, each)) for each in np.argwhere(reach & ~is_below)]


def _added(reach: Reach, one: _Configurations) -> Reach:
    """The loads that can be served with one more device."""
    found = np.zeros_like(reach)
    most = reach.shape[0] - 1
    for parts in one.maximal:
        # reach is closed downwards: what would be served beyond the whole of a load is served below it as well
        found[tuple(slice(p, None) for p in parts)] |= reach[tuple(slice(0, most + 1 - p) for p in parts)]
    _close(found)
    return found


def _divided(
    devices: Sequence[_Configurations], parts: int
) -> list[tuple[_Configurations, DeviceConfiguration]] | None:
    """A configuration for every device in use, so that all parts are served; None where there is none."""
    half = len(devices) // 2
    sides = []
    for side in (devices[:half], devices[half:]):
        reaches = [np.zeros_like(devices[0].reach)]
        reaches[0][(0,) * reaches[0].ndim] = True
        for device in side:
            reaches.append(_added(reaches[-1], device))
        sides.append(reaches)
    meets = sides[0][-1] & np.flip(sides[1][-1])
    if not meets.any():
        return None
    wanted = tuple(map(int, np.argwhere(meets)[0]))
    found = []
    for side, reaches, target in (
        (devices[:half], sides[0], wanted),
        (devices[half:], sides[1], tuple(parts - part for part in wanted)),
    ):
        for device, reach in zip(reversed(side), reversed(reaches[:-1]), strict=True):
            box = tuple(slice(0, part + 1) for part in target)
            here = np.argwhere(reach[box] & np.flip(device.reach[box]))[0]
            own = tuple(part - int(left) for part, left in zip(target, here, strict=True))
            if any(own):
                found.append((device, device.config(own)))
            target = tuple(map(int, here))
    return found
