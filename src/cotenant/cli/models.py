"""`cotenant models`: build the quick-start repository, or check one."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.options import AsJson, Repository, Stale, print_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotenant.measure.loader_process import Loader


def models(
    repository: Repository,
    build: Annotated[bool, typer.Option("--build", help="First build the quick-start models there.")] = False,
    stale: Stale = False,
    as_json: AsJson = False,
) -> None:
    """List the models of a repository, with errors of models that cannot be served or have a stale profile."""
    from cotenant.cli.console import console as make_console
    from cotenant.config import load_server_config
    from cotenant.measure.loader_process import Loader
    from cotenant.measure.rates import rates_fault
    from cotenant.profiles.profile_file import disturbed_words, load_profile
    from cotenant.report.fitted_table import FittedTable
    from cotenant.repository import SERVER_FILE, application_names, model_names, profile_path
    from cotenant.repository.measured_content import changes
    from cotenant.repository.sources import bare_words, check_not_empty

    if build:
        from cotenant.zoo import build_repository

        build_repository(repository, progress=None if as_json else print)
    check_not_empty(repository)
    path = profile_path(repository)
    profile = load_profile(path) if path.exists() else None
    contents = profile.contents if profile else {}
    changed = changes(repository, contents)
    profiled = {name: "stale" if name in changed else "yes" for name in contents}
    owners: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    with closing(Loader(load_server_config(repository / SERVER_FILE).server.load_limit_s)) as loader:
        for name in model_names(repository):
            rows += _describe(repository, name, profiled, owners, loader)
    if not stale:
        for row in rows:
            row["error"] = row["error"] or _stale_words(changed.get(row["tenant"]), repository)
    for row in rows:
        if profile and not row["remark"] and (known := profile.models.get(row["tenant"])):
            row["remark"] = disturbed_words(known, repository)
    good = [row["model"] for row in rows if row["units"] is not None]
    for name in application_names(repository):
        rows.append(_application(repository, name, good))
    fault = rates_fault(repository)
    if as_json:
        print_json({"models": rows, "rates_error": fault or ""})
    else:
        table = FittedTable("model", "version", "tenant", "SLO", "units", "profile", "remark")
        for row in rows:
            remark = row["error"] or row.get("remark", "")
            if "stages" in row and not remark:
                remark = f"application: {row['order']}"
            slo = f"{row['slo_ms']:g} ms" if row["slo_ms"] else ""
            table.add_row(
                row["model"], row["version"], row["tenant"], slo, str(row["units"] or ""), row["profile"], remark
            )
        make_console().print(table)
        if bare := bare_words(repository):
            print(f"Note: {bare}")
        if fault is not None:
            print(f"Error: {fault}")
    if fault is not None or any(row["error"] for row in rows):
        raise typer.Exit(1)


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


def _merging_remark(max_batch: int, merging: Any) -> str:
    """Remark on merging of queries: that it is refused, or not proven."""
    if merging.verdict == "refused":
        return f"queries run alone (max_batch 1 instead of {max_batch}): {merging.reason}"
    return f"queries are merged unproven: {merging.reason}" if merging.verdict == "trusted" else ""


def _stale_words(change: str | None, repository: Path) -> str:
    return f"its profile is stale: {change}. Run 'cotenant profile {repository}'" if change else ""


def _describe(
    repository: Path, name: str, profiled: Mapping[str, str], owners: dict[str, str], loader: Loader
) -> list[dict[str, Any]]:
    """A row for each version. The default version is the newest that can be loaded, as in a server.

    `owners` has the model of each tenant so far, and gets this one: a server refuses a second model of a tenant.
    """
    from cotenant.errors import CotenantError
    from cotenant.measure.load_spec import VersionSpec
    from cotenant.repository import check_owners, find_versions

    empty = {"model": name, "version": "", "tenant": "", "slo_ms": None, "units": None, "profile": "", "error": ""}
    empty |= {"max_batch": None, "merging": "", "remark": ""}
    rows: list[dict[str, Any]] = []
    unreadable: dict[str, str] = {}
    try:
        versions = find_versions(repository, name, unreadable)
        check_owners(versions, owners)
    except CotenantError as error:
        return [{**empty, "error": str(error)}]
    is_default = True
    for found in reversed(versions):
        found = replace(found, is_default=is_default)
        row = {
            **empty,
            "version": str(found.version),
            "tenant": found.tenant,
            "slo_ms": found.config.tenant.slo_ms,
            "profile": profiled.get(found.tenant, "no"),
        }
        try:
            report = loader.load(VersionSpec(str(repository), found))
            facts, is_default = report.facts, False
            owners[found.tenant] = name
            row["units"] = facts.unit_count
            row["max_batch"], row["merging"] = facts.found.config.model.max_batch, facts.merging.summary
            row["remark"] = report.warning or _merging_remark(found.config.model.max_batch, facts.merging)
        except CotenantError as error:
            row["error"] = str(error)
        rows.append(row)
    rows += [{**empty, "version": version, "error": reason} for version, reason in unreadable.items()]
    return sorted(rows, key=lambda row: int(row["version"]))
