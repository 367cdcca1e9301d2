"""One world, one policy, some arrivals: from the product's objects to the arrays of the compiled loop, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.papers.veltair import _flat, _flat_slack, _loop
from bench.papers.veltair._baselines import FixedBlocks, LayerWise, ModelWise, Prema
from bench.papers.veltair._jit import loaded
from bench.papers.veltair._models import Efficiency, Model
from bench.papers.veltair._worlds import CORES, Drawn, Truth, tables_of
from cotenant.core.snapshot import DropRule
from cotenant.profiles.version_table import UnitCosts
from cotenant.techniques.layer_blocks.policy.block_policy import BlockPolicy
from cotenant.techniques.layer_blocks.policy.price_plans import PRICES, SWITCH_NS, choices_of
from cotenant.techniques.layer_blocks.policy.published import ALGORITHM_2, LayerBlock, Variant
from cotenant.techniques.layer_blocks.policy.slack_blocks import SlackBlocks
from cotenant.work import Share

LANES = tuple(Share((core,)) for core in range(CORES))
Ints = npt.NDArray[np.int64]
_DROPS = {DropRule.NONE: _loop.NONE, DropRule.EXPIRED: _loop.EXPIRED, DropRule.HOPELESS: _loop.HOPELESS}


@cache
def compiled() -> tuple[ModuleType, ModuleType, ModuleType]:
    """The loop, and the rules that fill tables."""
    return loaded(_loop.__name__), loaded(_flat.__name__), loaded(_flat_slack.__name__)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Queries in the order of their arrival, and how many there are of each tenant."""

    times: Ints
    who: Ints
    counts: Ints

    def at(self, rate_per_s: float) -> Arrivals:
        """The same ones, at another rate; `times` of the first are in mean gaps of 2**20."""
        return Arrivals(np.asarray(self.times * (1e9 / rate_per_s / (1 << 20)), np.int64), self.who, self.counts)


@dataclass(frozen=True, slots=True)
class Played:
    """The results. `end_ns` is -1 where the run was stopped early: a tenant had missed too much."""

    end_ns: int
    ends: Ints
    outcomes: Ints
    stats: Ints


def arrivals(seed: int, count: int, parts: Sequence[float], *, uniform: bool = False) -> Arrivals:
    """Poisson arrivals (or evenly spaced ones) in mean gaps of 2**20; each is of a tenant by its part of the rate."""
    random = np.random.default_rng((7, seed))
    gaps = np.ones(count) if uniform else random.exponential(1.0, count)
    who = random.choice(len(parts), count, p=np.array(parts)).astype(np.int64)
    return Arrivals(np.asarray(np.cumsum(gaps) * (1 << 20), np.int64), who, np.bincount(who, minlength=len(parts)))


def _rows(made: Sequence[Any], kind: Any) -> Any:
    """Sequences as rows of one array, as long as the longest."""
    table = np.zeros((len(made), max(map(len, made))), kind)
    for row, values in zip(table, made, strict=True):
        row[: len(values)] = values
    return table


class Stage:
    """A world with its tenants, ready for policies."""

    def __init__(self, drawn: Drawn, truths: Sequence[Truth]) -> None:
        costs = [truth.real.costs() for truth in truths]
        beliefs = [truth.believed.spans() for truth in truths]
        machine = drawn.machine
        self.truths = truths
        self.slo = np.array([truth.model.qos_ns for truth in truths], np.int64)
        sizes = [len(each.ns) for each in costs]
        self.world = (
            np.array([each.units for each in costs], np.int64),
            np.array([each.versions for each in costs], np.int64),
            np.array([0, *np.cumsum(sizes)[:-1]], np.int64),
            *(np.concatenate([getattr(each, name) for each in costs]) for name in ("ns", "moved", "threads")),
            machine.bandwidth_bytes_per_s / 1e9,
            np.array(machine.conflicts_ns(), np.int64),
        )
        self.bandwidth = machine.bandwidth_bytes_per_s / 1e9
        self.dims = np.array([each[:4] for each in beliefs], np.int64).ravel()
        self.spans = _rows([each.ns for each in beliefs], np.int64)
        self.moved = _rows([each.moved for each in beliefs], np.int64)
        lasts = [np.array(each.ns).reshape(each.versions, each.levels, CORES, -1)[0, 0, :, -1] for each in beliefs]
        self.admit = np.array([last.min() for last in lasts], np.int64)
        self.least_work = np.array([least_work(each, slo) for each, slo in zip(costs, self.slo, strict=True)])
        self.isolated = np.array([_isolated(each) for each in costs])
        self._tight: dict[bool, Any] = {}

    def cast(self, policy: BlockPolicy) -> tuple[Any, ...]:
        """What the loop needs of a policy."""
        _, rules, slack = compiled()
        tenants, none = range(len(self.truths)), np.zeros((1, 1), np.int64)
        family, ints, floats = _loop.BLOCKS, [0, 0, 0, 0, 0], [policy.target]
        adapts = policy.is_adaptive
        if isinstance(policy, Prema):
            family, ints = _loop.PREMA, [round(policy.quantum_ms * 1e6)]
        elif isinstance(policy, SlackBlocks):
            quantum = policy.quantum_ns(int(min(self.slo)))
            family, floats = _loop.SLACK, [policy.target, quantum, policy.narrow, policy.used_patience, policy.memory]
        elif isinstance(policy, ModelWise):
            family = _loop.WHOLE
        elif isinstance(policy, LayerWise):
            ints = [1, True, False, policy.replan, False]
        elif isinstance(policy, FixedBlocks):
            ints = [policy.units, False, False, policy.replan, False]
        elif isinstance(policy, LayerBlock):
            by_layer = policy.variant is Variant.AC
            ints = [1 if by_layer else ALGORITHM_2, by_layer, policy.capped, policy.replan, adapts]
        tight, averages = np.zeros((1, 1)), none
        plans: list[Any] = [none] * 5
        if family == _loop.BLOCKS:
            averages = np.zeros((len(tenants), int(self.dims[2::4].max())), np.int64)
            if adapts not in self._tight:
                self._tight[adapts] = [np.zeros(self._size(m)[2] * CORES * self._size(m)[0]) for m in tenants]
                for m in tenants:
                    rules.fill_tight(self.dims, self.spans[m], m, adapts, CORES, self._tight[adapts][m])
                self._tight[adapts] = _rows(self._tight[adapts], np.float64)
            tight = self._tight[adapts]
            for m in tenants:
                budget = float(policy.target * self.slo[m])
                rules.fill_averages(self.dims, self.spans[m], m, adapts, CORES, budget, averages[m])
        elif family == _loop.SLACK:
            plans = self._plans(slack, policy.target, policy.byte_price)
        return (
            *(family, np.array(ints, np.int64), np.array(floats, np.float64), CORES, self.bandwidth, 0.0),
            *(self.dims, self.spans, self.moved, tight, averages, len(PRICES), *plans),
        )

    def _size(self, model: int) -> tuple[int, int, int]:
        units, versions, levels = (int(each) for each in self.dims[4 * model : 4 * model + 3])
        return units, versions, levels

    def _plans(self, slack: ModuleType, target: float, byte_price: float) -> list[Any]:
        byte_cost = byte_price * CORES / self.bandwidth
        choices = np.array(choices_of(CORES), np.int64)
        prices = np.array(PRICES)
        made: list[list[Any]] = [[], [], [], [], []]
        for m in range(len(self.truths)):
            units, _, levels = self._size(m)
            rows = levels * len(PRICES)
            tables = [np.zeros(rows * each, np.int64) for each in (units, units, units + 1, units + 1)]
            tables.append(np.zeros(levels, np.int64))
            scratch = [np.zeros(len(choices), kind) for kind in (np.float64, np.int64, np.int64, np.int64)]
            budget = float(target * self.slo[m])
            slack.fill_plans(
                *(self.dims, self.spans[m], self.moved[m], m, prices, float(SWITCH_NS), byte_cost, choices, budget),
                *(*scratch, *tables),
            )
            for into, table in zip(made, tables, strict=True):
                into.append(table)
        return [_rows(each, np.int64) for each in made]

    def play(self, policy: tuple[Any, ...], drop: DropRule, given: Arrivals, most_misses: Ints | None = None) -> Played:
        """Play arrivals under a policy as `cast` made it ready. Without `most_misses` to their ends."""
        loop, *_ = compiled()
        count = len(given.times)
        limit = np.full(len(self.slo), count, np.int64) if most_misses is None else most_misses
        ends, outcomes, stats = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(_loop.STATS, np.int64)
        end = loop.play(
            *(given.times, given.who, self.slo, _DROPS[drop], self.admit, limit, *self.world, *policy),
            *(ends, outcomes, stats),
        )
        assert end >= -1, "more cores were given than there are"
        return Played(end, ends, outcomes, stats)


def least_work(costs: UnitCosts, slo_ns: int) -> int:
    """No query that ends in time takes less core time than this, whatever runs beside it.

    Units may take any numbers of cores and versions. Their times must add up to the SLO at most; that is relaxed (weak
    duality). For any price of time, take the least of core time and time at that price. Less the price of the SLO, it
    is a bound.
    """
    ns = np.array(costs.ns, np.float64).reshape(costs.versions, costs.cores, costs.units).min(axis=0)
    cores = np.arange(1, costs.cores + 1)[:, None]
    prices = (0.0, *np.geomspace(0.1, 1000.0, 200))
    return int(max(float(((cores + price) * ns).min(axis=0).sum()) - price * slo_ns for price in prices))


def _isolated(costs: UnitCosts) -> int:
    """Time alone on all cores, each unit in its fastest version."""
    ns = np.array(costs.ns).reshape(costs.versions, costs.cores, costs.units)
    return int(ns[:, -1].min(axis=0).sum())


def warm_up(drawn: Drawn, models: Sequence[Model], made: Efficiency) -> None:
    """Compile everything once, before processes are forked."""
    stage = Stage(drawn, [tables_of(drawn, models[0], made)])
    given = arrivals(0, 4, [1.0]).at(100.0)
    for policy in (ModelWise(LANES), Prema(LANES), SlackBlocks(LANES)):
        stage.play(stage.cast(policy), DropRule.HOPELESS, given)
