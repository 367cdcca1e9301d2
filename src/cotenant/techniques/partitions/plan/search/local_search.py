"""Anytime local search (large neighbourhood search) for a plan on given devices.

With `m_i` the unserved rate of load i, `w_i` its weight and `l_i` a bonus for serving a load completely, minimise

    cost = sum of m_i * w_i + l_i over the loads with m_i > 0

1. Remove some columns, or whole devices, and fill the space again, greedily by value under perturbed weights.
2. Accept the new state if its cost is no higher. If little is missing, try other batches and one more slot in columns.
3. Raise the weights of the loads that stay unserved (breakout), and repeat.

The bonus is needed because a small remainder of a load takes a slot, another copy of the model and often a partition.
Columns come from a pool if there is one (`opt_pool`). Beside each other, batches are chosen again for the exact
slowdowns. Deterministic: the budget counts configurations, not seconds, and random choices are seeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cotenant.techniques.partitions.plan.search.columns import (
    Column,
    ColumnGenerator,
    DeviceConfiguration,
    Floats,
    SplitTree,
)
from cotenant.techniques.partitions.plan.search.opt_pool import PricedColumns, rebatched
from cotenant.techniques.partitions.plan.types import NS_PER_S

SERVED = 1e-10
"""Relative tolerance of an unserved rate."""
_LEAVES = 2
"""Splits per device for which columns are evaluated beside each other."""
_PASSES = 3
"""Most rounds of choosing batches again beside each other."""
_GROWTH = 1.005
_NOISE = 0.15
"""Standard deviation of the logarithm of perturbed weights."""
_LAST = 0.4
"""Bonus for serving a load completely, as a share of the value of all its rows..."""
_MOST_LAST = 0.3
"""...but at most this share of a device's value: a load that fills devices has one remainder as well."""
_SWAPS = 0.5
"""Share of the moves that replace single columns instead of whole devices."""
_CLOSE = 0.05
"""Share of the total value, up to which a missing rest starts the search over single slots."""
_COLUMNS, _DEVICES = (1, 2, 3, 4), (1, 2)
"""Numbers of columns, and of devices, that one move replaces."""
_MARGIN = 1e-7


class SearchBudget:
    """Remaining number of configurations to evaluate, shared by all searches of one plan."""

    __slots__ = ("left",)

    def __init__(self, configs: int) -> None:
        self.left = configs


class Search:
    """Local search over devices of the given types, each with a configuration or none.

    `rates`: demand in rows/s by load; `row_values`: value of a row/s of each load, as a share of a device.
    """

    def __init__(
        self,
        generators: Mapping[str, ColumnGenerator],
        kinds: Sequence[str],
        rates: Floats,
        row_values: Floats,
        budget: SearchBudget,
        *,
        most_slots: int,
        seed: int = 0,
        priced: PricedColumns | None = None,
    ) -> None:
        self.generators = generators
        self.kinds = tuple(kinds)
        self.rates = rates
        self.row_values = row_values
        self.budget = budget
        self.most_slots = most_slots
        self.random = np.random.default_rng(seed)
        self.is_restart = seed != 0
        self.configs: list[DeviceConfiguration | None] = [None] * len(kinds)
        is_priced = priced is not None and priced.least > 0  # else row values are shares of a device
        device = min(generator.kind.price for generator in generators.values()) if is_priced else 1.0
        self.remainder = _LAST * np.minimum(rates, _MOST_LAST * device / row_values)
        self.pools = {} if priced is None else priced.pools
        self.memory = {} if priced is None else priced.memory

    def served(self, configs: Sequence[DeviceConfiguration | None]) -> Floats:
        """Rates that these serve, in rows/s by load."""
        total = np.zeros(len(self.rates))
        for config in configs:
            if config is not None:
                total += config.served
        return total

    def missing(self, configs: Sequence[DeviceConfiguration | None]) -> Floats:
        """Unserved rates in rows/s by load, 0 within the tolerance."""
        rest: Floats = self.rates - self.served(configs)
        return np.where(rest > self.rates * SERVED, rest, 0.0)

    def run(self, start: Sequence[DeviceConfiguration | None]) -> bool:
        """Search from a start until all demand is served; whether it is. `configs` has the best state."""
        now = list(start)
        weights = self.row_values.copy()
        lost = self.missing(now)
        best = float(lost @ self.row_values)
        self.configs = list(now)
        is_first = True
        while best > 0 and self.budget.left > 0:
            empty = [number for number, config in enumerate(now) if config is None]
            if not is_first and self.pools and self.random.random() < _SWAPS:
                then = self._swapped(now, weights)
            else:
                chosen = empty if is_first and empty else self._refilled(len(now))
                then = [None if number in chosen else config for number, config in enumerate(now)]
                is_noisy = self.is_restart or not empty
                spread = np.exp(_NOISE * self.random.standard_normal(len(weights))) if is_noisy else 1.0
                for number in chosen:
                    then[number] = self.fill(self.kinds[number], self.missing(then), weights * spread)
                    if self.budget.left <= 0:
                        break
            is_first = False
            lost_then = self.missing(then)
            if self._cost(lost_then, weights) <= self._cost(lost, weights) * 1.0001:
                now, lost = then, lost_then
                total = float(lost @ self.row_values)
                if total < best:
                    if self.pools and total < _CLOSE * float(self.rates @ self.row_values):
                        now = self._closed(now, weights)
                        lost = self.missing(now)
                        total = float(lost @ self.row_values)
                    best, self.configs = total, list(now)
            weights = np.where(lost > 0, weights * _GROWTH, weights)
            if weights.max() > 1e3 * self.row_values.max():
                weights = np.sqrt(weights * self.row_values)
        return best <= 0

    def _last(self, wanted: Floats, prices: Floats) -> Floats:
        """Bonus for serving the whole wanted rate, by load."""
        return np.where(wanted > 0, prices * self.remainder, 0.0)

    def _value(self, config: DeviceConfiguration, wanted: Floats, prices: Floats) -> float:
        served = np.array(config.served)
        last = self._last(wanted, prices)
        return float(np.minimum(wanted, served) @ prices + last[served >= wanted].sum())

    def _cost(self, lost: Floats, weights: Floats) -> float:
        """Cost of the unserved rates."""
        return float(lost @ weights + self._last(lost, weights).sum())

    def _swapped(self, now: Sequence[DeviceConfiguration | None], weights: Floats) -> list[DeviceConfiguration | None]:
        """The state with some columns of any devices replaced."""
        then = list(now)
        places = [(d, c) for d, config in enumerate(now) if config is not None for c in range(len(config.columns))]
        if not places:
            return then
        self.budget.left -= 1
        count = min(len(places), int(self.random.choice(_COLUMNS)))
        chosen = self._related(now, [places[at] for at in self.random.permutation(len(places)).tolist()])[:count]
        made: dict[int, list[Column | None]] = {}
        wanted = self.rates - self.served(now)
        for device, index in chosen:
            config = now[device]
            assert config is not None
            made.setdefault(device, list(config.columns))[index] = None
            for number, batch in config.columns[index].slots:
                wanted[number] += batch * NS_PER_S / config.duty_ns[index]
        wanted = np.where(wanted > self.rates * SERVED, wanted, 0.0)
        spread = np.exp(_NOISE * self.random.standard_normal(len(weights)))
        for device, index in chosen:
            old = now[device]
            assert old is not None
            generator, size = self.generators[self.kinds[device]], old.columns[index].size
            own = [column for column in made[device] if column is not None]
            taken = sum(float(generator.memory[number]) for column in own for number, _ in column.slots)
            free = generator.kind.memory_bytes - taken - generator.kind.partition_bytes * len(old.columns)
            column = self._column(generator, size, wanted, weights * spread, free)
            if column is None:
                continue
            made[device][index] = column
            duty = generator.typical_ns(column)
            for number, batch in column.slots:
                wanted[number] = max(0.0, wanted[number] - batch * NS_PER_S / duty)
        for device in made:
            then[device] = None
        for device, columns in made.items():
            kept = [column for column in columns if column is not None]
            found = self._held(self.generators[self.kinds[device]], kept, self.missing(then), weights) if kept else None
            then[device] = None if found is None else found[1]
        return then

    def _related(
        self, now: Sequence[DeviceConfiguration | None], places: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The places of columns; at random, those first that share loads with the first one or with unserved loads."""
        if self.random.random() < 0.5:
            return places
        slots = [[] if (f := now[device]) is None else f.columns[index].slots for device, index in places]
        near = self.missing(now) > 0
        near[[number for number, _ in slots[0]]] = True
        far = [not any(near[number] for number, _ in own) for own in slots]
        return [places[at] for at in sorted(range(len(places)), key=lambda at: (at > 0, far[at]))]

    def _closed(self, now: Sequence[DeviceConfiguration | None], weights: Floats) -> list[DeviceConfiguration | None]:
        """The state with better batches, and added slots for unserved loads, as long as the unserved value falls."""
        best = list(now)
        lost = float(self.missing(best) @ weights)
        is_better = True
        while is_better and lost > 0 and self.budget.left > 0:
            is_better = False
            for device, config in enumerate(best):
                if config is None:
                    continue
                self.budget.left -= 1
                generator = self.generators[self.kinds[device]]
                rest: list[DeviceConfiguration | None] = [*best[:device], None, *best[device + 1 :]]
                wanted = self.missing(rest)
                before = float(wanted @ weights)
                for columns in self._variants(generator, config, self.missing(best), wanted, weights):
                    other = generator.config(columns)
                    if other is not None:
                        left = before - float(np.minimum(wanted, other.served) @ weights)
                        if left < lost * (1 - 1e-6):
                            best[device], lost, is_better = other, float(self.missing([*rest, other]) @ weights), True
        return best

    def _variants(
        self, generator: ColumnGenerator, config: DeviceConfiguration, lost: Floats, wanted: Floats, weights: Floats
    ) -> list[list[Column]]:
        """The columns with better batches, and with an unserved load added to one of them, in all ways."""
        columns = list(config.columns)
        found = [self._rebatched(generator, columns, wanted, weights, config.execution_ns)]
        for number in np.flatnonzero(lost).tolist():
            for index, column in enumerate(columns):
                if len(column.slots) < self.most_slots and all(number != other for other, _ in column.slots):
                    first = int(generator.rows[number, 0])
                    slots = tuple(sorted((*column.slots, (number, first))))
                    extended = [*columns[:index], Column(column.size, slots), *columns[index + 1 :]]
                    found.append(self._rebatched(generator, extended, wanted, weights, only=index))
        return found

    def _refilled(self, devices: int) -> list[int]:
        """Devices to fill again, in this order."""
        count = min(devices, int(self.random.choice(_DEVICES)))
        return [int(number) for number in self.random.permutation(devices)[:count]]

    def fill(self, kind: str, wanted: Floats, prices: Floats) -> DeviceConfiguration | None:
        """A configuration of high value for the wanted rates; None if nothing can be served."""
        self.budget.left -= 1
        generator = self.generators[kind]
        leaves: list[tuple[float, list[Column]]] = []
        self._extend(generator, generator.tree, [], 0.0, wanted, prices, float(generator.kind.memory_bytes), leaves)
        leaves.sort(key=lambda leaf: (-leaf[0], leaf[1]))
        best: tuple[float, DeviceConfiguration] | None = None
        for _, columns in leaves[:_LEAVES]:
            found = self._held(generator, columns, wanted, prices)
            if found is not None and (best is None or found[0] > best[0]):
                best = found
        if best is None:
            return None
        return best[1]

    def _extend(
        self,
        generator: ColumnGenerator,
        nodes: Sequence[SplitTree],
        columns: list[Column],
        value: float,
        wanted: Floats,
        prices: Floats,
        free_bytes: float,
        leaves: list[tuple[float, list[Column]]],
    ) -> None:
        """Add greedy columns for every split, the largest partition first, each for the rates still unserved."""
        for node in nodes:
            free = free_bytes - generator.kind.partition_bytes
            column = self._column(generator, node.size, wanted, prices, free)
            if column is None:
                continue
            left, gained, last = wanted.copy(), value, self._last(wanted, prices)
            duty = generator.typical_ns(column)
            for number, batch in column.slots:
                part = min(left[number], batch * NS_PER_S / duty)
                left[number] -= part
                gained += part * prices[number]
                if left[number] <= 0:
                    gained += float(last[number])
                free -= float(generator.memory[number])
            extended = [*columns, column]
            leaves.append((gained, extended))
            self._extend(generator, node.children, extended, gained, left, prices, free, leaves)

    def _column(
        self, generator: ColumnGenerator, size: int, wanted: Floats, prices: Floats, free_bytes: float
    ) -> Column | None:
        pool = self.pools.get(generator.kind.name)
        if pool is None:
            return generator.propose(size, wanted, prices, free_bytes, self.most_slots)
        lines = pool.lines[size]
        if not len(lines.memory):
            return None
        last = self._last(wanted, prices)
        values = pool.values(size, wanted, prices, last)
        price = self.memory.get(generator.kind.name, 0.0)
        free = free_bytes + generator.kind.partition_bytes  # the memory of lines includes it
        net = np.where((values > 0) & (lines.memory <= free), values - price * lines.memory, -np.inf)
        line = int(net.argmax())
        if net[line] == -np.inf:
            return None
        column = pool.column(size, line)
        free -= float(lines.memory[line])
        while len(column.slots) < self.most_slots:
            extended = pool.extended(column, wanted, prices, free, price, last)
            if extended is column or not generator.groups:  # a third slot is enough where slots run in turn
                return extended
            column, free = extended, free - float(generator.memory[extended.slots[-1][0]])
        return column

    def _held(
        self, generator: ColumnGenerator, columns: Sequence[Column], wanted: Floats, prices: Floats
    ) -> tuple[float, DeviceConfiguration] | None:
        """The best configuration of these columns and its value, with batches chosen for the exact slowdowns."""
        best: tuple[float, DeviceConfiguration] | None = None
        for _ in range(_PASSES):
            config = generator.config(columns)
            if config is not None:
                value = self._value(config, wanted, prices)
                if best is not None and value <= best[0] * (1 + 1e-9):
                    break
                best = value, config
            took = None if config is None else config.execution_ns
            changed = self._rebatched(generator, columns, wanted, prices, took)
            if changed == columns:
                break
            columns = changed
        return best

    def _rebatched(
        self,
        generator: ColumnGenerator,
        columns: Sequence[Column],
        wanted: Floats,
        prices: Floats,
        took: Sequence[Sequence[int]] | None = None,
        only: int = -1,
    ) -> list[Column]:
        """The columns with the best batches for the rates that the other columns leave.

        `took`: executions in ns without groups, if known; `only`: index of the one column to change, -1 for all.
        """
        made = list(columns)
        if took is None or generator.groups:
            took = [
                [generator.execution_ns(*slot, column.size, made[:at] + made[at + 1 :]) for slot in column.slots]
                for at, column in enumerate(made)
            ]
        left = wanted.copy()
        duties = [generator.duty_ns(column, own) for column, own in zip(made, took, strict=True)]
        for column, duty in zip(made, duties, strict=True):
            for number, batch in column.slots:
                left[number] -= batch * NS_PER_S / duty
        for index, column in enumerate(made):
            if only not in (-1, index):
                continue
            factors = []
            for (number, batch), ns in zip(column.slots, took[index], strict=True):
                alone = generator.alone[column.size][number, generator.position(number, batch)]
                factors.append(float(ns / alone) * (1 + _MARGIN))
                left[number] += batch * NS_PER_S / duties[index]
            rest = np.maximum(left, 0.0)
            found = rebatched(generator, column, factors, rest, prices, self._last(rest, prices))
            if found is None:
                slots = tuple((number, generator.smaller(number, batch)) for number, batch in column.slots)
                made[index] = Column(column.size, slots)
            else:
                made[index] = found[1]
            own_ns = [
                generator.alone[column.size][number, generator.position(number, batch)] * factor
                for (number, batch), factor in zip(made[index].slots, factors, strict=True)
            ]
            duty = generator.duty_ns(made[index], own_ns)
            for number, batch in made[index].slots:
                left[number] -= batch * NS_PER_S / duty
        return made


def kept(
    kinds: Sequence[str],
    names: Sequence[str],
    configs: Sequence[DeviceConfiguration],
    rates: Floats,
    row_values: Floats,
) -> list[DeviceConfiguration | None]:
    """The configurations (of devices of types `names`) of highest value, assigned to devices of types `kinds`."""
    order = sorted(range(len(names)), key=lambda n: -float(np.minimum(configs[n].served, rates) @ row_values))
    start: list[DeviceConfiguration | None] = [None] * len(kinds)
    for number in order:
        for place, name in enumerate(kinds):
            if start[place] is None and name == names[number]:
                start[place] = configs[number]
                break
    return start
