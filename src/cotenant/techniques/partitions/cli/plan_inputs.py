"""Inputs of `cotenant plan`: profiles of device types, and the number of devices of each type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from cotenant.techniques.partitions.plan.file import Request
    from cotenant.techniques.partitions.plan.sources import ProfileCosts

MOST_DEVICES = 10_000


def tables_of(profiles: Sequence[str], quantile: str) -> dict[str, ProfileCosts]:
    """Tables by name of device type; "" for all types without a profile of their own.

    Raises PlanError for a repository that guarantees higher rates than its lanes serve.
    """
    from cotenant.techniques.partitions.plan.answer import profile_costs

    found: dict[str, ProfileCosts] = {}
    for text in profiles:
        name, equals, rest = text.partition("=")
        if not equals or Path(text).exists():
            name, rest = "", text
        if name in found:
            raise typer.BadParameter(f"device {name!r} has two profiles, expected one", param_hint="--profiles")
        found[name] = profile_costs(rest, quantile)
    return found


def with_devices(request: Request, devices: str | None) -> Request:
    """The request with other numbers of its device types, in their order."""
    from cotenant.techniques.partitions.plan.answer import with_counts

    if devices is None:
        return request
    kinds = {device.name: device for device in request.devices}
    counts: dict[str, int] = {}
    for part in devices.split(","):
        name, equals, number = part.partition("=")
        if not equals:
            if len(kinds) != 1:
                text = f"{part!r} is not NAME=N, and the file has {len(kinds)} device types: {', '.join(kinds)}"
                raise typer.BadParameter(text, param_hint="--devices")
            name, number = next(iter(kinds)), part
        if name.strip() not in kinds:
            text = f"device {name.strip()!r} is not in the file, which has {', '.join(kinds)}"
            raise typer.BadParameter(text, param_hint="--devices")
        if not re.fullmatch(r"[0-9]{1,5}", number.strip()) or int(number) > MOST_DEVICES:
            text = f"{number!r} is not a number of devices up to {MOST_DEVICES}"
            raise typer.BadParameter(text, param_hint="--devices")
        if name.strip() in counts:
            raise typer.BadParameter(f"device {name.strip()!r} has two counts, expected one", param_hint="--devices")
        counts[name.strip()] = int(number)
    return with_counts(request, counts)
