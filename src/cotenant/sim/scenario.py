"""Simulating a workload: the tenants of a repository and their profile against a world made of the same profile.

The policy believes the profile at one quantile; the world draws from it with noise of a named size. With noise 0 and
the same quantile the policy is clairvoyant about latencies, which tables made here say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cotenant.config import NS_PER_MS, PolicySection, make_policy
from cotenant.core.actions import Respond
from cotenant.core.engine import Engine
from cotenant.errors import ConfigError
from cotenant.execute.simulated import TableWorld
from cotenant.metrics import OutcomeLog
from cotenant.predict.table import LatencyTable, TablePredictor
from cotenant.profile.table import Profile
from cotenant.repository import find_versions
from cotenant.sim.driver import Log, simulate
from cotenant.types import Partition, Query, Tenant, priority_rank
from cotenant.workload import Workload, arrivals


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated: who sends what, to which lanes. `owners` gives the core's tenant of each load."""

    workload: Workload
    tenants: tuple[Tenant, ...]
    owners: tuple[Tenant, ...]
    tables: Mapping[str, LatencyTable]
    lanes: tuple[Partition, ...]

    @property
    def cores(self) -> tuple[int, ...]:
        """All cores of the lanes."""
        return tuple(core for lane in self.lanes for core in lane.cores)

    @property
    def slo_ns(self) -> dict[str, int]:
        """SLO by name of the load, for accounting."""
        loads = zip(self.workload.tenants, self.owners, strict=True)
        return {load.name: load.slo_ns or owner.slo_ns for load, owner in loads}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Named errors of the world: `noise` is the deviation of the logarithm of latencies, `decision_ns` what a decision
    takes before a launch."""

    noise: float = 0.0
    decision_ns: int = 0


def scenario_of(
    root: Path, workload: Workload, profile: Profile, lanes: tuple[Partition, ...], quantile: str
) -> Scenario:
    """Read the tenants of the workload's models from a repository. Raises ConfigError for a model without a profile."""
    tenants: dict[str, Tenant] = {}
    for model in dict.fromkeys(load.model for load in workload.tenants):
        found = find_versions(root, model)[-1]
        measured = profile.models.get(found.tenant)
        if measured is None:
            raise ConfigError(f"model {model!r} has no profile: run 'cotenant profile {root}'")
        section = found.config.tenant
        tenants[model] = Tenant(
            name=found.tenant,
            slo_ns=round(section.slo_ms * NS_PER_MS),
            cuts=measured.cuts,
            max_batch=found.config.model.max_batch,
            weight=section.weight,
            priority=section.priority,
            max_queue=section.max_queue,
        )
    tables = {tenant.name: profile.models[tenant.name].table(quantile) for tenant in tenants.values()}
    owners = tuple(tenants[load.model] for load in workload.tenants)
    return Scenario(workload, tuple(tenants.values()), owners, tables, lanes)


def queries(scenario: Scenario, seed: int | None = None) -> Iterator[Query]:
    """The arrivals of the workload as queries; a time-out shorter than the SLO is the deadline, as in the server."""
    loads = list(zip(scenario.workload.tenants, scenario.owners, strict=True))
    for number, (time_ns, position, _) in enumerate(arrivals(scenario.workload, seed)):
        load, owner = loads[position]
        slo = owner.slo_ns if load.timeout_ns is None else min(owner.slo_ns, load.timeout_ns)
        yield Query(
            number,
            owner.name,
            time_ns,
            time_ns + slo,
            priority_rank(load.priority or owner.priority),
            load.items,
            load.shape,
            load.shape,
            None if load.timeout_ns is None else time_ns + load.timeout_ns,
        )


def run_scenario(
    scenario: Scenario, policy: PolicySection, assumptions: Assumptions, seed: int, log: Log | None = None
) -> OutcomeLog:
    """Simulate one policy with one seed (of arrivals and noise); give how the queries of each load ended."""
    made = make_policy(policy, scenario.lanes)
    predictor = TablePredictor(scenario.tables)
    tenants = [
        tenant if made.preempt else replace(tenant, cuts=(0, tenant.unit_count)) for tenant in scenario.tenants
    ]  # a policy that never stops inside a model runs it whole, without the cost of cuts
    engine = Engine(tenants, made, predictor, scenario.cores)
    world = TableWorld(TablePredictor(scenario.tables), noise=assumptions.noise, seed=seed)
    names = [load.name for load in scenario.workload.tenants]
    outcomes = OutcomeLog(names)
    sent: dict[int, tuple[str, int]] = {}

    def source() -> Iterator[Query]:
        origins = (names[position] for _, position, _ in arrivals(scenario.workload, seed))
        for query, name in zip(queries(scenario, seed), origins, strict=True):
            sent[query.id] = (name, query.arrival_ns)
            yield query

    def responded(respond: Respond, now_ns: int) -> None:
        name, arrival_ns = sent.pop(respond.query)
        outcomes.add(name, arrival_ns, now_ns, respond.outcome)

    simulate(engine, world, source(), responded, decision_ns=assumptions.decision_ns, log=log)
    return outcomes
