"""What leads the search for a plan: columns at hand, what rows are worth, and proofs from the same prices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cotenant.techniques.partitions.plan.search.columns import Column, ColumnGenerator, Floats
from cotenant.techniques.partitions.plan.search.opt_bound import Bound
from cotenant.techniques.partitions.plan.search.opt_exact import has_solver
from cotenant.techniques.partitions.plan.search.opt_master import DualPrices, dual_prices
from cotenant.techniques.partitions.plan.search.opt_pool import Pool, PricedColumns, is_affordable

_PROOFS = 3
"""How often prices are sought for a bound at most."""
_GUESSES = 6
"""How often columns are guessed before each of these."""
_GROWN = 40
"""Columns of a size that are tried with a load more."""
_GAIN = 1e-4
"""Share of a device that a guess has to be worth beyond them."""


def priced_columns(
    generators: Mapping[str, ColumnGenerator], rates: Floats, row_values: Floats, *, solver: bool
) -> PricedColumns | None:
    """Columns beside typical neighbours and their prices, `worth` without the solver; None where there are too many."""
    if not all(is_affordable(generator) for generator in generators.values()):
        return None
    pools = {name: Pool(generator, rates) for name, generator in generators.items()}
    prices = _prices(pools, rates) if solver else None
    if prices is None:
        return PricedColumns(pools, row_values, {})
    # a load that has no price would never be served, and any is served in the end
    return PricedColumns(pools, np.maximum(prices.rows, 0.02 * row_values), prices.memory, prices.least)


def proven(
    bound: Bound,
    generators: Mapping[str, ColumnGenerator],
    rates: Floats,
    is_enough: Callable[[float], bool] = lambda _: False,
) -> None:
    """Tighten a bound by the prices of columns that know no interference. Needs the solver.

    Columns of three and more loads that are worth more than these prices say are added, and prices found again, until
    there are none, the bound is enough, or it has been tried a few times. Such columns are guessed as long as that
    finds any, as a proof takes longer. `is_enough` is told the least price of fractions: no prices prove more.
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
                for number in range(len(better.slots)):  # what holds but for rounding holds with smaller batches
                    if generator.config((better,)) is not None:
                        more[name, better] = None
                        break
                    slots = list(better.slots)
                    slots[number] = slots[number][0], generator.smaller(*slots[number])
                    better = better._replace(slots=tuple(slots))
        if len(more) == known or is_enough(prices.least):
            return


def _guessed(pools: Mapping[str, Pool], rates: Floats, prices: DualPrices) -> list[tuple[str, Column]]:
    """The best columns of the pools with a load more, where that makes them worth more than any without."""
    found = []
    for name, pool in pools.items():
        kind, price = pool.generator.kind, prices.memory[name]
        for size, lines in pool.lines.items():
            net = pool.values(size, rates, prices.rows) - price * lines.memory
            most = float(net.max(initial=0.0))
            for line in np.argsort(-net, kind="stable")[:_GROWN].tolist():
                column, free = pool.column(size, line), kind.memory_bytes - float(lines.memory[line])
                extended = pool.extended(column, rates, prices.rows, free, price)
                row_values = sum(min(rates[n], rate) * prices.rows[n] for n, rate in pool.served(extended).items())
                if len(extended.slots) > 2 and row_values - price * pool.memory_bytes(extended) > most + _GAIN:
                    found.append((name, extended))
    return found


def _prices(pools: Mapping[str, Pool], rates: Floats, more: Sequence[tuple[str, Column]] = ()) -> DualPrices | None:
    costs = {name: pool.generator.kind.price for name, pool in pools.items()}
    return dual_prices(pools, costs, rates, more) if has_solver() and min(costs.values()) > 0 else None
