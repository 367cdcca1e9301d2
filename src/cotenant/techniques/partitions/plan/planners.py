"""Planners by name, as commands and configuration files know them; a package may add its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cotenant import registry
from cotenant.errors import InvalidValueError, PlanError
from cotenant.techniques.partitions.plan.types import Costs, DeviceType, Infeasible, Load, Plan, Planner

MakePlanner = Callable[[float, float], Planner]
"""Makes a planner that adds a share (the first) to every rate, and scales its time to search by an effort."""


@dataclass(frozen=True, slots=True)
class _Registered:
    make: MakePlanner
    is_blind: bool


_REGISTERED: dict[str, _Registered] = {}
_BLIND = ("elastic",)
"""Those of this package that do not look at interference."""


def register(name: str, planner: MakePlanner, *, is_blind: bool = False) -> None:
    """Add a planner under a name; an installed package adds one by an entry point of the group `registry.PLANNERS`.

    A planner that `is_blind` does not look at interference: its plans may not hold beside neighbours, and an error
    about one says why.

    Raises PlanError for a name that is taken.
    """
    if name in (*registry.built_in(registry.PLANNERS), *_REGISTERED):
        raise PlanError(f"planner {name!r} is registered already, expected another name")
    _REGISTERED[name] = _Registered(planner, is_blind)


def is_blind(name: str) -> bool:
    """Whether the planner of that name does not look at interference."""
    return name in _BLIND or (name in _REGISTERED and _REGISTERED[name].is_blind)


def make_planner(name: str, headroom: float = 0.0, effort: float = 1.0) -> Planner:
    """A planner with its own settings and that share added to every rate.

    `effort` scales the time that "ours" may search; the others of this package take what they need.

    Raises PlanError for a name that is none, InvalidValueError for a negative headroom.
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


def ours(headroom: float, effort: float) -> Planner:
    """Local search over columns, and an exact solver where it is installed. A `MakePlanner`."""
    from cotenant.techniques.partitions.plan.search.optimal import Optimal

    return Optimal(headroom=headroom, time_limit_s=effort)


def elastic_int(headroom: float, effort: float) -> Planner:
    """Elastic partitioning that looks at interference. A `MakePlanner`."""
    from cotenant.techniques.partitions.plan.elastic import Elastic

    return Elastic(with_interference=True, headroom=headroom)


def elastic(headroom: float, effort: float) -> Planner:
    """Elastic partitioning, blind to interference. A `MakePlanner`."""
    from cotenant.techniques.partitions.plan.elastic import Elastic

    return Elastic(with_interference=False, headroom=headroom)
