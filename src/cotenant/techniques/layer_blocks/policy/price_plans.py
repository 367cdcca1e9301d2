"""Plans of `slack_blocks`: where the blocks of a model end and on how many lanes each runs, for each price of time.

A unit that takes t on c lanes costs (c + price) * t, plus its memory traffic. Prices are in lanes: at price 0 the plan
of least core time wins, and the higher the price, the sooner the model ends. The plan is exact for the predicted times,
by dynamic programming from the last unit back. For unit u on c lanes:

    cost[u][c] = (c + price) * t[u][c] + traffic[u][c] + min(cost[u + 1][c], switch[u][c])

    switch[u][c] = min over d of cost[u + 1][d] + SWITCH_NS * (c + price)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from msgspec import Struct

PRICES = (0.0, 2.0, 5.0, 10.0, 16.0, 24.0, 40.0, 80.0, 200.0, 1000.0)
"""Prices of time in lanes, ascending, for which plans are made."""
SWITCH_NS = 30_000
"""Cost of another number of lanes within a query, in ns: one decision and the hand-over of a launch."""
_LAST = len(PRICES) - 1
_MOST_CHOICES = 24


class UnitPlans(Struct, frozen=True, gc=False):
    """The planned blocks that begin at one unit of a model, at one level of pressure; each field has one entry a price.

    `ends` and `cores`: the unit behind the block, and its lanes. `left_ns` and `work_ns`: time and core time from this
    unit to the end of the model. `saved_ns` is `-left_ns`, which ascends with the price as bisection needs.
    """

    ends: tuple[int, ...]
    cores: tuple[int, ...]
    left_ns: tuple[int, ...]
    work_ns: tuple[int, ...]
    saved_ns: tuple[int, ...]

    def cheapest_within(self, left_ns: float) -> int:
        """The lowest price (its number in PRICES) at which the model ends within this time, else the highest price."""
        return bisect_left(self.saved_ns, -left_ns, 0, _LAST)

    def dearest_within(self, most: int) -> int:
        """The highest price (its number in PRICES) at which the block takes no more than `most` lanes; 0 if none."""
        cores, low, high = self.cores, 0, _LAST
        while low < high:
            middle = (low + high + 1) // 2
            if cores[middle] <= most:
                low = middle
            else:
                high = middle - 1
        return low


def choices_of(cores: int) -> tuple[int, ...]:
    """The numbers of lanes that plans may use: all if there are few; else some, each at most a quarter more than the
    one before."""
    made = [1]
    while made[-1] < cores:
        last = made[-1]
        made.append(min(cores, last + max(1, last // 4 if cores > _MOST_CHOICES else 1)))
    return tuple(made)


def plans_of(
    choices: Sequence[int],
    takes_ns: Sequence[Sequence[int]],
    traffic: Sequence[Sequence[float]],
    switch_ns: float,
) -> list[UnitPlans]:
    """The plans of a model for all prices, by unit.

    `choices` are numbers of lanes. `takes_ns[unit]` and `traffic[unit]` have one entry a choice: predicted time in ns,
    and the cost of memory traffic in core-ns. O(prices x units x choices).
    """
    by_price = [_blocks_of(choices, takes_ns, traffic, switch_ns, price) for price in PRICES]
    made = []
    for blocks in zip(*by_price, strict=True):
        ends, cores, left, work = zip(*blocks, strict=True)
        made.append(UnitPlans(ends, cores, left, work, tuple([-each for each in left])))
    return made


def _blocks_of(
    choices: Sequence[int],
    takes_ns: Sequence[Sequence[int]],
    traffic: Sequence[Sequence[float]],
    switch_ns: float,
    price: float,
) -> list[tuple[int, int, int, int]]:
    """By unit, the best block that begins there at one price: (end, lanes, time left, core time left)."""
    units, numbers = len(takes_ns), range(len(choices))
    rates = [cores + price for cores in choices]
    switches = [switch_ns * rate for rate in rates]
    cost, end, left, work = [0.0] * len(choices), [units] * len(choices), [0] * len(choices), [0] * len(choices)
    next_cost, next_left, next_work = 0.0, 0, 0
    made = []
    for unit in range(units - 1, -1, -1):
        takes, moves = takes_ns[unit], traffic[unit]
        for at in numbers:
            cut = next_cost + switches[at]
            if cut < cost[at] and unit + 1 < units:
                cost[at], end[at], left[at], work[at] = cut, unit + 1, next_left, next_work
            cost[at] += rates[at] * takes[at] + moves[at]
            left[at] += takes[at]
            work[at] += choices[at] * takes[at]
        next_cost = min(cost)
        best = cost.index(next_cost)
        next_left, next_work = left[best], work[best]
        made.append((end[best], choices[best], next_left, next_work))
    made.reverse()
    return made
