"""Planner `ours`: column generation, local search and exact covering, with a lower bound of the price.

A plan is a set of configurations (`columns`) that covers all rates: a configuration problem, like cutting stock.

1. Start from the running plan and that of elastic partitioning. Solve small instances exactly (`opt_exact`).
2. Solve the linear relaxation (`opt_master`); its dual prices guide a greedy start and the local search.
3. Search cheaper sets of devices by local search (`local_search`), down to the lower bound (`opt_bound`).
4. If savings remain possible, tighten the bound (`opt_pricing`), and search again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.plan.check import check_plan
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.partial_plan import PartialPlan, impossible_alone
from cotenant.techniques.partitions.plan.rounds import RoundCache, round_cache_of
from cotenant.techniques.partitions.plan.search.columns import (
    Column,
    ColumnGenerator,
    DeviceConfiguration,
    Floats,
    device_plan,
)
from cotenant.techniques.partitions.plan.search.local_search import Search, SearchBudget, kept
from cotenant.techniques.partitions.plan.search.opt_bound import Bound
from cotenant.techniques.partitions.plan.search.opt_exact import all_configurations, cover, has_solver
from cotenant.techniques.partitions.plan.search.opt_moves import aligned, cheaper, limited, moved
from cotenant.techniques.partitions.plan.search.opt_pool import PricedColumns
from cotenant.techniques.partitions.plan.search.opt_pricing import priced_columns, proven
from cotenant.techniques.partitions.plan.search.opt_refusal import refusal
from cotenant.techniques.partitions.plan.types import (
    Costs,
    DeviceType,
    Infeasible,
    Load,
    Plan,
    Planner,
    checked,
    padded,
)

CONFIGURATIONS_PER_S = 600
"""Configurations that a core evaluates in a second (20 loads): converts time limits into budgets of work."""
_SLICE, _FRESH = 80, 400
"""Configurations of one attempt of the search: from the devices of a plan, and from empty devices."""
_PROOF_CONFIGURATIONS = 0.04
"""Work of a tighter bound, in configurations for each load, batch and size."""
_RESTARTS = 3
_SMALL = 20_000
"""Most columns and configurations of a device type that are enumerated for an exact answer."""
_SOLVER_S = 0.5


class State(NamedTuple):
    """The types of the devices in use, and their configurations."""

    kinds: tuple[str, ...]
    configs: tuple[DeviceConfiguration, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A plan or why there is none, a lower bound of the price, and whether the plan is proven optimal.

    Bound and proof cover plans

    - with at most one slot of each tenant in a partition (the checker also accepts two),
    - with the groups that make a round shortest without neighbours, or with no groups,
    - with at most the planner's number of partitions on a device.

    `price`: price of the plan's devices, infinite without a plan. `moved`: tenants that change partitions.
    """

    plan: Plan | Infeasible
    price: float
    bound: float
    is_proven: bool
    moved: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """Excess of the plan's price over the bound, as a share of the bound."""
        return self.price / self.bound - 1 if self.bound > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Optimal(Planner):
    """Minimises the price of the devices, then the number of moved tenants, then maximises slack.

    The plan passes the checker, and is never more expensive than that of elastic partitioning with interference. A
    tenant may be in several partitions, with a batch of its own in each. Every slot runs as slowly as its worst
    co-runners make it.

    - `most_partitions` of a device (0 for any number), `most_slots` of a partition.
    - `time_limit_s` for finding any plan, `saving_s` for cheaper plans after that. Both count work done at
      `CONFIGURATIONS_PER_S`, not the clock, so results are deterministic.
    - `solver`: use OR-Tools if installed: exact plans of small instances, dual prices, and tighter bounds.
    - `move_cost`: price of moving one tenant.

    Raises InvalidValueError when a setting is out of its range.
    """

    headroom: float = 0.0
    time_limit_s: float = 2.0
    saving_s: float = 1.0
    most_partitions: int = 0
    most_slots: int = 3
    move_cost: float = 0.02
    solver: bool = True
    seed: int = 0
    label: str = ""

    def __post_init__(self) -> None:
        for field, least in (
            ("time_limit_s", 0),
            ("saving_s", 0),
            ("most_partitions", 0),
            ("most_slots", 1),
            ("move_cost", 0),
        ):
            if not getattr(self, field) >= least:
                raise InvalidValueError("optimal planner", field, getattr(self, field), f"a number from {least}")

    @property
    @override
    def name(self) -> str:
        return self.label or "ours"

    @override
    def plan(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Plan | Infeasible:
        return self.solve(loads, devices, costs, running).plan

    def solve(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Found:
        """As `plan`, with the bound."""
        checked(loads, devices)
        padded_loads = padded(loads, self.headroom)
        if not padded_loads:
            return Found(Plan((), self.name), 0.0, 0.0, True)
        cache = round_cache_of(costs)
        allowed = [limited(device, self.most_partitions) for device in devices]
        for load in padded_loads:
            impossible = impossible_alone(PartialPlan(cache, allowed), load)
            if impossible is not None:
                return Found(impossible, np.inf, np.inf, True)
        return _Solving(self, padded_loads, allowed, cache, running).solve()


class _Solving:
    """State of one call of `Optimal.solve`."""

    def __init__(
        self, how: Optimal, loads: Sequence[Load], devices: Sequence[DeviceType], cache: RoundCache, old: Plan | None
    ) -> None:
        self.how = how
        self.loads = tuple(loads)
        self.devices = tuple(devices)
        self.cache = cache
        self.running = old
        self.types = {device.name: device for device in devices}
        self.inventory = tuple(device.name for device in devices)
        self.rates = np.array([load.rate_per_s for load in loads])
        self.generators = {name: ColumnGenerator(cache, loads, kind) for name, kind in self.types.items()}
        self.bound = Bound(self.generators, self.rates)
        self.row_values = self._row_values()
        self.priced: PricedColumns | None = None
        self.budget = SearchBudget(max(1, round(how.time_limit_s * CONFIGURATIONS_PER_S)))

    def solve(self) -> Found:
        least = self.bound.least(self.inventory)
        small = self._small()
        states = self._starts()
        if small is not None:
            state, is_proven = small
            if state is None and is_proven and not states:
                return Found(self._infeasible(None), np.inf, least, True)
            if state is not None and is_proven and self.running is None:
                return self._found(state, self.price(state.kinds), True)
        if small is not None and small[0] is not None:
            states.append(small[0])
        best = min(states, key=self.score) if states else None
        if best is None or self.price(best.kinds) > least * (1 + 1e-9):
            self.priced = priced_columns(self.generators, self.rates, self.row_values, solver=self.how.solver)
            greedy = self._greedy()
            if greedy is not None and (best is None or self.score(greedy) < self.score(best)):
                best = greedy
        if best is None:
            best, search = self._on_all()
            if best is None:
                return Found(self._infeasible(search), np.inf, least, False)
        self.budget = SearchBudget(round(self.how.saving_s * CONFIGURATIONS_PER_S))
        likely = 0.0 if self.priced is None else self.priced.least
        best = self._reduced(best, max(least, likely))
        if self.price(best.kinds) > least * (1 + 1e-9) and self._is_provable():
            goal = min(self.price(best.kinds), max(least, likely)) * (1 - 1e-9)
            proven(self.bound, self.generators, self.rates, lambda m: self.bound.least(self.inventory) >= min(goal, m))
            least = self.bound.least(self.inventory)
        best = self._reduced(best, least)
        return self._found(best, least, False)

    def _is_provable(self) -> bool:
        """Whether a tighter bound takes less work than the search for savings that it may replace."""
        work = sum(generator.rows.size * len(generator.kind.sizes) for generator in self.generators.values())
        is_small = work * _PROOF_CONFIGURATIONS <= self.how.saving_s * CONFIGURATIONS_PER_S
        has_groups = any(generator.groups for generator in self.generators.values())  # the tighter bound has none
        return self.how.solver and has_solver() and self.priced is not None and is_small and not has_groups

    def price(self, kinds: Sequence[str]) -> float:
        """Price of these devices."""
        return sum(self.types[name].price for name in kinds)

    def score(self, state: State) -> float:
        """Price of the devices and of the moved tenants."""
        cost = self.price(state.kinds)
        return cost if self.running is None else cost + self.how.move_cost * len(moved(self._plan(state), self.running))

    def _row_values(self) -> Floats:
        shares = [[r * each.kind.whole / z for z, r in each.best.items()] for each in self.generators.values()]
        most = np.max([np.max(each, axis=0) for each in shares], axis=0)
        found: Floats = 1 / most
        return found

    def _starts(self) -> list[State]:
        """Feasible start states: of the running plan and of elastic partitioning."""
        plans: list[Plan | Infeasible] = [] if self.running is None else [self.running]
        elastic = Elastic(with_interference=True)
        costs = self.cache.costs
        plans.append(elastic.plan(self.loads, [limited(device, 2) for device in self.devices], costs))
        states = [self._state(plan) for plan in plans if isinstance(plan, Plan)]
        return [state for state in states if state is not None]

    def _state(self, plan: Plan) -> State | None:
        """The state of another planner's plan; None if it serves less than all loads, or the checker refuses it."""
        numbers = {load.tenant: number for number, load in enumerate(self.loads)}
        kinds: list[str] = []
        configs: list[DeviceConfiguration | None] = []
        for device in plan.devices:
            generator = self.generators.get(device.device)
            if generator is None:
                return None
            columns = []
            for partition in device.partitions:
                slots = [(numbers[s.tenant], s.batch) for s in partition.slots if s.tenant in numbers]
                if any(batch not in generator.positions[number] for number, batch in slots):
                    return None
                if slots:
                    columns.append(Column(partition.size, tuple(slots)))
            if columns:
                kinds.append(device.device)
                configs.append(generator.config(tuple(columns)))
        return self._accepted(kinds, configs)

    def _accepted(self, kinds: Sequence[str], configs: Sequence[DeviceConfiguration | None]) -> State | None:
        """The state if it serves all loads and the checker finds no violation, else None."""
        used = [(name, config) for name, config in zip(kinds, configs, strict=False) if config is not None]
        exact = [self.generators[name].config(config.columns) for name, config in used]
        state = State(tuple(name for name, _ in used), tuple(config for config in exact if config is not None))
        if len(state.configs) < len(used) or (self._search(()).missing(state.configs) > 0).any():
            return None
        return None if check_plan(self._plan(state), self.loads, self.devices, self.cache.costs) else state

    def _plan(self, state: State) -> Plan:
        served = self._search(()).served(state.configs)
        shares = np.minimum(1.0, self.rates / np.maximum(served, 1e-300)).tolist()
        made = tuple(
            device_plan(self.generators[name], config, shares)
            for name, config in zip(state.kinds, state.configs, strict=True)
        )
        plan = Plan(made, self.how.name)
        return plan if self.running is None else aligned(plan, self.running)

    def _search(self, kinds: Sequence[str], seed: int = 0) -> Search:
        return Search(
            self.generators,
            kinds,
            self.rates,
            self.row_values if self.priced is None else self.priced.rows,
            self.budget,
            most_slots=self.how.most_slots,
            seed=seed,
            priced=self.priced,
        )

    def _greedy(self) -> State | None:
        """Greedy state: device after device, each of the type with the highest value per price."""
        search = self._search(())
        left = list(self.inventory)
        kinds: list[str] = []
        configs: list[DeviceConfiguration | None] = []
        wanted = self.rates
        while left and (wanted > 0).any():
            options = []
            for name in dict.fromkeys(left):
                config = search.fill(name, wanted, search.row_values)
                if config is not None:
                    value = float(np.minimum(wanted, config.served) @ search.row_values)
                    options.append((value / max(self.types[name].price, 1e-9), name, config))
            if not options:
                return None
            _, name, config = max(options, key=lambda option: option[0])
            kinds.append(name)
            configs.append(config)
            left.remove(name)
            wanted = search.missing(configs)
        return None if (wanted > 0).any() else self._accepted(kinds, configs)

    def _on_all(self) -> tuple[State | None, Search]:
        """A state on the whole inventory by local search, or None; and the best search."""
        best = self._search(self.inventory, self.how.seed)
        lost = np.inf
        part = max(1, self.budget.left // _RESTARTS)
        for attempt in range(0 if self.bound.is_too_little(self.inventory) else _RESTARTS):
            search = self._search(self.inventory, self.how.seed + attempt)
            search.budget = SearchBudget(part)
            is_found = search.run([None] * len(self.inventory))
            state = self._accepted(self.inventory, search.configs) if is_found else None
            if state is not None:
                return state, search
            left = float(search.missing(search.configs) @ self.row_values)
            if left < lost:
                best, lost = search, left
        return None, best

    def _reduced(self, best: State, least: float) -> State:
        """Reduce the devices as long as the budget lasts and the bound allows it, down to the price `least`."""
        is_better = True
        while is_better and self.budget.left > 0 and self.price(best.kinds) > least * (1 + 1e-9):
            is_better = False
            for kinds in cheaper(best.kinds, self.inventory, self.types):
                is_hopeful = self.price(kinds) >= least * (1 - 1e-9) and not self.bound.is_too_little(kinds)
                if self.budget.left > 0 and is_hopeful:
                    state = self._tried(kinds, best)
                    if state is not None and self.score(state) < self.score(best):
                        best, is_better = state, True
                        break
        return best

    def _tried(self, kinds: tuple[str, ...], best: State) -> State | None:
        """A state on these devices, searched alternately from the best state and from empty devices; None without."""
        total = self.budget.left
        spent, attempt = 0, 0
        while spent < total:
            part = SearchBudget(min(total - spent, _SLICE if attempt % 2 == 0 else _FRESH))
            search = self._search(kinds, self.how.seed + attempt)
            search.budget = part
            start = (
                kept(kinds, best.kinds, best.configs, self.rates, self.row_values)
                if attempt % 2 == 0
                else [None] * len(kinds)
            )
            before = part.left
            is_found = search.run(start)
            used = max(1, before - part.left)
            spent += used
            self.budget.left -= used
            state = self._accepted(kinds, search.configs) if is_found else None
            if state is not None:
                return state
            attempt += 1
        return None

    def _small(self) -> tuple[State | None, bool] | None:
        """The exact answer and whether it is proven; None if there are too many configurations."""
        if not self.how.solver or not has_solver() or self.how.most_slots < len(self.loads):
            return None
        pool = {}
        for name, generator in self.generators.items():
            configs = all_configurations(generator, self.rates, min(self.how.most_slots, len(self.loads)), _SMALL)
            if configs is None:
                return None
            pool[name] = configs
        counts = {name: self.inventory.count(name) for name in pool}
        chosen, is_proven = cover(pool, self.generators, counts, self.rates, 10 * _SOLVER_S, self.how.seed)
        if chosen is None:
            return None, is_proven
        state = self._accepted([name for name, _ in chosen], [config for _, config in chosen])
        return state, is_proven and state is not None

    def _found(self, state: State, bound: float, is_proven: bool) -> Found:
        plan = self._plan(state)
        gone = () if self.running is None else moved(plan, self.running)
        price = self.price(state.kinds)
        return Found(plan, price, min(bound, price), is_proven or price <= bound * (1 + 1e-9), gone)

    def _infeasible(self, search: Search | None) -> Infeasible:
        if search is None or not any(search.configs):
            search = self._search(self.inventory, self.how.seed)
            search.budget = SearchBudget(_SLICE)
            search.run([None] * len(self.inventory))
        is_too_little = self.bound.is_too_little(self.inventory)
        return refusal(self.loads, search, self.devices, self.cache, is_too_little, self._would_do)

    def _would_do(self, interference: bool, memory: bool) -> bool:
        """Whether a short search without some constraint serves all loads."""
        kinds = {
            name: kind if memory else replace(kind, memory_bytes=kind.memory_bytes << 20)
            for name, kind in self.types.items()
        }
        generators = {
            name: ColumnGenerator(self.cache, self.loads, kind, interference=interference)
            for name, kind in kinds.items()
        }
        priced = priced_columns(generators, self.rates, self.row_values, solver=False)
        slots, budget = self.how.most_slots, SearchBudget(_SLICE)
        search = Search(
            generators, self.inventory, self.rates, self.row_values, budget, most_slots=slots, priced=priced
        )
        return search.run([None] * len(self.inventory))
