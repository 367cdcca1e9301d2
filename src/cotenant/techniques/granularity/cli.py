"""`cotenant co-schedule`: plans how models that start together share the lanes of a server."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.options import (
    SEARCH_S,
    Fresh,
    Lanes,
    PlanOutput,
    Repository,
    SearchTime,
    chosen_of,
    print_json,
    settings_of,
)
from cotenant.cli.records import with_records
from cotenant.errors import ConfigError
from cotenant.files import write_whole
from cotenant.plan_file import sections_text

if TYPE_CHECKING:
    from cotenant.config import ServerConfig
    from cotenant.techniques.granularity.joint_plan import JointPlan, StoredJointPlan
    from cotenant.techniques.granularity.kernel_table import KernelTable
    from cotenant.techniques.granularity.plan.joint_overview import JointOverview
    from cotenant.techniques.granularity.plan.planner import FoundJointPlan
    from cotenant.techniques.granularity.predict.rules import Occupancy
    from cotenant.techniques.granularity.serve.trial_run import TrialRunTimes
    from cotenant.work import Share

_TRIAL_PLANS = 4
"""Plans with a trial run at most, the best predicted ones."""
_EXPLAINED = 1.25
"""Ratio of measured to predicted time up to which a measurement is plausible."""


@dataclass(frozen=True, slots=True)
class JointPlanRequest:
    """A set to plan: models of a repository with their rows, in the given order."""

    root: Path
    batches: Mapping[str, int]
    fresh: bool


@dataclass(frozen=True, slots=True)
class _Set:
    """Facts of a set: tables of its members on the lanes, digests of their graphs, cost model, sequential time."""

    tables: tuple[KernelTable, ...]
    digests: tuple[str, ...]
    rules: Occupancy
    sequential_ns: int


def requested_batches(names: Sequence[str], batches: str | None) -> dict[str, int]:
    """Rows of each model by name; 1 by default. Raises BadParameter for an unknown model or a bad number of rows."""
    found = dict.fromkeys(names, 1)
    if len(found) != len(names) or not all(names):
        raise typer.BadParameter(f"{' '.join(names)!r}, expected different models", param_hint="models")
    for part in batches.split(",") if batches else ():
        name, _, rows = (each.strip() for each in part.partition("="))
        if name not in found or not re.fullmatch(r"[1-9][0-9]{0,5}", rows):
            known = ", ".join(found)
            raise typer.BadParameter(f"{part!r}, expected MODEL=ROWS of one of {known}", param_hint="--batch")
        found[name] = int(rows)
    return found


@with_records
def co_schedule(
    repository: Repository,
    models: Annotated[list[str], typer.Argument(help="Models with queries that come together.", show_default=False)],
    *,
    batch: Annotated[
        str | None, typer.Option(metavar="MODEL=ROWS,...", help="Rows of each query.", show_default="1 each")
    ] = None,
    budget_s: SearchTime = SEARCH_S,
    fresh: Fresh = False,
    lanes: Lanes = None,
    output: PlanOutput,
) -> None:
    """Plan how several models share the lanes of a server when their queries come together.

    Measures the units of the models and searches a joint plan: where models wait for each other, and which run in
    chunks of the batch. The best plans have a trial run on the device. A plan that gains 3 % or more is kept in the
    repository, for the policy 'joint'. Ctrl-C ends the search with the best plan so far.
    """
    from cotenant.techniques.granularity.plan.joint_overview import overview
    from cotenant.techniques.granularity.plan.kept import store_joint_plan, stored_plan_of
    from cotenant.techniques.granularity.plan_section import JOINT_PLANS_KEY
    from cotenant.techniques.placement.measure.placed import KEPT_UP_TO

    request = JointPlanRequest(repository, requested_batches(models, batch), fresh)
    settings = settings_of(repository, chosen_of(None, lanes=lanes))
    shares = _lanes(settings)
    known = _measured(request, shares, as_json=output.as_json)
    found = _searched(known, budget_s, as_json=output.as_json)
    view = overview(known.tables, known.rules, found, known.sequential_ns)
    made = stored_plan_of(found, known.tables, known.digests, len(shares), shares[0].size)
    trial_times, kept = None, None
    if view.gains:
        candidates = [each for each in found.alternatives if not each.is_streams][:_TRIAL_PLANS]
        trial_times = _trial_run(request, settings, shares, candidates)
        best = (
            min((ns, number) for number, ns in enumerate(trial_times.plans_ns) if ns)
            if any(trial_times.plans_ns)
            else None
        )
        if best is not None and best[0] <= KEPT_UP_TO * min(trial_times.streams_ns, trial_times.sequential_ns):
            kept = _as_measured(made, candidates[best[1]], trial_times, best[0])
    store_joint_plan(repository, kept, made.key)
    written = [] if kept is None else [_together_path(repository)]
    if output.out is not None and kept is not None:
        write_whole(output.out, sections_text({JOINT_PLANS_KEY: (kept,)}).encode())
        written.append(output.out)
    notes = _doubts(view, trial_times) + (_use(settings) if kept is not None else [])
    _show(view, trial_times, kept, notes, written, output)


def _lanes(settings: ServerConfig) -> tuple[Share, ...]:
    """The lanes of the server. Raises ConfigError for a GPU, for one lane, and for lanes of several sizes."""
    from cotenant.execute.layout import cores_alone, lanes_of

    lanes = lanes_of(settings.device, cores_alone(settings.device, "joint plans are made"))
    sizes = {lane.size for lane in lanes}
    if len(lanes) < 2 or len(sizes) > 1:
        text = f"{len(lanes)} of {', '.join(map(str, sorted(sizes)))} cores"
        raise ConfigError(f"a joint plan needs two lanes or more, all of one size; there are {text}")
    return lanes


def _measured(request: JointPlanRequest, lanes: Sequence[Share], *, as_json: bool) -> _Set:
    from cotenant.cli.progress import progress
    from cotenant.repository import default_version
    from cotenant.techniques.granularity.plan.lane_tables import hand_over_ns, lane_rules, table_of_tasks
    from cotenant.techniques.placement.measure.tasks import TASK_EFFORT, measure_tasks
    from cotenant.work import Share

    if lanes[0].size > 1:
        raise ConfigError("a joint plan needs lanes of one core each: set lanes = 'single', or give --lanes")
    share = Share(tuple(core for lane in lanes for core in lane.cores))
    tables, tasks = [], []
    for model, rows in request.batches.items():
        config = default_version(request.root, model).config.model
        if rows > config.max_batch:
            raise ConfigError(f"model {model!r}: {rows} rows requested, but its max_batch is {config.max_batch}")
        with progress(f"measuring {model}", quiet=as_json) as on_step:
            tenant, taken = measure_tasks(
                request.root, model, share, TASK_EFFORT, fresh=request.fresh, on_step=on_step, rows=rows, in_a_row=True
            )
        tables.append(table_of_tasks(tenant, taken, rows, len(lanes)))
        tasks.append((taken, rows))
    whole = [taken.batches[rows].whole if rows > 1 else taken.whole for taken, rows in tasks]
    core = [taken.batches[rows].core if rows > 1 else taken.core for taken, rows in tasks]
    sequential = sum(min(one.whole_ns, other.whole_ns) for one, other in zip(whole, core, strict=True))
    rules = lane_rules(hand_over_ns([taken for taken, _ in tasks]))
    return _Set(tuple(tables), tuple(taken.digest for taken, _ in tasks), rules, sequential)


def _searched(known: _Set, budget_s: float, *, as_json: bool) -> FoundJointPlan:
    from cotenant.cli.console import console as make_console
    from cotenant.cli.progress import progress, spent_of
    from cotenant.inner_loop import has_compiler
    from cotenant.techniques.granularity.plan.joint_search import JointSearch

    console = make_console(stderr=True, quiet=as_json)
    if not has_compiler():
        console.print("the search is much slower without numba: pip install 'cotenant[solver]'")
    until = time.monotonic() + budget_s
    with progress("searching a joint plan", quiet=as_json) as on_step:

        def on_plans(evaluated: int, best_ns: float) -> bool:
            text = f"{evaluated:,} plans, {best_ns / 1e6:.4g} ms; Ctrl-C ends it with the best so far"
            on_step(*spent_of(budget_s, until), text)
            return time.monotonic() < until

        return JointSearch().find(known.tables, known.rules, on_plans)


def _trial_run(
    request: JointPlanRequest, settings: ServerConfig, lanes: tuple[Share, ...], plans: Sequence[JointPlan]
) -> TrialRunTimes:
    """Measured times of the best plans, of all at once, and of one after another."""
    from cotenant.techniques.granularity.serve.trial_run import TrialRun

    with TrialRun(request.root, settings, request.batches, lanes, plans) as trial_run:
        return trial_run.run()


def _as_measured(
    made: StoredJointPlan, plan: JointPlan, trial_times: TrialRunTimes, makespan_ns: int
) -> StoredJointPlan:
    """The fastest plan on the device, with the measured times."""
    import msgspec

    members = tuple(
        msgspec.structs.replace(member, graph=known.graph)
        for member, known in zip(plan.members, made.members, strict=True)
    )
    return msgspec.structs.replace(
        made,
        members=members,
        barriers=plan.barriers,
        waits=plan.waits,
        chunks=plan.chunks,
        makespan_ns=makespan_ns,
        streams_ns=trial_times.streams_ns,
        sequential_ns=trial_times.sequential_ns,
        is_measured=True,
    )


def _doubts(view: JointOverview, trial_times: TrialRunTimes | None) -> list[str]:
    """A note if the measurement is not plausible."""
    over = 0.0 if trial_times is None else trial_times.streams_ns / max(1, view.before.end_ns)
    if over <= _EXPLAINED:
        return []
    return [
        f"On the device all at once takes {over:.2f} times the predicted time: the machine was busy with other work, "
        "or the models slow each other down. Plan again when the machine is quiet."
    ]


def _use(settings: ServerConfig) -> list[str]:
    """A note on how to let the server follow the plan."""
    from cotenant.techniques.granularity.policy.joint_schedule import JointSchedule

    if settings.policy.name == JointSchedule.name:
        return []
    return [f"To follow the plan, set name = '{JointSchedule.name}' under [policy] in cotenant.toml."]


def _together_path(root: Path) -> Path:
    from cotenant.repository import together_path

    return together_path(root)


def _show(
    view: JointOverview,
    trial_times: TrialRunTimes | None,
    kept: StoredJointPlan | None,
    notes: list[str],
    written: list[Path],
    output: PlanOutput,
) -> None:
    from cotenant.cli.console import console as make_console
    from cotenant.techniques.granularity.report import joint_lines, joint_picture, joint_svg

    if output.svg is not None:
        write_whole(output.svg, joint_svg(view, " and ".join(view.members)).encode())
        written = [*written, output.svg]
    if output.as_json:
        print_json(_facts(view, trial_times, kept, notes, written))
        return
    console = make_console()

    def lines() -> Iterator[str]:
        yield from joint_lines(view)
        if trial_times is not None:
            plans = " and ".join("not followed" if ns is None else f"{ns / 1e6:.3g} ms" for ns in trial_times.plans_ns)
            verdict = "" if kept is not None else ": none is 3 % faster, so none is kept"
            yield (
                f"Measured: one after the other {trial_times.sequential_ns / 1e6:.3g} ms, all at once "
                f"{trial_times.streams_ns / 1e6:.3g} ms, by the best plans {plans}{verdict}."
            )
        yield from notes
        yield from (f"Written: {path}" for path in written)

    console.print(joint_picture(view, console.width))
    console.print()
    for line in lines():
        console.print(line, highlight=False)


def _facts(
    view: JointOverview,
    trial_times: TrialRunTimes | None,
    kept: StoredJointPlan | None,
    notes: list[str],
    written: list[Path],
) -> dict[str, Any]:
    import msgspec

    return {
        "members": view.members,
        "gains": view.gains,
        "gain_pct": view.gain_pct,
        "gap_pct": view.gap_pct,
        "makespan_ns": view.after.end_ns,
        "streams_ns": view.before.end_ns,
        **msgspec.to_builtins(view),
        "measured": None if trial_times is None else msgspec.to_builtins(trial_times),
        "kept": None if kept is None else msgspec.to_builtins(kept),
        "notes": notes,
        "written": [str(path) for path in written],
    }
