"""Plans that promise a share of misses: their own simulation with Poisson arrivals confirms it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from typing_extensions import override

from cotenant.errors import InvalidValueError, PlanError
from cotenant.metrics import Summary
from cotenant.techniques.partitions.plan.application import Application
from cotenant.techniques.partitions.plan.planners import PlannerAround
from cotenant.techniques.partitions.plan.types import MISSES, Costs, DeviceType, Infeasible, Load, Plan
from cotenant.techniques.partitions.world import simulate_plan

SIMULATED_S = 60.0
SIMULATED_ROWS = 20_000
"""Rows that are simulated at most; the simulated time is shorter for high rates."""
SEED = 1
_LEAST_QUERIES = 3.0
"""Queries of the slowest tenant in a simulation that confirms a promise, over 1 / misses."""
_MOST_ROWS = 3
"""Largest factor on the rows of a simulation for that."""
SEARCHED_ROWS = 4_000
"""Rows of simulations in searches, which plan many times."""
_ROUNDS = 12
_HIGHER, _TIGHTER, _PATIENCE = 1.15, 0.85, 3
"""Factors on the rates of tenants that miss too much and, after `_PATIENCE` rounds, on their SLOs."""


def simulated(
    plan: Plan,
    loads: Sequence[Load],
    applications: Sequence[Application],
    costs: Costs,
    misses: float | None = None,
    rows: int = SIMULATED_ROWS,
) -> tuple[Summary, float]:
    """Outcomes of a plan with Poisson arrivals of about `rows` rows, and the simulated seconds.

    `loads` include those of the applications' stages. `misses`: the promise that it confirms; then it has more rows if
    a tenant would have too few.
    """
    total = sum(load.rate_per_s for load in loads)
    seconds = min(SIMULATED_S, rows / total)
    if misses is not None:
        slowest = min(load.rate_per_s for load in loads)
        seconds = max(seconds, min(_LEAST_QUERIES / misses / slowest, _MOST_ROWS * rows / total))
    return simulate_plan(plan, loads, costs, duration_s=seconds, seed=SEED, applications=applications), seconds


def missed(summary: Summary) -> dict[str, float]:
    """Share of the queries of each tenant that were late or not answered."""
    return {each.tenant: (each.offered - each.answered) / max(1, each.offered) for each in summary.tenants}


@dataclass(frozen=True, slots=True)
class Promising(PlannerAround):
    """Planner of plans that simulations confirm: each tenant and application misses at most `misses` of its SLOs.

    While a simulation shows more, `within` plans again for higher rates of these tenants, then for tighter SLOs, too.
    The plans have these larger rates in their slots. `rows`: see `simulated`.

    Raises InvalidValueError for a share outside of (0, 1).
    """

    misses: float
    applications: tuple[Application, ...] = ()
    rows: int = SIMULATED_ROWS

    def __post_init__(self) -> None:
        if not 0.0 < self.misses < 1.0:
            raise InvalidValueError("plan", "misses", self.misses, "a share above 0 and below 1, as 0.01 or 1%")

    @override
    def plan(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Plan | Infeasible:
        applications = _at_rates(self.applications, loads)
        staged = {app.name: {app.tenant(stage) for stage in app.stages} for app in applications}
        tried, why = tuple(loads), ""
        worst = max(loads, key=lambda load: load.rate_per_s).tenant
        for turn in range(_ROUNDS):
            found = self.within.plan(tried, devices, costs, running)
            if isinstance(found, Infeasible):
                return Infeasible(worst, MISSES, f"{why} ({found.detail})") if turn else found
            shares = missed(simulated(found, loads, applications, costs, self.misses, self.rows)[0])
            over = {name: share for name, share in shares.items() if share > self.misses}
            if not over:
                return found
            name = max(over, key=lambda each: over[each])
            worst = next(iter(staged.get(name, {name})))
            why = (
                f"{name!r} misses {over[name]:.2%} of its SLOs with Poisson arrivals, and {self.misses:.2%} are "
                "promised; with more reserve for it there is no plan"
            )
            stricter = {each for name in over for each in staged.get(name, {name})}
            tried = _stricter(tried, stricter, is_slo=turn >= _PATIENCE)
        return Infeasible(worst, MISSES, why)


def _stricter(loads: Sequence[Load], tenants: Collection[str], *, is_slo: bool) -> tuple[Load, ...]:
    """The loads, those of some tenants with higher rates, and with tighter SLOs if `is_slo`."""
    return tuple(
        replace(
            load,
            rate_per_s=load.rate_per_s * _HIGHER,
            slo_ns=max(1, round(load.slo_ns * _TIGHTER)) if is_slo else load.slo_ns,
        )
        if load.tenant in tenants
        else load
        for load in loads
    )


def _at_rates(applications: Sequence[Application], loads: Sequence[Load]) -> tuple[Application, ...]:
    """The applications at the rates of the loads of their stages; those without such loads are left out."""
    rates = {load.tenant: load.rate_per_s for load in loads}
    found = [(app, [rates.get(app.tenant(stage)) for stage in app.stages]) for app in applications]
    return tuple(replace(app, rate_per_s=known[0]) for app, known in found if None not in known and known[0])


def share_of(text: str) -> float:
    """A share of misses from a text such as "1%" or "0.01". Raises PlanError."""
    try:
        value = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1.0:
        raise PlanError(f"misses is {text!r}, expected a share above 0 and below 1, as 1% or 0.01")
    return value
