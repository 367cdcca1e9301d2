"""Plans that keep their SLOs when arrivals vary: for more than the rates, by as much as a simulation asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from bench.papers.gpulet._simulate import Simulated, simulate_plan
from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.plan.application import Application
from cotenant.techniques.partitions.plan.poisson_headroom import with_poisson_headroom
from cotenant.techniques.partitions.plan.types import NS_PER_S, Costs, DeviceType, Infeasible, Load, Plan, Planner

_MOST_GROWTH = 0.4
_SHRINK = 0.7
_EASE = 0.85


@dataclass(frozen=True, slots=True)
class Trial:
    """How plans are tried: with arrivals of so many seconds, in at most so many rounds, for this share of violations.

    Raises InvalidValueError when a value is out of its range.
    """

    target: float = 0.01
    rounds: int = 10
    duration_s: float = 30.0
    warmup_s: float = 1.0
    seed: int = 1
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise InvalidValueError("trial", "target", self.target, "a share between 0 and 1")
        if self.rounds < 1:
            raise InvalidValueError("trial", "rounds", self.rounds, "at least 1")
        if not 0 <= self.warmup_s < self.duration_s:
            raise InvalidValueError("trial", "warmup_s", self.warmup_s, "from 0, shorter than the trial")


@dataclass(frozen=True, slots=True)
class Tried:
    """The best plan that was found, or why there is none, and what became of the queries under it.

    `planned` are the loads with the rates that the planner was asked for.
    """

    plan: Plan | Infeasible
    planned: tuple[Load, ...]
    simulated: Simulated | None
    is_met: bool


def plan_simulated(
    planner: Planner,
    loads: Sequence[Load],
    devices: Sequence[DeviceType],
    costs: Costs,
    *,
    applications: Sequence[Application] = (),
    actual: Costs | None = None,
    trial: Trial | None = None,
    running: Plan | None = None,
) -> Tried:
    """Plan, simulate, and plan again for more where queries were late, for less where none was.

    It starts from `with_poisson_headroom`. It ends with the first plan under which late and dropped queries are within
    the target share of all. Without such a plan it ends with the one that had the fewest of them. Where the planner
    finds no plan, all additions shrink. `loads` include those of the stages of `applications`. The planner's own
    headroom should be 0.

    Raises what the planner and the simulation raise.
    """
    trial = trial or Trial()
    factors = {
        load.tenant: more.rate_per_s / load.rate_per_s
        for load, more in zip(loads, with_poisson_headroom(loads), strict=True)
    }
    owner = {app.tenant(stage): app.name for app in applications for stage in app.stages}
    best: Tried | None = None
    failed: Tried | None = None
    for _ in range(trial.rounds):
        planned = tuple(replace(load, rate_per_s=load.rate_per_s * factors[load.tenant]) for load in loads)
        plan = planner.plan(planned, devices, costs, running)
        if isinstance(plan, Infeasible):
            failed = Tried(plan, planned, None, False)
            if max(factors.values()) == 1.0:
                break
            factors = {tenant: _eased(factor, _SHRINK) for tenant, factor in factors.items()}
            continue
        simulated = simulate_plan(
            plan,
            loads,
            devices,
            costs,
            applications=applications,
            actual=actual,
            duration_ns=round(trial.duration_s * NS_PER_S),
            warmup_ns=round(trial.warmup_s * NS_PER_S),
            seed=trial.seed,
            noise=trial.noise,
        )
        share = simulated.violation_share
        if best is None or best.simulated is None or share < best.simulated.violation_share:
            best = Tried(plan, planned, simulated, share <= trial.target)
        if share <= trial.target:
            break
        factors = _next(factors, owner, simulated, trial.target)
    found = best or failed
    assert found is not None
    return found


def _eased(factor: float, by: float) -> float:
    return 1.0 + (factor - 1.0) * by if factor > 1.01 else 1.0


def _next(
    factors: Mapping[str, float], owner: Mapping[str, str], simulated: Simulated, target: float
) -> dict[str, float]:
    shares = {outcome.name: outcome.violation_share for outcome in simulated.outcomes}
    found = {}
    for tenant, factor in factors.items():
        share = shares[owner.get(tenant, tenant)]
        if share > target:
            found[tenant] = factor * (1 + min(_MOST_GROWTH, 2 * (share - target) + 0.02))
        else:
            found[tenant] = _eased(factor, _EASE) if share < target / 4 else factor
    return found
