"""`cotenant simulate`: results of policies for a workload, without running models."""

from __future__ import annotations

from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.options import (
    MIN_FACTOR,
    MOST_FACTOR,
    AsJson,
    Repository,
    SettingsOptions,
    Stale,
    a_number,
    print_json,
    settings_of,
)
from cotenant.cli.records import with_records

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotenant.core.actions import Action
    from cotenant.core.events import Event
    from cotenant.predict.grouped import FittedGroups
    from cotenant.profile.profile_file import Profile
    from cotenant.sim.driver import Log
    from cotenant.trace.lost import LossAccount
    from cotenant.work import Round


class WorldKind(StrEnum):
    """Model of the latency of launches in the simulator."""

    TABLE = "table"
    CONTENTION = "contention"
    GROUPS = "groups"


@with_records
def simulate(
    workload: Annotated[Path, typer.Argument(help="Workload file (TOML), as for 'cotenant load'.")],
    repository: Repository,
    *,
    policy: Annotated[list[str] | None, typer.Option(help="Policy to simulate; can be repeated.")] = None,
    options: SettingsOptions,
    seeds: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Number of runs, with seeds from that of the workload on.")
    ] = 1,
    factor: Annotated[
        float, typer.Option(min=MIN_FACTOR, max=MOST_FACTOR, callback=a_number, help="Multiply all rates.")
    ] = 1.0,
    noise: Annotated[
        float, typer.Option(min=0, max=10, callback=a_number, help="Standard deviation of the logarithm of latencies.")
    ] = 0.05,
    decision_us: Annotated[
        float, typer.Option(min=0, max=1e9, callback=a_number, help="Decision time charged before each launch.")
    ] = 50.0,
    world: Annotated[
        WorldKind | None,
        typer.Option(
            help="'table': no contention; 'contention': calibrated memory contention; 'groups': measured latencies of "
            "groups of launches.",
            show_default="groups for a plan with groups, else table",
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the trace of the last run to this file.")] = None,
    bound: Annotated[
        bool, typer.Option("--bound", help="Also print upper bounds of any schedule for each run.")
    ] = False,
    stale: Stale = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a workload with the profile of a repository under one or more policies."""
    from cotenant import registry
    from cotenant.cli.console import console as make_console
    from cotenant.execute.layout import device_cores, lanes_of
    from cotenant.measure.group_models import group_models, resolved_by
    from cotenant.metrics import summarise, to_json
    from cotenant.policies.registry import policy_class, policy_text, takes_rounds
    from cotenant.profile.profile_file import load_profile
    from cotenant.report.bound_text import facts, sentences
    from cotenant.report.lost_text import lost_facts, lost_table
    from cotenant.report.tables import outcome_table
    from cotenant.repository import profile_path
    from cotenant.repository.measured_content import changes, refuse_changes
    from cotenant.serve.services import plan_files
    from cotenant.sim.scenario import Assumptions, run_scenario, scenario_of, tenants_of
    from cotenant.trace import TraceWriter, header, read
    from cotenant.trace.basis import GroupTally
    from cotenant.trace.bound import bound_of
    from cotenant.trace.lost import LossAccount
    from cotenant.workload import load_workload, scale

    over = options.chosen()
    chosen = {key.removeprefix("policy."): over.pop(key) for key in list(over) if key.startswith("policy.")}
    settings = settings_of(repository, over)
    spec = load_workload(workload)
    spec = spec if factor == 1.0 else scale(spec, factor)
    used = device_cores(settings.device)
    rounds: tuple[Round, ...] = ()
    shares: Mapping[str, Mapping[str, int]] = {}
    if settings.plan.file is None:
        partitions = lanes_of(settings.device, used)
    else:
        laid = plan_files().open(settings.plan, used, repository, stale=stale)
        partitions, rounds, shares = laid.lanes.lanes, laid.lanes.rounds, laid.shares_ns
    profile = load_profile(profile_path(repository))
    changed = changes(repository, profile.contents, tenants_of(repository, spec))
    refuse_changes(changed, repository, stale=stale)
    scenario = scenario_of(repository, spec, profile, partitions, settings.predict.quantile, shares)
    kept = registry.load_all(registry.KEPT_PLANS)
    plans = {field: read_kept(repository, profile, partitions) for field, read_kept in kept.items()}
    scenario = replace(scenario, plans={"rounds": rounds, **plans})
    named = str(chosen.pop("name", settings.policy.name))
    names = policy or [named]
    derives = any(hasattr(policy_class(each, "command line"), "resolve") for each in names)
    has_groups = any(len(step) > 1 for made in rounds for step in made.steps)
    world = world or (WorldKind.GROUPS if has_groups else WorldKind.TABLE)
    fitted = _fitted(repository, profile) if derives or has_groups or world is WorldKind.GROUPS else None
    scenario = replace(scenario, groups=fitted, plays_groups=world is WorldKind.GROUPS)
    if trace is not None and fitted is not None:  # in the folder of the trace, for a replay
        group_models().keep(trace.parent, fitted)
    assumptions = Assumptions(noise, round(decision_us * 1000))
    contention = None
    if world is WorldKind.CONTENTION:
        from cotenant.measure.contention_profile import load_contention
        from cotenant.repository import contention_path

        contention = load_contention(contention_path(repository)).contention()
    console = make_console()
    runs = []
    scratch = TemporaryDirectory(prefix="cotenant-") if bound and trace is None else None
    recorded = Path(scratch.name) / "trace.jsonl" if scratch else trace
    for name in names:
        if any(made.slots for made in rounds) and not takes_rounds(name):
            typer.echo(f"policy {name!r} follows no rounds: it uses only the partitions of the plan", err=True)
        requested = settings.policy.over(name, chosen, "command line")
        section = resolved_by(requested, partitions, lambda: None if fitted is None else (fitted, profile))
        made = scenario.policy(section)
        for seed in range(spec.seed, spec.seed + seeds):
            beliefs, writer = scenario.online_model(made), None
            if recorded is not None:
                head = header(made, beliefs.predictor, scenario.served(made), scenario.machine, created="")
                writer = TraceWriter(recorded.open("wb"), head)
            account = LossAccount(beliefs.predictor, made.spec.lanes, scenario.served(made))
            tally = GroupTally(made, fitted, _both(account, writer))
            outcomes = run_scenario(
                *(scenario, section, assumptions, seed, tally), contention=contention, follower=beliefs
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
            found = bound_of(*read(recorded)) if bound and recorded is not None else None
            if as_json:
                chosen_drop, is_tail_aware = made.spec.drop.value, made.spec.goes_by_margin
                run: dict[str, Any] = {"policy": name, "drop": chosen_drop, "tail_aware": is_tail_aware, "seed": seed}
                run |= {"groups": [asdict(each) for each in tally.found]} if tally.found else {}
                run |= {"bound": facts(found)} if found else {}
                run |= {"policy_faults": outcomes.policy_faults} if outcomes.policy_faults else {}
                runs.append({**run, **to_json(summary), **lost_facts(account)})
            else:
                text = policy_text(made)
                title = f"simulated: {text}, seed {seed}, noise {noise:g}, world {world.value}"
                console.print(outcome_table(summary, title))
                if account.lost:
                    console.print(lost_table(account.lost))
                if outcomes.policy_faults:
                    faults = f"policy {name!r} failed {outcomes.policy_faults} times"
                    console.print(f"{faults}: earliest deadline first, or the fallback, decided instead")
                if tally.found:
                    console.print(f"groups started: {', '.join(map(str, tally.found))}")
                if found:
                    console.print("\n".join(sentences(found)), highlight=False, soft_wrap=True)
    if scratch:
        scratch.cleanup()
    if as_json:
        print_json({"simulated": True, "world": world.value, "noise": noise, "decision_us": decision_us, "runs": runs})


def _both(account: LossAccount, writer: Log | None) -> Log:
    """A log that passes events to an account and, if given, to the writer of a trace."""

    def observe(time_ns: int, event: Event, actions: list[Action]) -> None:
        account(time_ns, event, actions)
        if writer is not None:
            writer(time_ns, event, actions)

    return observe


def _fitted(root: Path, profile: Profile) -> FittedGroups | None:
    """The fitted predictor of groups; None, with a warning, if there is none."""
    from cotenant.errors import CotenantError
    from cotenant.measure.group_models import group_models
    from cotenant.predict.conformal import UPPER_QUANTILE

    try:
        return group_models().load(root, profile, UPPER_QUANTILE)
    except CotenantError as error:
        typer.echo(f"{error}; the prediction is that launches on disjoint cores do not slow each other down", err=True)
        return None
