"""Workload files: TOML to `Workload` and back. Every error names the file, the key and what was expected."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cotenant.errors import ConfigError, InvalidValueError
from cotenant.types import DEFAULT_PRIORITY
from cotenant.workload.spec import (
    NS_PER_MS,
    NS_PER_S,
    PROTOCOLS,
    ArrivalProcess,
    Gamma,
    Mmpp,
    Poisson,
    TenantLoad,
    Trace,
    Uniform,
    Workload,
)

_WORKLOAD_KEYS = ("seed", "duration_s", "warmup_s", "tenant")
_TENANT_KEYS = ("name", "model", "arrivals", "protocol", "slo_ms", "items", "shape", "timeout_ms", "priority")
_PROCESS_KEYS: Mapping[str, tuple[str, ...]] = {
    "poisson": ("rate",),
    "uniform": ("rate",),
    "gamma": ("rate", "cv"),
    "mmpp": ("rates", "mean_dwell_s"),
    "trace": ("file", "scale"),
}


def load_workload(path: Path | str) -> Workload:
    """Read a workload file. Raises ConfigError when it cannot be read or is not a valid workload."""
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}), expected a workload file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return parse_workload(table, source=str(path), folder=path.parent)


def parse_workload(table: Mapping[str, Any], source: str = "workload", folder: Path | None = None) -> Workload:
    """Turn the table of a workload file into a `Workload`.

    `source` names the file in errors; trace files are looked up from `folder`. Raises ConfigError.
    """
    top = _Table(table, source, "")
    top.only(_WORKLOAD_KEYS)
    entries = table.get("tenant")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{source}: tenant is missing or not a list, expected at least one [[tenant]] table")
    tenants = tuple(
        _tenant(_Table(entry, source, f"tenant[{i}]."), folder or Path()) for i, entry in enumerate(entries)
    )
    try:
        return Workload(
            tenants=tenants,
            duration_ns=round(top.number("duration_s", above=0.0) * NS_PER_S),
            warmup_ns=round(top.number("warmup_s", default=0.0, least=0.0) * NS_PER_S),
            seed=top.integer("seed", default=0, least=0),
        )
    except InvalidValueError as error:
        raise ConfigError(f"{source}: {error}") from error


def _tenant(table: _Table, folder: Path) -> TenantLoad:
    kind = table.choice("arrivals", tuple(_PROCESS_KEYS), default="poisson")
    table.only(_TENANT_KEYS + _PROCESS_KEYS[kind], f'with arrivals = "{kind}"')
    model = table.text("model")
    slo_ms = table.optional_number("slo_ms", above=0.0)
    timeout_ms = table.optional_number("timeout_ms", above=0.0)
    try:
        return TenantLoad(
            name=table.text("name", default=model),
            model=model,
            process=_process(kind, table, model, folder),
            protocol=table.choice("protocol", PROTOCOLS, default="http"),
            slo_ns=None if slo_ms is None else round(slo_ms * NS_PER_MS),
            items=table.integer("items", default=1, least=1),
            shape=table.integer("shape", default=0, least=0),
            timeout_ns=None if timeout_ms is None else round(timeout_ms * NS_PER_MS),
            priority=table.integer("priority", default=DEFAULT_PRIORITY, least=0),
        )
    except InvalidValueError as error:
        raise ConfigError(f"{table.source}: {table.prefix[:-1]}: {error}") from error


def _process(kind: str, table: _Table, model: str, folder: Path) -> ArrivalProcess:
    match kind:
        case "poisson":
            return Poisson(table.number("rate", above=0.0))
        case "uniform":
            return Uniform(table.number("rate", above=0.0))
        case "gamma":
            return Gamma(table.number("rate", above=0.0), table.number("cv", above=0.0))
        case "mmpp":
            return Mmpp(table.numbers("rates"), table.numbers("mean_dwell_s"))
        case _:
            file = folder / table.text("file")
            times_ns = _read_trace(file, model, f"{table.source}: {table.prefix}file")
            return Trace(times_ns, table.number("scale", default=1.0, above=0.0), str(file))


def _read_trace(file: Path, model: str, where: str) -> tuple[int, ...]:
    """Read column `time_s` of a CSV file: all rows, or those of `model` when there is a column `model`."""
    try:
        with file.open(newline="", encoding="utf-8") as lines:
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
                if not 0 <= time_s < math.inf:
                    raise ConfigError(
                        f"{where}: {file}, line {rows.line_num}: time_s is {row['time_s']!r}, expected seconds from 0"
                    )
                times_ns.append(round(time_s * NS_PER_S))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{where}: {file} cannot be read ({error}), expected a CSV file of arrivals") from error
    if not times_ns:
        raise ConfigError(f"{where}: {file} has no arrival of {model!r}, expected at least one row")
    return tuple(sorted(times_ns))


class _Table:
    """A TOML table with typed access; errors say `source: prefix.key is VALUE, expected ...`."""

    def __init__(self, table: Mapping[str, Any], source: str, prefix: str) -> None:
        self._table = table
        self.source = source
        self.prefix = prefix

    def only(self, keys: Sequence[str], when: str = "") -> None:
        for key in self._table:
            if key not in keys:
                context = f" {when}" if when else ""
                raise ConfigError(f"{self.source}: {self.prefix}{key} is unknown{context}, expected {', '.join(keys)}")

    def wrong(self, key: str, expected: str) -> ConfigError:
        if key not in self._table:
            return ConfigError(f"{self.source}: {self.prefix}{key} is missing, expected {expected}")
        return ConfigError(f"{self.source}: {self.prefix}{key} is {self._table[key]!r}, expected {expected}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._table.get(key, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text that is not empty")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        value = self._table.get(key, default)
        if value not in choices:
            raise self.wrong(key, "one of " + ", ".join(f'"{choice}"' for choice in choices))
        return str(value)

    def integer(self, key: str, default: int, least: int) -> int:
        value = self._table.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(key, f"an integer from {least}")
        return value

    def number(
        self, key: str, default: float | None = None, above: float | None = None, least: float | None = None
    ) -> float:
        value = self._table.get(key, default)
        bound = f" above {above:g}" if above is not None else f" from {least:g}" if least is not None else ""
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
            or (above is not None and value <= above)
            or (least is not None and value < least)
        ):
            raise self.wrong(key, f"a number{bound}")
        return float(value)

    def optional_number(self, key: str, above: float) -> float | None:
        return self.number(key, above=above) if key in self._table else None

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._table.get(key)
        if not isinstance(value, list) or not all(
            isinstance(v, int | float) and not isinstance(v, bool) for v in value
        ):
            raise self.wrong(key, "a list of numbers, one per state")
        return tuple(float(v) for v in value)


def to_toml(workload: Workload) -> str:
    """Write a workload as the text of a workload file, so that `load_workload` gives an equal one back.

    Raises InvalidValueError for a trace that did not come from a file.
    """
    lines = [
        f"seed = {workload.seed}",
        f"duration_s = {workload.duration_ns / NS_PER_S!r}",
        f"warmup_s = {workload.warmup_ns / NS_PER_S!r}",
    ]
    for tenant in workload.tenants:
        lines += ["", "[[tenant]]", f"name = {_quote(tenant.name)}", f"model = {_quote(tenant.model)}"]
        lines += _process_lines(tenant)
        lines += [f"protocol = {_quote(tenant.protocol)}", f"items = {tenant.items}", f"shape = {tenant.shape}"]
        if tenant.slo_ns is not None:
            lines.append(f"slo_ms = {tenant.slo_ns / NS_PER_MS!r}")
        if tenant.timeout_ns is not None:
            lines.append(f"timeout_ms = {tenant.timeout_ns / NS_PER_MS!r}")
        if tenant.priority != DEFAULT_PRIORITY:
            lines.append(f"priority = {tenant.priority}")
    return "\n".join(lines) + "\n"


def _process_lines(tenant: TenantLoad) -> list[str]:
    match tenant.process:
        case Poisson(rate):
            return ['arrivals = "poisson"', f"rate = {rate!r}"]
        case Uniform(rate):
            return ['arrivals = "uniform"', f"rate = {rate!r}"]
        case Gamma(rate, cv):
            return ['arrivals = "gamma"', f"rate = {rate!r}", f"cv = {cv!r}"]
        case Mmpp(rates, dwells):
            return ['arrivals = "mmpp"', f"rates = {list(rates)!r}", f"mean_dwell_s = {list(dwells)!r}"]
        case Trace(_, speed, file):
            if not file:
                raise InvalidValueError(f"tenant {tenant.name!r}", "file", file, "a trace read from a file")
            return ['arrivals = "trace"', f"file = {_quote(str(Path(file).absolute()))}", f"scale = {speed!r}"]


def _quote(text: str) -> str:
    # A TOML basic string takes JSON's escapes, for these names at least: both have \uXXXX, \" and \\.
    return json.dumps(text)
