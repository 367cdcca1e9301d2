"""What a partition can hold, as columns: batches of some loads that share a round, and the rates that they serve.

A column runs its batches without a pause, one after the other or in groups (`group_steps`): that is the shortest duty
cycle, and with the batches given it serves the most of every load at once. A configuration is one device with a column
in each partition in use; it knows what the columns cost each other. Columns are the squishy tasks of Nexus (SOSP 2019),
section 6.1; their search over batch, partition and time sharing together is that of GPU-let (ATC 2022), section 4.
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
"""Duty cycles for which a column is sought, evenly spread in their logarithm."""
_SAMPLES = 3
_MEMORY_SHARES = np.array((0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8))
"""Prices of a device's memory that are tried, as shares of what its partitions are worth."""
_KEPT = 1 << 18


class Column(NamedTuple):
    """A partition of some size and its slots: number of the load, and batch."""

    size: int
    slots: tuple[tuple[int, int], ...]


class DeviceConfiguration(NamedTuple):
    """A device's columns, their duty cycles and executions, and the rate of each load that they serve, in rows/s.

    `steps` are the positions of each column's slots by when they run; an execution is that of the step.
    """

    columns: tuple[Column, ...]
    duty_ns: tuple[int, ...]
    execution_ns: tuple[tuple[int, ...], ...]
    served: tuple[float, ...]
    steps: tuple[Steps, ...]


class SplitTree(NamedTuple):
    """Splits by what they begin with: a size, and what may follow it."""

    size: int
    children: tuple[SplitTree, ...]


class Grid(NamedTuple):
    """Duty cycles in ns; by (duty cycle, load, batch) what fits and the rate served; by (load, batch) the ns taken."""

    duty: Floats
    fits: NDArray[np.bool_]
    rate: Floats
    time: Floats


class ColumnGenerator:
    """All that loads can be given on one type of device. Pure; remembers what it has worked out.

    `alone[size]` is the latency in ns of every load (rows) at every batch (columns), infinite where there is none.
    `typical[size]` is what each load is slowed down by beside others, from a few samples: proposals rest on it, what
    is promised rests on `config` alone.
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
        """No round serves more than this times what it could without groups."""
        self.tree = _tree(kind.splits)
        self.grids = {size: self._grid(size) for size in kind.sizes}
        self._able: dict[tuple[int, int], tuple[Floats, Floats]] = {}

    def value(self, prices: Floats) -> tuple[float, Floats]:
        """No configuration serves more than this of the loads, rates being worth `prices` a row/s; and what reaches it.

        An upper bound: interference is left out, and memory counts with a price of its own, the best of some, which
        bounds as any price does. Columns of one load are enough for it: several share a round at a weighted mean of
        what each is worth a unit of time.
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
        """Latencies in ns and batches of a load with which it holds alone in a partition."""
        known = self._able.get((size, number))
        if known is None:
            time = self.alone[size][number]
            holds = 2 * time <= self.slo[number]
            known = self._able[size, number] = time[holds], self.rows[number][holds]
        return known

    def position(self, number: int, batch: int) -> int:
        """Where a batch stands among those of a load."""
        return self.positions[number][batch]

    def smaller(self, number: int, batch: int) -> int:
        """The next batch that is about a tenth smaller; the smallest where there is none."""
        batches = list(self.positions[number])
        return max((each for each in batches if each <= 0.92 * batch), default=batches[0])

    def config(self, columns: Sequence[Column]) -> DeviceConfiguration | None:
        """The columns side by side on a device; None where an SLO or the memory breaks."""
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
        """The columns with groups as they would be best without neighbours, or with none."""
        served = [0.0] * len(self.loads)
        duties, executions, steps = [], [], []
        for size, slots in columns:
            turns: Steps = tuple((at,) for at in range(len(slots)))
            best = None if in_turn else self.groups.arranged(size, slots, [1.0] * len(slots))
            steps.append(best.steps if best else turns)
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
        """Time of a slot or a group beside these columns with their steps, the worst that these can make of it."""
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
        """What a column runs at a time: one of each list, as many of which there are as a step has members."""
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
        """Time of one batch beside these columns, their slots in turn, the worst that one of each can make of it."""
        others = [(column, tuple((at,) for at in range(len(column.slots)))) for column in beside]
        return self._step_ns([(number, batch)], size, others)

    def typical_ns(self, column: Column) -> float:
        """The duty cycle of a column beside typical neighbours."""
        time = self.grids[column.size].time
        return self.duty_ns(column, [float(time[n, self.position(n, batch)]) for n, batch in column.slots])

    def duty_ns(self, column: Column, took: Sequence[float]) -> float:
        """The shortest duty cycle of a column whose slots would take so long in turn; groups are slowed down alike."""
        if self.groups:
            alone = [self.alone[column.size][n, self.position(n, batch)] for n, batch in column.slots]
            factors = [float(ns / own) for ns, own in zip(took, alone, strict=True)]
            found = self.groups.arranged(column.size, column.slots, factors)
            if found is not None:
                return found.duty
        return sum(took)

    def propose(self, size: int, wanted: Floats, prices: Floats, free_bytes: float, most: int) -> Column | None:
        """A column of up to `most` slots that serves much of what is wanted, by typical slowdowns; None for nothing.

        For each duty cycle of a grid the batches that serve the most a unit of time go first, and once more those
        that serve the most: a knapsack filled greedily. The best of all these columns is given.
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
        """The slots of the best of some choices, each a line of positions in (load, batch)."""
        there = chosen >= 0
        at = np.where(there, chosen, 0)
        loads = active[at // rows.shape[1]]
        took = np.where(there, time.reshape(-1)[at], 0.0)
        batch = np.where(there, rows.reshape(-1)[at], 0.0)
        busy = np.maximum(took.sum(axis=1), 1.0)
        holds = (~there | (busy[:, None] + took <= self.slo[loads])).all(axis=1) & there.any(axis=1)
        gained = np.minimum(wanted[loads], batch * NS_PER_S / busy[:, None]) * prices[loads]
        value = np.where(holds, np.where(there, gained, 0.0).sum(axis=1), -1.0)
        line = int((value * (1 - 1e-6 * busy / busy.max())).argmax())  # of equals the shortest
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
        # a round may end up shorter than the duty cycle that it was sought for: what holds is checked in the end
        fits = (time <= shaped) & (2 * time <= self.slo[:, None]) & (0.8 * shaped + time <= self.slo[:, None])
        return Grid(duty, fits, self.rows * NS_PER_S / shaped, time)

    def _typical(self, size: int) -> Floats:
        """Mean slowdown of each load beside single others in the largest partition that may stand beside it."""
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
    """A configuration with a share of what it serves of each load. Spare time goes where slowdowns are borne best.

    With the batches as they are, the duty cycle is stretched until SLOs bear as much as the round does, or until a
    batch holds no more rows. The slots stand in the order of their steps.
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
    """Splits with their largest sizes first, those with a common beginning together."""
    ordered = sorted(dict.fromkeys(tuple(sorted(split, reverse=True)) for split in splits), reverse=True)
    return _nodes([split for split in ordered if split])


def _nodes(splits: Sequence[tuple[int, ...]]) -> tuple[SplitTree, ...]:
    first = dict.fromkeys(split[0] for split in splits)
    return tuple(
        SplitTree(size, _nodes([split[1:] for split in splits if split[0] == size and len(split) > 1]))
        for size in first
    )
