"""`cotenant.simulate`, and the runs behind it, which `cotenant simulate` prints."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from cotenant import registry
from cotenant.api.assumed import AssumedModel
from cotenant.config import DeviceSection, PolicySection, load_server_config
from cotenant.core.snapshot import Policy
from cotenant.errors import ConfigError, CotenantError
from cotenant.execute.layout import device_cores, lanes_of, usable_cores
from cotenant.measure.campaign import OnStep
from cotenant.measure.group_models import group_models, resolved_by
from cotenant.metrics import Summary, TenantSummary, summarise, to_json
from cotenant.policies.registry import policy_class, takes_rounds
from cotenant.predict.conformal import UPPER_QUANTILE
from cotenant.profiles.profile_file import Profile, load_profile
from cotenant.report.bound_text import facts
from cotenant.report.lost_text import lost_facts
from cotenant.repository import application_names, contention_path, profile_path, readable_versions
from cotenant.repository.measured_content import changes, refuse_changes
from cotenant.repository.server_settings import settings_of
from cotenant.serve.services import plan_files
from cotenant.sim.scenario import Assumptions, Scenario, run_scenario, scenario_of, tenants_of
from cotenant.sim.served_requests import ServerLoad
from cotenant.tabular import Tabular
from cotenant.trace import TraceWriter, header, read
from cotenant.trace.basis import GroupTally
from cotenant.trace.bound import bound_of
from cotenant.trace.lost import LossAccount
from cotenant.trace.recorded_workload import is_trace, models_by_tenant, recorded_workload
from cotenant.trace.trace_log import OnRead
from cotenant.workload import Workload, load_workload, parse_workload, scale
from cotenant.world.kinds import WorldKind

if TYPE_CHECKING:
    from cotenant.core.actions import Action
    from cotenant.core.events import Event
    from cotenant.predict.grouped import FittedGroups
    from cotenant.sim.driver import Log
    from cotenant.trace.basis import GroupEvidence
    from cotenant.trace.bound import RunBound
    from cotenant.work import Round
    from cotenant.world.contention import Contention

_EVENTS_A_STEP = 4096
DECISION_US = 50.0
"""Cost of a launch in microseconds where none was measured."""
_log = logging.getLogger("cotenant.simulate")


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """The world of simulated runs. `world` None is "groups" for a plan with groups, else "table".

    `noise` is the deviation of the logarithm of latencies. Each launch costs `decision_us` before it, by default as
    measured with the profile, else DECISION_US. `trace` is the file for the trace of the last run. With `has_bound`
    runs are compared with the best possible schedule. `is_stale` accepts a profile of models that changed since.
    """

    factor: float = 1.0
    noise: float = 0.05
    decision_us: float | None = None
    world: WorldKind | None = None
    trace: Path | None = None
    has_bound: bool = False
    is_stale: bool = False


@dataclass(frozen=True, slots=True)
class SimulatedRun(Tabular):
    """One simulated run: the figures of each tenant in `summary`, and the causes of lost queries in `losses`."""

    policy: str
    seed: int
    summary: Summary
    losses: LossAccount
    made: Policy
    """The policy with its lanes and options."""
    groups: Sequence[GroupEvidence] = ()
    bound: RunBound | None = None
    policy_faults: int = 0
    server: ServerLoad | None = None
    """Load of the server by requests, where their cost was measured."""

    def tenant(self, name: str) -> TenantSummary:
        """The figures of one tenant. Raises InvalidValueError for an unknown one."""
        return self.summary.tenant(name)

    @override
    def rows(self) -> list[dict[str, Any]]:
        """A row for each tenant, as `Summary.rows`."""
        return self.summary.rows()

    def to_json(self) -> dict[str, Any]:
        """Plain data, as an element of `runs` in the output of `cotenant simulate --json`."""
        spec = self.made.spec
        found: dict[str, Any] = {
            "policy": self.policy,
            "drop": spec.drop.value,
            "tail_aware": spec.goes_by_margin,
            "seed": self.seed,
        }
        found |= {"groups": [asdict(each) for each in self.groups]} if self.groups else {}
        found |= {"bound": facts(self.bound)} if self.bound else {}
        found |= {"policy_faults": self.policy_faults} if self.policy_faults else {}
        found |= {"server": asdict(self.server)} if self.server else {}
        return {**found, **to_json(self.summary), **lost_facts(self.losses)}


class Simulation:
    """A workload and the profile of a repository, ready to be simulated under policies.

    `chosen` are keys of `cotenant.toml`, by SECTION.KEY, and of tenants, by tenant.NAME.KEY. `policies` are names, by
    default that of the settings. `warn` is called with sentences for the user. Assumed models by name may stand in
    place of a repository; they take no keys of tenants. Raises CotenantError for files that are missing, wrong or
    stale, and for wrong keys.
    """

    def __init__(
        self,
        workload: Workload,
        repository: Path | Mapping[str, AssumedModel],
        chosen: Mapping[str, object],
        policies: Sequence[str],
        options: SimulationOptions,
        warn: Callable[[str], None],
    ) -> None:
        over = dict(chosen)
        self._chosen = _taken(over, "policy.")
        self._tenants = _taken(over, "tenant.")
        self._spec = spec = workload if options.factor == 1.0 else scale(workload, options.factor)
        self._options, self._warn = options, warn
        self.on_step: OnStep = lambda done, total, text: None
        """Called now and then in a run with the simulated and all milliseconds, and the policy and the seed."""
        self._contention: Contention | None = None
        self._profile: Profile | None = None
        self._fitted: FittedGroups | None = None
        self._has_rounds, self.world = False, options.world or WorldKind.TABLE
        self._settings = (
            load_server_config(None, over) if isinstance(repository, Mapping) else settings_of(repository, over)
        )
        named = str(self._chosen.pop("name", self._settings.policy.name))
        self._names = tuple(policies) or (named,)
        if isinstance(repository, Mapping):
            if self.world is not WorldKind.TABLE or self._settings.plan.file is not None:
                raise CotenantError("assumed models are simulated without a plan and in the world 'table'")
            if self._tenants:
                key = next(iter(self._tenants))
                raise CotenantError(f"tenant.{key}: assumed models have no keys of tenants; change the AssumedModel")
            self._scenario = _assumed(repository, spec, self._settings.device)
        else:
            self._read(repository)

    def _read(self, repository: Path) -> None:
        """Read the profile, the plan and the models of a repository."""
        settings, options, spec = self._settings, self._options, self._spec
        used = device_cores(settings.device)
        rounds: tuple[Round, ...] = ()
        shares: Mapping[str, Mapping[str, int]] = {}
        if settings.plan.file is None:
            partitions = lanes_of(settings.device, used)
        else:
            laid = plan_files().open(settings.plan, used, repository, stale=options.is_stale)
            partitions, rounds, shares = laid.lanes.lanes, laid.lanes.rounds, laid.shares_ns
        profile = load_profile(profile_path(repository))
        changed = changes(repository, profile.contents, tenants_of(repository, spec))
        refuse_changes(changed, repository, stale=options.is_stale)
        scenario = scenario_of(repository, spec, profile, partitions, settings.predict.quantile, shares, self._tenants)
        kept = registry.load_all(registry.KEPT_PLANS)
        plans = {field: read_kept(repository, profile, partitions) for field, read_kept in kept.items()}
        derives = any(hasattr(policy_class(each, "command line"), "resolve") for each in self._names)
        has_groups = any(len(step) > 1 for made in rounds for step in made.steps)
        self._has_rounds = any(made.slots for made in rounds)
        self.world = options.world or (WorldKind.GROUPS if has_groups else WorldKind.TABLE)
        plays_groups = self.world is WorldKind.GROUPS
        self._profile = profile
        if derives or has_groups or plays_groups:
            self._fitted = _fitted(repository, profile, self._warn)
        requests = scenario.requests and replace(scenario.requests, cores=max(len(used), len(usable_cores())))
        self._scenario = replace(
            scenario,
            requests=requests,
            plans={"rounds": rounds, **plans},
            groups=self._fitted,
            plays_groups=plays_groups,
        )
        if options.trace is not None and self._fitted is not None:  # beside the trace, where a replay looks for it
            group_models().keep(options.trace.parent, self._fitted)
        if self.world is WorldKind.CONTENTION:
            from cotenant.measure.contention_profile import load_contention

            self._contention = load_contention(contention_path(repository)).contention()

    def runs(self, seeds: Sequence[int]) -> Iterator[SimulatedRun]:
        """Simulate every policy with every seed."""
        trace = self._options.trace
        is_scratch = self._options.has_bound and trace is None
        with TemporaryDirectory(prefix="cotenant-") if is_scratch else nullcontext() as scratch:
            recorded = trace if scratch is None else Path(scratch) / "trace.jsonl"
            for name in self._names:
                if self._has_rounds and not takes_rounds(name):
                    self._warn(f"policy {name!r} follows no rounds: of the plan it has the partitions alone")
                section = self._section(name)
                for seed in seeds:
                    yield self._run(name, section, seed, recorded)

    def _on_time(self, name: str, seed: int) -> Callable[[int], None]:
        """A function that passes the simulated time of a run to `on_step`."""
        total = self._spec.duration_ns // 1_000_000
        return lambda now_ns: self.on_step(min(total, now_ns // 1_000_000), total, f"{name}, seed {seed}")

    def _section(self, name: str) -> PolicySection:
        fitted = self._fitted
        found = self._settings.policy.over(name, self._chosen, "command line")
        measured = None if fitted is None or self._profile is None else (fitted, self._profile)
        return resolved_by(found, self._scenario.lanes, lambda: measured)

    def _run(self, name: str, section: PolicySection, seed: int, recorded: Path | None) -> SimulatedRun:
        scenario, spec = self._scenario, self._spec
        made = scenario.policy(section)
        beliefs, writer = scenario.online_model(made), None
        served = scenario.served(made)
        launch_ns = 0 if scenario.requests is None else scenario.requests.cost.launch_ns
        if recorded is not None:
            head = header(made, beliefs.predictor, served, scenario.machine, created="", launch_ns=launch_ns)
            writer = TraceWriter(recorded.open("wb"), head)
        losses = LossAccount(beliefs.predictor, made.spec.lanes, served)
        tally = GroupTally(made, self._fitted, _both(losses, writer, self._on_time(name, seed)))
        load, inflation = None, 1.0
        if scenario.requests is not None:
            load = scenario.requests.load(spec, seed, scenario.cores)
            inflation = 1 / (1 - load.lanes_share)
        usual_us = DECISION_US if scenario.requests is None else launch_ns / 1000
        chosen_us = self._options.decision_us
        assumptions = Assumptions(
            self._options.noise,
            round(1000 * (usual_us if chosen_us is None else chosen_us)),
            inflation=dict.fromkeys(scenario.tables, inflation) if inflation != 1.0 else {},
        )
        outcomes = run_scenario(
            *(scenario, section, assumptions, seed, tally), contention=self._contention, follower=beliefs
        )
        if writer is not None:
            writer.close()
        summary = summarise(
            outcomes,
            end_ns=spec.duration_ns,
            start_ns=spec.warmup_ns,
            slo_ns=scenario.slo_ns,
            limit_ns=spec.limit_ns,
            tenants=list(scenario.slo_ns),
        )
        bound = bound_of(*read(recorded)) if self._options.has_bound and recorded is not None else None
        return SimulatedRun(name, seed, summary, losses, made, tally.found, bound, outcomes.policy_faults, load)


def simulate(
    workload: str | os.PathLike[str] | Workload | Mapping[str, Any],
    repository: str | os.PathLike[str] | Mapping[str, AssumedModel],
    *,
    policy: str | None = None,
    seed: int | None = None,
    settings: Mapping[str, object] = MappingProxyType({}),
    noise: float = 0.05,
    decision_us: float | None = None,
    world: str | None = None,
    trace: str | os.PathLike[str] | None = None,
    bound: bool = False,
    stale: bool = False,
) -> SimulatedRun:
    """Simulate a workload with the profile of a repository under one policy; no model runs.

    `workload` is a file, a recorded trace, a Workload, or the tables of a file as a mapping. `policy` is by default
    that of the settings, `seed` that of the workload. `settings` are keys of `cotenant.toml`, as {"device.cores":
    [0, 1]}, and of tenants, as {"tenant.resnet.slo_ms": 50}.
    `noise` is the deviation of the logarithm of latencies; each launch costs `decision_us` microseconds before
    it, by default as measured with the profile. Requests cost what the profile says, if it has their cost.
    `world` is "table", "contention" or "groups"; see `cotenant simulate --help`. `trace` is a file for the trace of the
    run, for `cotenant.explain`. With `bound` the run is compared with upper bounds of any schedule. `stale` accepts a
    profile of models that changed since.

    In place of a repository, `repository` may give an assumed SLO and latency for each model:

    >>> import cotenant
    >>> workload = {"duration_s": 10.0, "seed": 1, "tenant": [{"model": "vision", "rate": 5.0}]}
    >>> models = {"vision": cotenant.AssumedModel(slo_ms=200, latency_ms=50)}
    >>> cotenant.simulate(workload, models, policy="edf", settings={"device.cores": [0]}).tenant("vision").attainment
    1.0

    >>> run = cotenant.simulate("workload.toml", "models/", policy="edf")  # doctest: +SKIP
    >>> run.tenant("resnet").attainment  # doctest: +SKIP
    >>> run.to_pandas()  # doctest: +SKIP

    Raises CotenantError for files that are missing, wrong or stale, and for an unknown policy.
    """
    models = dict(repository) if isinstance(repository, Mapping) else Path(repository)
    spec = workload_of(workload, models)
    try:
        kind = None if world is None else WorldKind(world)
    except ValueError:
        raise CotenantError(f"world is {world!r}, expected one of {', '.join(WorldKind)}") from None
    file = None if trace is None else Path(trace)
    options = SimulationOptions(1.0, noise, decision_us, kind, file, bound, stale)
    policies = () if policy is None else (policy,)
    made = Simulation(spec, models, settings, policies, options, _log.warning)
    [found] = made.runs([spec.seed if seed is None else seed])
    return found


def workload_of(
    workload: str | os.PathLike[str] | Workload | Mapping[str, Any],
    repository: Path | Mapping[str, AssumedModel],
    on_read: OnRead = lambda done, total: None,
) -> Workload:
    """The workload of `simulate`: that of a file, of tables, or the arrivals of a trace for the models of a repository.

    Raises CotenantError for a file that is neither, and for a trace with an unknown tenant.
    """
    if isinstance(workload, Workload):
        return workload
    if isinstance(workload, Mapping):
        return parse_workload(workload)
    path = Path(workload)
    if not is_trace(path):
        return load_workload(path)
    if isinstance(repository, Mapping):
        known = {name: name for name in repository}
    else:
        known = {each.tenant: each.model for each in readable_versions(repository) if each.is_default}
        known |= {name: name for name in application_names(repository)}
    return recorded_workload(path, models_by_tenant(known), on_read)


def _taken(chosen: dict[str, object], section: str) -> dict[str, object]:
    """Remove the keys of a section, which ends with a dot, and return them without it."""
    return {key.removeprefix(section): chosen.pop(key) for key in list(chosen) if key.startswith(section)}


def _assumed(models: Mapping[str, AssumedModel], workload: Workload, device: DeviceSection) -> Scenario:
    """A scenario of assumed models: the configured cores, which need not exist here. Raises ConfigError."""
    if unknown := [load.model for load in workload.tenants if load.model not in models]:
        raise ConfigError(f"the workload has the model {unknown[0]!r}, expected one of {', '.join(models)}")
    tenants = {name: model.tenant(name) for name, model in models.items()}
    owners = tuple(tenants[load.model] for load in workload.tenants)
    for load, owner in zip(workload.tenants, owners, strict=True):
        if (reason := load.misfit(owner.max_batch, 1)) is not None:
            raise ConfigError(reason)
    tables = {name: model.table() for name, model in models.items()}
    return Scenario(workload, tuple(tenants.values()), owners, tables, lanes_of(device, device.cores or usable_cores()))


def _both(losses: LossAccount, writer: Log | None, on_time: Callable[[int], None]) -> Log:
    """A log that reports to an account, to a trace where one is written, and now and then the time to `on_time`."""
    ticks = cycle([False] * (_EVENTS_A_STEP - 1) + [True])

    def log(time_ns: int, event: Event, actions: list[Action]) -> None:
        if next(ticks):
            on_time(time_ns)
        losses(time_ns, event, actions)
        if writer is not None:
            writer(time_ns, event, actions)

    return log


def _fitted(root: Path, profile: Profile, warn: Callable[[str], None]) -> FittedGroups | None:
    """The fitted predictor of groups; None, with a warning, when there is none."""
    try:
        return group_models().load(root, profile, UPPER_QUANTILE)
    except CotenantError as error:
        warn(f"{error}; launches on disjoint cores are believed not to slow each other down")
        return None
