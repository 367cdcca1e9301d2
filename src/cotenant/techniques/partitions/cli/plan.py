"""`cotenant plan`: whether tenants fit, on how many devices, and which tenant breaks first; without hardware."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant import registry
from cotenant.cli.options import PlanOutput, Stale, a_number, print_json
from cotenant.cli.records import with_records
from cotenant.errors import PlanError
from cotenant.files import write_whole
from cotenant.plan_file import TENANTS, read_sections, sections_text
from cotenant.techniques.partitions.cli.plan_inputs import tables_of, with_devices

if TYPE_CHECKING:
    from cotenant.techniques.partitions.plan.answer import NoPlan
    from cotenant.techniques.partitions.plan.file import PlanFile, Request
    from cotenant.techniques.partitions.plan.sources import CostBasis, ProfileCosts
    from cotenant.techniques.partitions.plan.types import Planner

EXIT_INFEASIBLE = 1
DEFAULT_HEADROOM = 0.1
_PLANNERS = tuple(registry.built_in(registry.PLANNERS))


def _refused(sentence: str) -> Callable[[str | None], None]:
    """Callback that refuses an option which moved to another command."""

    def refuse(value: str | None) -> None:
        if value:
            raise PlanError(sentence)

    return refuse


@dataclass(frozen=True, slots=True)
class MovedOptions:
    """Record of options that moved to other commands; they are refused for one version."""

    placement: Annotated[
        str | None,
        typer.Option(
            *("--placement", "--goal", "--latency-bound-ms"),
            hidden=True,
            is_eager=True,
            callback=_refused("a model is placed by 'cotenant place REPOSITORY MODEL' now"),
        ),
    ] = None
    together: Annotated[
        str | None,
        typer.Option(
            *("--together", "--batch"),
            hidden=True,
            is_eager=True,
            callback=_refused("joint plans are made by 'cotenant co-schedule REPOSITORY MODELS...' now"),
        ),
    ] = None
    searched: Annotated[
        str | None,
        typer.Option(
            *("--budget-s", "--lanes"),
            hidden=True,
            callback=_refused("--budget-s and --lanes are options of 'cotenant place' and 'cotenant co-schedule' now"),
        ),
    ] = None
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            hidden=True,
            callback=_refused("--fresh is an option of 'cotenant place' and 'cotenant co-schedule' now"),
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class CostOptions:
    """Record of the options for the measurements of a plan."""

    profiles: Annotated[
        list[str] | None,
        typer.Option(
            help="Profiled repository or profile file; DEVICE=PROFILE for one type of device. Repeatable.",
            show_default=False,
        ),
    ] = None
    quantile: Annotated[str, typer.Option(help="Quantile of the measured latencies to plan with.")] = "p95"
    stale: Stale = False

    def tables(self) -> dict[str, ProfileCosts]:
        """Costs by name of device type. Raises as `tables_of`."""
        return tables_of(self.profiles or (), self.quantile)


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """Record of the options for the planner and the rates."""

    planner: Annotated[str, typer.Option(help=f"Planner: {', '.join((*_PLANNERS, 'or one that a package adds'))}.")] = (
        _PLANNERS[0]
    )
    headroom: Annotated[
        float | None,
        typer.Option(
            min=0, max=10, callback=a_number, help="Share added to every rate.", show_default=f"{DEFAULT_HEADROOM}"
        ),
    ] = None
    poisson: Annotated[
        bool, typer.Option("--poisson", help="Instead, add the headroom that Poisson arrivals need.")
    ] = False
    misses: Annotated[
        str | None,
        typer.Option(
            help="Share of SLOs, as 1%, that each tenant misses at most with Poisson arrivals: simulations confirm it.",
            show_default="no promise",
        ),
    ] = None
    running: Annotated[Path | None, typer.Option(help="Plan file to start from, if the planner can.")] = None
    quick: Annotated[bool, typer.Option("--quick", help="Do not search how far rates may grow.")] = False

    @property
    def share(self) -> float:
        """Share added to every rate."""
        from cotenant.techniques.partitions.plan.answer import added_share

        return added_share(self.headroom, self.poisson)

    @property
    def has_any(self) -> bool:
        """Whether an option is given that makes another plan."""
        return bool(self.running or self.poisson or self.misses) or self.headroom is not None

    @property
    def promised(self) -> float | None:
        """The promised share of misses. Raises PlanError."""
        from cotenant.techniques.partitions.plan.promise import share_of

        return None if self.misses is None else share_of(self.misses)

    def planners(self) -> tuple[Planner, Planner]:
        """The planner, and the same planner with less effort for searches of many plans. Raises PlanError."""
        from cotenant.techniques.partitions.plan.answer import pair_of_planners

        if self.planner == "ours" and find_spec("ortools") is None:
            text = "without OR-Tools it uses local search only: pip install 'cotenant[solver]'"
            typer.echo(f"cotenant: planner {self.planner}: {text}", err=True)
        return pair_of_planners(self.planner, self.share, is_poisson=self.poisson)


@with_records
def plan(
    tenants: Annotated[
        Path | None, typer.Argument(help="File of tenants, rates, SLOs and devices (TOML).", show_default=False)
    ] = None,
    *,
    costs: CostOptions,
    devices: Annotated[
        str | None,
        typer.Option(help="Number of devices instead of the file's: N, or NAME=N,...", show_default=False),
    ] = None,
    planning: PlannerOptions,
    check: Annotated[Path | None, typer.Option(help="Check this plan against the profiles instead.")] = None,
    output: PlanOutput,
    moved: MovedOptions,
) -> None:
    """Plan tenants onto devices from measured profiles, check the plan, and show it.

    Reports whether the tenants fit, on how many devices, and which tenant breaks
    first. If they do not fit, lists changes that would help (exit status 1).
    With --check, judges a plan file, also of 'cotenant place' or 'co-schedule'.
    """
    if not costs.profiles:
        raise typer.BadParameter("expected at least one profile", param_hint="--profiles")
    if (tenants is None) == (check is None):
        raise typer.BadParameter("expected a file of tenants, or --check PLAN", param_hint="TENANTS")
    if planning.poisson and planning.headroom is not None:
        raise typer.BadParameter("expected one of --headroom and --poisson", param_hint="--poisson")
    if check is not None:
        if devices or output.out or planning.has_any:
            text = "a plan file has its own devices and headroom: give --profiles, --svg and --json only"
            raise typer.BadParameter(text, param_hint="--check")
        _check(check, costs, output)
        return
    assert tenants is not None
    from cotenant.techniques.partitions.plan.answer import basis_for, kept_sections, request_of

    tables = costs.tables()
    planners = planning.planners()
    request = with_devices(request_of(tenants, tables), devices)
    basis = basis_for(tables, request, stale=costs.stale)
    request = replace(request, devices=basis.devices)
    file, answers = _planned(planners, planning, request, basis, as_json=output.as_json)
    contents = {TENANTS: file, **kept_sections(tables, request)}
    if output.out is not None:
        write_whole(output.out, sections_text(contents).encode())
    answers["poisson"] = planning.poisson
    _show(contents, basis, answers, output)


def _planned(
    planners: tuple[Planner, Planner], planning: PlannerOptions, request: Request, basis: CostBasis, *, as_json: bool
) -> tuple[PlanFile, dict[str, Any]]:
    """A checked plan, and the least number of devices and growth limit; ends the command if there is no plan.

    `planners`: those of `PlannerOptions.planners`.
    """
    from cotenant.cli.progress import progress
    from cotenant.techniques.partitions.plan.answer import NoPlan, planned
    from cotenant.techniques.partitions.plan.file import read_plan

    running = read_plan(planning.running).plan if planning.running else None
    with progress("planning", quiet=as_json) as on_step:
        found = planned(
            *(planners, request, basis),
            headroom=planning.share,
            running=running,
            is_quick=planning.quick,
            misses=planning.promised,
            on_step=lambda step: on_step(0, 0, step),
        )
        if isinstance(found, NoPlan):
            _show_infeasible(found, basis, as_json=as_json)
            raise typer.Exit(EXIT_INFEASIBLE)
    return found


def _check(path: Path, costs: CostOptions, output: PlanOutput) -> None:
    """Check a plan file against measured profiles; ends the command if it does not hold."""
    from cotenant.techniques.partitions.plan.answer import checked_tenants

    contents = read_sections(path)
    if TENANTS not in contents:
        _check_others(path, contents, costs, output)
        return
    found = checked_tenants(contents, costs.tables(), is_stale=costs.stale)
    wrong = found.check.violations
    facts = {"holds": found.check.holds, "violations": wrong, "same_profile": found.check.same_profile}
    if wrong:
        if output.as_json:
            print_json({**facts, "plan_file": str(path)})
        else:
            _print_faults(path, wrong, found.basis.notes)
            if not found.check.same_profile:
                print("It was made from another profile.")
        raise typer.Exit(EXIT_INFEASIBLE)
    _show(found.contents, found.basis, facts, output)


def _check_others(path: Path, contents: Mapping[str, Any], costs: CostOptions, output: PlanOutput) -> None:
    """Check a plan file without tenants."""
    from cotenant.techniques.partitions.plan.answer import check_sections, words_of

    check = check_sections(contents, [Path(text) for text in costs.profiles or ()], is_stale=costs.stale)
    faults, old = check.violations, check.stale
    if output.as_json:
        print_json({"holds": check.holds, "violations": faults, "stale": old, "plan_file": str(path)})
    else:
        if faults:
            _print_faults(path, faults)
        else:
            print(f"{path} holds: {', '.join(words for _, words in words_of(contents))}.")
        print(*old, sep="\n", end="\n" if old else "")
    if faults:
        raise typer.Exit(EXIT_INFEASIBLE)


def _print_faults(path: Path, faults: Sequence[str], notes: Sequence[str] = ()) -> None:
    """Print why a plan file does not hold."""
    print(f"{path} does not hold, {len(faults)} violation{'' if len(faults) == 1 else 's'}:")
    print(*(f"  {sentence}" for sentence in (*faults, *notes)), sep="\n")


def _show(contents: Mapping[str, Any], basis: CostBasis, answers: dict[str, Any], output: PlanOutput) -> None:
    from cotenant.cli.console import console as make_console
    from cotenant.techniques.partitions.plan.answer import answer_of
    from cotenant.techniques.partitions.report import plan_picture, summary_lines, tenant_table

    answer = answer_of(contents, basis, answers)
    view, facts, notes = answer.view, answer.facts, answer.facts["notes"]
    if output.svg is not None:
        write_whole(output.svg, answer.svg().encode())
    if output.as_json:
        print_json(answer.to_json())
        return
    console = make_console()
    console.print(plan_picture(view, console.width))
    late = {each["name"]: each["violation_share"] for each in facts["simulated"]["outcomes"]}
    console.print(tenant_table(view, late))
    console.print()
    for line in summary_lines(view, facts, notes):
        console.print(line, highlight=False)
    for path in (output.out, output.svg):
        if path is not None:
            console.print(f"Written: {path}", highlight=False)


def _show_infeasible(answer: NoPlan, basis: CostBasis, *, as_json: bool) -> None:
    if as_json:
        print_json(answer.to_json())
        return
    from cotenant.cli.console import console as make_console

    console = make_console()
    found, remedies, planner = answer.broken, answer.remedies, answer.planner

    def say(line: str) -> None:
        console.print(line, highlight=False)

    count = len(basis.devices)
    say(
        f"The tenants do not fit on {count} device{'' if count == 1 else 's'} (planner {planner}). "
        f"Tenant {found.tenant!r} breaks first: {found.constraint}."
    )
    say(f"  {found.detail}")
    if answer.unservable:
        say("Without the others these cannot be served either:")
        for each in answer.unservable:
            say(f"  {each.name}: {each.broken.constraint}. {each.broken.detail}")
            for remedy in each.remedies:
                say(f"    - {remedy.text}")
    if remedies or not answer.unservable:
        say("Each of these changes makes them fit:" if remedies else "No tried change of devices, SLOs or rates helps.")
    for remedy in remedies:
        say(f"  - {remedy.text}")
    for note in basis.notes:
        say(f"  {note}")
