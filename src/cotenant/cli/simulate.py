"""`cotenant simulate`: what policies would make of a workload, without running a model."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from cotenant.cli.options import (
    AsJson,
    Cautious,
    CoresOption,
    DeviceNumber,
    Drop,
    Lanes,
    PlanOption,
    Preempt,
    Repository,
    goes_by_margin,
    policy_text,
    print_json,
    settings_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotenant.config import PredictSection
    from cotenant.policies import AnyPolicy
    from cotenant.policies.lane_rounds import LaneRound
    from cotenant.predict.overlap import OverlapPredictor
    from cotenant.profile.table import Profile
    from cotenant.serve.beliefs import Beliefs
    from cotenant.sim.scenario import Scenario


class World(StrEnum):
    """What launches take in the simulator."""

    TABLE = "table"
    CONTENTION = "contention"


def simulate(
    workload: Annotated[Path, typer.Argument(help="Workload file (TOML), as 'cotenant load' takes it.")],
    repository: Repository,
    policy: Annotated[list[str] | None, typer.Option(help="Policy to simulate; give it several times.")] = None,
    drop: Drop = None,
    preempt: Preempt = None,
    cautious: Cautious = None,
    lanes: Lanes = None,
    plan: PlanOption = None,
    device_number: DeviceNumber = None,
    cores: CoresOption = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs, with seeds from the workload's seed on.")] = 1,
    factor: Annotated[float, typer.Option(help="Multiply all rates.")] = 1.0,
    noise: Annotated[float, typer.Option(min=0, help="Deviation of log latency in the simulated world.")] = 0.05,
    decision_us: Annotated[float, typer.Option(min=0, help="Decision time charged before each launch.")] = 50.0,
    world: Annotated[
        World, typer.Option(help="'table': launches never slow each other down; 'contention': as calibrated.")
    ] = World.TABLE,
    trace: Annotated[Path | None, typer.Option(help="Write the trace of the last run here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a workload with the repository's profile under one or more policies; print the table of 'load'."""
    from cotenant.cli.console import console as make_console
    from cotenant.config import device_cores, lanes_of, make_policy
    from cotenant.metrics import summarise, to_json
    from cotenant.profile.table import load_profile
    from cotenant.report.tables import outcome_table
    from cotenant.repository import profile_path
    from cotenant.serve.plan_lanes import Cores, open_plan
    from cotenant.sim.scenario import Assumptions, run_scenario, scenario_of
    from cotenant.trace import TraceWriter, header
    from cotenant.workload import load_workload, scale

    settings = settings_of(
        *(repository, None, drop, preempt, lanes),
        cautious=cautious,
        cores=cores,
        plan=plan,
        device_number=device_number,
    )
    spec = load_workload(workload)
    spec = spec if factor == 1.0 else scale(spec, factor)
    used = device_cores(settings.device)
    rounds: tuple[LaneRound, ...] = ()
    shares: Mapping[str, Mapping[str, int]] = {}
    if settings.plan.file is None:
        partitions = lanes_of(settings.device, used)
    else:
        laid = open_plan(Path(settings.plan.file), settings.plan.device, Cores(used), root=repository)
        partitions, rounds, shares = laid.lanes.lanes, laid.lanes.rounds, laid.shares_ns
    profile = load_profile(profile_path(repository))
    scenario = scenario_of(repository, spec, profile, partitions, settings.predict.quantile, shares)
    scenario = replace(scenario, rounds=rounds)
    names = policy or [settings.policy.name]
    if "overlap" in names:
        scenario = replace(scenario, groups=_fitted(repository, profile, settings.predict.group_quantile))
    assumptions = Assumptions(noise, round(decision_us * 1000))
    contention = None
    if world is World.CONTENTION:
        from cotenant.profile.contention import contention_path, load_contention

        contention = load_contention(contention_path(repository)).contention()
    console = make_console()
    runs = []
    for name in names:
        section = msgspec.structs.replace(settings.policy, name=name)
        made = make_policy(section, partitions, rounds=rounds)
        for seed in range(spec.seed, spec.seed + seeds):
            beliefs, writer = _beliefs(scenario, made, settings.predict), None
            if trace is not None:
                head = header(made, beliefs.predictor, scenario.tenants, scenario.cores, created="")
                writer = TraceWriter(trace.open("wb"), head)
            outcomes = run_scenario(
                *(scenario, section, assumptions, seed, writer), contention=contention, follower=beliefs
            )
            if writer is not None:
                writer.close()
            summary = summarise(
                outcomes,
                end_ns=spec.duration_ns,
                start_ns=spec.warmup_ns,
                slo_ns=scenario.slo_ns,
                tenants=list(scenario.slo_ns),
            )
            if as_json:
                is_cautious = goes_by_margin(made, settings.predict)
                told = {"policy": name, "drop": section.drop.value, "cautious": is_cautious, "seed": seed}
                runs.append({**told, **to_json(summary)})
            else:
                text = policy_text(made, settings.predict)
                title = f"simulated: {text}, seed {seed}, noise {noise:g}, world {world.value}"
                console.print(outcome_table(summary, title))
    if as_json:
        print_json({"simulated": True, "world": world.value, "noise": noise, "decision_us": decision_us, "runs": runs})


def _beliefs(scenario: Scenario, policy: AnyPolicy, section: PredictSection) -> Beliefs:
    """What a server would believe: the profile, corrected by what is observed, with the margin of cautious policies."""
    from cotenant.core.admission import most_cores
    from cotenant.serve.beliefs import Beliefs
    from cotenant.serve.caution import Caution

    quantile = section.group_quantile
    made = Beliefs(
        most_cores(policy),
        adapt=section.adapt,
        grouped=policy.grouped,
        quantile=quantile,
        caution=Caution(quantile) if goes_by_margin(policy, section) else None,
    )
    for tenant, table in scenario.tables.items():
        made.add(tenant, table)
    if policy.grouped:
        made.believe_groups(scenario.groups)
    return made


def _fitted(root: Path, profile: Profile, quantile: float) -> OverlapPredictor | None:
    """The fitted predictor of groups, kept for replays of the trace; None, with a warning, when there is none."""
    from cotenant.errors import CotenantError
    from cotenant.predict.overlap_file import keep_overlap
    from cotenant.profile.groups import load_overlap
    from cotenant.repository import STATE_FOLDER

    try:
        fitted = load_overlap(root, profile, quantile=quantile)
    except CotenantError as error:
        typer.echo(f"{error}; launches on disjoint cores are believed not to slow each other down", err=True)
        return None
    keep_overlap(root / STATE_FOLDER, fitted)
    return fitted
