"""Simulation of a workload: the tenants of a repository in a world that is made of their profile.

The policy predicts with one quantile of the profile. The world draws latencies from the profile with seeded noise. With
noise 0 and the same quantile, predictions are exact. A follower corrects predictions by observations, as in a server.

Costs of a server besides its launches, and of its clients, are `Assumptions`, 0 by default (`python -m bench fidelity`
measures them).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from heapq import heappop, heappush
from math import exp, prod
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, Protocol

from msgspec import UNSET, structs
from typing_extensions import override

from cotenant import registry
from cotenant.config import NS_PER_MS, PolicySection, load_application_config, with_keys
from cotenant.core.actions import Action, Respond
from cotenant.core.engine import Engine
from cotenant.core.events import Event
from cotenant.core.snapshot import Policy
from cotenant.errors import ConfigError, InvalidValueError, expected_one_of
from cotenant.metrics import OutcomeLog
from cotenant.policies.registry import make_policy
from cotenant.predict.grouped import FittedGroups, GroupedPredictor
from cotenant.predict.online import OnlineModel
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyTable
from cotenant.profiles.profile_file import Profile
from cotenant.profiles.server_cost import ServerCost
from cotenant.repository import ModelVersion, application_names, default_version
from cotenant.repository.application_spec import ApplicationSpec, read_application
from cotenant.sim.applications import SimulatedApplication, StagedEngine
from cotenant.sim.driver import Log, simulate
from cotenant.sim.served_requests import ServedRequests
from cotenant.types import ANSWERS, Outcome, Query, Tenant, priority_rank
from cotenant.work import Machine, Share
from cotenant.workload import Workload, arrivals
from cotenant.world.contention import Contention, ContentionWorld
from cotenant.world.groups import GroupWorld
from cotenant.world.simulated import TableWorld, World


@dataclass(frozen=True, slots=True)
class Scenario:
    """Input of a simulation: workload, tenants, tables and lanes. `owners` has the core's tenant of each load."""

    workload: Workload
    tenants: tuple[Tenant, ...]
    owners: tuple[Tenant, ...]
    tables: Mapping[str, LatencyTable]
    lanes: tuple[Share, ...]
    groups: FittedGroups | None = None
    """Predictor of groups for policies that launch groups; None predicts no slowdown in groups."""
    plays_groups: bool = False
    """Whether groups also take the latency of `groups` in the world, without other assumptions on contention."""
    plans: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of policies from plans, by field of the policy, such as `rounds` (one for each lane)."""
    applications: Mapping[str, SimulatedApplication] = field(default_factory=dict)
    """Applications by the name of their owner: each query runs several of the tenants' models."""
    requests: ServedRequests | None = None
    """What requests cost a server, where it was measured and is to be simulated."""

    @property
    def cores(self) -> int:
        """Number of cores of all lanes."""
        return len({core for lane in self.lanes for core in lane.cores})

    @property
    def machine(self) -> Machine:
        """The slots of all lanes."""
        return Machine.holding(self.lanes)

    def policy(self, section: PolicySection) -> Policy:
        """A policy with its lanes and its arguments from plans. Raises ConfigError."""
        return make_policy(section.name, section.options, self.lanes, self.plans)

    def served(self, policy: Policy) -> list[Tenant]:
        """The tenants with the cuts that a policy uses: all if it preempts, else those of its plans or none."""
        found, spec = [], policy.spec
        for tenant in self.tenants:
            cuts = tenant.cuts if spec.preempt else (0, tenant.unit_count)
            if spec.cuts is not None:
                cuts = spec.cuts.cuts_of(tenant.name, cuts)
            found.append(tenant if cuts == tenant.cuts else replace(tenant, cuts=cuts))
        return found

    def predictor(self, policy: Policy) -> TablePredictor:
        """The predictor of a policy at the start."""
        if policy.spec.groups is not None and self.groups is not None:
            return GroupedPredictor(self.tables, None, self.groups)
        return TablePredictor(self.tables)

    def online_model(self, policy: Policy) -> OnlineModel:
        """The model of latencies of a server: the profile, corrected by observations, and the learned margin."""
        made = OnlineModel.under(policy)
        for tenant, table in self.tables.items():
            made.add(tenant, table)
        if policy.spec.groups is not None:
            made.believe_groups(self.groups)
        return made

    @property
    def slo_ns(self) -> dict[str, int]:
        """SLO by name of the load."""
        loads = zip(self.workload.tenants, self.owners, strict=True)
        return {load.name: load.slo_ns or owner.slo_ns for load, owner in loads}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Deviations of the world from the profile, and the costs around launches.

    - `noise`: standard deviation of the logarithm of latencies.
    - `inflation`: latency in service over that of the profile, by tenant, without front ends.
    - `decision_ns`: cost of a launch besides its latency: decision, submission, notice of its end.
    - `front_end_share`: part of each core that front ends, and clients on the same machine, use.
    - `request_ns`: time from sending a query to its arrival at the core.
    - `response_ns`: time from its end to the client, times a log-normal factor (`response_noise` is its sigma). The
      part `reply_share` of it passes until the response is written: a server observes that part.

    Raises InvalidValueError when a value is negative, `front_end_share` not below 1, or `reply_share` above 1.
    """

    noise: float = 0.0
    decision_ns: int = 0
    front_end_share: float = 0.0
    request_ns: int = 0
    response_ns: int = 0
    response_noise: float = 0.0
    reply_share: float = 1.0
    inflation: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.name != "inflation"):
            if getattr(self, name) < 0:
                raise InvalidValueError("assumptions", name, getattr(self, name), "a number from 0")
        if self.reply_share > 1:
            raise InvalidValueError("assumptions", "reply_share", self.reply_share, "a share up to 1")
        if self.front_end_share >= 1:
            raise InvalidValueError("assumptions", "front_end_share", self.front_end_share, "a share below 1")
        for tenant, factor in self.inflation.items():
            if factor <= 0:
                raise InvalidValueError("assumptions", f"inflation of {tenant!r}", factor, "a positive factor")


class Follower(Protocol):
    """Observes a run and may replace the predictor, as the server's model of latencies does."""

    @property
    def predictor(self) -> TablePredictor:
        """The predictor at the start."""

    def replied(self, delay_ns: int) -> None:
        """Note that a response was written `delay_ns` after the end of its query."""

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: None) -> Event | None:
        """Observe an event and its actions. Returns the next event, if any."""


def _members(
    root: Path, workload: Workload, chosen: Mapping[str, object] = MappingProxyType({})
) -> tuple[dict[str, ApplicationSpec], dict[str, ModelVersion]]:
    """The applications of a workload, and all models, stages included, with `chosen` keys. Raises ConfigError."""
    models = dict.fromkeys(load.model for load in workload.tenants)
    declared = application_names(root)
    specs = {name: read_application(root, name) for name in models if name in declared}
    stages = [stage.model for spec in specs.values() for stage in spec.stages]
    members = {model: default_version(root, model) for model in dict.fromkeys((*models, *stages)) if model not in specs}
    keys: dict[str, dict[str, object]] = {}
    for text, value in chosen.items():
        name, dot, key = text.rpartition(".")
        if not dot:
            raise ConfigError(f"command line: the key is tenant.{key}, expected tenant.NAME.KEY, as tenant.NAME.slo_ms")
        keys.setdefault(name, {})[key] = value
    for name, spec in specs.items():
        if name in keys:
            section = with_keys(load_application_config(spec.path), keys.pop(name), name)
            specs[name] = replace(spec, slo_ns=round(section.slo_ms * NS_PER_MS), priority=section.priority)
    for model, found in members.items():
        name = found.tenant if found.tenant in keys else model
        if name in keys:
            config = structs.replace(found.config, tenant=with_keys(found.config.tenant, keys.pop(name), name))
            members[model] = replace(found, config=config)
    for name in keys:
        known = [*specs, *(found.tenant for found in members.values())]
        raise ConfigError(f"command line: the workload has no tenant {name!r}, {expected_one_of(name, known)}")
    return specs, members


def tenants_of(root: Path, workload: Workload) -> list[str]:
    """Names of the tenants that own the models of a workload. Raises ConfigError for an unknown model."""
    return [found.tenant for found in _members(root, workload)[1].values()]


def scenario_of(
    root: Path,
    workload: Workload,
    profile: Profile,
    lanes: tuple[Share, ...],
    quantile: str,
    shares_ns: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
    chosen: Mapping[str, object] = MappingProxyType({}),
) -> Scenario:
    """Read the tenants of the workload's models, and applications, from a repository.

    `shares_ns` is the division of the SLO of an application among its stages by a plan. `chosen` are keys of tenants,
    by TENANT.KEY, that replace those of their files. An SLO of the workload sets the deadlines of the queries of its
    load. The SLO of a tenant is the longest of its loads. An SLO in `chosen` replaces those of the workload.

    Raises ConfigError for a model without a profile, for queries that a server refuses (too many rows, or an undeclared
    shape), and for wrong keys.
    """
    specs, members = _members(root, workload, chosen)
    slo_ns = {name: spec.slo_ns for name, spec in specs.items()}
    slo_ns |= {model: round(found.config.tenant.slo_ms * NS_PER_MS) for model, found in members.items()}
    fixed = {text.rpartition(".")[0] for text in chosen if text.endswith(".slo_ms")}
    fixed |= {model for model, found in members.items() if found.tenant in fixed}
    workload = _with_slos(workload, slo_ns, fixed)
    slo_ns |= {
        load.model: max(each.slo_ns or 0 for each in workload.tenants if each.model == load.model)
        for load in workload.tenants
    }
    tenants = {model: _tenant(root, model, found, profile, slo_ns[model]) for model, found in members.items()}
    shapes = {model: len(found.config.model.shapes) for model, found in members.items()}
    tables = {tenant.name: profile.models[tenant.name].table(quantile) for tenant in tenants.values()}
    applications: dict[str, SimulatedApplication] = {}
    whole: dict[str, Tenant] = {}
    for name, spec in specs.items():
        stage_tenants = tuple(tenants[stage.model] for stage in spec.stages)
        least = tuple(_smallest(members[stage.model].config.model.shapes) for stage in spec.stages)
        graph = replace(spec.graph.divided(shares_ns.get(name, {})), smallest=least)
        applications[name] = SimulatedApplication(graph, stage_tenants)
        most = min([tenant.max_batch for tenant in stage_tenants])
        whole[name] = Tenant(name, slo_ns[name], priority=spec.priority, max_batch=most)
        shapes[name] = _declared(spec, shapes)
    owners = tuple((tenants | whole)[load.model] for load in workload.tenants)
    for load, owner in zip(workload.tenants, owners, strict=True):
        reason = load.misfit(owner.max_batch, shapes[load.model])
        if reason is not None:
            raise ConfigError(reason)
    requests = None if profile.server is UNSET else _requests(workload, profile, profile.server, tenants)
    return Scenario(
        *(workload, tuple(tenants.values()), owners, tables, lanes), applications=applications, requests=requests
    )


def _requests(workload: Workload, profile: Profile, cost: ServerCost, tenants: Mapping[str, Tenant]) -> ServedRequests:
    """The cost of a workload's requests. Those of applications, and of models of older profiles, count as small."""
    sizes: dict[str, tuple[int, int]] = {}
    for load in workload.tenants:
        owner = tenants.get(load.model)
        rows = UNSET if owner is None else profile.models[owner.name].row_bytes
        taken, given = (0, 0) if rows is UNSET else rows[load.shape]
        sizes[load.name] = taken * load.items, given * load.items
    return ServedRequests(cost, sizes, profile.device.cores)


def _with_slos(workload: Workload, slo_ns: Mapping[str, int], fixed: Collection[str]) -> Workload:
    """The workload with an SLO in each load: its own, or that of its model if it has none or the model is `fixed`."""
    loads = [
        structs.replace(load, slo_ns=slo_ns[load.model] if load.model in fixed else load.slo_ns or slo_ns[load.model])
        for load in workload.tenants
    ]
    return structs.replace(workload, tenants=tuple(loads))


def _smallest(shapes: Sequence[Mapping[str, Sequence[int]]]) -> int:
    """Number of the declared shape with the fewest elements; 0 without declared shapes."""
    elements = [sum([prod(dims) for dims in shape.values()]) for shape in shapes]
    return elements.index(min(elements)) if elements else 0


def _declared(spec: ApplicationSpec, shapes: Mapping[str, int]) -> int:
    """Number of shapes of an application: those of a first stage that takes all inputs, else 1."""
    for stage, after in zip(spec.stages, spec.graph.after, strict=True):
        taken = {source.tensor for source in stage.inputs.values() if source.stage is None}
        if not after and len(taken) == len(spec.inputs):
            return shapes[stage.model]
    return 1


def _tenant(root: Path, model: str, found: ModelVersion, profile: Profile, slo_ns: int) -> Tenant:
    measured = profile.models.get(found.tenant)
    if measured is None:
        raise ConfigError(f"model {model!r} has no profile: run 'cotenant profile {root}'")
    section = found.config.tenant
    return Tenant(
        name=found.tenant,
        slo_ns=slo_ns,
        cuts=measured.cuts,
        max_batch=measured.merged_rows(found.config.model.max_batch),
        weight=section.weight,
        share=section.share or 0.0,
        rate=section.rate or UNSET,
        max_rate=section.max_rate or UNSET,
        priority=section.priority,
        max_queue=section.max_queue,
        splits=measured.splits,
    )


def queries(scenario: Scenario, seed: int | None = None, request_ns: int = 0) -> Iterator[Query]:
    """The arrivals of the workload as queries. A time-out below the SLO sets the deadline, as in the server.

    A query reaches the core `request_ns` after it was sent, or when the simulated server has handled its request. Its
    deadline counts from the time at which a server begins to read it.
    """
    loads = list(zip(scenario.workload.tenants, scenario.owners, strict=True))
    way = None if scenario.requests is None else scenario.requests.way(scenario.workload, seed, scenario.cores)
    for number, (sent_ns, position, _) in enumerate(arrivals(scenario.workload, seed)):
        load, owner = loads[position]
        begun_ns = time_ns = sent_ns + request_ns
        if way is not None:
            begun_ns, time_ns = way.enter(position, time_ns)
        own = (
            owner.priority if owner.name in scenario.applications else 0
        )  # stages have the priority of their application
        slo = load.slo_ns or owner.slo_ns
        slo = slo if load.timeout_ns is None else min(slo, load.timeout_ns)
        yield Query(
            number,
            owner.name,
            time_ns,
            begun_ns + slo,
            priority_rank(load.priority or own),
            load.items,
            load.shape,
            load.shape,
            None if load.timeout_ns is None else begun_ns + load.timeout_ns,
        )


def run_scenario(
    scenario: Scenario,
    policy: PolicySection,
    assumptions: Assumptions,
    seed: int,
    log: Log | None = None,
    *,
    contention: Contention | None = None,
    follower: Follower | None = None,
    noise_seed: int | None = None,
) -> OutcomeLog:
    """Simulate one policy with one seed of arrivals and noise; return the outcomes of queries by load.

    With `contention` launches slow each other down. Else each takes the latency of its table or, if the scenario plays
    groups, of its group. A `follower` corrects the predictor by observations; by default the profile is the predictor.
    As in the load generator, a query is late if its client has the response after the SLO of its load.
    """
    made = scenario.policy(policy)
    predictor = scenario.predictor(made) if follower is None else follower.predictor
    tenants = scenario.served(made)
    if follower is None:
        engine, outer_log = Engine(tenants, made, predictor, scenario.machine), log
    else:
        engine, outer_log = _FollowedEngine(tenants, made, predictor, scenario.machine), None
        engine.follower, engine.log, engine.replies = follower, log, []
    driven: Engine | StagedEngine = engine
    if scenario.applications:
        driven, outer_log = StagedEngine(engine, scenario.applications, outer_log), None
    names = [load.name for load in scenario.workload.tenants]
    outcomes = OutcomeLog(names)
    sent: dict[int, tuple[str, int]] = {}
    slo_ns = scenario.slo_ns
    requests = scenario.requests
    later_ns = {
        load.name: 0 if requests is None else requests.later_ns(load.protocol) for load in scenario.workload.tenants
    }
    noise_seed = seed if noise_seed is None else noise_seed
    wire = Random(f"wire {noise_seed}")  # a stream of its own: the world's draws stay as they are

    def source() -> Iterator[Query]:
        origins = ((names[position], sent_ns) for sent_ns, position, _ in arrivals(scenario.workload, seed))
        for query, origin in zip(queries(scenario, seed, assumptions.request_ns), origins, strict=True):
            sent[query.id] = origin
            yield query

    def responded(respond: Respond, now_ns: int) -> None:
        name, sent_ns = sent.pop(respond.query)
        response_ns, outcome = assumptions.response_ns + later_ns[name], respond.outcome
        if assumptions.response_noise:
            response_ns = int(response_ns * exp(wire.gauss(0.0, assumptions.response_noise)))
        ended_ns = now_ns + response_ns
        if outcome in ANSWERS:
            if response_ns and isinstance(engine, _FollowedEngine):
                delay_ns = int(response_ns * assumptions.reply_share)
                heappush(engine.replies, (now_ns + delay_ns, delay_ns))
            outcome = Outcome.ANSWERED if ended_ns - sent_ns <= slo_ns[name] else Outcome.LATE
        outcomes.add(name, sent_ns, ended_ns, outcome)

    world = make_world(scenario, assumptions, noise_seed, contention, made.spec.groups is not None)
    simulate(driven, world, source(), responded, decision_ns=assumptions.decision_ns, log=outer_log)
    outcomes.policy_faults = sum(engine.guard.faults.values())
    return outcomes


def make_world(
    scenario: Scenario, assumptions: Assumptions, seed: int, contention: Contention | None, has_groups: bool = False
) -> World:
    """The world that the assumptions describe.

    Without assumptions it is the first registered world that supports these models. A `front_end_share` needs the
    contention world, even without contention for memory. With `has_groups`, launches of one group start together.
    """
    is_plain = contention is None and not (assumptions.front_end_share or assumptions.noise or assumptions.inflation)
    is_plain = is_plain and not scenario.plays_groups
    for world_of in registry.load_all(registry.WORLDS).values() if is_plain else ():
        found: World | None = world_of(scenario.tables, seed)
        if found is not None:
            return found
    table = TablePredictor(scenario.tables, assumptions.inflation)
    if contention is None and assumptions.front_end_share == 0:
        if has_groups and scenario.plays_groups:
            grouped = GroupedPredictor(scenario.tables, assumptions.inflation, scenario.groups)
            return GroupWorld(grouped, noise=assumptions.noise, seed=seed)
        return TableWorld(table, noise=assumptions.noise, seed=seed)
    return ContentionWorld(
        table,
        contention or Contention(),
        front_end_share=assumptions.front_end_share,
        noise=assumptions.noise,
        seed=seed,
    )


class _FollowedEngine(Engine):
    """An engine with a follower: its events are handled at the same instant, as in the server's driver."""

    follower: Follower
    log: Log | None
    replies: list[tuple[int, int]]
    """Heap of pending responses: time of writing, and delay after the end of the query."""

    @override
    def handle(self, event: Event, now_ns: int) -> list[Action]:
        while self.replies and self.replies[0][0] <= now_ns:
            self.follower.replied(heappop(self.replies)[1])
        actions = super().handle(event, now_ns)
        if self.log is not None:
            self.log(now_ns, event, actions)
        follow_up = self.follower(now_ns, event, actions, None)
        return actions if follow_up is None else [*actions, *self.handle(follow_up, now_ns)]
