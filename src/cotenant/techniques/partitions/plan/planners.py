"""Planners by name, as commands and configuration files know them; a package may add its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.plan.types import Costs, DeviceType, Infeasible, Load, Plan, PlanError, Planner

DEFAULT_PLANNER = "ours"
PLANNERS = (DEFAULT_PLANNER, "elastic_int", "elastic")
"""Those of this package; see `register` for others."""
GROUP = "cotenant.planners"
"""Entry points by which an installed package adds planners: each names a `MakePlanner`."""

MakePlanner = Callable[[float, float], Planner]
"""Makes a planner that adds a share (the first) to every rate, and scales its time to search by an effort."""


@dataclass(frozen=True, slots=True)
class _Registered:
    make: MakePlanner
    is_blind: bool


_REGISTERED: dict[str, _Registered] = {}


def register(name: str, planner: MakePlanner, *, is_blind: bool = False) -> None:
    """Add a planner under a name. One that `is_blind` does not look at interference: its plans may not hold beside
    neighbours, and an error about one says why.

    Raises PlanError for a name that is taken.
    """
    if name in _REGISTERED:
        raise PlanError(f"planner {name!r} is registered already, expected another name")
    _REGISTERED[name] = _Registered(planner, is_blind)


def is_blind(name: str) -> bool:
    """Whether the planner of that name does not look at interference."""
    return name in _REGISTERED and _REGISTERED[name].is_blind


def make_planner(name: str, headroom: float = 0.0, effort: float = 1.0) -> Planner:
    """A planner with its own settings and that share added to every rate.

    `effort` scales the time that "ours" may search; the others of this package take what they need.

    Raises PlanError for a name that is none, InvalidValueError for a negative headroom.
    """
    if name not in _REGISTERED:
        for point in entry_points(group=GROUP):
            if point.name == name:
                register(name, point.load())
    if name not in _REGISTERED:
        raise PlanError(
            f"planner is {name!r}, expected one of {', '.join(_REGISTERED)}, or one that a package adds by the entry "
            f"points {GROUP!r}; greedy, sbp and ideal are yardsticks of the benchmarks (python -m bench.plan)"
        )
    if not 0 <= headroom < float("inf"):
        raise InvalidValueError("planner", "headroom", headroom, "a share from 0")
    return _REGISTERED[name].make(headroom, effort)


@dataclass(frozen=True, slots=True)
class ForBursts:
    """A planner that is asked for the rates of `with_poisson_headroom`: what arrivals at random need, tenant by tenant.

    Rates in its answers are those larger ones. The planner within should have no headroom of its own.
    """

    within: Planner

    @property
    def name(self) -> str:
        """See Planner."""
        return self.within.name

    def plan(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Plan | Infeasible:
        """See Planner."""
        from cotenant.techniques.partitions.plan.poisson_headroom import with_poisson_headroom

        return self.within.plan(with_poisson_headroom(loads), devices, costs, running)


def _ours(headroom: float, effort: float) -> Planner:
    from cotenant.techniques.partitions.plan.search.optimal import Optimal

    return Optimal(headroom=headroom, time_limit_s=effort)


def _elastic(headroom: float, *, with_interference: bool) -> Planner:
    from cotenant.techniques.partitions.plan.elastic import Elastic

    return Elastic(with_interference=with_interference, headroom=headroom)


register(DEFAULT_PLANNER, _ours)
register("elastic_int", lambda headroom, _: _elastic(headroom, with_interference=True))
register("elastic", lambda headroom, _: _elastic(headroom, with_interference=False), is_blind=True)
