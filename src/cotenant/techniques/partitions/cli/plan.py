"""`cotenant plan`: does it fit, on how many devices, how, and who breaks first; without hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.options import LONGEST_S, AsJson, Lanes, Stale, a_number, print_json
from cotenant.files import write_whole
from cotenant.techniques.granularity.cli import TogetherAsked, asked_batches, plan_together
from cotenant.techniques.partitions.cli.plan_inputs import basis_for, tables_of, with_devices
from cotenant.techniques.partitions.plan.planners import DEFAULT_PLANNER, PLANNERS
from cotenant.techniques.placement.cli import EXIT_INFEASIBLE, Aim, PlacementAsked, check_alone, place, placement_words

if TYPE_CHECKING:
    from cotenant.techniques.partitions.plan.advice import Remedy
    from cotenant.techniques.partitions.plan.file import PlanFile, Request
    from cotenant.techniques.partitions.plan.sources import CostBasis
    from cotenant.techniques.partitions.plan.types import Infeasible, Plan, Planner

DEFAULT_HEADROOM = 0.1
SIMULATED_S = 60.0
_SEARCH_EFFORT = 0.2
_SIMULATED_ROWS = 20_000


def plan(
    tenants: Annotated[
        Path | None,
        typer.Argument(
            help="File of tenants, rates, SLOs and devices (TOML); with --placement or --together a model repository.",
            show_default=False,
        ),
    ] = None,
    profiles: Annotated[
        list[str] | None,
        typer.Option(
            "--profiles",
            help="A profiled repository or a profile file; DEVICE=PROFILE for one kind of device. May be given several "
            "times.",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="So many devices instead of the file's counts: N, or NAME=N,...", show_default=False),
    ] = None,
    planner: Annotated[
        str, typer.Option(help=f"Who plans: {', '.join(PLANNERS)}, or one that a package adds.")
    ] = DEFAULT_PLANNER,
    headroom: Annotated[
        float | None,
        typer.Option(
            min=0, max=10, callback=a_number, help="Share added to every rate.  [default: 0.1]", show_default=False
        ),
    ] = None,
    poisson: Annotated[
        bool, typer.Option("--poisson", help="Instead, add to each rate what arrivals at random need.")
    ] = False,
    quantile: Annotated[str, typer.Option(help="Of measured latency, that the plan rests on.")] = "p95",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan here (TOML).")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the picture of the plan here (SVG).")] = None,
    running: Annotated[Path | None, typer.Option(help="Start from this plan, where the planner can.")] = None,
    check: Annotated[Path | None, typer.Option(help="Plan nothing: check this plan against the profiles.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not search how far rates may grow.")] = False,
    placement: Annotated[
        str | None,
        typer.Option(
            "--placement",
            metavar="MODEL",
            help="Plan no tenants: place the branches of this model on the cores of a share.",
            show_default=False,
        ),
    ] = None,
    together: Annotated[
        str | None,
        typer.Option(
            "--together",
            metavar="MODELS",
            help="Plan no tenants: how these models, as a,b,c, run when queries of them come together.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Rows of models of --together, as a=4,b=2.", show_default="1 each")
    ] = None,
    goal: Annotated[Aim | None, typer.Option(help="Of a placement.", show_default=Aim.latency.value)] = None,
    latency_bound_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=3_600_000,
            callback=a_number,
            help="What a placement for throughput may take.",
            show_default=False,
        ),
    ] = None,
    budget_s: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=LONGEST_S,
            callback=a_number,
            help="Seconds to search for a placement, or a plan of --together.",
            show_default="10",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure the models to be placed, or planned together, anew.")
    ] = False,
    lanes: Lanes = None,
    stale: Stale = False,
    as_json: AsJson = False,
) -> None:
    """Plan tenants onto devices from measured profiles, check the plan, and show it.

    Says whether it fits, on how many devices, how, and who breaks first. Status 1 when it does not fit, with what would
    mend it. With --placement it measures the units of one model and finds where its branches run best; with --together
    those of several, and finds where they are to wait for each other and which of them are cut along the batch.
    """
    mine = {"--goal": goal, "--latency-bound-ms": latency_bound_ms, "--budget-s": budget_s, "--lanes": lanes}
    others = {"--profiles": profiles, "--devices": devices, "--headroom": headroom, "--running": running}
    others |= {"--check": check, "--poisson": poisson, "--quick": quick, "--stale": stale}
    if together is not None:
        _none_of(others | {"--placement": placement}, "it is no option of --together")
        _none_of({"--goal": goal, "--latency-bound-ms": latency_bound_ms}, "it needs --placement")
        if tenants is None:
            raise typer.BadParameter("expected the repository of the models, before --together", param_hint="TENANTS")
        wanted = TogetherAsked(tenants, asked_batches(together, batch), budget_s, lanes, fresh)
        plan_together(wanted, out, svg, as_json=as_json)
        return
    _none_of({"--batch": batch}, "it needs --together")
    if placement is not None:
        _none_of(others, "it is no option of --placement")
        if tenants is None:
            raise typer.BadParameter("expected the repository of the model, before --placement", param_hint="TENANTS")
        asked = PlacementAsked(tenants, placement, goal or Aim.latency, latency_bound_ms, budget_s, lanes, fresh)
        place(asked, out, svg, as_json=as_json)
        return
    _none_of({**mine, "--fresh": fresh}, "it needs --placement or --together")
    if not profiles:
        raise typer.BadParameter("expected at least one profile", param_hint="--profiles")
    if (tenants is None) == (check is None):
        raise typer.BadParameter("expected a file of tenants, or --check PLAN", param_hint="TENANTS")
    from cotenant.techniques.partitions.plan.file import plan_text, read_plan, read_request
    from cotenant.techniques.partitions.plan.planners import ForBursts, make_planner

    if poisson and headroom is not None:
        raise typer.BadParameter("expected one of --headroom and --poisson", param_hint="--poisson")
    if check is not None:
        if devices or out or running or poisson or headroom is not None:
            text = "a plan has its devices and headroom in its file: give --profiles, --svg and --json only"
            raise typer.BadParameter(text, param_hint="--check")
        _check(check, profiles, quantile, svg, stale=stale, as_json=as_json)
        return
    tables = tables_of(profiles, quantile)
    assert tenants is not None
    share = headroom if headroom is not None else 0.0 if poisson else DEFAULT_HEADROOM
    if planner == "ours" and find_spec("ortools") is None:
        text = "without the solver it plans by local search alone: pip install 'cotenant[solver]'"
        typer.echo(f"cotenant: planner {planner}: {text}", err=True)
    made_by, searching = make_planner(planner, share), make_planner(planner, share, _SEARCH_EFFORT)
    if poisson:
        made_by, searching = ForBursts(made_by), ForBursts(searching)
    known = {name: each for table in tables.values() for name, each in table.known.items()}
    applications = {name: each for table in tables.values() for name, each in table.applications.items()}
    request = with_devices(read_request(tenants, known, applications), devices)
    basis = basis_for(tables, request, stale=stale)
    request = replace(request, devices=basis.devices)
    before = read_plan(running).plan if running else None
    file, answers = _planned(made_by, searching, request, basis, share, before, quick=quick, as_json=as_json)
    models = {load.model for load in request.loads}
    kept = (each for table in tables.values() for each in table.placements if each.model in models)
    file = replace(file, placements=tuple(kept))
    if out is not None:
        write_whole(out, plan_text(file).encode())
    answers["poisson"] = poisson
    _show(file, basis, answers, svg, as_json=as_json, written=out)


def _none_of(options: Mapping[str, object], why: str) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise typer.BadParameter(why, param_hint=name)


def _planned(
    planner: Planner,
    searching: Planner,
    request: Request,
    basis: CostBasis,
    headroom: float,
    running: Plan | None,
    *,
    quick: bool,
    as_json: bool,
) -> tuple[PlanFile, dict[str, Any]]:
    """A plan that was checked, and what else was found by planning; ends the command where there is none.

    `searching` is the same planner with less effort, for the many plans of a search.
    """
    from cotenant.cli.console import console as make_console
    from cotenant.techniques.partitions.plan.advice import Advisor, all_loads
    from cotenant.techniques.partitions.plan.assess import violations
    from cotenant.techniques.partitions.plan.file import PlanFile
    from cotenant.techniques.partitions.plan.planners import is_blind
    from cotenant.techniques.partitions.plan.scaling import least_devices
    from cotenant.techniques.partitions.plan.types import Infeasible, PlanError

    advisor = Advisor(searching, request, basis.costs)
    loads = all_loads(request, request.devices, basis.costs)
    with make_console(stderr=True).status("planning") as status:
        found = planner.plan(loads, request.devices, basis.costs, running)
        if isinstance(found, Infeasible):
            status.update("searching what would mend it")
            _show_infeasible(found, advisor.remedies(found), basis, planner.name, as_json=as_json)
            raise typer.Exit(EXIT_INFEASIBLE)
        wrong = violations(found, loads, request.devices, basis.costs, headroom, request.applications)
        if wrong:
            blind = (
                "it is blind to interference: plan with elastic_int or ours" if is_blind(planner.name) else "a fault"
            )
            raise PlanError(f"planner {planner.name!r} made a plan that does not hold ({blind}): {wrong[0]}")
        status.update("searching the least number of devices")
        least = least_devices(planner, loads, request.devices, basis.costs, found)
        status.update("searching how far rates may grow")
        growth = None if quick else advisor.growth()
    file = PlanFile(replace(request, loads=loads), found, headroom, basis.fingerprint)
    return file, {"fits": True, "least_devices": least.devices, "growth": growth}


def _check(path: Path, profiles: list[str], quantile: str, svg: Path | None, *, stale: bool, as_json: bool) -> None:
    from cotenant.techniques.granularity.plan.kept import verdicts
    from cotenant.techniques.partitions.plan.assess import violations
    from cotenant.techniques.partitions.plan.file import read_plan
    from cotenant.techniques.placement.plan.judge import placement_faults

    file = read_plan(path)
    if not file.request.loads and (file.placements or file.together):
        roots = [Path(text) for text in profiles]
        check_alone(path, file.placements, file.together, roots, stale=stale, as_json=as_json)
        return
    tables = tables_of(profiles, quantile)
    basis = basis_for(tables, file.request, stale=stale)
    request = replace(file.request, devices=basis.devices)
    file = replace(file, request=request)
    wrong = [*violations(file.plan, request.loads, request.devices, basis.costs, file.headroom, request.applications)]
    tasks = {name: by_cores for table in tables.values() for name, by_cores in table.tasks.items()}
    wrong += [fault for each in file.placements for fault in placement_faults(each, tasks.get(each.model, {}))]
    faults, others = verdicts(file.together, tasks)
    wrong += faults
    same = file.profile == basis.fingerprint and not others
    facts: dict[str, Any] = {"holds": not wrong, "violations": wrong, "same_profile": same}
    if wrong:
        if as_json:
            print_json({**facts, "plan_file": str(path)})
        else:
            print(f"{path} does not hold, {len(wrong)} violation{'' if len(wrong) == 1 else 's'}:")
            for sentence in (*wrong, *basis.notes):
                print(f"  {sentence}")
            if not same:
                print("It was made from another profile.")
        raise typer.Exit(EXIT_INFEASIBLE)
    _show(file, basis, facts, svg, as_json=as_json)


def _show(
    file: PlanFile,
    basis: CostBasis,
    answers: dict[str, Any],
    svg: Path | None,
    *,
    as_json: bool,
    written: Path | None = None,
) -> None:
    from cotenant.cli.console import console as make_console
    from cotenant.techniques.granularity.plan.kept import words_of
    from cotenant.techniques.partitions.plan.assess import assess, turn_notes
    from cotenant.techniques.partitions.report import plan_picture, plan_svg, summary_lines, tenant_table

    request, made = file.request, file.plan
    view = assess(made, request.loads, request.devices, basis.costs, basis.tail)
    notes = (
        *basis.notes,
        *turn_notes(made, request.loads, basis.costs),
        *(f"placement: {placement_words(each)}" for each in file.placements),
        *(f"together: {words_of(each)}" for each in file.together),
    )
    facts: dict[str, Any] = {
        **answers,
        "checked": True,
        "planner": made.planner,
        "headroom": file.headroom,
        "fingerprint": basis.fingerprint,
        "notes": notes,
        "devices_there": len(request.devices),
        "devices_used": len(made.devices),
        "simulated": _simulated(file, basis),
    }
    if svg is not None:
        write_whole(svg, plan_svg(view, next(iter(summary_lines(view, facts, ())))).encode())
    if as_json:
        import msgspec

        print_json(
            msgspec.to_builtins({**facts, "first": view.first.tenant, "devices": view.devices, "tenants": view.tenants})
        )
        return
    console = make_console()
    console.print(plan_picture(view, console.width))
    late = {each["name"]: each["violation_share"] for each in facts["simulated"]["outcomes"]}
    console.print(tenant_table(view, console.width, late))
    console.print()
    for line in summary_lines(view, facts, notes):
        console.print(line, highlight=False)
    for path in (written, svg):
        if path is not None:
            console.print(f"Written: {path}", highlight=False)


def _simulated(file: PlanFile, basis: CostBasis) -> dict[str, Any]:
    """What becomes of queries that arrive at random at the rates asked for; a shorter time for many rows."""
    from cotenant.techniques.partitions.world import simulate_plan

    request = file.request
    seconds = min(SIMULATED_S, _SIMULATED_ROWS / sum(load.rate_per_s for load in request.loads))
    done = simulate_plan(
        file.plan, request.loads, basis.costs, duration_s=seconds, seed=1, applications=request.applications
    )
    outcomes = [
        {
            "name": each.tenant,
            "offered": each.offered,
            "in_slo": each.answered,
            "late": each.late,
            "dropped": each.offered - each.answered - each.late,
            "p50_ns": each.p50_ns or 0,
            "p99_ns": each.p99_ns or 0,
            "violation_share": (each.offered - each.answered) / max(1, each.offered),
        }
        for each in done.tenants
    ]
    return {"arrivals": "poisson", "seconds": seconds, "seed": 1, "outcomes": outcomes}


def _show_infeasible(
    found: Infeasible, remedies: tuple[Remedy, ...], basis: CostBasis, planner: str, *, as_json: bool
) -> None:
    if as_json:
        import msgspec

        facts = {"fits": False, "planner": planner, "broken": found, "remedies": remedies, "notes": basis.notes}
        print_json(msgspec.to_builtins(facts))
        return
    from cotenant.cli.console import console as make_console

    console = make_console()

    def say(line: str) -> None:
        console.print(line, highlight=False)

    count = len(basis.devices)
    say(
        f"It does not fit on {count} device{'' if count == 1 else 's'}, says the planner {planner}. "
        f"{found.tenant!r} breaks: {found.constraint}."
    )
    say(f"  {found.detail}")
    say("Any one of these would mend it:" if remedies else "No change of devices, one SLO or rates mends it.")
    for remedy in remedies:
        say(f"  - {remedy.text}")
    for note in basis.notes:
        say(f"  {note}")
