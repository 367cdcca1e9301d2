"""`cotenant plan`: does it fit, on how many devices, how, and who breaks first; without hardware."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cotenant.cli.options import print_json
from cotenant.cli.plan import EXIT_INFEASIBLE, PlanOptions, check_sections, print_faults, words_of
from cotenant.files import write_whole
from cotenant.plan_file import TENANTS, read_sections, sections, sections_text
from cotenant.techniques.partitions.cli.plan_inputs import basis_for, tables_of, with_devices

if TYPE_CHECKING:
    from cotenant.techniques.partitions.plan.advice import Remedy
    from cotenant.techniques.partitions.plan.file import PlanFile, Request
    from cotenant.techniques.partitions.plan.sources import CostBasis, ProfileCosts
    from cotenant.techniques.partitions.plan.types import Infeasible, Plan, Planner

DEFAULT_HEADROOM = 0.1
SIMULATED_S = 60.0
_SEARCH_EFFORT = 0.2
_SIMULATED_ROWS = 20_000


def plan_tenants(options: PlanOptions) -> None:
    """Plan tenants onto devices, check the plan and show it; or check the plan of `options.check`."""
    from cotenant.techniques.partitions.plan.file import read_plan, read_request
    from cotenant.techniques.partitions.plan.planners import ForBursts, make_planner

    if options.check is not None:
        _check(options.check, options)
        return
    tables = tables_of(options.profiles, options.quantile)
    assert options.tenants is not None
    planner, poisson = options.planner, options.poisson
    share = options.headroom if options.headroom is not None else 0.0 if poisson else DEFAULT_HEADROOM
    if planner == "ours" and find_spec("ortools") is None:
        text = "without the solver it plans by local search alone: pip install 'cotenant[solver]'"
        typer.echo(f"cotenant: planner {planner}: {text}", err=True)
    made_by, searching = make_planner(planner, share), make_planner(planner, share, _SEARCH_EFFORT)
    if poisson:
        made_by, searching = ForBursts(made_by), ForBursts(searching)
    known = {name: each for table in tables.values() for name, each in table.known.items()}
    applications = {name: each for table in tables.values() for name, each in table.applications.items()}
    request = with_devices(read_request(options.tenants, known, applications), options.devices)
    basis = basis_for(tables, request, stale=options.stale)
    request = replace(request, devices=basis.devices)
    before = read_plan(options.running).plan if options.running else None
    file, answers = _planned(
        made_by, searching, request, basis, share, before, quick=options.quick, as_json=options.as_json
    )
    contents = {TENANTS: file, **_kept(_roots(tables), {load.model for load in request.loads})}
    if options.out is not None:
        write_whole(options.out, sections_text(contents).encode())
    answers["poisson"] = poisson
    _show(contents, basis, answers, options.svg, as_json=options.as_json, written=options.out)


def _roots(tables: Mapping[str, ProfileCosts]) -> list[Path]:
    return [table.root for table in tables.values() if table.root is not None]


def _kept(roots: Sequence[Path], models: Collection[str]) -> dict[str, Any]:
    """What repositories keep of these models for other sections of a plan file."""
    found = {name: [section.kept(root, models) for root in roots] for name, section in sections().items()}
    return {name: tuple(chain(*each)) for name, each in found.items() if any(each)}


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
    from cotenant.errors import PlanError
    from cotenant.techniques.partitions.plan.advice import Advisor, all_loads
    from cotenant.techniques.partitions.plan.assess import violations
    from cotenant.techniques.partitions.plan.file import PlanFile
    from cotenant.techniques.partitions.plan.planners import is_blind
    from cotenant.techniques.partitions.plan.scaling import least_devices
    from cotenant.techniques.partitions.plan.types import Infeasible

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


def _check(path: Path, options: PlanOptions) -> None:
    from cotenant.techniques.partitions.plan.assess import violations

    contents = read_sections(path)
    file: PlanFile = contents[TENANTS]
    tables = tables_of(options.profiles, options.quantile)
    basis = basis_for(tables, file.request, stale=options.stale)
    request = replace(file.request, devices=basis.devices)
    contents[TENANTS] = file = replace(file, request=request)
    wrong = [*violations(file.plan, request.loads, request.devices, basis.costs, file.headroom, request.applications)]
    faults, old = check_sections(contents, _roots(tables), stale=None)
    wrong += faults
    same = file.profile == basis.fingerprint and not old
    facts: dict[str, Any] = {"holds": not wrong, "violations": wrong, "same_profile": same}
    if wrong:
        if options.as_json:
            print_json({**facts, "plan_file": str(path)})
        else:
            print_faults(path, wrong, basis.notes)
            if not same:
                print("It was made from another profile.")
        raise typer.Exit(EXIT_INFEASIBLE)
    _show(contents, basis, facts, options.svg, as_json=options.as_json)


def _show(
    contents: Mapping[str, Any],
    basis: CostBasis,
    answers: dict[str, Any],
    svg: Path | None,
    *,
    as_json: bool,
    written: Path | None = None,
) -> None:
    from cotenant.cli.console import console as make_console
    from cotenant.techniques.partitions.plan.assess import assess, turn_notes
    from cotenant.techniques.partitions.report import plan_picture, plan_svg, summary_lines, tenant_table

    file: PlanFile = contents[TENANTS]
    request, made = file.request, file.plan
    view = assess(made, request.loads, request.devices, basis.costs, basis.tail)
    notes = (
        *basis.notes,
        *turn_notes(made, request.loads, basis.costs),
        *(f"{name}: {words}" for name, words in words_of(contents)),
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
