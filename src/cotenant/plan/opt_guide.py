"""What leads the search for a plan: columns at hand, what rows are worth, and proofs from the same prices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cotenant.plan.columns import Column, Floats, Shelf
from cotenant.plan.opt_bound import Bound
from cotenant.plan.opt_exact import has_solver
from cotenant.plan.opt_master import Prices, priced
from cotenant.plan.opt_pool import Guide, Pool, is_affordable

_PROOFS = 4
"""How often prices are sought for a bound at most."""


def guided(shelves: Mapping[str, Shelf], rates: Floats, worth: Floats, *, solver: bool) -> Guide | None:
    """Columns beside typical neighbours and their prices, `worth` without the solver; None where there are too many."""
    if not all(is_affordable(shelf) for shelf in shelves.values()):
        return None
    pools = {name: Pool(shelf, rates) for name, shelf in shelves.items()}
    prices = _priced(pools, rates) if solver else None
    if prices is None:
        return Guide(pools, worth, {})
    # a load that has no price would never be served, and any is served in the end
    return Guide(pools, np.maximum(prices.rows, 0.02 * worth), prices.memory)


def proven(
    bound: Bound, shelves: Mapping[str, Shelf], rates: Floats, is_enough: Callable[[], bool] = lambda: False
) -> None:
    """Tighten a bound by the prices of columns that know no interference. Needs the solver.

    Columns of three and more loads that are worth more than these prices say are added, and prices found again, until
    there are none, the bound is enough, or it has been tried a few times.
    """
    pools = {name: Pool(shelf, rates, alone=True) for name, shelf in shelves.items()}
    more: dict[tuple[str, Column], None] = {}
    for _ in range(_PROOFS):
        prices = _priced(pools, rates, list(more))
        if prices is None:
            return
        made = bound.tighten(prices.rows, prices.memory, pools)
        known = len(more)
        for name, column in made:
            if len(column.slots) > 2:
                shelf = shelves[name]
                better = pools[name].rebatched(column, rates, prices.rows) or column
                for number in range(len(better.slots)):  # what holds but for rounding holds with smaller batches
                    if shelf.filling((better,)) is not None:
                        more[name, better] = None
                        break
                    slots = list(better.slots)
                    slots[number] = slots[number][0], shelf.smaller(*slots[number])
                    better = better._replace(slots=tuple(slots))
        if len(more) == known or is_enough():
            return


def _priced(pools: Mapping[str, Pool], rates: Floats, more: Sequence[tuple[str, Column]] = ()) -> Prices | None:
    costs = {name: pool.shelf.kind.price for name, pool in pools.items()}
    return priced(pools, costs, rates, more) if has_solver() and min(costs.values()) > 0 else None
