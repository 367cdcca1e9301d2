"""Registry of planners by name, for commands and configuration files; other packages may add planners."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from cotenant import registry
from cotenant.errors import InvalidValueError, PlanError
from cotenant.techniques.partitions.plan.types import SERVER, Costs, DeviceType, Infeasible, Load, Plan, Planner

MakePlanner = Callable[[float, float], Planner]
"""Makes a planner from its headroom (a share added to every rate) and its effort (a factor on its search time)."""


@dataclass(frozen=True, slots=True)
class _Registered:
    make: MakePlanner
    is_blind: bool


_REGISTERED: dict[str, _Registered] = {}
_BLIND = ("elastic",)
"""Planners of this package without an interference model."""


def register(name: str, planner: MakePlanner, *, is_blind: bool = False) -> None:
    """Add a planner under a name; an installed package adds one by an entry point of the group `registry.PLANNERS`.

    `is_blind`: the planner ignores interference, so its plans may be infeasible beside neighbours. Errors say so.

    Raises PlanError for a name that is taken.
    """
    if name in (*registry.built_in(registry.PLANNERS), *_REGISTERED):
        raise PlanError(f"planner {name!r} is registered already, expected another name")
    _REGISTERED[name] = _Registered(planner, is_blind)


def is_blind(name: str) -> bool:
    """Whether the planner of that name ignores interference."""
    return name in _BLIND or (name in _REGISTERED and _REGISTERED[name].is_blind)


def make_planner(name: str, headroom: float = 0.0, effort: float = 1.0) -> Planner:
    """A planner by name. `headroom`: share added to every rate; `effort`: factor on the search time of "ours".

    Raises PlanError for an unknown name, InvalidValueError for a negative headroom.
    """
    make: MakePlanner | None = _REGISTERED[name].make if name in _REGISTERED else registry.load(registry.PLANNERS, name)
    if make is None:
        names = ", ".join((*registry.built_in(registry.PLANNERS), *_REGISTERED))
        raise PlanError(
            f"planner is {name!r}, expected one of {names}, or one that a package adds by the entry "
            f"points {registry.PLANNERS!r}; greedy, sbp and ideal are yardsticks of the benchmarks (python -m "
            "bench.plan)"
        )
    if not 0 <= headroom < float("inf"):
        raise InvalidValueError("planner", "headroom", headroom, "a share from 0")
    return make(headroom, effort)


@dataclass(frozen=True, slots=True)
class PlannerAround(Planner, ABC):
    """Planner that changes the request, or judges the plans, of the planner `within`, and has its name."""

    within: Planner

    @property
    @override
    def name(self) -> str:
        return self.within.name

    @abstractmethod
    @override
    def plan(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Plan | Infeasible: ...


@dataclass(frozen=True, slots=True)
class ForBursts(PlannerAround):
    """Planner for Poisson arrivals: plans for the rates of `with_poisson_headroom` by the planner `within`.

    Its plans have these larger rates. `within` should have no headroom of its own.
    """

    @override
    def plan(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Plan | Infeasible:
        from cotenant.techniques.partitions.plan.poisson_headroom import with_poisson_headroom

        return self.within.plan(with_poisson_headroom(loads), devices, costs, running)


@dataclass(frozen=True, slots=True)
class ForServers(PlannerAround):
    """Planner that refuses more requests than the servers of the devices can process; else `within` plans.

    `overload` says why servers of these devices cannot process so many requests, by rows a second of each model, or is
    "". `later`: tenants that no request is for, as later stages of applications are. Rates count `factor` times.
    """

    overload: Callable[[Mapping[str, float], Sequence[DeviceType]], str]
    later: Collection[str] = ()
    factor: float = 1.0

    @override
    def plan(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Plan | Infeasible:
        requests = [load for load in loads if load.tenant not in self.later]
        rates: dict[str, float] = {}
        for load in requests:
            rates[load.model] = rates.get(load.model, 0.0) + load.rate_per_s * self.factor
        if devices and (problem := self.overload(rates, devices)):
            return Infeasible(max(requests, key=lambda load: load.rate_per_s).tenant, SERVER, problem)
        return self.within.plan(loads, devices, costs, running)


def ours(headroom: float, effort: float) -> Planner:
    """Column search, with an exact solver if OR-Tools is installed. A `MakePlanner`."""
    from cotenant.techniques.partitions.plan.search.optimal import Optimal

    return Optimal(headroom=headroom, time_limit_s=effort)


def elastic_int(headroom: float, effort: float) -> Planner:
    """Elastic partitioning with the interference model. A `MakePlanner`."""
    from cotenant.techniques.partitions.plan.elastic import Elastic

    return Elastic(with_interference=True, headroom=headroom)


def elastic(headroom: float, effort: float) -> Planner:
    """Elastic partitioning without an interference model. A `MakePlanner`."""
    from cotenant.techniques.partitions.plan.elastic import Elastic

    return Elastic(with_interference=False, headroom=headroom)
