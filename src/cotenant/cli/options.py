"""Options and functions shared by several commands."""

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
"""Largest value of an option in seconds."""
MIN_FACTOR, MOST_FACTOR = 1e-6, 1e6
"""Range of factors of rates."""


def a_number(value: float | None) -> float | None:
    """Callback of options that refuses nan, which ranges accept. Raises BadParameter."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("'nan' is not a number")
    return value


Repository = Annotated[Path, typer.Argument(help="Model repository: a directory with MODEL/config.toml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Lanes = Annotated[
    str | None,
    typer.Option(
        "--lanes", help="'single' (one lane per core), 'all' (one lane), or like '0,1/2,3'.", show_default=False
    ),
]
Stale = Annotated[bool, typer.Option("--stale", help="Use measurements of models that have changed, with a warning.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Repeat measurements that exist already.")]


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
    float, typer.Option("--budget-s", min=0.1, max=LONGEST_S, callback=a_number, help="Search time in seconds.")
]
SEARCH_S = 10.0
"""Default of SearchTime."""


FLAGS = {
    "policy": "policy.name",
    "drop": "policy.drop",
    "preempt": "policy.preempt",
    "tail_aware": "policy.tail_aware",
    "former_tail_aware": "policy.cautious",
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
"""Keys of `cotenant.toml` with their own option, by option."""


def chosen_of(assigned: Sequence[str] | None, **flags: object) -> dict[str, object]:
    """Settings of the command line, by SECTION.KEY: `assigned` by --set, and the FLAGS that are not None.

    Raises ConfigError for an invalid assignment.
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


def values_of(assignment: str) -> tuple[str, list[object]]:
    """Key and values of KEY=A,B,C. Raises ConfigError for another form."""
    key, is_given, text = assignment.partition("=")
    whole = _value(f"[{text}]", None)
    texts = [each.strip() for each in text.split(",")]
    if not is_given or not key.strip() or not all(texts):
        raise ConfigError(f"the sweep is {assignment!r}, expected KEY=A,B,C, as rate=0.5,1,2")
    return key.strip(), whole if isinstance(whole, list) else [_value(each, each) for each in texts]


def _value(text: str, otherwise: object) -> object:
    """The TOML value of a text; `otherwise` if it is not valid TOML, such as a name without quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except UNREADABLE:  # also for brackets too deep, or more digits than Python converts
        return otherwise


@dataclass(frozen=True, slots=True)
class SettingsOptions:
    """Record of the options of `cotenant serve` and `cotenant simulate` that set keys of `cotenant.toml`."""

    drop: Annotated[DropRule | None, typer.Option(help="Which waiting queries to drop.", show_default=False)] = None
    preempt: Annotated[
        bool | None,
        typer.Option(
            "--preempt/--no-preempt", help="Let urgent queries preempt at segment boundaries.", show_default=False
        ),
    ] = None
    tail_aware: Annotated[
        bool | None,
        typer.Option(
            "--tail-aware/--no-tail-aware",
            help="First serve queries that meet their SLO even at an upper latency estimate.",
            show_default="fcfs, sjf: no, others: yes",
        ),
    ] = None
    former_tail_aware: Annotated[bool | None, typer.Option("--cautious/--no-cautious", hidden=True)] = None
    lanes: Lanes = None
    plan: Annotated[Path | None, typer.Option(help="Plan file of 'cotenant plan': its partitions are the lanes.")] = (
        None
    )
    device_number: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="Number of this machine's device in the plan.", show_default="0"),
    ] = None
    cores: Annotated[str | None, typer.Option(help="Cores for models, like '0,1'.", show_default="all usable ones")] = (
        None
    )
    assigned: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help="Set a key of cotenant.toml; 'simulate' also takes tenant.NAME.KEY=VALUE. Can be repeated.",
        ),
    ] = None

    def chosen(self, **flags: object) -> dict[str, object]:
        """Settings of the command line, by SECTION.KEY, with other FLAGS of the command. Raises as `chosen_of`."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return chosen_of(own.pop("assigned"), **own, **flags)


@dataclass(frozen=True, slots=True)
class PlanOutput:
    """Record of the output options of commands that make a plan. `out` is a plan file."""

    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan to this file (TOML).")] = None
    svg: Annotated[Path | None, typer.Option(help="Write a picture of the plan to this file (SVG).")] = None
    as_json: AsJson = False


def print_json(value: object) -> None:
    """Print one JSON object on standard output."""
    print(json.dumps(value, allow_nan=False, default=str))
