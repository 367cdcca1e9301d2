"""Workload files: TOML to `Workload` and back. Errors name the file, the key and the expected value."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import fields

from cotenant.errors import ConfigError, InvalidValueError
from cotenant.files import MOST_BYTES, convert, open_regular, read_toml, to_table, toml_text
from cotenant.workload.spec import (
    NS_PER_S,
    Gamma,
    Mmpp,
    Name,
    Poisson,
    Positive,
    TenantLoad,
    Trace,
    Uniform,
    Workload,
)

_MOST_S = 1e9
"""Latest time in a trace, 30 years, like the longest duration."""
_TENANT_KEYS = tuple(each.encode_name for each in fields(TenantLoad) if each.name != "process")


class _TraceFile(Struct, tag_field="arrivals", tag="trace", forbid_unknown_fields=True):
    """Arrivals of a tenant from a trace, as keys of a workload file."""

    file: Name
    scale: Positive = 1.0


_Process = Poisson | Uniform | Gamma | Mmpp | _TraceFile


def load_workload(path: Path | str) -> Workload:
    """Read a workload file. Raises ConfigError when it cannot be read or is not a valid workload."""
    path = Path(path)
    return parse_workload(read_toml(path, ConfigError), source=str(path), folder=path.parent)


def parse_workload(table: Mapping[str, Any], source: str = "workload", folder: Path | None = None) -> Workload:
    """Convert the table of a workload file to a `Workload`.

    `source` names the file in errors. Paths of traces are relative to `folder`. Raises ConfigError.
    """
    tenants = table.get("tenant")
    if isinstance(tenants, list):
        made = [_tenant(each, source, f"tenant[{at}]", folder or Path()) for at, each in enumerate(tenants)]
        table = {**table, "tenant": made}
    return convert(table, Workload, source, ConfigError)


def _tenant(table: Any, source: str, at: str, folder: Path) -> Any:
    """Table of a tenant with its arrival process as an object; in the file its keys are among those of the tenant."""
    if not isinstance(table, dict):
        return table
    made = {key: value for key, value in table.items() if key in _TENANT_KEYS}
    if "model" in made:
        made.setdefault("name", made["model"])
    rest = {key: value for key, value in table.items() if key not in _TENANT_KEYS}
    found: Any = convert({"arrivals": "poisson", **rest}, _Process, source, ConfigError, at)  # type: ignore[arg-type]
    if isinstance(found, _TraceFile):
        file = folder / found.file
        found = Trace(_read_trace(file, str(made.get("model")), f"{source}: {at}.file"), found.scale, str(file))
    return {**made, "process": found}


def _read_trace(file: Path, model: str, where: str) -> tuple[int, ...]:
    """Read column `time_s` of a CSV file: all rows or, with a column `model`, those of this model."""
    try:
        opened = open_regular(file, ConfigError, "", MOST_BYTES)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}, expected a CSV file of arrivals") from None
    try:
        with TextIOWrapper(opened, encoding="utf-8", newline="") as lines:
            rows = csv.DictReader(lines)
            columns = rows.fieldnames or []
            if "time_s" not in columns:
                raise ConfigError(f"{where}: {file} has the columns {list(columns)}, expected one called time_s")
            times_ns = []
            for row in rows:
                if "model" in columns and row["model"] != model:
                    continue
                try:
                    time_s = float(row["time_s"])
                except (TypeError, ValueError):
                    time_s = math.nan
                if not 0 <= time_s <= _MOST_S:
                    raise ConfigError(
                        f"{where}: {file}, line {rows.line_num}: time_s is {row['time_s']!r}, "
                        f"expected seconds from 0 to {_MOST_S:g}"
                    )
                times_ns.append(round(time_s * NS_PER_S))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{where}: {file} cannot be read ({error}), expected a CSV file of arrivals") from error
    if not times_ns:
        raise ConfigError(f"{where}: {file} has no arrival of {model!r}, expected at least one row")
    return tuple(sorted(times_ns))


def to_toml(workload: Workload) -> str:
    """Text of a workload file from which `load_workload` reads an equal workload.

    Raises InvalidValueError for a trace that is not from a file.
    """
    table = to_table(workload)
    for tenant, load in zip(table["tenant"], workload.tenants, strict=True):
        tenant |= tenant.pop("process")
        if isinstance(load.process, Trace):
            if not load.process.file:
                raise InvalidValueError(f"tenant {load.name!r}", "file", "", "a trace read from a file")
            tenant["file"] = str(Path(load.process.file).absolute())
            del tenant["times_ns"]
    return toml_text(table)
