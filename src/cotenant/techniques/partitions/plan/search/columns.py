"""Columns: batches of some loads that share the round of one partition, and the rates that they serve.

A column runs its batches without a pause, one after the other or in groups (`group_steps`). Batches `b_i` of latencies
`L_i` have the shortest duty cycle `D = sum L_i` and serve load i at the rate `b_i / D`. A configuration is one device
with a column in each partition in use, under their interference.

Sources: squishy bin packing, Nexus (SOSP 2019), section 6.1; joint choice of batch, partition and time sharing, GPU-let
(ATC 2022), section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cotenant.techniques.partitions.plan.rounds import RoundCache
from cotenant.techniques.partitions.plan.search.group_steps import GroupSteps, Steps
from cotenant.techniques.partitions.plan.types import (
    NS_PER_S,
    CoRunner,
    DevicePlan,
    DeviceType,
    Load,
    PartitionPlan,
    Slot,
)

Floats = NDArray[np.float64]
_DUTIES = 20
"""Duty cycles for which a column is proposed, at equal ratios."""
_SAMPLES = 3
_MEMORY_SHARES = np.array((0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8))
"""Tried prices of a device's whole memory, as shares of the value of its partitions."""
_KEPT = 1 << 18


class Column(NamedTuple):
    """A partition of some size and its slots, each a load's number and a batch."""

    size: int
    slots: tuple[tuple[int, int], ...]


class DeviceConfiguration(NamedTuple):
    """The columns of a device, their duty cycles and executions, and the served rate of each load in rows/s.

    `steps`: the steps of each column, as positions of slots. `execution_ns`: of each slot the execution of its step.
    """

    columns: tuple[Column, ...]
    duty_ns: tuple[int, ...]
    execution_ns: tuple[tuple[int, ...], ...]
    served: tuple[float, ...]
    steps: tuple[Steps, ...]


class SplitTree(NamedTuple):
    """Prefix tree of splits: a partition size, and the sizes that may follow it."""

    size: int
    children: tuple[SplitTree, ...]


class Grid(NamedTuple):
    """Grid of duty cycles in ns. `fits`, `rate` (rows/s) by (duty cycle, load, batch); `time` (ns) by (load, batch)."""

    duty: Floats
    fits: NDArray[np.bool_]
    rate: Floats
    time: Floats


class ColumnGenerator:
    """Proposes columns and evaluates configurations of loads on one type of device. Pure; results are cached.

    `alone[size]`: latencies in ns by load (rows) and batch (columns), infinite where there is none. `typical[size]`:
    sampled slowdown of each load beside others. Proposals use `typical`; `config` evaluates the exact slowdowns.
    """

    def __init__(
        self, cache: RoundCache, loads: Sequence[Load], kind: DeviceType, *, interference: bool = True
    ) -> None:
        self.cache = cache
        self.loads = tuple(loads)
        self.kind = kind
        self.interference = interference
        self._configs: dict[tuple[Column, ...], DeviceConfiguration | None] = {}
        self.memory = np.array([cache.costs.memory_bytes(load.model) for load in loads], dtype=np.float64)
        self.slo = np.array([load.slo_ns for load in loads], dtype=np.float64)
        curves = {size: [cache.curve(load.model, size, kind.name) for load in loads] for size in kind.sizes}
        width = max(len(curve.batches) for curve in curves[kind.whole])
        self.rows = np.zeros((len(loads), width))
        for number, curve in enumerate(curves[kind.whole]):
            self.rows[number, : len(curve.batches)] = curve.batches
        self.positions = [curve.position for curve in curves[kind.whole]]
        self.alone: dict[int, Floats] = {}
        for size in kind.sizes:
            table = self.alone[size] = np.full(self.rows.shape, np.inf)
            for number, curve in enumerate(curves[size]):
                table[number, : len(curve.batches)] = curve.latency_ns
        self.best = {
            size: np.array([cache.capacity(load.model, load.slo_ns, size, kind.name) for load in loads])
            for size in kind.sizes
        }
        self._best = np.stack([self.best[size] for size in kind.sizes])
        self._counts = np.array([[split.count(size) for size in kind.sizes] for split in kind.splits], dtype=np.float64)
        self._needs = self.memory + kind.partition_bytes
        self.typical = {size: self._typical(size) for size in kind.sizes}
        self.groups = GroupSteps(cache.costs, self.loads, kind, self.rows, self.alone)
        self.gain = self.groups.gain() if self.groups else 1.0
        """Upper bound of the throughput of rounds with groups over that of rounds without."""
        self.tree = _tree(kind.splits)
        self.grids = {size: self._grid(size) for size in kind.sizes}
        self._able: dict[tuple[int, int], tuple[Floats, Floats]] = {}

    def value(self, prices: Floats) -> tuple[float, Floats]:
        """Upper bound of the value of a configuration, at `prices` of a row/s by load; and the rates that reach it.

        Interference is left out. Memory has a price: every price gives a bound (Lagrangian relaxation), and the best of
        several is taken. Columns of one load suffice, as the value of a shared round is a weighted mean of them.
        """
        load_values = self._best * prices * self.gain  # by size and load
        free = (load_values.max(axis=1) * self._counts).sum(axis=1).max()
        price = free * _MEMORY_SHARES / self.kind.memory_bytes
        net = load_values - price[:, None, None] * self._needs
        most = np.maximum(net.max(axis=2), 0.0)  # a partition may stay unused
        values = most @ self._counts.T + (price * self.kind.memory_bytes)[:, None]
        at = values.argmin(axis=0)  # by split the price of memory that bounds it best
        bounds = values[at, np.arange(len(self._counts))]
        split = int(bounds.argmax())
        chosen = net[at[split]].argmax(axis=1)
        served = np.zeros(len(prices))
        for size, count in enumerate(self._counts[split].tolist()):
            served[chosen[size]] += count * load_values[size, chosen[size]] / prices[chosen[size]]
        return float(bounds[split]), served

    def able(self, size: int, number: int) -> tuple[Floats, Floats]:
        """Latencies in ns and batches of a load that are feasible alone in a partition."""
        known = self._able.get((size, number))
        if known is None:
            time = self.alone[size][number]
            holds = 2 * time <= self.slo[number]
            known = self._able[size, number] = time[holds], self.rows[number][holds]
        return known

    def position(self, number: int, batch: int) -> int:
        """Position of a batch among those of a load."""
        return self.positions[number][batch]

    def smaller(self, number: int, batch: int) -> int:
        """The largest batch that is at least 8 % smaller, else the smallest batch."""
        batches = list(self.positions[number])
        return max((each for each in batches if each <= 0.92 * batch), default=batches[0])

    def config(self, columns: Sequence[Column]) -> DeviceConfiguration | None:
        """The configuration of these columns on one device; None if an SLO or the memory limit is broken."""
        key = tuple(columns)
        if key in self._configs:
            return self._configs[key]
        if len(self._configs) >= _KEPT:
            self._configs.clear()
        found = self._configs[key] = self._config(key)
        return found

    def _config(self, columns: tuple[Column, ...]) -> DeviceConfiguration | None:
        models = [dict.fromkeys(self.loads[number].model for number, _ in column.slots) for column in columns]
        taken = sum(self.cache.costs.memory_bytes(model) for own in models for model in own)
        if taken + self.kind.partition_bytes * len(columns) > self.kind.memory_bytes:
            return None
        made = self._arranged(columns, in_turn=False) if self.groups else None
        return made or self._arranged(columns, in_turn=True)

    def _arranged(self, columns: tuple[Column, ...], *, in_turn: bool) -> DeviceConfiguration | None:
        """The configuration with the groups that are best without neighbours, or without groups if `in_turn`."""
        served = [0.0] * len(self.loads)
        duties, executions, steps = [], [], []
        for size, slots in columns:
            single: Steps = tuple((at,) for at in range(len(slots)))
            best = None if in_turn else self.groups.arranged(size, slots, [1.0] * len(slots))
            steps.append(best.steps if best else single)
        for index, (size, slots) in enumerate(columns):
            beside = [(other, steps[at]) for at, other in enumerate(columns) if at != index]
            took = [0] * len(slots)
            for step in steps[index]:
                ns = self._step_ns(sorted(slots[at] for at in step), size, beside)
                for at in step:
                    took[at] = ns
            duty = sum(took[step[0]] for step in steps[index])
            for (number, batch), ns in zip(slots, took, strict=True):
                if duty + ns > self.loads[number].slo_ns:
                    return None
                served[number] += batch * NS_PER_S / duty
            duties.append(duty)
            executions.append(tuple(took))
        return DeviceConfiguration(columns, tuple(duties), tuple(executions), tuple(served), tuple(steps))

    def _step_ns(self, step: Sequence[tuple[int, int]], size: int, beside: Sequence[tuple[Column, Steps]]) -> int:
        """Execution in ns of a slot or a group, beside the worst co-runners of these columns with their steps."""
        if len(step) == 1:
            number, batch = step[0]
            sizes: tuple[int, ...] = (size,)
            alone = self.cache.alone_ns(self.loads[number].model, batch, size, self.kind.name)
        else:
            found = self.groups.division(size, step)
            assert found is not None
            alone, sizes = found
        if not self.interference or not beside:
            return alone
        others = [lane for column, steps in beside for lane in self._lanes(column, steps)]
        factors = [
            self.cache.worst_factor(self.loads[number].model, batch, part, others, self.kind.name)
            for (number, batch), part in zip(step, sizes, strict=True)
        ]
        return math.ceil(alone * max(factors))

    def _lanes(self, column: Column, steps: Steps) -> list[list[CoRunner]]:
        """Co-runners of a column: at most one of each list at a time, with a list per member of its largest step."""
        if len(steps) == len(column.slots):
            return [[(self.loads[number].model, batch, column.size) for number, batch in column.slots]]
        lanes: list[list[CoRunner]] = [[] for _ in range(max(map(len, steps)))]
        for step in steps:
            slots = sorted(column.slots[at] for at in step)
            found = self.groups.division(column.size, slots) if len(step) > 1 else None
            sizes = found[1] if found else (column.size,)
            for lane, (number, batch), size in zip(lanes, slots, sizes, strict=False):
                lane.append((self.loads[number].model, batch, size))
        return lanes

    def execution_ns(self, number: int, batch: int, size: int, beside: Sequence[Column]) -> int:
        """Execution in ns of one batch beside the worst slots of these columns, which run without groups."""
        others = [(column, tuple((at,) for at in range(len(column.slots)))) for column in beside]
        return self._step_ns([(number, batch)], size, others)

    def typical_ns(self, column: Column) -> float:
        """The duty cycle of a column beside typical neighbours."""
        time = self.grids[column.size].time
        return self.duty_ns(column, [float(time[n, self.position(n, batch)]) for n, batch in column.slots])

    def duty_ns(self, column: Column, took: Sequence[float]) -> float:
        """The shortest duty cycle of a column, given the ns of each slot alone; groups have the same slowdowns."""
        if self.groups:
            alone = [self.alone[column.size][n, self.position(n, batch)] for n, batch in column.slots]
            factors = [float(ns / own) for ns, own in zip(took, alone, strict=True)]
            found = self.groups.arranged(column.size, column.slots, factors)
            if found is not None:
                return found.duty
        return sum(took)

    def propose(self, size: int, wanted: Floats, prices: Floats, free_bytes: float, most: int) -> Column | None:
        """A column of up to `most` slots of high value, under typical slowdowns; None if nothing can be served.

        A greedy knapsack for each duty cycle of the grid, once by value per time and once by value. The best of these
        columns, and of single loads, is returned.
        """
        duty, fits, rate, time = self.grids[size]
        active = np.flatnonzero((wanted > 0) & (self.best[size] > 0) & (self.memory <= free_bytes))
        if not len(active):
            return None
        time, rows = time[active], self.rows[active]
        load_values = prices[active, None] * np.minimum(wanted[active, None], rate[:, active])
        load_values = np.where(fits[:, active], load_values, 0.0)
        count, width, grid = len(active), rows.shape[1], len(duty)
        flat_time = time.reshape(-1)
        keys = [(load_values / time).reshape(grid, -1), load_values.reshape(grid, -1)]
        lines = np.arange(grid)
        owner = np.repeat(np.arange(count), width)
        needs = self.memory[active]
        is_tight = float(np.sort(needs)[-most:].sum()) > free_bytes
        singles = np.where(2 * time <= self.slo[active, None], rows / time, 0.0).argmax(axis=1)
        found = np.full((count + 2 * grid, most), -1)
        found[:count, 0] = np.arange(count) * width + singles
        for number, key in enumerate(keys):
            left, memory = duty.copy(), np.full(grid, free_bytes)
            chosen = found[count + number * grid : count + (number + 1) * grid]
            for pick in range(most):
                usable = np.where(flat_time <= left[:, None], key, 0.0)
                if pick and is_tight:
                    usable[needs[owner] > memory[:, None]] = 0.0
                at = usable.argmax(axis=1)
                took = usable[lines, at] > 0
                if not took.any():
                    break
                chosen[took, pick] = at[took]
                left -= np.where(took, flat_time[at], 0.0)
                memory -= np.where(took, needs[owner[at]], 0.0)
                key = np.where((owner == owner[at][:, None]) & took[:, None], 0.0, key)
        best = self._best_of(found, active, time, rows, wanted, prices)
        return None if best is None else Column(size, tuple(best))

    def _best_of(
        self, chosen: NDArray[Any], active: NDArray[Any], time: Floats, rows: Floats, wanted: Floats, prices: Floats
    ) -> list[tuple[int, int]] | None:
        """The slots of the choice of highest value; a choice is a row of positions in (load, batch)."""
        there = chosen >= 0
        at = np.where(there, chosen, 0)
        loads = active[at // rows.shape[1]]
        took = np.where(there, time.reshape(-1)[at], 0.0)
        batch = np.where(there, rows.reshape(-1)[at], 0.0)
        busy = np.maximum(took.sum(axis=1), 1.0)
        holds = (~there | (busy[:, None] + took <= self.slo[loads])).all(axis=1) & there.any(axis=1)
        gained = np.minimum(wanted[loads], batch * NS_PER_S / busy[:, None]) * prices[loads]
        value = np.where(holds, np.where(there, gained, 0.0).sum(axis=1), -1.0)
        line = int((value * (1 - 1e-6 * busy / busy.max())).argmax())  # the shortest of equal ones
        if value[line] <= 0:
            return None
        picked = [
            (int(n), int(b)) for n, b, is_there in zip(loads[line], batch[line], there[line], strict=True) if is_there
        ]
        return sorted(picked)

    def _grid(self, size: int) -> Grid:
        time = self.alone[size] * self.typical[size][:, None]
        served = self.best[size] > 0
        low = float(time[served].min()) if served.any() else 1.0
        high = float(max(self.slo.max(), 2 * low))
        duty = np.geomspace(low, high, _DUTIES)
        shaped = duty[:, None, None]
        # The round may become shorter than this duty cycle, so feasibility is checked at the end.
        fits = (time <= shaped) & (2 * time <= self.slo[:, None]) & (0.8 * shaped + time <= self.slo[:, None])
        return Grid(duty, fits, self.rows * NS_PER_S / shaped, time)

    def _typical(self, size: int) -> Floats:
        """Mean slowdown of each load beside single other loads in the largest partition that may stand beside it."""
        beside = [sum(split) - size for split in self.kind.splits if size in split and len(split) > 1]
        if not self.interference or not beside:
            return np.ones(len(self.loads))
        partners = [
            other for split in self.kind.splits if size in split and len(split) > 1 for other in _less(split, size)
        ]
        other_size = max(partners)
        others = []
        step = max(1, len(self.loads) // _SAMPLES)
        for load in self.loads[::step]:
            batch = self.cache.best_batch(load.model, load.slo_ns, other_size, self.kind.name)
            if batch:
                others.append((load.model, batch, other_size))
        found = np.ones(len(self.loads))
        for number, load in enumerate(self.loads):
            own = self.cache.best_batch(load.model, load.slo_ns, size, self.kind.name)
            if own and others:
                slowed = [self.cache.factor(load.model, own, size, (other,), self.kind.name) for other in others]
                found[number] = sum(slowed) / len(slowed)
        return found


def device_plan(generator: ColumnGenerator, config: DeviceConfiguration, shares: Sequence[float]) -> DevicePlan:
    """The plan of a configuration, with `shares` of the served rates.

    The duty cycle is extended, with the same batches, until the SLOs bear only as large a slowdown as the round does.
    It ends earlier when a batch is full. Slots are in the order of their steps.
    """
    made = []
    for column, duty, took, steps in zip(
        config.columns, config.duty_ns, config.execution_ns, config.steps, strict=True
    ):
        slots: list[Slot] = []
        longest = math.inf
        numbered = 0
        for step in steps:
            members = sorted(column.slots[at] for at in step)
            found = generator.groups.division(column.size, members) if len(step) > 1 else None
            numbered += found is not None
            for (number, batch), size in zip(members, found[1] if found else (0,), strict=True):
                load, ns = generator.loads[number], took[step[0]]
                rate = batch * NS_PER_S / duty * shares[number]
                slots.append(Slot(load.tenant, batch, rate, numbered if found else 0, size))
                longest = min(longest, batch * NS_PER_S / rate, load.slo_ns * duty // (ns + duty))
        made.append(PartitionPlan(column.size, max(duty, int(longest)), tuple(slots)))
    return DevicePlan(generator.kind.name, tuple(made))


def _less(split: tuple[int, ...], size: int) -> tuple[int, ...]:
    at = split.index(size)
    return split[:at] + split[at + 1 :]


def _tree(splits: Sequence[tuple[int, ...]]) -> tuple[SplitTree, ...]:
    """Prefix tree of the splits, with the sizes of each split in descending order."""
    ordered = sorted(dict.fromkeys(tuple(sorted(split, reverse=True)) for split in splits), reverse=True)
    return _nodes([split for split in ordered if split])


def _nodes(splits: Sequence[tuple[int, ...]]) -> tuple[SplitTree, ...]:
    first = dict.fromkeys(split[0] for split in splits)
    return tuple(
        SplitTree(size, _nodes([split[1:] for split in splits if split[0] == size and len(split) > 1]))
        for size in first
    )
