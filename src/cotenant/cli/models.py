"""`cotenant models`: build the quick-start repository, or check one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cotenant.cli.options import AsJson, Repository, print_json


def models(
    repository: Repository,
    build: Annotated[bool, typer.Option("--build", help="Make the quick-start models there first.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the models of a repository, with what is wrong with those that cannot be served."""
    from rich.table import Table

    from cotenant.cli.console import console as make_console
    from cotenant.profile.profile_file import load_profile
    from cotenant.repository import application_names, model_names, profile_path

    if build:
        from cotenant.zoo import build_repository

        build_repository(repository, progress=None if as_json else print)
    path = profile_path(repository)
    profiled = load_profile(path).models if path.exists() else {}
    rows: list[dict[str, Any]] = []
    for name in model_names(repository):
        rows += _describe(repository, name, set(profiled))
    good = [row["model"] for row in rows if not row["error"]]
    for name in application_names(repository):
        rows.append(_application(repository, name, good))
    if as_json:
        print_json({"models": rows})
    else:
        table = Table("model", "version", "tenant", "SLO", "units", "profile", "remark")
        for row in rows:
            remark = row["error"] or row.get("remark", "")
            if "stages" in row and not remark:
                remark = f"application: {' -> '.join(row['stages'])}"
            slo = f"{row['slo_ms']:g} ms" if row["slo_ms"] else ""
            table.add_row(
                row["model"], row["version"], row["tenant"], slo, str(row["units"] or ""), row["profile"], remark
            )
        make_console().print(table)
    if any(row["error"] for row in rows):
        raise typer.Exit(1)


def _application(repository: Any, name: str, models: list[str]) -> dict[str, Any]:
    """What can be said of an application without opening its models: whether their tensors fit, the server sees."""
    from cotenant.config import NS_PER_MS
    from cotenant.errors import CotenantError
    from cotenant.repository.application_spec import read_application

    row: dict[str, Any] = {"model": name, "version": "", "tenant": "", "slo_ms": None, "units": None, "profile": ""}
    try:
        spec = read_application(repository, name)
    except CotenantError as error:
        return {**row, "stages": [], "error": str(error)}
    missing = [stage for stage in spec.stages if stage.model not in models]
    wrong = (
        f"stage {missing[0].name!r}: model {missing[0].model!r} is not there, or cannot be served" if missing else ""
    )
    stages = [stage.name for stage in spec.stages]
    return {**row, "slo_ms": spec.slo_ns / NS_PER_MS, "stages": stages, "error": wrong}


def _merging_remark(max_batch: int, merging: Any) -> str:
    """What an operator should know of merging: that it is refused, or not proven."""
    if merging.verdict == "refused":
        return f"queries run alone (max_batch 1 instead of {max_batch}): {merging.reason}"
    return f"queries are merged unproven: {merging.reason}" if merging.verdict == "trusted" else ""


def _describe(repository: Any, name: str, profiled: set[str]) -> list[dict[str, Any]]:
    from cotenant.errors import CotenantError
    from cotenant.measure.opening import open_version
    from cotenant.repository import find_versions

    empty = {"model": name, "version": "", "tenant": "", "slo_ms": None, "units": None, "profile": "", "error": ""}
    empty |= {"max_batch": None, "merging": "", "remark": ""}
    rows: list[dict[str, Any]] = []
    try:
        for found in find_versions(repository, name):
            row = {
                **empty,
                "version": str(found.version),
                "tenant": found.tenant,
                "slo_ms": found.config.tenant.slo_ms,
                "profile": "yes" if found.tenant in profiled else "no",
            }
            try:
                opened = open_version(repository, found, placed=False)
                row["units"] = opened.runner.unit_count
                row["max_batch"], row["merging"] = opened.found.config.model.max_batch, opened.merging.told
                row["remark"] = _merging_remark(found.config.model.max_batch, opened.merging)
                opened.runner.close()
            except CotenantError as error:
                row["error"] = str(error)
            rows.append(row)
    except CotenantError as error:
        rows.append({**empty, "error": str(error)})
    return rows
