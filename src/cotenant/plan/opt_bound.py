"""Lower bounds for plans: what even fractions of devices could not undercut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from cotenant.plan.columns import Floats, Shelf

ROUNDS = 150
_STEP = 0.5


class Bound:
    """Prices of the loads' rates that prove how much of the devices every plan takes.

    The dual of covering the rates by fractions of fillings (Gilmore and Gomory): whatever rates are worth, no plan is
    cheaper than all of them together over the most that a device can serve of them. Any prices make a bound; good ones
    are sought by multiplying up those of loads that the best fillings leave out. Interference is left out, so that the
    bound holds for every plan, but is not reached beside much of it.
    """

    def __init__(self, shelves: Mapping[str, Shelf], rates: Floats, rounds: int = ROUNDS) -> None:
        self._shelves = dict(shelves)
        self._rates = rates
        self._rounds = rounds
        self._known: dict[tuple[tuple[str, float], ...], float] = {}

    def price(self) -> float:
        """A price that every plan costs at least, with as many devices of each type as may be."""
        costs = {name: shelf.kind.price for name, shelf in self._shelves.items()}
        if min(costs.values()) <= 0:
            return 0.0
        return self._best({name: 1 / cost for name, cost in costs.items()}, is_sum=False)

    def devices(self) -> int:
        """So many devices at least, whichever they are."""
        return math.ceil(self._best(dict.fromkeys(self._shelves, 1.0), is_sum=False) * (1 - 1e-9))

    def is_too_little(self, kinds: Sequence[str]) -> bool:
        """Whether these devices are proven not to be enough."""
        counts = {name: float(kinds.count(name)) for name in self._shelves}
        return self._best(counts, is_sum=True) > 1 + 1e-9

    def _best(self, weights: Mapping[str, float], *, is_sum: bool) -> float:
        """The largest found of: worth of all rates over the weighted value of the types, their sum or the largest."""
        if len(weights) == 1:  # only the scale differs
            ((name, weight),) = weights.items()
            if weight <= 0:
                return math.inf
            key: tuple[tuple[str, float], ...] = ((name, 1.0),)
            if key not in self._known:
                self._known[key] = self._sought({name: 1.0}, is_sum)
            return self._known[key] / weight
        key = (*sorted(weights.items()), ("", float(is_sum)))
        if key not in self._known:
            self._known[key] = self._sought(weights, is_sum)
        return self._known[key]

    def _sought(self, weights: Mapping[str, float], is_sum: bool) -> float:
        rates = self._rates
        most = np.max([weight * self._whole(self._shelves[name]) for name, weight in weights.items()], axis=0)
        if (most <= 0).any():
            return math.inf
        prices = 1 / most
        mean = np.zeros(len(rates))
        best = 0.0
        for number in range(self._rounds):
            bound, served = self._one(prices, weights, is_sum)
            best = max(best, bound)
            mean += prices / (prices @ rates)
            if number % 10 == 9:
                best = max(best, self._one(mean, weights, is_sum)[0])
            cover = served * max(bound, best) / rates
            step = _STEP / math.sqrt(1 + number) / max(1.0, float(cover.max()) / 4)
            prices = prices * np.exp(np.clip(step * (1 - cover), -1.0, 1.0))
        return best

    def _one(self, prices: Floats, weights: Mapping[str, float], is_sum: bool) -> tuple[float, Floats]:
        values = [
            (weight * value, weight * served)
            for name, weight in weights.items()
            for value, served in [self._shelves[name].value(prices)]
        ]
        if is_sum:
            total = sum(value for value, _ in values)
            served = np.sum([each for _, each in values], axis=0)
        else:
            total, served = max(values, key=lambda each: each[0])
        worth = float(prices @ self._rates)
        return (worth / total if total > 0 else math.inf), served

    @staticmethod
    def _whole(shelf: Shelf) -> Floats:
        most: Floats = np.max([rates * shelf.kind.whole / size for size, rates in shelf.best.items()], axis=0)
        return most
