"""Options and habits that several commands share."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import typer

from cotenant.core.snapshot import DropRule
from cotenant.errors import ConfigError
from cotenant.files import UNREADABLE
from cotenant.log import LEVEL
from cotenant.repository.server_settings import settings_of as settings_of

LONGEST_S = 30 * 86_400.0
"""Longest time that an option of seconds can give."""
MIN_FACTOR, MOST_FACTOR = 1e-6, 1e6
"""Ends of the range of factors of rates."""


def a_number(value: float | None) -> float | None:
    """Callback of options: refuses nan, which no range does. Raises BadParameter."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("'nan' is not a number")
    return value


Repository = Annotated[Path, typer.Argument(help="Model repository: a directory with MODEL/config.toml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Lanes = Annotated[
    str | None,
    typer.Option("--lanes", help="'single' (a lane a core), 'all' (one lane), or like '0,1/2,3'.", show_default=False),
]
Stale = Annotated[bool, typer.Option("--stale", help="Use measurements of models that changed since, with a warning.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure anew what is known already.")]


def _set_log_level(level: str | None) -> str | None:
    """Callback of LogLevel: child processes find it in their environment."""
    if level is not None:
        os.environ[LEVEL] = level
    return level


LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"] | None,
    typer.Option("--log-level", callback=_set_log_level, help="Least level of the log.", show_default="info"),
]
SearchTime = Annotated[
    float, typer.Option("--budget-s", min=0.1, max=LONGEST_S, callback=a_number, help="Seconds to search.")
]
SEARCH_S = 10.0
"""Default of SearchTime."""


FLAGS = {
    "policy": "policy.name",
    "drop": "policy.drop",
    "preempt": "policy.preempt",
    "cautious": "policy.cautious",
    "lanes": "device.lanes",
    "cores": "device.cores",
    "isolation": "device.isolation",
    "plan": "plan.file",
    "device_number": "plan.device",
    "host": "server.host",
    "http_port": "server.http_port",
    "grpc_port": "server.grpc_port",
    "admin_port": "server.admin_port",
    "frontends": "server.frontends",
}
"""Keys of `cotenant.toml` that have an option of their own."""


def chosen_of(assigned: Sequence[str] | None, **flags: object) -> dict[str, object]:
    """What the command line says, by SECTION.KEY: `assigned` by --set, and the FLAGS that are not None.

    Raises ConfigError for what is no assignment.
    """
    chosen = {FLAGS[flag]: value for flag, value in flags.items() if value is not None}
    if "device.cores" in chosen:
        chosen["device.cores"] = _value(f"[{flags['cores']}]", flags["cores"]) or flags["cores"]
    if "device.lanes" in chosen:
        chosen["device.lanes"] = _value(f"[[{str(flags['lanes']).replace('/', '],[')}]]", flags["lanes"])
    if "plan.file" in chosen:
        chosen["plan.file"] = str(flags["plan"])
    for text in assigned or ():
        key, is_given, value = text.partition("=")
        if not is_given or "." not in key:
            raise ConfigError(f"--set is {text!r}, expected SECTION.KEY=VALUE")
        chosen[key.strip()] = _value(value, value.strip())
    return chosen


def _value(text: str, otherwise: object) -> object:
    """The value that a text is in TOML; `otherwise` where it is none, as names without quotes are."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except UNREADABLE:  # also of brackets too deep, or of more digits than Python converts
        return otherwise


@dataclass(frozen=True, slots=True)
class SettingsOptions:
    """Record of the options of `cotenant serve` and `cotenant simulate` that stand for keys of `cotenant.toml`."""

    drop: Annotated[DropRule | None, typer.Option(help="When waiting queries are given up.", show_default=False)] = None
    preempt: Annotated[
        bool | None,
        typer.Option(
            "--preempt/--no-preempt", help="Let urgent queries go first at segment boundaries.", show_default=False
        ),
    ] = None
    cautious: Annotated[
        bool | None,
        typer.Option(
            "--cautious/--no-cautious",
            help="Let queries that are sure to be in time go before doubtful ones.",
            show_default="fcfs, sjf: no, others: yes",
        ),
    ] = None
    lanes: Lanes = None
    plan: Annotated[Path | None, typer.Option(help="Plan file of 'cotenant plan': its partitions are the lanes.")] = (
        None
    )
    device_number: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="Which device of the plan this machine is.", show_default="0"),
    ] = None
    cores: Annotated[
        str | None, typer.Option(help="Cores for models, like '0,1'.", show_default="all that it may use")
    ] = None
    assigned: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="A key of cotenant.toml; may be given several times."),
    ] = None

    def chosen(self, **flags: object) -> dict[str, object]:
        """What the command line says, by SECTION.KEY, with other FLAGS of the command. Raises as `chosen_of`."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return chosen_of(own.pop("assigned"), **own, **flags)


@dataclass(frozen=True, slots=True)
class PlanOutput:
    """Record of the options of commands that make a plan: where the plan goes. `out` is a plan file."""

    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan here (TOML).")] = None
    svg: Annotated[Path | None, typer.Option(help="Write the picture of the plan here (SVG).")] = None
    as_json: AsJson = False


def print_json(value: object) -> None:
    """One JSON object on standard output."""
    print(json.dumps(value, allow_nan=False, default=str))
