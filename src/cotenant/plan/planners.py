"""Planners by name, as commands and configuration files know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.errors import InvalidValueError
from cotenant.plan.types import Costs, DeviceType, Infeasible, Load, Plan, PlanError, Planner

PLANNERS = {
    "ours": "configuration columns, exact with a solver, local search without; fewest devices, then most slack",
    "elastic_int": "elastic partitioning that respects interference (GPU-let)",
    "elastic": "elastic partitioning, blind to interference (GPU-let)",
    "greedy": "partitions without time sharing, blind to interference",
    "sbp": "time sharing of undivided devices (Nexus)",
    "ideal": "exhaustive over the splits of all devices; slow, a yardstick",
}
"""What each does, in a few words."""
BLIND = ("elastic", "greedy", "sbp")
"""Those that do not look at interference: beside neighbours their plans may not hold."""
DEFAULT_PLANNER = "ours"


def make_planner(name: str, headroom: float = 0.0, effort: float = 1.0) -> Planner:
    """A planner with its own settings and that share added to every rate.

    `effort` scales the time that "ours" may search; the others take what they need.

    Raises PlanError for a name that is none, InvalidValueError for a negative headroom.
    """
    if name not in PLANNERS:
        raise PlanError(f"planner is {name!r}, expected one of {', '.join(PLANNERS)}")
    if not 0 <= headroom < float("inf"):
        raise InvalidValueError("planner", "headroom", headroom, "a share from 0")
    if name == "ours":
        from cotenant.plan.optimal import Optimal

        return Optimal(headroom=headroom, time_limit_s=effort)
    if name == "ideal":
        from cotenant.plan.ideal import Ideal

        return Ideal(headroom=headroom)
    if name == "sbp":
        from cotenant.plan.nexus import SquishyBinPacking

        return SquishyBinPacking(headroom=headroom)
    if name == "greedy":
        from cotenant.plan.greedy import greedy

        return greedy(headroom)
    from cotenant.plan.elastic import Elastic

    return Elastic(with_interference=name == "elastic_int", headroom=headroom)


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
        from cotenant.plan.arrivals import with_poisson_headroom

        return self.within.plan(with_poisson_headroom(loads), devices, costs, running)
