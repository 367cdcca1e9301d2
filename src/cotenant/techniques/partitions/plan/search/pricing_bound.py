"""What a partition can be worth at most, at given prices of rows: a proof for `opt_bound`.

A column has a duty cycle D: its executions fit into D, each batch has D and its execution within the SLO, and serves
batch / D. Whatever the column, D lies in one of some intervals [low, high] that cover all duty cycles there can be.
There it is worth no more than the best choice of one batch of each load (or none) with

- executions that together take `high` at most, each cut down to whole cells, a fixed part of `high`,
- `low` and each execution within the SLO,
- min(rate wanted, batch / low) served, as a load that is served more than is wanted counts for no more,

because every one of these conditions is weaker, and every value larger, than the column's own. That choice is a
knapsack, solved exactly by dynamic programming, for any number of slots. An interval whose worth is above what is known
to be reached is searched again with executions as they are, depth first: what the cells say of the loads that are still
to be chosen from bounds what may come of a beginning. What is above even then is halved, until nothing is or the work
is done: the result is an upper bound throughout.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cotenant.techniques.partitions.plan.search.columns import ColumnGenerator, Floats
from cotenant.techniques.partitions.plan.types import NS_PER_S

Slots = tuple[tuple[int, int], ...]
"""Loads by their numbers, and their batches."""
_RATIO = 1.1
"""Between the ends of an interval to begin with."""
_MOST_OPEN = 64
"""Intervals that are halved at a time at most; with more of them the work is done."""
_CLOSE = 0.002
"""What an interval may be worth more than is reached, without being halved."""
_CELLS, _MOST_CELLS = 48, 108
_FINEST = 8
"""How often an interval is halved at most, the cells growing by half each time."""
_MOST_NODES = 3000
"""Beginnings that are looked at in one interval; with more of them what the cells say has to do."""


def pricing_bound(
    generator: ColumnGenerator, size: int, rates: Floats, prices: Floats, memory_price: float, reached: float
) -> tuple[float, Slots]:
    """An upper bound, 0 or more, of what one column of `size` is worth after its models' memory at `memory_price`.

    `rates` are those wanted, in rows/s; `prices` those of a row/s of each load; `reached` what some column is known to
    be worth, below which nothing is refined. A column has at most one slot of each load. Interference is left out.
    Also gives a choice, loads and batches, that is worth about that much, or nothing; it need not hold.
    """
    time = generator.alone[size]
    able = 2 * time <= generator.slo[:, None]
    if not able.any():
        return 0.0, ()
    first = float(time[able].min())
    last = float((generator.slo[:, None] - time)[able].max())
    count = int(np.ceil(np.log(max(last / first, 1.0)) / np.log(_RATIO))) + 1
    edges: Floats = first * (1 - 1e-9) * np.power(_RATIO, np.arange(count + 1.0))
    low, high = edges[:-1], edges[1:]
    sharing = Counter(load.model for load in generator.loads)  # a partition holds a model once, whoever asks for it
    paid = memory_price * generator.memory / np.array([sharing[load.model] for load in generator.loads])
    least, cells = reached * (1 + _CLOSE), _CELLS
    best = 0.0
    slots: Slots = ()
    for refinement in range(_FINEST + 1):
        tables = _knapsack(generator, time, able, low, high, rates, prices, paid, cells)
        values = tables[-1][:, -1].copy()
        found: dict[int, Slots] = {}
        if refinement:
            for line in np.flatnonzero(values > max(least, best)).tolist():
                ends = float(low[line]), float(high[line])
                own = [table[line] for table in tables]
                values[line], found[line] = _searched(
                    generator, time, able, *ends, rates, prices, paid, own, max(least, best)
                )
        open_ = values > max(least, best)
        is_last = refinement == _FINEST or np.count_nonzero(open_) > _MOST_OPEN
        shut = np.ones_like(open_) if is_last else ~open_
        if values[shut].max(initial=0.0) > best:
            line = int(np.where(shut, values, -1.0).argmax())
            best, slots = float(values[line]), found.get(line, ())
        if shut.all():
            break
        if open_.any():
            line = int(np.where(open_, values, -1.0).argmax())
            slots = found.get(line, slots)
        low, high = low[open_], high[open_]
        middle: Floats = np.sqrt(low * high)
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
        cells = min(cells * 3 // 2, _MOST_CELLS)
    return best, slots


def _searched(
    generator: ColumnGenerator,
    time: Floats,
    able: NDArray[np.bool_],
    low: float,
    high: float,
    rates: Floats,
    prices: Floats,
    paid: Floats,
    tables: list[Floats],
    least: float,
) -> tuple[float, Slots]:
    """The worth of the best choice in an interval with executions as they are, and the choice.

    `tables` are those of `_knapsack`. Where nothing is worth more than `least`, that is given.
    """
    cells = len(tables[0]) - 1
    options: list[list[tuple[float, float, int]]] = []
    for number in range(len(rates)):
        ns = time[number]
        values = prices[number] * np.minimum(rates[number], generator.rows[number] * NS_PER_S / low) - paid[number]
        fits = able[number] & (ns <= high) & (low + ns <= generator.slo[number]) & (values > 0)
        own: list[tuple[float, float, int]] = []
        each = zip(
            ns[fits].tolist(), values[fits].tolist(), generator.rows[number][fits].astype(int).tolist(), strict=True
        )
        for took, gain, rows in sorted(each):
            if not own or gain > own[-1][1]:
                own.append((took, gain, rows))
        options.append(own[::-1])
    best, nodes = least, 0
    chosen: Slots = ()
    stack: list[tuple[int, float, float, Slots]] = [(len(rates), high * (1 + 1e-12), 0.0, ())]
    scale = cells / high * (1 + 1e-12)
    while stack:
        number, left, value, slots = stack.pop()
        nodes += 1
        if nodes > _MOST_NODES:
            return float(tables[-1][-1]), slots
        if value > best:
            best, chosen = value, slots
        while number:
            number -= 1
            for took, gain, rows in options[number]:
                rest = left - took
                if rest >= 0 and value + gain + tables[number][min(cells, int(rest * scale))] > best * (1 + 1e-12):
                    stack.append((number, rest, value + gain, ((number, rows), *slots)))
            if value + tables[number][min(cells, int(left * scale))] <= best:
                break
    return best, chosen


def _cells(time: Any, high: Any, cells: int) -> NDArray[np.int64]:
    """Whole cells of an execution, never more than it takes."""
    found: NDArray[np.int64] = np.minimum(cells + 1.0, time / high * cells * (1 - 1e-12)).astype(np.int64)
    return found


def _knapsack(
    generator: ColumnGenerator,
    time: Floats,
    able: NDArray[np.bool_],
    low: Floats,
    high: Floats,
    rates: Floats,
    prices: Floats,
    paid: Floats,
    cells: int,
) -> list[Floats]:
    """By the number of loads that may be chosen from: the worth of the best choice by interval and cells."""
    lines = np.arange(len(low))
    table = np.zeros((len(low), cells + 1))  # what so many cells are worth at most; to the left of a start nothing is
    tables = [table]
    places = np.arange(cells + 1)
    for number in range(len(rates)):
        best = table
        batches = generator.rows[number]
        enough = float((rates[number] * high).max()) / NS_PER_S
        quickest = np.inf  # of the batches that serve all there is to serve, whatever the duty cycle
        for at in np.flatnonzero(able[number]).tolist():
            ns = time[number, at]
            if ns >= quickest:
                continue
            if batches[at] >= enough:
                quickest = ns
            fits = (ns <= high) & (low + ns <= generator.slo[number])
            values = prices[number] * np.minimum(rates[number], batches[at] * NS_PER_S / low) - paid[number]
            fits &= values > 0
            chosen = lines[fits]
            if not len(chosen):
                continue
            shift = _cells(ns, high[chosen], cells)
            before = places[None, :] - shift[:, None]
            moved = np.where(before >= 0, np.take_along_axis(table[chosen], np.maximum(before, 0), axis=1), -np.inf)
            if best is table:
                best = table.copy()
            best[chosen] = np.maximum(best[chosen], moved + values[chosen, None])
        table = best
        tables.append(table)
    return tables
