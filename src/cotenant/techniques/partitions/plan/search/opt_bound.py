"""Lower bounds of the price of plans, by linear programming duality (Gilmore and Gomory, 1961).

Let `r_i` be the rates, and `p_i >= 0` any prices of a row/s. Let `V(k)` bound the value that a device of type k serves
at these prices. Then

    number of devices of every plan >= sum_i p_i * r_i / max_k V(k)

Two bounds V are used:

- Single loads (`ColumnGenerator.value`): a round serves at most the value per time of its best load alone. Prices are
  improved by multiplicative updates: those of loads that the best device does not serve rise.
- All rounds, where no load counts for more than its demand (`pricing_bound`). Prices come from the linear program
  (`tighten`). `V = max over splits of sum_z max(0, c(z)) + m * M` for a device of memory `M` at the price `m` a byte.
  `c(z)` is the pricing bound of a column of size z less its memory.

Both leave out interference, so they hold for every plan with at most one slot of each load in a partition. `least` uses
that devices are whole: it returns the price of the cheapest set of devices that is not refuted.
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
"""Relative slack of bounds, for rounding and the checker's tolerance."""
_CHOICES = 10_000
"""Most sets of devices that are tried one by one."""
_LOOKS = 10
"""Sets of devices for which prices of their own are searched."""


class Bound:
    """Lower bounds of price and number of devices, for device types and rates in rows/s by load."""

    def __init__(self, generators: Mapping[str, ColumnGenerator], rates: Floats, rounds: int = ROUNDS) -> None:
        self._generators = dict(generators)
        self._rates = rates
        self._rounds = rounds
        self._known: dict[tuple[tuple[str, float], ...], float] = {}
        self._proofs: list[tuple[float, dict[str, float]]] = []

    def tighten(self, rows: Floats, memory: Mapping[str, float], pools: Mapping[str, Pool]) -> list[tuple[str, Column]]:
        """Add the bound of given prices: of a row/s of each load, and of a byte of each type's memory.

        `pools` guide the refinement; any pools give a valid bound. Returns the columns of the bounds by device type;
        they may be infeasible.
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
        """Lower bound of the price of every plan, with any number of devices of each type."""
        costs = {name: generator.kind.price for name, generator in self._generators.items()}
        if min(costs.values()) <= 0:
            return 0.0
        found = self._best({name: 1 / cost for name, cost in costs.items()}, is_sum=False)
        for total_value, values in self._proofs:
            most = max(values[name] / cost for name, cost in costs.items())
            found = max(found, total_value / most if most > 0 else math.inf)
        return found * (1 - _SLACK)

    def devices(self) -> float:
        """Lower bound of the number of devices, of any types; infinite if no number suffices."""
        found = self._best(dict.fromkeys(self._generators, 1.0), is_sum=False)
        for total_value, values in self._proofs:
            most = max(values.values())
            found = max(found, total_value / most if most > 0 else math.inf)
        return math.ceil(found * (1 - _SLACK)) if math.isfinite(found) else found

    def least(self, inventory: Sequence[str]) -> float:
        """Price of the cheapest devices of an inventory that are not refuted; infinite if all are."""
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
        """Whether these devices are proven insufficient."""
        weights = {name: float(kinds.count(name)) for name in self._generators}
        return self._is_refuted(Counter(kinds)) or self._best(weights, is_sum=True) > 1 + _SLACK

    def _is_refuted(self, counts: Mapping[str, int]) -> bool:
        return any(
            sum(counts.get(name, 0) * value for name, value in values.items()) < total_value * (1 - _SLACK)
            for total_value, values in self._proofs
        )

    def _best(self, weights: Mapping[str, float], *, is_sum: bool) -> float:
        """Largest ratio found of the value of all rates to the weighted value of the types (their sum or maximum)."""
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
