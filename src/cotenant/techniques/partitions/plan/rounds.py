"""Rounds of a partition: the duty cycle and the batches that serve given rates within their SLOs.

With rate `r_i`, SLO `S_i`, batch `b_i` and latency `L_i(b_i)` of slot i, a round of duty cycle `D` is feasible if

    sum_i L_i(b_i) <= D,    D + L_i(b_i) <= S_i    and    b_i >= r_i * D    for all i

Source: squishy bin packing of Nexus (SOSP 2019), section 6.1.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, cast

from cotenant.errors import PlanError
from cotenant.techniques.overlap.policy.headroom_control import MOST_MEMBERS
from cotenant.techniques.partitions.plan.types import NS_PER_S, CoRunner, Costs, DeviceType, Load, worst_beside
from cotenant.work import Work

Neighbour = tuple[int, tuple[tuple[str, int], ...]]
"""Another partition of the device: its size, and the model and batch of each slot."""
_ROUNDING = 1e-10
_MEMORY = 1 << 16
"""Largest number of entries of each cache; about 50 MB."""
_MOST_FACTORS = 1 << 18


class Demand(NamedTuple):
    """Demand for one model: rows a second, each within an SLO."""

    model: str
    slo_ns: int
    rate_per_s: float


class RoundFit(NamedTuple):
    """A duty cycle and the batch of each slot. `bears`: largest slowdown of all executions at which it is feasible."""

    duty_ns: int
    batches: tuple[int, ...]
    bears: float = 1.0


class Curve:
    """Latency over batch size of one model in one partition, beside given neighbours.

    `choice[n]`: position of the batch to run for n rows, the fastest batch of at least n rows.
    """

    __slots__ = ("batches", "choice", "latency_ns", "least_ns_per_row", "position")

    def __init__(self, batches: Sequence[int], latency_ns: Sequence[int]) -> None:
        self.batches = tuple(batches)
        self.latency_ns = tuple(latency_ns)
        self.position = {batch: position for position, batch in enumerate(self.batches)}
        quickest = list(range(len(self.batches)))
        for position in reversed(quickest[:-1]):
            later = quickest[position + 1]
            if self.latency_ns[later] < self.latency_ns[position]:
                quickest[position] = later
        position = 0
        self.choice = [0]
        for rows in range(1, self.batches[-1] + 1):
            position += self.batches[position] < rows
            self.choice.append(quickest[position])
        self.least_ns_per_row = min(ns / batch for ns, batch in zip(self.latency_ns, self.batches, strict=True))

    def capacity(self, slo_ns: int) -> tuple[float, int]:
        """Largest rate that the model alone can have in the partition, in rows/s, and the batch; (0.0, 0) for none."""
        rate, chosen = 0.0, 0
        for batch, ns in zip(self.batches, self.latency_ns, strict=True):
            if 2 * ns <= slo_ns and batch * NS_PER_S / ns > rate:
                rate, chosen = batch * NS_PER_S / ns, batch
        return rate, chosen


class RoundCache:
    """Cache of curves, capacities and rounds under one set of costs."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._curves: dict[tuple[str, int, str, tuple[Neighbour, ...]], Curve] = {}
        self._capacities: dict[tuple[str, int, int, str, tuple[Neighbour, ...]], tuple[float, int]] = {}
        self._rounds: dict[tuple[tuple[Demand, ...], int, str, tuple[Neighbour, ...]], RoundFit | None] = {}
        self._knees: dict[tuple[str, int, DeviceType, float], int] = {}
        self._factors: dict[tuple[str, int, int, tuple[CoRunner, ...], str], float] = {}
        self._adds: dict[tuple[str, int, int, str], dict[CoRunner, float]] = {}

    def curve(self, model: str, size: int, device: str, neighbours: tuple[Neighbour, ...] = ()) -> Curve:
        """Latencies of a model in a partition, beside the worst choice of at most one slot of each neighbour."""
        key = (model, size, device, neighbours)
        curve = self._curves.get(key)
        if curve is None:
            batches = self.costs.batches(model)
            if not batches or any(a >= b for a, b in pairwise(batches)) or batches[0] < 1:
                raise PlanError(f"batches of model {model!r} are {tuple(batches)!r}, expected ascending ones from 1")
            latency = [self.costs.latency_ns(Work(model, 0, batch), size, device) for batch in batches]
            if neighbours:
                beside = [[(other, batch, other_size) for other, batch in slots] for other_size, slots in neighbours]
                latency = [
                    math.ceil(ns * self.worst_factor(model, batch, size, beside, device))
                    for batch, ns in zip(batches, latency, strict=True)
                ]
            if len(self._curves) >= _MEMORY:
                self._curves.clear()
            curve = self._curves[key] = Curve(batches, latency)
        return curve

    def alone_ns(self, model: str, batch: int, size: int, device: str) -> int:
        """Latency in ns of one batch without co-runners."""
        curve = self.curve(model, size, device)
        return curve.latency_ns[curve.position[batch]]

    def worst_factor(
        self, model: str, batch: int, size: int, beside: Sequence[Sequence[CoRunner]], device: str
    ) -> float:
        """The largest slowdown of a batch beside at most one slot of each other partition."""
        known = self._adds.setdefault((model, batch, size, device), {})

        def adds(other: CoRunner) -> float:
            found = known.get(other)
            if found is None:
                found = known[other] = self.costs.adds(model, batch, size, other, device)
            return found

        return self.factor(model, batch, size, tuple(worst_beside(beside, adds)), device)

    def factor(self, model: str, batch: int, size: int, others: tuple[CoRunner, ...], device: str) -> float:
        """The slowdown of a batch beside these co-runners."""
        key = (model, batch, size, others, device)
        known = self._factors.get(key)
        if known is None:
            if len(self._factors) >= _MOST_FACTORS:
                self._factors.clear()
            known = self._factors[key] = self.costs.factor(model, batch, size, others, device)
        return known

    def capacity(
        self, model: str, slo_ns: int, size: int, device: str, neighbours: tuple[Neighbour, ...] = ()
    ) -> float:
        """Largest rate that a model can have in a partition of its own, in rows a second."""
        return self._capacity(model, slo_ns, size, device, neighbours)[0]

    def best_batch(self, model: str, slo_ns: int, size: int, device: str) -> int:
        """The batch of the largest rate of a model in a partition of its own; 0 if the SLO cannot be met."""
        return self._capacity(model, slo_ns, size, device, ())[1]

    def _capacity(
        self, model: str, slo_ns: int, size: int, device: str, neighbours: tuple[Neighbour, ...]
    ) -> tuple[float, int]:
        key = (model, slo_ns, size, device, neighbours)
        capacity = self._capacities.get(key)
        if capacity is None:
            if len(self._capacities) >= _MEMORY:
                self._capacities.clear()
            capacity = self._capacities[key] = self.curve(model, size, device, neighbours).capacity(slo_ns)
        return capacity

    def knee(self, model: str, slo_ns: int, kind: DeviceType, min_gain: float) -> int:
        """The most efficient partition size: the knee of capacity over size; 0 if no size can serve the model.

        A size is considered if its capacity is at least `min_gain` times that of the size considered before it. The
        knee is the size farthest above the straight line from the origin to the largest size, else the largest size.
        Source: GPU-let, section 4.3, which does not define the knee.
        """
        key = (model, slo_ns, kind, min_gain)
        knee = self._knees.get(key)
        if knee is None:
            points: list[tuple[int, float]] = []
            for size in kind.sizes:
                rate = self.capacity(model, slo_ns, size, kind.name)
                if rate > 0 and (not points or rate >= min_gain * points[-1][1]):
                    points.append((size, rate))
            if not points:
                knee = 0
            else:
                most_size, most_rate = points[-1]
                knee = max(points, key=lambda at: (round(at[1] / most_rate - at[0] / most_size, 6), at[0]))[0]
            self._knees[key] = knee
        return knee

    def interferes(self, models: Sequence[str], kinds: Sequence[DeviceType]) -> bool:
        """Whether the costs have an interference between the models, at their smallest or largest batches."""
        ends = {model: self.costs.batches(model) for model in models}
        runs = [(model, batch) for model, batches in ends.items() for batch in (batches[0], batches[-1])]
        places = {
            (kind.name, own, tuple(sorted((*split[:at], *split[at + 1 :]))))
            for kind in kinds
            for split in kind.splits
            for at, own in enumerate(split)
        }
        return any(
            self.worst_factor(model, batch, own, [[(*run, size) for run in runs] for size in others], device) > 1.0
            for device, own, others in sorted(places)
            for model, batch in runs
        )

    def least_share(self, load: Load, kind: DeviceType) -> float:
        """Lower bound of the devices of one type that a load takes; infinite if none can serve it.

        No round has a larger throughput than the best batch alone in its partition, of latency up to half the SLO.
        """
        most = max(self.capacity(load.model, load.slo_ns, size, kind.name) * kind.whole / size for size in kind.sizes)
        return load.rate_per_s / most if most > 0 else math.inf

    def fit(
        self, demands: tuple[Demand, ...], size: int, device: str, neighbours: tuple[Neighbour, ...] = ()
    ) -> RoundFit | None:
        """The feasible round of all demands in one partition that bears the largest slowdown; None if there is none.

        Exact: any feasible round stays feasible when its duty cycle is extended to some `min(b / r_i, S_i - L_i(b))`.
        Only these duty cycles are tried. Each is then shortened, with the same batches, until the SLOs bear as large a
        slowdown as the duty cycle.
        """
        key = (demands, size, device, neighbours)
        if key in self._rounds:
            return self._rounds[key]
        if len(self._rounds) >= _MEMORY:
            self._rounds.clear()
        curves = [self.curve(work.model, size, device, neighbours) for work in demands]
        found = self._rounds[key] = _fit(demands, curves)
        return found

    def stands(
        self, demands: tuple[Demand, ...], made: RoundFit, size: int, device: str, neighbours: tuple[Neighbour, ...]
    ) -> bool:
        """Whether an unchanged round is feasible beside these neighbours."""
        busy = 0
        for work, batch in zip(demands, made.batches, strict=True):
            curve = self.curve(work.model, size, device, neighbours)
            ns = curve.latency_ns[curve.position[batch]]
            busy += ns
            if busy > made.duty_ns or made.duty_ns + ns > work.slo_ns:
                return False
        return True


def most_members(costs: Costs, kind: DeviceType, size: int, loads: int) -> int:
    """Largest number of members of known groups in partitions of a size; 1 if no groups are known."""
    known = (count for count in range(2, min(MOST_MEMBERS, loads) + 1) if costs.divisions(size, count, kind.name))
    return max(known, default=1)


def round_cache_of(costs: Costs) -> RoundCache:
    """The cache of these costs; the same one as last time for hashable costs."""
    return _kept_cache(costs) if isinstance(costs, Hashable) else RoundCache(costs)


@lru_cache(maxsize=4)
def _kept_cache(costs: Hashable) -> RoundCache:
    return RoundCache(cast(Costs, costs))


def _fit(demands: Sequence[Demand], curves: Sequence[Curve]) -> RoundFit | None:
    rates = [work.rate_per_s / NS_PER_S for work in demands]
    if sum(rate * curve.least_ns_per_row for rate, curve in zip(rates, curves, strict=True)) > 1 + _ROUNDING:
        return None
    duties = []
    for work, rate, curve in zip(demands, rates, curves, strict=True):
        for batch, ns in zip(curve.batches, curve.latency_ns, strict=True):
            duty = min(int(batch / rate * (1 + _ROUNDING)), work.slo_ns - ns)
            if duty >= ns:
                duties.append(duty)
    slots = [
        (rate * (1 - 4 * _ROUNDING), curve.choice, curve.latency_ns, work.slo_ns, curve.batches[-1])
        for work, rate, curve in zip(demands, rates, curves, strict=True)
    ]
    best: tuple[float, int, int] | None = None
    for duty in sorted(set(duties)):
        busy = 0
        for rate, choice, latency, slo, most in slots:
            rows = math.ceil(rate * duty)
            if rows > most:
                break
            ns = latency[choice[rows]]
            busy += ns
            if busy > duty or duty + ns > slo:
                break
        else:
            shorter, bearable = duty, 1.0
            for rate, choice, latency, slo, _ in slots:
                ns = latency[choice[math.ceil(rate * duty)]]
                shorter = min(shorter, slo * busy // (ns + busy))
            bearable = shorter / busy
            for rate, choice, latency, slo, _ in slots:
                bearable = min(bearable, (slo - shorter) / latency[choice[math.ceil(rate * duty)]])
            if best is None or bearable > best[0]:
                best = (bearable, shorter, duty)
    if best is None:
        return None
    bearable, duty, longest = best
    chosen = [
        curve.batches[curve.choice[math.ceil(rate * longest)]] for (rate, *_), curve in zip(slots, curves, strict=True)
    ]
    return RoundFit(duty, tuple(chosen), bearable)
