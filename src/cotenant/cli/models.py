"""`cotenant models`: build the quick-start repository, or check one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.options import AsJson, Repository, Stale, print_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotenant.measure.verdict import ModelVerdict
    from cotenant.profiles.profile_file import Profile

_CAPTION = (
    "p99 alone: one query without others, by the stored profile; '(30 runs)': the longest of 30 runs, too few for a "
    "p99; '!': longer than the SLO. CPU: processor time of that query."
)


def models(
    repository: Repository,
    build: Annotated[bool, typer.Option("--build", help="First build the quick-start models there.")] = False,
    stale: Stale = False,
    as_json: AsJson = False,
) -> None:
    """List the models of a repository, with errors of models that cannot be served or have a stale profile."""
    from cotenant.cli.console import console as make_console
    from cotenant.cli.console import print_verdicts
    from cotenant.config import load_server_config
    from cotenant.measure.rates import rates_fault
    from cotenant.measure.verdict import judge_repository
    from cotenant.profiles.profile_file import load_profile
    from cotenant.report.fitted_table import FittedTable
    from cotenant.repository import SERVER_FILE, application_names, model_names, profile_path
    from cotenant.repository.sources import bare_words, check_not_empty

    if build:
        from cotenant.zoo import build_repository

        build_repository(repository, progress=None if as_json else print)
    check_not_empty(repository)
    settings = load_server_config(repository / SERVER_FILE)
    path = profile_path(repository)
    profile = load_profile(path) if path.exists() else None
    verdicts = judge_repository(repository, settings, model_names(repository), profile, stale=stale)
    rows = [_row(verdict, profile) for verdict in verdicts]
    good = [row["model"] for row in rows if row["units"] is not None]
    applications = [_application(repository, name, good) for name in application_names(repository)]
    rows += applications
    fault = rates_fault(repository)
    if as_json:
        print_json({"models": rows, "rates_error": fault or ""})
    else:
        owned = any(row["tenant"] not in ("", row["model"]) for row in rows)
        heads = "SLO", "p99 alone", "CPU", "units", "profile", "verdict"
        table = FittedTable("model", "version", *["tenant"] * owned, *heads)
        for row in rows:
            cells = _ms(row["slo_ms"]), _alone(row), _ms(row.get("cpu_ms")), str(row["units"] or ""), *_state(row)
            table.add_row(row["model"], row["version"], *[row["tenant"]] * owned, *cells)
        table.caption = _CAPTION
        console = make_console()
        console.print(table)
        print_verdicts(console, verdicts)
        for row in applications:
            if row["error"]:
                console.print(f"{row['model']}: {row['error']}", style="red", soft_wrap=True)
        if bare := bare_words(repository):
            print(f"Note: {bare}")
        if fault is not None:
            print(f"Error: {fault}")
    if fault is not None or any(row["error"] for row in rows):
        raise typer.Exit(1)


def _ms(value: float | None) -> str:
    return f"{value:.3g} ms" if value and value < 1000 else f"{value:.0f} ms" if value else ""


def _alone(row: Mapping[str, Any]) -> str:
    """The cell of the time of one query, marked where it exceeds the SLO."""
    upper_ms, runs = row.get("upper_ms"), "" if row.get("p99_ms") else f" ({row.get('runs')} runs)"
    return f"{_ms(upper_ms)}{runs}{' !' if upper_ms > (row['slo_ms'] or upper_ms) else ''}" if upper_ms else ""


def _state(row: Mapping[str, Any]) -> tuple[str, str]:
    """The cells of the profile and of the verdict."""
    verdict = "problem" if row["error"] else "warning" if row.get("remark") else "good"
    return row["profile"], f"{verdict}; {row['order']}" if row.get("order") else verdict


def _application(repository: Any, name: str, models: list[str]) -> dict[str, Any]:
    """Row of an application, without a check of the tensors of its models, which the server does."""
    from cotenant.config import NS_PER_MS
    from cotenant.errors import CotenantError
    from cotenant.repository.application_spec import read_application

    row: dict[str, Any] = {"model": name, "version": "", "tenant": "", "slo_ms": None, "units": None, "profile": ""}
    try:
        spec = read_application(repository, name)
    except CotenantError as error:
        return {**row, "stages": [], "order": "", "error": str(error)}
    missing = [stage for stage in spec.stages if stage.model not in models]
    wrong = f"stage {missing[0].name!r}: model {missing[0].model!r} is missing or cannot be served" if missing else ""
    stages = [stage.name for stage in spec.stages]
    return {**row, "slo_ms": spec.slo_ns / NS_PER_MS, "stages": stages, "order": spec.stages_text, "error": wrong}


def _row(verdict: ModelVerdict, profile: Profile | None) -> dict[str, Any]:
    """The row of a version; `error` and `remark` are all its problems and warnings."""
    from cotenant.config import NO_CONFIG, NS_PER_MS
    from cotenant.measure.verdict import fastest

    found, report = verdict.found, verdict.report
    known = profile.models.get(found.tenant) if profile is not None and found is not None else None
    has_slo = (
        found is not None
        and found.config != NO_CONFIG
        and not any("tenant.slo_ms" in each for each in verdict.problems)
    )
    is_stale = any("its profile is stale" in each for each in verdict.problems)
    worst = max(fastest(known).values(), key=lambda point: point.p99_ns, default=None) if known else None
    return {
        "model": verdict.model,
        "version": verdict.version,
        "tenant": found.tenant if found is not None else "",
        "slo_ms": found.config.tenant.slo_ms if found is not None and has_slo else None,
        "p99_ms": worst.p99_ns / NS_PER_MS if worst and worst.supports("p99") else None,
        "upper_ms": worst.p99_ns / NS_PER_MS if worst else None,
        "runs": worst.runs if worst else None,
        "cpu_ms": worst.cpu_ns / NS_PER_MS or None if worst else None,
        "units": report.facts.unit_count if report is not None else None,
        "max_batch": report.facts.found.config.model.max_batch if report is not None else None,
        "merging": report.facts.merging.summary if report is not None else "",
        "profile": "" if found is None else "stale" if is_stale else "yes" if known else "no",
        "problems": list(verdict.problems),
        "warnings": list(verdict.warnings),
        "error": "\n".join(verdict.problems),
        "remark": "\n".join(verdict.warnings),
    }
