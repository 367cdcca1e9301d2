"""Options and habits that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from cotenant.config import PredictSection, ServerConfig, load_server_config
from cotenant.core.snapshot import DropRule
from cotenant.errors import ConfigError
from cotenant.policies import POLICIES, AnyPolicy
from cotenant.policies.duty_cycle import DutyCycle
from cotenant.repository import SERVER_FILE

Repository = Annotated[Path, typer.Argument(help="Model repository: a directory with MODEL/config.toml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
PolicyName = Annotated[
    str | None, typer.Option("--policy", help=f"Scheduling policy: {', '.join(sorted(POLICIES))}.", show_default=False)
]
Drop = Annotated[DropRule | None, typer.Option("--drop", help="When waiting queries are given up.", show_default=False)]
Preempt = Annotated[
    bool | None,
    typer.Option(
        "--preempt/--no-preempt", help="Let urgent queries go first at segment boundaries.", show_default=False
    ),
]
Cautious = Annotated[
    bool | None,
    typer.Option(
        "--cautious/--no-cautious",
        help="Let queries that are sure to be in time go before doubtful ones.",
        show_default="overlap: yes, others: no",
    ),
]
Lanes = Annotated[
    str | None,
    typer.Option("--lanes", help="'single' (a lane a core), 'all' (one lane), or like '0,1/2,3'.", show_default=False),
]

Isolation = Annotated[
    str | None,
    typer.Option("--isolation", help="'process' (a worker process a tenant) or 'thread'.", show_default=False),
]


CoresOption = Annotated[
    str | None, typer.Option("--cores", help="Cores for models, like '0,1'.", show_default="all that it may use")
]
PlanOption = Annotated[
    Path | None, typer.Option("--plan", help="Plan file of 'cotenant plan': its partitions are the lanes.")
]
DeviceNumber = Annotated[
    int | None, typer.Option(min=0, help="Which device of the plan this machine is.", show_default="0")
]


def settings_of(
    root: Path,
    policy: str | None = None,
    drop: DropRule | None = None,
    preempt: bool | None = None,
    lanes: str | None = None,
    isolation: str | None = None,
    *,
    cautious: bool | None = None,
    cores: str | None = None,
    plan: Path | None = None,
    device_number: int | None = None,
) -> ServerConfig:
    """The repository's `cotenant.toml` with the options of the command line over it.

    With a plan, from here or there, the policy is duty_cycle unless the command line names another, and
    `plan.file` is a path that holds from the working directory. Raises ConfigError.
    """
    settings = load_server_config(root / SERVER_FILE)
    if plan is not None:
        settings = msgspec.structs.replace(settings, plan=msgspec.structs.replace(settings.plan, file=str(plan)))
    elif settings.plan.file is not None:
        named = str(root / settings.plan.file)
        settings = msgspec.structs.replace(settings, plan=msgspec.structs.replace(settings.plan, file=named))
    if settings.plan.file is not None:
        policy = policy or DutyCycle.name
        if lanes is not None:
            raise ConfigError(f"--lanes is {lanes!r}, but the plan {settings.plan.file} makes the lanes: leave one out")
    if device_number is not None:
        if settings.plan.file is None:
            raise ConfigError(f"--device-number is {device_number}, but there is no plan: name one with --plan")
        section = msgspec.structs.replace(settings.plan, device=device_number)
        settings = msgspec.structs.replace(settings, plan=section)
    if cores is not None:
        numbers = parse_cores(cores)
        settings = msgspec.structs.replace(settings, device=msgspec.structs.replace(settings.device, cores=numbers))
    chosen: dict[str, Any] = {}
    if policy is not None:
        chosen["name"] = policy
    if drop is not None:
        chosen["drop"] = drop
    if preempt is not None:
        chosen["preempt"] = preempt
    if cautious is not None:
        chosen["cautious"] = cautious
    if chosen:
        settings = msgspec.structs.replace(settings, policy=msgspec.structs.replace(settings.policy, **chosen))
    if lanes is not None:
        settings = msgspec.structs.replace(
            settings, device=msgspec.structs.replace(settings.device, lanes=parse_lanes(lanes))
        )
    if isolation is not None:
        if isolation not in ("process", "thread"):
            raise ConfigError(f"--isolation is {isolation!r}, expected 'process' or 'thread'")
        device: Any = {"isolation": isolation}
        settings = msgspec.structs.replace(settings, device=msgspec.structs.replace(settings.device, **device))
    return settings


def parse_cores(text: str) -> tuple[int, ...]:
    """Core numbers with ',' between them. Raises ConfigError."""
    try:
        numbers = tuple(int(core) for core in text.split(","))
    except ValueError:
        raise ConfigError(f"--cores is {text!r}, expected core numbers like '0,1'") from None
    if min(numbers) < 0:
        raise ConfigError(f"--cores is {text!r}, expected core numbers from 0")
    return numbers


def parse_lanes(text: str) -> str | tuple[tuple[int, ...], ...]:
    """'single', 'all', or core numbers with ',' within and '/' between lanes."""
    if not any(character.isdigit() for character in text):
        return text
    try:
        return tuple(tuple(int(core) for core in lane.split(",")) for lane in text.split("/"))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not like 'single', 'all' or '0,1/2,3'", param_hint="--lanes") from None


def goes_by_margin(policy: AnyPolicy, predict: PredictSection) -> bool:
    """Whether a policy is cautious in what it does: a margin is learnt for it, and it looks at that."""
    return policy.cautious and not policy.grouped and predict.adapt


def policy_text(policy: AnyPolicy, predict: PredictSection) -> str:
    """A policy in a few words, for tables: every table names its drop rule."""
    return f"{policy.name} (drop: {policy.drop.value}{', cautious' if goes_by_margin(policy, predict) else ''})"


def print_json(value: object) -> None:
    """One JSON object on standard output."""
    print(json.dumps(value, allow_nan=False, default=str))
