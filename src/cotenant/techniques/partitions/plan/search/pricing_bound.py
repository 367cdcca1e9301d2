"""Pricing bound: an upper bound of the value of one column at given prices, for `opt_bound`.

A column of duty cycle D has executions of D in all, `D + L_i(b_i) <= SLO_i`, and serves load i at `b_i / D`. Intervals
[low, high] cover all possible D. Within one, a column's value is at most that of the knapsack over one batch a load:

- maximise `sum_i p_i * min(r_i, b_i / low) - price of memory`
- subject to `sum_i floor(L_i(b_i) / cell) * cell <= high` and `low + L_i(b_i) <= SLO_i`

Each constraint is weaker, and each value larger, than the column's own. `cell` is a fixed part of `high`.

1. Solve the knapsack of every interval by dynamic programming, for any number of slots.
2. Search intervals above the known reached value again by branch and bound (depth first) with exact executions. The
   tables of step 1 bound the value of the loads still to be chosen.
3. Halve the intervals that are still above, with more cells. Repeat until none is or the work limit is reached. The
   result is an upper bound at any time.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cotenant.techniques.partitions.plan.search.columns import ColumnGenerator, Floats
from cotenant.techniques.partitions.plan.types import NS_PER_S

Slots = tuple[tuple[int, int], ...]
"""Numbers of loads, and their batches."""
_RATIO = 1.1
"""Ratio of the ends of the first intervals."""
_MOST_OPEN = 64
"""Most intervals that are halved at a time; with more, the search stops."""
_CLOSE = 0.002
"""Relative excess over the reached value up to which an interval is not halved."""
_CELLS, _MOST_CELLS = 48, 108
"""Cells of an interval: at first, and at most."""
_FINEST = 8
"""Most halvings of an interval; each has half as many cells again."""
_MOST_NODES = 3000
"""Most nodes of branch and bound in one interval; with more, the knapsack's value stands."""


def pricing_bound(
    generator: ColumnGenerator, size: int, rates: Floats, prices: Floats, memory_price: float, reached: float
) -> tuple[float, Slots]:
    """Upper bound (>= 0) of the value of one column of `size`, less its models' memory at `memory_price`.

    `rates`: demand in rows/s; `prices`: of a row/s of each load; `reached`: value of a known column, below which
    nothing is refined. A column has at most one slot of each load; interference is left out. Also returns loads and
    batches of about that value, possibly infeasible or empty.
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
    sharing = Counter(load.model for load in generator.loads)  # a partition holds a model once for all its loads
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
    """The best choice of an interval with exact executions, and its value, by branch and bound.

    `tables`: those of `_knapsack`. Returns `least` if no choice has a higher value.
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
    """Whole cells of an execution, rounded down."""
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
    """Tables of the dynamic program, by number of allowed loads: value of the best choice by interval and cells."""
    lines = np.arange(len(low))
    table = np.zeros((len(low), cells + 1))  # highest value by interval and cells
    tables = [table]
    places = np.arange(cells + 1)
    for number in range(len(rates)):
        best = table
        batches = generator.rows[number]
        enough = float((rates[number] * high).max()) / NS_PER_S
        quickest = np.inf  # of the batches that serve the whole demand at every duty cycle of the interval
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
