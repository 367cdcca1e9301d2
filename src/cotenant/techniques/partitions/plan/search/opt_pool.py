"""Pool of columns of one and two loads, as arrays, from which the best column of a partition is chosen.

Of the batches of a pair of loads, only those undominated in both rates (up to the demand) are kept. `extended` adds
further loads to a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cotenant.techniques.partitions.plan.search.columns import Column, ColumnGenerator, Floats
from cotenant.techniques.partitions.plan.types import NS_PER_S

Ints = NDArray[np.int64]
MOST_WORK = 30_000_000
"""Most pairs of batches that are evaluated for one device type; about two seconds."""
_MOST_SLOTS = 3
_SHAPES = (((-1,),), ((-1, 1), (1, -1)), ((-1, 1, 1), (1, -1, 1), (1, 1, -1)))


class Lines(NamedTuple):
    """Columns of one size, a line each: two loads (a single load twice, with batch 0), batches, rates and memory."""

    loads: Ints
    batches: Ints
    rates: Floats
    memory: Floats


class Pool:
    """The columns of one device type, beside typical neighbours, or without neighbours if `alone`."""

    def __init__(self, generator: ColumnGenerator, rates: Floats, *, alone: bool = False) -> None:
        self.generator = generator
        self.lines: dict[int, Lines] = {}
        self.time: dict[int, Floats] = {}
        for size in generator.kind.sizes:
            time = generator.alone[size]
            if not alone and size != generator.kind.whole:
                time = time * generator.typical[size][:, None]
            self.time[size] = time
            self.lines[size] = _lines(generator, size, time, rates)

    def values(self, size: int, wanted: Floats, prices: Floats, last: Floats | None = None) -> Floats:
        """Value of each line of a size for the wanted rates, at these prices of a row/s.

        `last`: bonus for each load that is served completely.
        """
        lines = self.lines[size]
        needs = wanted[lines.loads]
        value = np.minimum(needs, lines.rates) * prices[lines.loads]
        if last is not None:
            value += np.where(lines.rates >= needs, last[lines.loads], 0.0)
        found: Floats = value[0] + value[1]
        return found

    def extended(
        self,
        column: Column,
        wanted: Floats,
        prices: Floats,
        free_bytes: float,
        memory_price: float,
        last: Floats | None = None,
    ) -> Column:
        """The column with one more slot, of the load and batch that add the most value; unchanged if none does."""
        generator, size = self.generator, column.size
        last = np.zeros(len(wanted)) if last is None else last
        time = self.time[size]
        numbers = [number for number, _ in column.slots]
        took = [time[number, generator.position(number, batch)] for number, batch in column.slots]
        busy = generator.duty_ns(column, took)
        if generator.groups:
            duty = self._extended_duties(column)
            holds = np.isfinite(duty)
        else:
            slack = min(generator.slo[number] - ns for number, ns in zip(numbers, took, strict=True))
            duty = busy + time
            holds = (duty <= slack) & (duty + time <= generator.slo[:, None])
        holds &= ((wanted > 0) & (generator.memory <= free_bytes))[:, None]
        holds[numbers] = False
        if not holds.any():
            return column
        rounds = NS_PER_S / duty
        value = _value(generator.rows * rounds, wanted[:, None], prices[:, None], last[:, None])
        value -= (memory_price * generator.memory)[:, None]
        before = 0.0
        for number, batch in column.slots:
            own = wanted[number], prices[number], last[number]
            value += _value(batch * rounds, *own)
            before += float(_value(batch * NS_PER_S / busy, *own))
        value = np.where(holds, value, -np.inf)
        at = int(value.argmax())
        number, place = divmod(at, value.shape[1])
        if value[number, place] <= before * (1 + 1e-9):
            return column
        return Column(size, (*column.slots, (number, int(generator.rows[number, place]))))

    def served(self, column: Column) -> dict[int, float]:
        """Served rates of a column's loads, in rows/s."""
        time = self.time[column.size]
        took = [float(time[number, self.generator.position(number, batch)]) for number, batch in column.slots]
        duty = self.generator.duty_ns(column, took)
        return {number: batch * NS_PER_S / duty for number, batch in column.slots}

    def memory_bytes(self, column: Column) -> int:
        """Memory of a column's models and its partition."""
        costs, models = self.generator.cache.costs, (self.generator.loads[number].model for number, _ in column.slots)
        return sum(map(costs.memory_bytes, dict.fromkeys(models))) + self.generator.kind.partition_bytes

    def rebatched(self, column: Column, wanted: Floats, prices: Floats) -> Column | None:
        """The column with the batches of highest value; None if none are feasible, or too many would be tried."""
        alone, time = self.generator.alone[column.size], self.time[column.size]
        numbers = [number for number, _ in column.slots]
        factors = [float(time[number, 0] / alone[number, 0]) for number in numbers]
        found = rebatched(self.generator, column, factors, wanted, prices)
        return None if found is None else found[1]

    def _extended_duties(self, column: Column) -> Floats:
        """Duty cycles of the column with one more slot, by its load and batch; infinite if infeasible."""
        generator, numbers = self.generator, [number for number, _ in column.slots]
        slowed = self.time[column.size][:, 0] / generator.alone[column.size][:, 0]
        duty = np.full(generator.rows.shape, np.inf)
        for number in range(len(generator.loads)):
            if number not in numbers:
                factors = slowed[[*numbers, number]].tolist()
                duty[number] = generator.groups.extended_duties(column.size, column.slots, number, factors)
        return duty

    def column(self, size: int, line: int) -> Column:
        """A line as a column."""
        lines = self.lines[size]
        (first, second), (batch, other) = lines.loads[:, line].tolist(), lines.batches[:, line].tolist()
        return Column(size, ((first, batch), (second, other)) if other else ((first, batch),))


class PricedColumns(NamedTuple):
    """Pools by device type, with prices of a row/s of each load and of a byte of each type's memory.

    `least`: optimum of the relaxation over these columns, 0 if unknown. Plans of whole devices are seldom cheaper.
    """

    pools: dict[str, Pool]
    rows: Floats
    memory: dict[str, float]
    least: float = 0.0


def is_affordable(generator: ColumnGenerator) -> bool:
    """Whether evaluating all pairs of batches is affordable."""
    loads, batches = generator.rows.shape
    return loads * loads // 2 * batches * batches * len(generator.kind.sizes) <= MOST_WORK


def rebatched(
    generator: ColumnGenerator,
    column: Column,
    factors: Sequence[float],
    wanted: Floats,
    prices: Floats,
    last: Floats | None = None,
) -> tuple[float, Column] | None:
    """The batches of highest value for a column's loads under slowdowns `factors`, with the value; None if infeasible.

    `last`: bonus for each load that is served completely. All combinations of up to three loads are tried, with groups
    up to `_MOST_CHOICES` combinations; None if there are more.
    """
    numbers = [number for number, _ in column.slots]
    count = len(numbers)
    if generator.groups:
        found = generator.groups.choices(column.size, numbers, factors)
        if found is None:
            return None
        batches, duty = found
        is_late = np.isinf(duty)
    elif not 1 <= count <= _MOST_SLOTS:
        return None
    else:
        batches, times = [], []
        for axis, (number, factor) in enumerate(zip(numbers, factors, strict=True)):
            time, rows = generator.able(column.size, number)
            shape = _SHAPES[count - 1][axis]
            times.append((time * factor).reshape(shape))
            batches.append(rows.reshape(shape))
        duty = sum(times[1:], times[0])
        is_late = np.zeros(duty.shape, dtype=np.bool_)
        for number, time in zip(numbers, times, strict=True):
            is_late |= duty > generator.slo[number] - time
    if not duty.size:
        return None
    rounds = NS_PER_S / duty
    value = np.zeros(duty.shape)
    for number, batch in zip(numbers, batches, strict=True):
        value += _value(batch * rounds, wanted[number], prices[number], 0.0 if last is None else last[number])
    value[is_late] = -1.0
    at = int(value.argmax())
    if value.flat[at] < 0:
        return None
    places = np.unravel_index(at, value.shape)
    slots = tuple((n, int(batch.flat[place])) for n, batch, place in zip(numbers, batches, places, strict=True))
    return float(value.flat[at]), Column(column.size, slots)


def _value(rate: Any, wanted: Any, price: Any, last: Any) -> Any:
    """Value of rates, up to the wanted ones, at a price of a row/s; plus `last` if the wanted rate is reached."""
    return np.minimum(wanted, rate) * price + last * (rate >= wanted)


def _lines(generator: ColumnGenerator, size: int, time: Floats, rates: Floats) -> Lines:
    rows, slo = generator.rows, generator.slo
    able = 2 * time <= slo[:, None]
    numbers = np.flatnonzero(able.any(axis=1))
    alone = np.where(able, rows * NS_PER_S / time, 0.0)
    best = alone.argmax(axis=1)
    parts: list[list[NDArray[np.float64]]] = []
    if len(numbers):
        own = numbers.astype(np.float64)
        zero = np.zeros(len(own))
        parts.append([own, own, rows[numbers, best[numbers]], zero, alone[numbers, best[numbers]], zero])
    for place, first in enumerate(numbers.tolist()):
        partners = numbers[place + 1 :]
        batches = np.flatnonzero(able[first])
        mine = time[first, batches][None, :, None]
        theirs = time[partners][:, None, :]
        duty = mine + theirs
        holds = (duty + mine <= slo[first]) & (duty + theirs <= slo[partners][:, None, None])
        if generator.groups:
            _grouped(generator, size, time, first, partners, batches, duty, holds)
        partner, one, other = np.nonzero(holds)
        if not len(partner):
            continue
        took = duty[partner, one, other]
        second = partners[partner]
        parts.append(
            [
                np.full(len(partner), float(first)),
                second.astype(np.float64),
                rows[first, batches[one]],
                rows[second, other],
                rows[first, batches[one]] * NS_PER_S / took,
                rows[second, other] * NS_PER_S / took,
            ]
        )
    if not parts:
        return Lines(np.zeros((2, 0), np.int64), np.zeros((2, 0), np.int64), np.zeros((2, 0)), np.zeros(0))
    first_, second_, batch, other_batch, rate, other_rate = (np.concatenate(each) for each in zip(*parts, strict=True))
    at = _undominated(
        first_ * len(rows) + second_, rate / rates[first_.astype(int)], other_rate / rates[second_.astype(int)]
    )
    loads = np.stack([first_, second_]).astype(np.int64)[:, at]
    made = np.stack([batch, other_batch]).astype(np.int64)[:, at]
    models = np.unique([load.model for load in generator.loads], return_inverse=True)[1]
    is_one = models[loads[0]] == models[loads[1]]  # a partition holds a model once
    memory = generator.memory[loads[0]] + np.where(is_one, 0.0, generator.memory[loads[1]])
    return Lines(loads, made, np.stack([rate, other_rate])[:, at], memory + generator.kind.partition_bytes)


def _grouped(
    generator: ColumnGenerator,
    size: int,
    time: Floats,
    first: int,
    partners: Ints,
    batches: Ints,
    duty: Floats,
    holds: NDArray[np.bool_],
) -> None:
    """Update `duty` and `holds` for groups of a load with its partners that are feasible and faster than in turn."""
    slowed = time[:, 0] / generator.alone[size][:, 0]
    for place, second in enumerate(partners.tolist()):
        known = generator.groups.times(size, (first, second))
        if known is None:
            continue
        took = known[batches] * max(slowed[first], slowed[second])
        width = took.shape[1]
        own, is_held = duty[place, :, :width], holds[place, :, :width]
        is_better = (2 * took <= min(generator.slo[first], generator.slo[second])) & ((took < own) | ~is_held)
        own[is_better] = took[is_better]
        is_held[is_better] = True


def _undominated(pair: Floats, share: Floats, other: Floats) -> Ints:
    """Of each pair of loads the lines that no other line dominates in both shares of the rates, each up to 1."""
    share, other = np.minimum(share, 1.0), np.minimum(other, 1.0)
    order = np.lexsort((-other, -share, pair))
    key = 2 * np.unique(pair, return_inverse=True)[1][order] + other[order]
    before = np.concatenate(([-1.0], np.maximum.accumulate(key)[:-1]))
    found: Ints = np.sort(order[key > before + 1e-9])
    return found
