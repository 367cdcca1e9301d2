"""`cotenant plan`: the options, the section of a plan file that is planned, and checks of plan files.

Who makes a section registers a function of `PlanOptions` (the socket `registry.PLAN_COMMANDS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cotenant import registry
from cotenant.cli.options import LONGEST_S, AsJson, Lanes, Stale, a_number, print_json
from cotenant.errors import PlanError
from cotenant.plan_file import TENANTS, SectionCheck, read_sections, sections

EXIT_INFEASIBLE = 1
SEARCH_S = 10.0
"""Of `--budget-s`, unless given."""
_PLANNERS = tuple(registry.built_in(registry.PLANNERS))
_DEFAULT_PLANNER = next(iter(_PLANNERS), "")


class Aim(StrEnum):
    """What a placement is to make small."""

    latency = "latency"
    throughput = "throughput"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of `cotenant plan`; each command uses its own. `tenants` is a file, or the repository of models."""

    tenants: Path | None
    profiles: Sequence[str]
    devices: str | None
    planner: str
    headroom: float | None
    poisson: bool
    quantile: str
    out: Path | None
    svg: Path | None
    running: Path | None
    check: Path | None
    quick: bool
    placement: str
    together: str
    batch: str | None
    goal: Aim | None
    latency_bound_ms: float | None
    budget_s: float
    fresh: bool
    lanes: str | None
    stale: bool
    as_json: bool

    @property
    def repository(self) -> Path:
        """The repository of the models of --placement or --together."""
        assert self.tenants is not None
        return self.tenants


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
        str, typer.Option(help=f"Who plans: {', '.join((*_PLANNERS, 'or one that a package adds'))}.")
    ] = _DEFAULT_PLANNER,
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
    options = PlanOptions(
        tenants=tenants,
        profiles=profiles or (),
        devices=devices,
        planner=planner,
        headroom=headroom,
        poisson=poisson,
        quantile=quantile,
        out=out,
        svg=svg,
        running=running,
        check=check,
        quick=quick,
        placement=placement or "",
        together=together or "",
        batch=batch,
        goal=goal,
        latency_bound_ms=latency_bound_ms,
        budget_s=budget_s or SEARCH_S,
        fresh=fresh,
        lanes=lanes,
        stale=stale,
        as_json=as_json,
    )
    of_placements: dict[str, object] = {"--goal": goal, "--latency-bound-ms": latency_bound_ms}
    of_tenants = {"--profiles": profiles, "--devices": devices, "--headroom": headroom, "--running": running}
    of_tenants |= {"--check": check, "--poisson": poisson, "--quick": quick, "--stale": stale}
    if together is not None:
        _none_of(of_tenants | {"--placement": placement}, "it is no option of --together")
        _none_of(of_placements, "it needs --placement")
        if tenants is None:
            raise typer.BadParameter("expected the repository of the models, before --together", param_hint="TENANTS")
        _run("together", options)
        return
    _none_of({"--batch": batch}, "it needs --together")
    if placement is not None:
        _none_of(of_tenants, "it is no option of --placement")
        if tenants is None:
            raise typer.BadParameter("expected the repository of the model, before --placement", param_hint="TENANTS")
        _run("placement", options)
        return
    others = {"--budget-s": budget_s, "--lanes": lanes, "--fresh": fresh}
    _none_of(of_placements | others, "it needs --placement or --together")
    if not profiles:
        raise typer.BadParameter("expected at least one profile", param_hint="--profiles")
    if (tenants is None) == (check is None):
        raise typer.BadParameter("expected a file of tenants, or --check PLAN", param_hint="TENANTS")
    if poisson and headroom is not None:
        raise typer.BadParameter("expected one of --headroom and --poisson", param_hint="--poisson")
    if check is not None:
        if devices or out or running or poisson or headroom is not None:
            text = "a plan has its devices and headroom in its file: give --profiles, --svg and --json only"
            raise typer.BadParameter(text, param_hint="--check")
        contents = read_sections(check)
        if TENANTS not in contents:
            _check(check, contents, [Path(text) for text in profiles], stale=stale, as_json=as_json)
            return
    _run(TENANTS, options)


def _none_of(options: Mapping[str, object], why: str) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise typer.BadParameter(why, param_hint=name)


def _run(name: str, options: PlanOptions) -> None:
    command = registry.load(registry.PLAN_COMMANDS, name)
    if command is None:
        raise PlanError(
            f"plans of the section {name!r} need a package that is not installed: no entry point {name!r} of the group "
            f"{registry.PLAN_COMMANDS!r} was found"
        )
    command(options)


def check_sections(contents: Mapping[str, Any], roots: Sequence[Path], *, stale: bool | None) -> SectionCheck:
    """Judge all sections of a plan file together: see `FileSection.check`."""
    found = [sections()[name].check(content, roots, stale=stale) for name, content in contents.items()]
    return SectionCheck([each for one in found for each in one.faults], [each for one in found for each in one.stale])


def words_of(contents: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each part of a plan file in a few words, with the name of its section."""
    return [(name, words) for name, content in contents.items() for words in sections()[name].words(content)]


def print_faults(path: Path, faults: Sequence[str], notes: Sequence[str] = ()) -> None:
    """Say why a plan file does not hold."""
    print(f"{path} does not hold, {len(faults)} violation{'' if len(faults) == 1 else 's'}:")
    print(*(f"  {sentence}" for sentence in (*faults, *notes)), sep="\n")


def _check(path: Path, contents: Mapping[str, Any], roots: Sequence[Path], *, stale: bool, as_json: bool) -> None:
    """Say whether a plan file without tenants holds on what was measured; ends the command if not."""
    faults, old = check_sections(contents, roots, stale=stale)
    if as_json:
        print_json({"holds": not faults, "violations": faults, "stale": old, "plan_file": str(path)})
    else:
        if faults:
            print_faults(path, faults)
        else:
            print(f"{path} holds: {', '.join(words for _, words in words_of(contents))}.")
        print(*old, sep="\n", end="\n" if old else "")
    if faults:
        raise typer.Exit(EXIT_INFEASIBLE)
