"""Lower bounds for plans: what even fractions of devices could not undercut.

The dual of covering the rates by fractions of configurations (Gilmore and Gomory, 1961): whatever rates are worth, no
plan is cheaper than all of them together over the most that a device can serve of them. Any prices make a bound. Two
ways to say what a device can serve at most are kept:

- of single loads (`ColumnGenerator.value`): a round of several serves no more a unit of time than the best of them
  alone. Cheap, so prices for it are sought by multiplying up those of loads that the best device leaves out. It allows
  a device to serve more of a load than is wanted.
- of all rounds, with no load counting for more than is wanted of it (`pricing_bound`): `tighten` takes prices from
  elsewhere, of rows and of a type's memory. With c the pricing bound of a column of each size after memory, a device of
  memory M at m a byte is worth at most the largest sum of c over a split, plus m * M: columns pay for their memory at
  the same price, and together they have no more than M. Partitions may stay unused, hence c is 0 at least. A plan
  covers every rate, so that it covers it column by column as well when each counts for no more than is wanted.

Both leave interference out, so that they hold for every plan with at most one slot of each load in a partition, and
are not reached beside much interference. `least` makes the most of devices being whole: no choice of whole devices
that is proven too little is a plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from cotenant.techniques.partitions.plan.search.columns import Column, ColumnGenerator, Floats
from cotenant.techniques.partitions.plan.search.opt_pool import Pool
from cotenant.techniques.partitions.plan.search.pricing_bound import pricing_bound

ROUNDS = 60
_STEP = 0.5
_SLACK = 1e-8
"""Share of a bound that is given up for what rounding and the checker's tolerance may lose."""
_CHOICES = 10_000
_LOOKS = 10
"""Choices of devices for which prices of their own are sought."""


class Bound:
    """Proofs of how much of the devices every plan takes, for loads, types of devices and their rates in rows/s."""

    def __init__(self, generators: Mapping[str, ColumnGenerator], rates: Floats, rounds: int = ROUNDS) -> None:
        self._generators = dict(generators)
        self._rates = rates
        self._rounds = rounds
        self._known: dict[tuple[tuple[str, float], ...], float] = {}
        self._proofs: list[tuple[float, dict[str, float]]] = []

    def tighten(self, rows: Floats, memory: Mapping[str, float], pools: Mapping[str, Pool]) -> list[tuple[str, Column]]:
        """Take prices of a row/s of each load and of a byte of each type's memory, and prove what follows from them.

        `pools` say what is worth refining; any pools give a valid bound. Gives the columns that stand for the bounds,
        by type of device; they need not hold.
        """
        values, made = {}, []
        for name, generator in self._generators.items():
            kind, price = generator.kind, memory.get(name, 0.0)
            by_size = {}
            for size in kind.sizes:
                lines = pools[name].lines[size]
                taken = price * (lines.memory - kind.partition_bytes)
                reached = float((pools[name].values(size, self._rates, rows) - taken).max(initial=0.0))
                most, slots = pricing_bound(generator, size, self._rates, rows, price, reached)
                made.append((name, Column(size, slots)))
                by_size[size] = max(0.0, most - price * kind.partition_bytes)
            values[name] = (
                max(sum(by_size[size] for size in split) for split in kind.splits) + price * kind.memory_bytes
            )
        if rows @ self._rates > 0:
            self._proofs.append((float(rows @ self._rates), values))
        return made

    def price(self) -> float:
        """A price that every plan costs at least, with as many devices of each type as may be."""
        costs = {name: generator.kind.price for name, generator in self._generators.items()}
        if min(costs.values()) <= 0:
            return 0.0
        found = self._best({name: 1 / cost for name, cost in costs.items()}, is_sum=False)
        for total_value, values in self._proofs:
            most = max(values[name] / cost for name, cost in costs.items())
            found = max(found, total_value / most if most > 0 else math.inf)
        return found * (1 - _SLACK)

    def devices(self) -> float:
        """So many devices at least, whichever they are; infinite where none would do."""
        found = self._best(dict.fromkeys(self._generators, 1.0), is_sum=False)
        for total_value, values in self._proofs:
            most = max(values.values())
            found = max(found, total_value / most if most > 0 else math.inf)
        return math.ceil(found * (1 - _SLACK)) if math.isfinite(found) else found

    def least(self, inventory: Sequence[str]) -> float:
        """The price of the cheapest devices of an inventory that are not proven too little; infinite for none."""
        there = Counter(inventory)
        costs = {name: generator.kind.price for name, generator in self._generators.items() if there[name]}
        if math.prod(there[name] + 1 for name in costs) > _CHOICES:
            count = int(min(self.devices(), len(inventory)))
            return max(self.price(), sum(sorted(costs[name] for name in inventory)[:count]))
        chosen = product(*(range(there[name] + 1) for name in costs))
        priced = sorted((sum(n * cost for n, cost in zip(each, costs.values(), strict=True)), each) for each in chosen)
        price, devices, looks = self.price(), self.devices(), 0
        for total, counts in priced:
            if total < price or sum(counts) < devices or self._is_refuted(dict(zip(costs, counts, strict=True))):
                continue
            looks += 1
            if looks > _LOOKS or not self.is_too_little(
                [n for n, count in zip(costs, counts, strict=True) for _ in range(count)]
            ):
                return total
        return math.inf

    def is_too_little(self, kinds: Sequence[str]) -> bool:
        """Whether these devices are proven not to be enough."""
        weights = {name: float(kinds.count(name)) for name in self._generators}
        return self._is_refuted(Counter(kinds)) or self._best(weights, is_sum=True) > 1 + _SLACK

    def _is_refuted(self, counts: Mapping[str, int]) -> bool:
        return any(
            sum(counts.get(name, 0) * value for name, value in values.items()) < total_value * (1 - _SLACK)
            for total_value, values in self._proofs
        )

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
        most = np.max([weight * self._whole(self._generators[name]) for name, weight in weights.items()], axis=0)
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
            for value, served in [self._generators[name].value(prices)]
        ]
        if is_sum:
            total = sum(value for value, _ in values)
            served = np.sum([each for _, each in values], axis=0)
        else:
            total, served = max(values, key=lambda each: each[0])
        total_value = float(prices @ self._rates)
        return (total_value / total if total > 0 else math.inf), served

    @staticmethod
    def _whole(generator: ColumnGenerator) -> Floats:
        most: Floats = np.max([rates * generator.kind.whole / size for size, rates in generator.best.items()], axis=0)
        return most
