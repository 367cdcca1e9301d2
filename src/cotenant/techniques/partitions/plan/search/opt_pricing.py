"""Prices for the search of a plan, from the linear relaxation, and tighter bounds from the same prices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cotenant.techniques.partitions.plan.search.columns import Column, ColumnGenerator, Floats
from cotenant.techniques.partitions.plan.search.opt_bound import Bound
from cotenant.techniques.partitions.plan.search.opt_exact import has_solver
from cotenant.techniques.partitions.plan.search.opt_master import DualPrices, dual_prices
from cotenant.techniques.partitions.plan.search.opt_pool import Pool, PricedColumns, is_affordable

_PROOFS = 3
"""Most iterations of tightening a bound."""
_GUESSES = 6
"""Most rounds of guessing columns before each of these."""
_EXTENDED = 40
"""Columns of a size that are extended by a load."""
_GAIN = 1e-4
"""Value, as a share of a device, by which a guessed column must exceed all others."""


def priced_columns(
    generators: Mapping[str, ColumnGenerator], rates: Floats, row_values: Floats, *, solver: bool
) -> PricedColumns | None:
    """Pools beside typical neighbours and their prices (`row_values` without the solver); None if too large."""
    if not all(is_affordable(generator) for generator in generators.values()):
        return None
    pools = {name: Pool(generator, rates) for name, generator in generators.items()}
    prices = _prices(pools, rates) if solver else None
    if prices is None:
        return PricedColumns(pools, row_values, {})
    # a load of price 0 would never be chosen, but every load must be served
    return PricedColumns(pools, np.maximum(prices.rows, 0.02 * row_values), prices.memory, prices.least)


def proven(
    bound: Bound,
    generators: Mapping[str, ColumnGenerator],
    rates: Floats,
    is_enough: Callable[[float], bool] = lambda _: False,
) -> None:
    """Tighten a bound by the dual prices of columns without interference. Needs the solver.

    1. Solve the relaxation. Add guessed columns of three and more loads with a positive reduced value, and repeat.
    2. Compute the pricing bound. Add its columns, and repeat from 1 up to `_PROOFS` times.
    3. Stop if no column was added, or if `is_enough(optimum of the relaxation)`, which no prices can exceed.
    """
    pools = {name: Pool(generator, rates, alone=True) for name, generator in generators.items()}
    more: dict[tuple[str, Column], None] = {}
    for _ in range(_PROOFS):
        prices = _prices(pools, rates, list(more))
        for _ in range(_GUESSES):
            known = len(more)
            if prices is not None:
                more.update(dict.fromkeys(_guessed(pools, rates, prices)))
            if len(more) == known:
                break
            prices = _prices(pools, rates, list(more))
        if prices is None:
            return
        made = bound.tighten(prices.rows, prices.memory, pools)
        known = len(more)
        for name, column in made:
            if len(column.slots) > 2:
                generator = generators[name]
                better = pools[name].rebatched(column, rates, prices.rows) or column
                for number in range(len(better.slots)):  # smaller batches correct what rounding made infeasible
                    if generator.config((better,)) is not None:
                        more[name, better] = None
                        break
                    slots = list(better.slots)
                    slots[number] = slots[number][0], generator.smaller(*slots[number])
                    better = better._replace(slots=tuple(slots))
        if len(more) == known or is_enough(prices.least):
            return


def _guessed(pools: Mapping[str, Pool], rates: Floats, prices: DualPrices) -> list[tuple[str, Column]]:
    """The best columns of the pools, extended, if they have a higher value than all columns of the pools."""
    found = []
    for name, pool in pools.items():
        kind, price = pool.generator.kind, prices.memory[name]
        for size, lines in pool.lines.items():
            net = pool.values(size, rates, prices.rows) - price * lines.memory
            most = float(net.max(initial=0.0))
            for line in np.argsort(-net, kind="stable")[:_EXTENDED].tolist():
                column, free = pool.column(size, line), kind.memory_bytes - float(lines.memory[line])
                extended = pool.extended(column, rates, prices.rows, free, price)
                row_values = sum(min(rates[n], rate) * prices.rows[n] for n, rate in pool.served(extended).items())
                if len(extended.slots) > 2 and row_values - price * pool.memory_bytes(extended) > most + _GAIN:
                    found.append((name, extended))
    return found


def _prices(pools: Mapping[str, Pool], rates: Floats, more: Sequence[tuple[str, Column]] = ()) -> DualPrices | None:
    costs = {name: pool.generator.kind.price for name, pool in pools.items()}
    return dual_prices(pools, costs, rates, more) if has_solver() and min(costs.values()) > 0 else None
